"""Texts of tiny models on a device, the same for all that is tried on the simulated GPU."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import outrider
from outrider.decode import Request, decode
from outrider.draft_length import FixedLength
from outrider.drafters import Drafter, ModelDrafter
from outrider.randomness import RandomStream
from outrider.records import Round
from outrider.sampling import SamplingSettings
from tests.helpers.toys import SETTINGS as LAWS

PROMPTS = [[5, 6, 7, 5, 6], [9, 10, 11, 9, 10, 11, 9], [4]]
SETTINGS = {name: LAWS[name] for name in ("greedy", "temperature 1", "bias", "all")}
Written = tuple[list[list[int]], list[list[Round]]]


@cache
def opened(folder: Path, device: str, captured: bool = False) -> Any:
    """In float64: devices add up in other orders, and a number that lies near an edge would draw another token."""
    return outrider.load(folder, dtype="float64", device=device, pack=captured)


def write(
    target: Any,
    drafter: Drafter | None,
    setting: str = "greedy",
    prompts: Any = PROMPTS,
    count: int = 9,
    by_position: bool = False,
    **options: Any,
) -> Written:
    """With a fixed length and given costs, since measuring them takes hundreds of passes."""
    streams = [RandomStream(0, row, by_position=by_position) for row in range(len(prompts))]
    requests = [Request(prompt, count, stream) for prompt, stream in zip(prompts, streams, strict=True)]
    return decode(target, requests, SETTINGS[setting], drafter, FixedLength(3), **options)


def given(folder: Path, device: str) -> ModelDrafter:
    return ModelDrafter(opened(folder, device), step_seconds=0.01)


def flat(folder: Path, device: str) -> ModelDrafter:
    """The target itself, but undecided: what it drafts is often rejected, what it holds likely comes."""
    return ModelDrafter(opened(folder, device), SamplingSettings(temperature=3.0), step_seconds=0.01)
