"""What a pass of beam search did, and the figures that follow. Every reported number derives from these records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Literal

from outrider.records import PHASES, seconds_by_phase

EndReason = Literal["eos", "length", "context", "cancelled"]


@dataclass(frozen=True)
class BeamRound:
    """One pass of the target.

    steps: tokens by which all running hypotheses grew, at least one. drafted: steps that the draft went ahead. accepted: of
    these, how many had all of the target's hypotheses among the draft's: steps - 1, or less where the search ended.
    hypotheses: whose continuations the pass gave. rows: of the pass. scored: tokens scored in it; again: those of them that
    had been scored before, or that only lead to a hypothesis. seconds: by phase.
    """

    steps: int
    drafted: int
    accepted: int
    hypotheses: int
    rows: int
    scored: int
    again: int
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def tested(self) -> int:
        """Drafted steps about which it was decided: the accepted ones and the refused one, if any."""
        return min(self.accepted + 1, self.drafted)


@dataclass(frozen=True)
class BeamStats:
    """Figures of one search.

    passes: of the target. steps: tokens of each hypothesis followed. acceptance_rate: accepted / tested steps (None without
    drafts). hypotheses, scored: what the target was asked, and the tokens that this took.
    """

    passes: int
    steps: int
    drafted: int
    accepted: int
    tested: int
    hypotheses: int
    scored: int
    again: int
    rows: int
    seconds: dict[str, float]

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.tested if self.tested else None

    @property
    def steps_per_pass(self) -> float:
        return self.steps / self.passes if self.passes else 0.0

    @property
    def decode_seconds(self) -> float:
        """Seconds from the first pass on, reading the prompt left out."""
        return sum(self.seconds[phase] for phase in PHASES if phase != "prefill")

    @property
    def steps_per_second(self) -> float:
        return self.steps / self.decode_seconds if self.decode_seconds > 0 else 0.0

    def to_dict(self) -> dict[str, object]:
        """For machine-readable output."""
        return {
            **asdict(self),
            "acceptance_rate": self.acceptance_rate,
            "steps_per_pass": self.steps_per_pass,
            "scored_per_pass": self.scored / self.passes if self.passes else 0.0,
            "steps_per_second": self.steps_per_second,
            "seconds": {**self.seconds, "total": sum(self.seconds.values())},
        }


def summarise(rounds: Iterable[BeamRound], prefill_seconds: float = 0.0) -> BeamStats:
    """Add up the rounds of one search."""
    rounds = list(rounds)
    seconds = seconds_by_phase(rounds)
    seconds["prefill"] += prefill_seconds
    names = ("steps", "drafted", "accepted", "tested", "hypotheses", "scored", "again", "rows")
    totals: dict[str, int] = {name: sum(getattr(one, name) for one in rounds) for name in names}
    return BeamStats(passes=len(rounds), seconds=seconds, **totals)


@dataclass(frozen=True)
class BeamText:
    """One finished text. logprob: its log-probability under the target; score: that, with the length penalty."""

    text: str
    tokens: list[int]
    logprob: float
    score: float
    finish_reason: EndReason


@dataclass(frozen=True)
class BeamResult:
    """What a search returns. sequences: best first, as many as were asked for (fewer only where fewer exist).

    prompt_tokens: those that texts began with; source_tokens: those that an encoder read, None without one or for audio.
    """

    sequences: list[BeamText]
    stats: BeamStats
    rounds: list[BeamRound]
    prompt_tokens: int
    source_tokens: int | None = None

    @property
    def best(self) -> BeamText:
        return self.sequences[0]

    @property
    def text(self) -> str:
        return self.best.text

    @property
    def tokens(self) -> list[int]:
        return self.best.tokens

    @property
    def finish_reason(self) -> EndReason:
        return self.best.finish_reason

    def to_dict(self) -> dict[str, object]:
        """The machine-readable form: the best text as `generate` gives it, and all of them."""
        return {
            **asdict(self.best),
            "sequences": [asdict(one) for one in self.sequences],
            "prompt_tokens": self.prompt_tokens,
            **({} if self.source_tokens is None else {"source_tokens": self.source_tokens}),
            "stats": self.stats.to_dict(),
        }
