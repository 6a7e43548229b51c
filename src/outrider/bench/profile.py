"""Where the time of a generation went: by phase, and how near its passes came to what the memory can deliver."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch

from outrider.drafters import Drafter, ModelDrafter
from outrider.models.base import LanguageModel, ReadsWeights
from outrider.records import PHASES, Round, seconds_by_phase

_PROBE_BYTES = 1 << 29
_PROBES = 7


@dataclass(frozen=True)
class Reading:
    """Passes of one model. seconds: all of them. weight_bytes: what one pass reads, None if the engine can't say."""

    model: str
    passes: int
    seconds: float
    weight_bytes: int | None

    @property
    def bandwidth(self) -> float | None:
        """Bytes of weights read a second."""
        return self.weight_bytes * self.passes / self.seconds if self.weight_bytes and self.seconds > 0 else None


@dataclass(frozen=True)
class Profile:
    """rounds: passes of the target after the prompt. seconds: by phase, in all. machine_bandwidth: bytes a second."""

    rounds: int
    tokens: int
    seconds: dict[str, float]
    readings: list[Reading]
    machine_bandwidth: float

    def to_dict(self) -> dict[str, object]:
        """For machine-readable output."""
        return {
            "rounds": self.rounds,
            "seconds_per_round": {phase: self.seconds[phase] / max(self.rounds, 1) for phase in self.phases},
            "machine_bytes_per_second": self.machine_bandwidth,
            "readings": [{**asdict(r), "bytes_per_second": r.bandwidth} for r in self.readings],
        }

    @property
    def phases(self) -> tuple[str, ...]:
        """Those of a round."""
        return tuple(phase for phase in PHASES if phase != "prefill")


def profile(rounds: Iterable[Round], target: LanguageModel, drafter: Drafter | None) -> Profile:
    """Of one sequence. Models that draft are listed, with a pass a token. Measures the memory for half a second."""
    rounds = list(rounds)
    seconds = seconds_by_phase(rounds)
    readings = [Reading(target.name, len(rounds), seconds["verify"], _weight_bytes(target))]
    for part in [] if drafter is None else drafter.parts():
        if isinstance(part, ModelDrafter):
            mine = [r for r in rounds if r.drafter == part.name and r.drafted]
            if mine:
                passes, spent = sum(r.drafted for r in mine), sum(r.seconds.get("draft", 0.0) for r in mine)
                readings.append(Reading(part.model.name, passes, spent, _weight_bytes(part.model)))
    return Profile(len(rounds), sum(len(r.tokens) for r in rounds), seconds, readings, memory_bandwidth(target.device))


def _weight_bytes(model: LanguageModel) -> int | None:
    return model.weight_bytes if isinstance(model, ReadsWeights) else None


def memory_bandwidth(device: torch.device) -> float:
    """Bytes a second that a sum over half a gigabyte reads, best of a few."""
    values = torch.ones(_PROBE_BYTES // 4, device=device)
    best = float("inf")
    for _ in range(_PROBES):
        start = time.perf_counter()
        float(values.sum())
        best = min(best, time.perf_counter() - start)
    return _PROBE_BYTES / best
