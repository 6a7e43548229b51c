"""Rows that are decided by position."""

from __future__ import annotations

from outrider.randomness import RandomStream


def stream_by_position(seed: int, row: int = 0) -> RandomStream:
    return RandomStream(seed, row, by_position=True)
