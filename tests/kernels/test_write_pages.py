"""write_pages against a loop over tokens, and one worked example."""

import jax.numpy as jnp
import numpy as np
from helpers.driver import ids, jit
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.kernels.write_pages import write_pages

write = jit(write_pages)
PAGES, HEADS, SIZE, DIM, GROUPS, TOKENS, TOUCHED = 9, 1, 8, 2, 2, 12, 4


def pool_of(rng, dtype=np.float32):
    return rng.standard_normal((PAGES, HEADS, SIZE, DIM)).astype(dtype)


def by_loop(pool, new, pages, first_tokens, begins, ends, blanks):
    pool = np.array(pool)
    for group, i in np.ndindex(pages.shape):
        page, token = pages[group, i], first_tokens[group, i]
        if page == 0:
            continue
        for slot in range(begins[group, i], ends[group, i]):
            pool[page, :, slot] = new[group, token]
            token += 1
        pool[page, :, blanks[group, i] :] = 0
    return pool


def test_worked_example():
    # One group; page 2 has tokens in slots 0..5, a step brings tokens 10, 11, 12: the first two fill slots 6 and 7,
    # the third opens page 1 in slot 0, whose other slots become 0. The third entry is padding and goes to page 0.
    pool = np.full((3, 1, 8, 2), 7.0, np.float32)
    new = np.array([[[[10, 10]], [[11, 11]], [[12, 12]], [[99, 99]]]], np.float32)
    out = np.asarray(write(jnp.asarray(pool), jnp.asarray(new), ids([[2, 1, 0]]), ids([[0, 2, 0]]), ids([[6, 0, 0]]),
                           ids([[8, 1, 0]]), ids([[8, 1, 0]])))  # fmt: skip
    np.testing.assert_array_equal(out[2, 0, :, 0], [7, 7, 7, 7, 7, 7, 10, 11])
    np.testing.assert_array_equal(out[1, 0, :, 0], [12, 0, 0, 0, 0, 0, 0, 0])


@settings(max_examples=50)
@given(st.data())
def test_any_layout_equals_the_loop(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    pool, new = pool_of(rng), rng.standard_normal((GROUPS, TOKENS, HEADS, DIM)).astype(np.float32)
    pool[0], pool[3, :, 5:] = np.nan, np.nan
    # Distinct pages in shuffled order, some of them padding.
    pages = rng.permutation(np.arange(1, PAGES))[: GROUPS * TOUCHED].reshape(GROUPS, TOUCHED)
    pages = np.where(rng.random(pages.shape) < 0.3, 0, pages)
    begins = rng.integers(0, SIZE, pages.shape)
    ends = rng.integers(begins + 1, SIZE + 1)
    first = rng.integers(0, TOKENS - (ends - begins) + 1)
    blanks = np.where(rng.random(pages.shape) < 0.5, ends, rng.integers(ends, SIZE + 1))
    arguments = [array.astype(np.int32) for array in (pages, first, begins, ends, blanks)]
    out = np.asarray(write(jnp.asarray(pool), jnp.asarray(new), *map(jnp.asarray, arguments)))
    np.testing.assert_array_equal(out[1:], by_loop(pool, new, *arguments)[1:])


def test_new_tokens_are_rounded_to_the_format_of_the_pool():
    rng = np.random.default_rng(0)
    new = rng.standard_normal((GROUPS, TOKENS, HEADS, DIM)).astype(np.float32)
    nothing = np.zeros((GROUPS, TOUCHED), np.int32)
    pages, ends = nothing.copy(), nothing.copy()
    pages[0, 1], ends[0, 1] = 4, 3
    where = map(jnp.asarray, (pages, nothing, nothing, ends, ends))
    out = write(jnp.asarray(pool_of(rng), jnp.bfloat16), jnp.asarray(new), *where)
    np.testing.assert_array_equal(np.asarray(out)[4, 0, :3], np.asarray(new[0, :3, 0]).astype(out.dtype))


def test_padding_may_bring_nan_tokens_and_changes_no_page():
    pool = pool_of(np.random.default_rng(0))
    new, nothing = np.full((GROUPS, TOKENS, HEADS, DIM), np.nan, np.float32), ids(np.zeros((GROUPS, TOUCHED)))
    out = np.asarray(write(jnp.asarray(pool), jnp.asarray(new), *(nothing,) * 5))
    np.testing.assert_array_equal(out[1:], pool[1:])
