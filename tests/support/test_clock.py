"""Seconds by phase."""

from __future__ import annotations

import itertools

import pytest

from outrider.support.clock import PhaseClock


def test_an_inner_phase_suspends_the_outer_one_and_errors_end_both(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr("outrider.support.clock.time.perf_counter", lambda: float(2 ** next(ticks)))
    counted = PhaseClock()  # at 1
    with counted.phase("draft"):  # at 2
        with pytest.raises(ValueError, match="so"), counted.phase("sampling"):  # at 4, until 8
            raise ValueError("so")
        with counted.phase("verify"):  # at 16, until 32
            pass
    # The outer one until 64, taken at 128.
    assert counted.take() == {
        "prefill": 0.0,
        "draft": 2.0 + 8.0 + 32.0,
        "verify": 16.0,
        "sampling": 4.0,
        "other": 1.0 + 64.0,
    }
    assert counted.take() == {"prefill": 0.0, "draft": 0.0, "verify": 0.0, "sampling": 0.0, "other": 128.0}
