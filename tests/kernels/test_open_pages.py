"""Open pages of per-channel keys: XLA against the definition, and writing in any parts."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.driver import ids, jit
from helpers.paged import Paged, assert_equal, case_of

from kvjax.kernels.formats import FORMATS, Stored, encode
from kvjax.kernels.paged_attention import open_pages, xla
from kvjax.kernels.write_pages import write_full_pages

FORM = "int4_per_channel"
QUERIES = {"decode": [0, 1, 1, 1, 1], "prefill": [0, 1, 9, 16, 20], "mixed": [1, 0, 5, 1, 1]}
LENGTHS = (1, 7, 9, 16, 100)


def case(kind: str, values: str, **changes) -> tuple[Paged, np.ndarray]:
    """A case, and its open keys with NaN where there is no token."""
    options: dict[str, Any] = dict(lengths=LENGTHS, ring=None, forms=(FORM, values)) | changes
    paged = case_of(QUERIES[kind], **options)
    in_group, size = paged.kv_heads // paged.groups, paged.page_size
    kept = np.full((3, paged.groups, len(paged.lengths), in_group, size, paged.head_dim), np.nan, np.float32)
    for (group, seq), length in np.ndenumerate(np.broadcast_to(LENGTHS, (paged.groups, len(LENGTHS)))):
        first = length // size * size
        of_group = paged.k[seq][first:, group * in_group : (group + 1) * in_group]
        kept[1, group, seq, :, : length - first] = np.asarray(of_group, np.float32).swapaxes(0, 1)
    return paged, kept


@functools.partial(jit, static_argnames=("max_query_length", "scale", "soft_cap", "last_logits"))
def attend(*arguments, **options):
    return open_pages.paged_attention(xla.paged_attention, *arguments, **options)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind == "prefill")) for kind in QUERIES]
)
@pytest.mark.parametrize(
    "changes",
    [
        dict(sinks_learned=True),
        dict(window=9, ring=5, groups=2),
        dict(window=9, sinks=11, has_sink_query=True, ring=5),
        dict(lengths=LENGTHS, start=3, values="float32"),
    ],
    ids=str,
)
def test_full_and_open_pages_together_equal_the_definition(kind, changes):
    changes = dict(changes)
    paged, kept = case(kind, changes.pop("values", "int4_hadamard"), **changes)
    options = {name: of if isinstance(of, float) else jnp.asarray(of) for name, of in paged.options.items()}
    longest = 1 if kind == "decode" else 20
    got = attend(*paged.arguments, jnp.asarray(kept), max_query_length=longest, last_logits=2, **options)
    assert_equal(got, paged.reference(open_keys=kept, last_logits=2), 1e-4)


@functools.partial(jit)
def write(pages, kept, new, *where):
    return write_full_pages(pages, kept, new, jnp.int32(1), *where)


@pytest.mark.parametrize("parts", [[40], [1] * 40, [7, 1, 8, 24], [16, 24]], ids=str)
def test_pages_are_the_same_in_whatever_parts_their_tokens_come(parts):
    size, dim, heads, form = 8, 6, 2, FORMATS[FORM]
    keys = np.random.default_rng(0).standard_normal((1, 40, heads, dim)).astype(np.float32)
    kept = jnp.full((2, 1, 3, heads, size, dim), 9, jnp.float32)
    codes, scales = encode(jnp.zeros((7, heads, size, dim)), form)
    pages, done = Stored(codes, scales, form), 0
    for part in parts:
        of_page = np.arange(done // size, -(-(done + part) // size))
        begin = np.maximum(done - of_page * size, 0)
        touched = [
            np.full(of_page.shape, 2), of_page + 1, np.maximum(of_page * size - done, 0), begin,
            np.minimum(done + part - of_page * size, size),
        ]  # fmt: skip
        padded = [ids(np.pad(of, (0, 7 - len(of)))[None]) for of in touched]
        new = jnp.asarray(np.pad(keys[:, done : done + part], ((0, 0), (0, 40 - part), (0, 0), (0, 0))))
        pages, kept = write(pages, kept, new, *padded, padded[-1])
        done += part
        left = done % size
        if left:
            exact = keys[0, done - left : done].swapaxes(0, 1)
            np.testing.assert_array_equal(kept[1, 0, 2], np.pad(exact, ((0, 0), (0, size - left), (0, 0))))
    wanted = encode(jnp.asarray(keys[0].reshape(5, size, heads, dim).swapaxes(1, 2)), form)
    np.testing.assert_array_equal(pages.codes[1:6], wanted[0])
    for got, scale in zip(pages.scales, wanted[1], strict=True):
        np.testing.assert_array_equal(got[1:6], scale)
    # Other layers' and sequences' open pages are as they were.
    assert (np.asarray(kept[0]) == 9).all() and (np.asarray(kept[1, 0, :2]) == 9).all()
