"""Every quantised format with every feature of the cache, against float64 attention over what the pages stand for."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from helpers.driver import DECODE, PREFILL, SPEC, Twin, assert_same, fork, ids, leaves, release

from kvjax.cache import Status, clear_status
from kvjax.invariants import check

pytestmark = pytest.mark.slow  # every pair compiles programs of its own
FORMATS = {
    "fp8": dict(format="fp8_e4m3"),
    "int8": dict(format="int8"),
    "int4": dict(format="int4"),
}


def twin_of(formats: dict[str, Any], *steps: list[int], **changes) -> Twin:
    twin = Twin(dataclasses.replace(SPEC, **(dict(num_pages=60, debug=False) | formats | changes)))
    for lengths in steps:
        assert bool(twin.step(lengths, **(DECODE if max(lengths) == 1 else PREFILL)).ok)
    return twin


def window(formats) -> Twin:
    # Rings that are used again, in decode and in prefill.
    return twin_of(formats, [15, 9, 0, 0], [20, 1, 0, 0], [1, 1, 0, 0], [3, 8, 0, 0], windows=(5, 11))


def forks(formats) -> Twin:
    twin = twin_of(formats, [11, 13, 0, 0])
    twin.cache, ok = fork(twin.cache, ids([0, 1]), ids([2, 3]))
    assert bool(ok)
    twin.tokens[2:] = [list(tokens) for tokens in twin.tokens[:2]]
    twin.step([1, 1, 1, 1], **DECODE)
    twin.step([0, 9, 5, 0], **PREFILL)
    return twin


def chunked_prefill(formats) -> Twin:
    return twin_of(formats, [7, 0, 0, 0], [13, 8, 0, 0], [1, 16, 0, 3], [20, 0, 0, 1], [1, 1, 0, 1])


def out_of_pages_and_resume(formats) -> Twin:
    twin = twin_of(formats, [20, 3, 0, 0], num_pages=13)
    before = leaves(twin.cache)
    report = twin.step([0, 0, 20, 3], **PREFILL)
    assert not bool(report.ok) and int(report.status) == Status.OUT_OF_PAGES
    assert_same(twin.cache, before)
    twin.cache = release(clear_status(twin.cache), ids([0]))
    twin.tokens[0] = []
    twin.step([0, 1, 0, 0], **DECODE)
    twin.step([0, 2, 20, 0], **PREFILL)
    return twin


def groups(formats) -> Twin:
    return twin_of(formats, [15, 9, 0, 0], [1, 1, 0, 0], [3, 8, 0, 7], groups=SPEC.num_kv_heads, num_pages=90)


@pytest.mark.parametrize("feature", [window, forks, chunked_prefill, out_of_pages_and_resume, groups])
@pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS)
def test_outputs_are_those_of_decoded_pages(formats, feature):
    twin = feature(formats)
    assert np.abs(twin.out).max() > 0.1
    check(twin.cache, held={})
