"""The decode loop's list of blocks: rows may have none of one size while their neighbours have some."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.paged import assert_equal, rows_of

from kvjax.kernels.paged_attention import Queries, reference, xla

PAGE_SIZE, PAGES = 32, 24


def test_rows_without_blocks_of_a_size_may_lie_between_others():
    # 512 tokens are one large block and no small one; the short rows have a small one and no large one. One iteration
    # therefore meets owners more than eight rows apart.
    lengths = np.array([1] + [512] * 8 + [5, 700, 3], np.int32)
    rng = np.random.default_rng(0)
    table, positions, next_page = np.zeros((1, 12, PAGES), np.int32), [np.full(PAGE_SIZE, -1)], 1
    for row, length in enumerate(lengths):
        for page in range(-(-int(length) // PAGE_SIZE)):
            slots = page * PAGE_SIZE + np.arange(PAGE_SIZE)
            positions.append(np.where(slots < length, slots, -1))
            table[0, row, page] = next_page
            next_page += 1
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    pool = (
        draw(next_page, 1, PAGE_SIZE, 8),
        draw(next_page, 1, PAGE_SIZE, 8),
        jnp.asarray(np.stack(positions), jnp.int32),
    )
    zeros = jnp.zeros(12, jnp.int32)
    rows = rows_of(table, zeros[None], lengths[None])
    queries = Queries(jnp.arange(12, dtype=jnp.int32), zeros + 1, jnp.asarray(lengths) - 1, zeros)
    q = draw(12, 2, 8)
    attention = jax.jit(lambda q: xla.paged_attention(q, *pool, rows, queries, scale=0.5, max_query_length=1))(q)
    assert_equal(attention, reference.paged_attention(q, *pool, rows, queries, scale=0.5), 1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["keys", "values"])
def test_a_sequence_that_overflowed_spoils_no_other(bad, where):
    rng = np.random.default_rng(0)
    pool = {name: rng.normal(size=(5, 1, PAGE_SIZE, 8)).astype(np.float32) for name in ("keys", "values")}
    pool[where][2, 0, 7] = bad
    positions = jnp.asarray(np.tile(np.arange(PAGE_SIZE), (5, 1)), jnp.int32).at[0].set(-1)
    zeros = jnp.zeros(4, jnp.int32)
    rows = rows_of(np.arange(1, 5).reshape(1, 4, 1), zeros[None], zeros[None] + PAGE_SIZE)
    queries = Queries(jnp.arange(4, dtype=jnp.int32), zeros + 1, zeros + PAGE_SIZE - 1, zeros)
    arguments: tuple[Any, ...] = (
        jnp.asarray(rng.normal(size=(4, 2, 8)), jnp.float32),
        *map(jnp.asarray, pool.values()),
        positions,
        rows,
        queries,
    )
    out = np.array(xla.paged_attention(*arguments, max_query_length=1, scale=0.5).out)
    with np.errstate(invalid="ignore"):
        expected = np.asarray(reference.paged_attention(*arguments, scale=0.5).out)
    np.testing.assert_allclose(out[[0, 2, 3]], expected[[0, 2, 3]], atol=1e-5)
