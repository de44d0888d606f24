"""Faults planted in the source of the Hopper kernel: every one must be noticed by a small case."""

import dataclasses
import functools

import numpy as np
import pytest
from helpers.faults import assert_all_noticed, noticed_by, with_fault
from helpers.hopper import MODULES, PREFILL, SMALL, attend, check, forget_state
from helpers.paged import Paged

from kvjax.kernels.paged_attention import (
    hopper,
    hopper_block,
    hopper_join,
    hopper_kernel,
    hopper_logits,
    hopper_run,
    tiles,
)

# (module, what stands there, the fault).
FAULTS = {
    "missing wait for keys": (hopper_block, "plgpu.barrier_wait(at.k_full.at[slot])\n", "pass\n"),
    "missing wait for values": (hopper_block, "plgpu.barrier_wait(at.v_full.at[slot])\n", "pass\n"),
    "missing wait for a free buffer": (
        hopper_kernel, "pl.when(is_reused)(lambda: plgpu.barrier_wait(into.k_free.at[slot]))", "pass"
    ),
    "missing wait for the query": (hopper_kernel, "plgpu.barrier_wait(at.q_full)\n", "pass\n"),
    "missing wait for a part": (hopper_join, "plgpu.barrier_wait(at.full.at[slot])\n", "pass\n"),
    "missing wait for the zeroing": (
        hopper_kernel, "pl.when(me != 0)(lambda: plgpu.barrier_wait(at.zeroed))", "pass"
    ),
    "missing commit of a fragment": (hopper_kernel, "plgpu.commit_smem()\n            for i, of", "for i, of"),
    "missing commit of the result": (
        hopper_join, "maximum * (1 / LOG2E) + jnp.log(total))\n        plgpu.commit_smem()",
        "maximum * (1 / LOG2E) + jnp.log(total))",
    ),
    "values of empty slots not zeroed": (hopper_block, "position >= 0, matrix.shape", "position >= -1, matrix.shape"),
    "full blocks counted short": (hopper_run, "lambda block: block >= first\n", "lambda block: block > first\n"),
    "unmasked tail": (hopper_block, "broadcast_in_dim((position >= earliest) &", "broadcast_in_dim("),
    "not causal": (
        hopper_block, "visible = (position >= earliest) & (position <= latest)", "visible = position >= earliest"
    ),
    "stale page id": (hopper_kernel, "following = pages_of(i + 1)", "following = pages_of(i)"),
    "swapped pages": (
        hopper_kernel, "fetch_values(config, pool, page,", "fetch_values(config, pool, pages[-1 - j][0],"
    ),
    "dropped scale": (hopper_block, "logits * (scale * LOG2E)", "logits * LOG2E"),
    "wrong head map": (hopper_kernel, "self.given.q.at[tile, self.head,", "self.given.q.at[tile, 0,"),
    "wrong layer": (hopper, "plan.windows, rows.layer[None]", "plan.windows, rows.layer[None] * 0"),
    "old total not shrunk": (hopper_block, "total * shrink + weights", "total + weights"),
    "window + 1": (hopper_run, "windows[self.layer] - 1", "windows[self.layer]"),
    "window - 1": (hopper_run, "windows[self.layer] - 1", "windows[self.layer] - 2"),
    "one piece too few": (tiles, "end_piece = -(-(first_slot + tiles.tokens[None, None]) // piece)",
                          "end_piece = (first_slot + tiles.tokens[None, None]) // piece"),
    "one piece skipped": (tiles, "oldest_piece = oldest_slot // piece", "oldest_piece = oldest_slot // piece + 1"),
    "a fragment left out": (hopper_join, "(last - first + 1) * in_turns", "(last - first) * in_turns"),
    "parts not shrunk": (hopper_join, "other_total * factor", "other_total"),
    "learned sink counted twice": (hopper_join, "jnp.ones_like(sink)", "2 * jnp.ones_like(sink)"),
    "sinks + 1": (hopper_run, "start + self.config.sinks\n", "start + self.config.sinks + 1\n"),
    "sinks seen by the query of the others": (hopper_run, "self.config.kinds - 1, 0)", "0, 0)"),
    "ring not behind the pinned pages": (hopper_run, "config.pinned + lax.rem", "lax.rem"),
    "logits of the neighbour": (hopper_logits, "kv_head, tile[None, ..., None]", "kv_head * 0, tile[None, ..., None]"),
    "logits a slot late": (hopper_logits, "slot - first + config.sink_blocks", "slot + 1 - first + config.sink_blocks"),
}  # fmt: skip

# The case that notices a fault, where the first does not.
NOTICED_BY = {
    "missing wait for a free buffer": 2, "missing wait for the zeroing": 3, "not causal": 3, "old total not shrunk": 2,
    "window + 1": 1, "window - 1": 1, "sinks + 1": 4, "sinks seen by the query of the others": 4,
    "ring not behind the pinned pages": 4,
}  # fmt: skip


@functools.cache
def _suite():
    """Small cases that together use everything: (case, shape, options)."""
    learned = dict(sink_logits=np.array([0.5, -1, 1, 0], np.float32))
    lone = dataclasses.replace(SMALL, workers=1)
    return (
        (Paged([150, 9, 70], kv_heads=2, heads=4, options=learned), SMALL, dict(last_logits=1)),
        (Paged([70, 20], window=9), SMALL, {}),
        (Paged([330]), lone, {}),
        (Paged([40], [40]), PREFILL, {}),
        (Paged([70, 9], window=20, sinks=11, ring=4, has_sink_query=True), SMALL, {}),
    )


def _noticed_by(kernel, first: int = 0) -> str | None:
    def run(case, shape, options):
        check(attend(case, shape=shape, kernel=kernel, **options), case, **options)

    return noticed_by((functools.partial(run, *of) for of in _suite()), forget_state, first)


@pytest.mark.slow
def test_mutation_suite_passes_without_a_fault():
    assert _noticed_by(hopper) is None


@pytest.mark.slow
def test_mutation_every_planted_fault_is_noticed(capsys):
    def notice(name):
        return _noticed_by(with_fault(MODULES, *FAULTS[name]), NOTICED_BY.get(name, 0))

    assert_all_noticed(FAULTS, notice, capsys)
