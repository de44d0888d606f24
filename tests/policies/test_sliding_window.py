"""A window in layers that had none: dense attention over it, pages given back, windows of the model's own untouched."""

import dataclasses

import pytest
from helpers.driver import DECODE, PREFILL, SPEC, Twin, table
from helpers.policies import MIXED

from kvjax.errors import InputError
from kvjax.invariants import check
from kvjax.policies import SlidingWindow
from kvjax.spec import pages_for

WINDOW = 13
SLIDING = dataclasses.replace(SPEC, num_pages=48, pages_per_seq=8, policy=SlidingWindow(window=WINDOW))


class WindowTwin(Twin):
    """Layers attend to the model's window or, where it has none, to the policy's."""

    def expected_of_sequence(self, sequence: int, q):
        assert self.spec.windows is not None
        spec = self.spec
        windows = [WINDOW if window is None else window for window in self.spec.windows]
        self.spec = dataclasses.replace(SPEC, windows=windows, pages_per_seq=8)
        try:
            return super().expected_of_sequence(sequence, q)
        finally:
            self.spec = spec


@pytest.mark.slow
def test_every_layer_has_a_window_and_gives_back_what_it_has_passed():
    twin, most = WindowTwin(SLIDING), pages_for(WINDOW + SLIDING.rollback, SLIDING.page_size) + 1
    for shape, lengths, _ in MIXED * 2:
        assert bool(twin.step(lengths, **shape).ok)
        assert ((table(twin.cache) > 0).sum(-1) <= most).all()
        check(twin.cache, held={})
    assert len(twin.tokens[0]) > 6 * WINDOW
    for _ in range(2 * WINDOW):
        twin.step([1, 1, 1, 1], **DECODE)
    assert int(twin.cache.pages_used) <= 2 * 4 * most
    assert bool(twin.step([17, 0, 3, 0], **PREFILL).ok)


def test_rows_are_as_long_as_the_window_needs():
    # Layer 0: ceil((13 + 20 + 4) / 8) + 1; layer 1 keeps its window of 11: ceil((11 + 20 + 4) / 8) + 1.
    assert SLIDING.layer_windows == (WINDOW, 11) and SLIDING.rings == (6, 6)
    assert SLIDING.max_tokens is None and SLIDING.windows == (None, 11)


def test_a_window_of_nothing_is_refused():
    with pytest.raises(InputError, match="window is 0"):
        SlidingWindow(window=0)
