"""Faults planted in the source of the TPU kernel: the interpreter must notice every one."""

import functools
from typing import Any

import numpy as np
import pytest
from helpers.faults import assert_all_noticed, noticed_by, with_fault
from helpers.paged import Paged
from helpers.tpu import DIM, attend, check, quantized
from jax.experimental.pallas import tpu as pltpu

from kvjax.kernels.paged_attention import tpu, tpu_block, tpu_codes, tpu_fetch, tpu_kernel, tpu_logits, tpu_plan

# Faults planted in the source: (module, what stands there, the fault). Every one must fail a case of the suite.
SOURCE_FAULTS = {
    "missing wait for pages": (tpu_kernel, "            fetch.wait(step, i, slot)\n", ""),
    "missing wait for a page": (tpu_fetch, "slot, lambda j: 0, lambda copy: copy.wait()",
                                "slot, lambda j: 0, lambda copy: None"),
    "missing wait for values": (tpu_fetch, "*at.values.arrays, ", ""),
    "missing wait for ids": (tpu_kernel, "                fetch.wait_ids(following, next_row)\n", ""),
    "copy into the buffer in use": (tpu_fetch, "at.values.codes.at[slot, :, there]",
                                    "at.values.codes.at[1 - slot, :, there]"),
    "stale page id": (tpu_kernel, "fetch.start(following, 0, next_slot, next_row)",
                      "fetch.start(following, 0, next_slot, row)"),
    "swapped pages": (tpu_fetch, "pool.values.codes.at[page, here]", "pool.values.codes.at[page_of(j ^ 1), here]"),
    "page of another group": (tpu_fetch, "lax.div(part, self._slices())", "0 * part"),
    "wrong head map": (tpu_fetch, "lax.rem(self._part(step)[0], slices) *", "0 *"),
    "unmasked tail": (tpu_block, "(in_reach & (positions <= latest))", "(in_reach & (positions <= latest + 1))"),
    "stale positions": (tpu_block, "jnp.where(index < live * page_size, positions, -1)", "positions"),
    "values of empty slots not zeroed": (tpu_block, "jnp.broadcast_to(used, (LANES, LANES)).T > 0",
                                         "jnp.broadcast_to(used, (LANES, LANES)).T > -1"),
    "dropped scale": (tpu_block, "logits * (scale * LOG2E)", "logits * LOG2E"),
    "old total not shrunk": (tpu_block, "at.total[here, :rows] * shrink +", "at.total[here, :rows] +"),
    "old output not shrunk": (tpu_block, "at.acc[here, :rows] * shrink +", "at.acc[here, :rows] +"),
    "tile not emptied": (tpu_block, "at.total[...] = jnp.zeros_like(at.total)", "pass"),
    "window + 1": (tpu_block, "latest - tile.window + 1", "latest - tile.window"),
    "window - 1": (tpu_block, "latest - tile.window + 1", "latest - tile.window + 2"),
    "one page too few": (tpu_plan, "-(-(first_slot + tokens[None]) // page_size)",
                         "(first_slot + tokens[None]) // page_size"),
    "one page skipped": (tpu_plan, "oldest_slot // page_size)", "oldest_slot // page_size + 1)"),
    "one slot too few": (tpu_plan, "first_slot = ends - left[None]", "first_slot = ends - left[None] - 1"),
    "sink off by one": (tpu_block, "positions < tile.start + choices.sinks",
                        "positions < tile.start + choices.sinks + 1"),
    "sink counted twice": (tpu_block, "jnp.exp2(sinks - higher)", "2 * jnp.exp2(sinks - higher)"),
    "logits of another query": (tpu_logits, "- last + lengths[:, None]", "- last + lengths[:, None] - 1"),
    "logits of a ring not turned": (tpu_logits, "turn * page_size,", "0 * turn,"),
    "missing wait for logits": (tpu_kernel, "                copy.wait()\n", ""),
    "query of sinks for all": (tpu_block, "jnp.where(is_sink,", "jnp.where(is_sink | True,"),
}  # fmt: skip

# The same where pages are quantised.
QUANTIZED_FAULTS = {
    "missing wait for scales": (tpu_codes, "return (self.codes, *self.scales)", "return (self.codes,)"),
    "scales of another page": (tpu_fetch, "source.at[page]", "source.at[page_of(j ^ 1)]"),
    "scales of another head": (tpu_codes, "target[head] = of_slots[head : head + 1]", "target[head] = of_slots[:1]"),
    "scales of another slice of the heads": (tpu_kernel, "Tile(q, fetch.first_head(step)", "Tile(q, 0"),
    "the neighbour's scale": (tpu_codes, "jnp.concatenate(of_pages, axis=1)",
                              "jnp.roll(jnp.concatenate(of_pages, axis=1), 1, axis=1)"),
    "scales of empty slots": (tpu_codes, "jnp.where(used, jnp.concatenate(of_pages, axis=1), 0)",
                              "jnp.concatenate(of_pages, axis=1)"),
    "codes of empty slots": (tpu_codes, "not form.is_quantized or form.bits_of is not None", "not form.is_quantized"),
    "dropped key scale": (tpu_codes, "logits = products * rows[0][heads]", "logits = products"),
    "dropped value scale": (tpu_codes, "return weights * rows[0][heads], minima", "return weights, minima"),
    "scale in the normaliser": (tpu_block, "weights.sum(axis=2, keepdims=True)",
                                "scale_weights(weights, at.values, at.value_rows, of_page)[0].sum(2, keepdims=True)"),
    "swapped nibbles": (tpu_codes, "return numbers(codes, pages.form, dtype)",
                        "return jnp.roll(numbers(codes, pages.form, dtype), codes.shape[2], axis=2)"),
    "swapped nibbles of channels": (tpu_codes, "values = numbers(codes, pages.form, jnp.float32)",
                                    "values = jnp.roll(numbers(codes, pages.form, jnp.float32), codes.shape[2], 2)"),
    "forgotten minimum of keys": (tpu_codes, "logits = logits + query", "logits = logits + 0 * query"),
    "minimum times another query": (tpu_block, "scale_logits(_product(query, keys, 2), query,",
                                    "scale_logits(_product(query, keys, 2), tile.q[0, here, :rows],"),
    "forgotten minimum of values": (tpu_block, "at.acc[here, :rows] += minima", "at.acc[here, :rows] += 0 * minima"),
    "scale of the channels of another page": (tpu_codes, "target[head, page] = of_pages[page]",
                                              "target[head, page] = of_pages[0]"),
    "forgotten minimum of channels": (tpu_codes, "* scale + minimum\n", "* scale\n"),
    "sign of a float16": (tpu_codes, "jnp.where(bits >= 0x8000, -value, value)", "value"),
    "output of a query without pages": (tpu_kernel, "out[...], lse[...] = jnp.zeros_like(out)",
                                        "out[...], lse[...] = jnp.ones_like(out)"),
}  # fmt: skip


# The case that notices a fault, where the first does not.
NOTICED_BY = {
    "wrong head map": 1, "unmasked tail": 2, "old total not shrunk": 2, "old output not shrunk": 2, "window + 1": 1,
    "window - 1": 1, "sink off by one": 1, "logits of another query": 1, "logits of a ring not turned": 1,
    "missing wait for logits": 1, "query of sinks for all": 1, "missing wait for scales": 2, "swapped nibbles": 1,
    "swapped nibbles of channels": 2, "forgotten minimum of keys": 1, "minimum times another query": 1,
    "forgotten minimum of values": 1, "scale of the channels of another page": 2, "forgotten minimum of channels": 2,
    "sign of a float16": 1, "output of a query without pages": 2,
}  # fmt: skip


@functools.cache
def _suite():
    """Small cases that together use everything: (case, mode, heads of a step, logits asked for)."""
    learned = np.array([0.5, -1, 1, 0], np.float32)
    wide: dict[str, Any] = dict(head_dim=DIM, kv_heads=2, heads=4)
    return (
        (Paged([150, 17, 9], **wide, groups=2, options=dict(sink_logits=learned)), "on_wait", 1, 0),
        (Paged([150, 20, 8], **wide, window=9, ring=3, sinks=3, has_sink_query=True), "eager", 1, 1),
        (Paged([300, 16, 9], query_lengths=[9, 16, 1], **wide), "eager", 2, 0),
    )


@functools.cache
def _quantized_suite():
    """The same over quantised pages."""
    return (
        (quantized(("int8", "fp8_e4m3"), lengths=[150, 70, 9]), "eager", 1, 0),
        (quantized(("int4_per_token", "int4_hadamard"), lengths=[300, 64], window=70, ring=3, sinks=3,
                   has_sink_query=True), "on_wait", 2, 0),
        (quantized(("int4_per_channel", "int8"), lengths=[300, 9, 129]), "on_wait", 1, 0),
    )  # fmt: skip


def _noticed_by(kernel, suite, first: int = 0) -> str | None:
    def run(case, mode, heads, last):
        shape = tpu.Shape(heads, max(128 // case.page_size, 1), 1 if case.longest == 1 else 8)
        check(attend(case, shape=shape, mode=mode, last_logits=last, kernel=kernel), case, last_logits=last)

    cases = (functools.partial(run, *of) for of in suite)
    return noticed_by(cases, pltpu.reset_tpu_interpret_mode_state, first)


@pytest.mark.slow
@pytest.mark.parametrize("suite", [_suite, _quantized_suite])
def test_mutation_suite_passes_without_a_fault(suite):
    assert _noticed_by(tpu, suite()) is None


@pytest.mark.slow
@pytest.mark.parametrize("faults, suite", [(SOURCE_FAULTS, _suite), (QUANTIZED_FAULTS, _quantized_suite)])
def test_mutation_every_planted_fault_is_noticed(faults, suite, capsys):
    modules = (tpu_plan, tpu_codes, tpu_block, tpu_fetch, tpu_kernel, tpu_logits, tpu)

    def notice(name):
        return _noticed_by(with_fault(modules, *faults[name]), suite(), NOTICED_BY.get(name, 0))

    assert_all_noticed(faults, notice, capsys)
