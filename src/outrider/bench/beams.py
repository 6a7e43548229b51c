"""Speculative beam search beside plain beam search on many prompts (Leviathan A.4): cost, speed, agreement.

For each width, plain search and every number of drafted steps answer the same prompts, in an order that rotates from prompt
to prompt. Ends of text are ignored, so all searches take the same steps, and all texts have the same length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from outrider.beam.generate import BeamGeneration
from outrider.bench.asking import prompt_tokens
from outrider.bench.contest import in_turn
from outrider.bench.examples import Example, TaskKind
from outrider.bench.resumed import Resumed
from outrider.bench.statistics import Spread, paired_ratios
from outrider.drafters import Drafter
from outrider.models.base import TextModel
from outrider.settings.beams import BeamSettings
from outrider.support.run_log import RunLog

PLAIN = "plain"
WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class BeamRun:
    """One prompt, one width. drafted: "plain", a number of steps, or "auto". texts: all finished ones, best first."""

    example: str
    digest: str
    width: int
    drafted: str
    texts: list[list[int]]
    scores: list[float]
    passes: int
    steps: int
    accepted: int
    tested: int
    scored: int
    seconds: dict[str, float]

    @property
    def key(self) -> tuple[str, str, int, str]:
        return self.example, self.digest, self.width, self.drafted

    @property
    def rate(self) -> float:
        """Steps a second, reading the prompt left out."""
        return self.steps / sum(value for phase, value in self.seconds.items() if phase != "prefill")


def measure(
    target: TextModel,
    draft: Drafter,
    kind: TaskKind,
    examples: Sequence[Example],
    widths: Sequence[int],
    lengths: Sequence[int | None],
    max_new_tokens: int,
    log: RunLog,
) -> Iterator[BeamRun]:
    """Run what the log does not hold yet, append it there, and yield all runs. lengths: steps to draft, None: adaptive."""
    runs = Resumed(log, BeamRun)
    choices: list[tuple[int, str]] = [(width, name) for width in widths for name in (PLAIN, *map(_name, lengths))]
    for number, example in enumerate(examples):
        prompt = prompt_tokens(target, kind, example)
        for choice in in_turn(choices, number):
            made = partial(_search, target, draft, prompt, example, *choice)
            key = (example.name, example.digest, *choice)
            yield runs.run(key, partial(made, max_new_tokens), choice, partial(made, WARM_UP_TOKENS))


def _name(length: int | None) -> str:
    return "auto" if length is None else str(length)


def _search(
    target: TextModel, draft: Drafter, prompt: list[int], example: Example, width: int, drafted: str, tokens: int
) -> BeamRun:
    plain = drafted == PLAIN
    steps = None if plain or drafted == "auto" else int(drafted)
    settings = BeamSettings(width, num_return_sequences=width)
    search = BeamGeneration(target, prompt, settings, None if plain else draft, tokens, steps, ignore_eos=True)
    for _ in search.run():
        pass
    found = search.result()
    stats = found.stats
    return BeamRun(
        example=example.name,
        digest=example.digest,
        width=width,
        drafted=drafted,
        texts=[one.tokens for one in found.sequences],
        scores=[one.score for one in found.sequences],
        passes=stats.passes,
        steps=stats.steps,
        accepted=stats.accepted,
        tested=stats.tested,
        scored=stats.scored,
        seconds=stats.seconds,
    )


@dataclass(frozen=True)
class Row:
    """One width and number of drafted steps.

    steps_per_pass: of the target. acceptance: accepted / tested steps. scored_per_step: tokens that the target scored for a
    step; num_beams, or less, when plain. seconds: of a step, by phase. speedup: steps a second over plain search, prompt
    by prompt. identical: prompts whose texts are the plain search's, all of them in order. score_gap: the greatest
    difference of scores at one rank.
    """

    width: int
    drafted: str
    prompts: int
    steps_per_pass: float
    acceptance: float | None
    scored_per_step: float
    seconds: dict[str, float]
    speedup: Spread
    identical: int
    score_gap: float


def summarise(runs: Sequence[BeamRun]) -> list[Row]:
    """A row per width and number of drafted steps, plain search first."""
    groups: dict[tuple[int, str], dict[tuple[str, str], BeamRun]] = {}
    for run in runs:
        groups.setdefault((run.width, run.drafted), {})[run.example, run.digest] = run
    order = sorted(groups, key=lambda key: (key[0], key[1] != PLAIN, key[1] == "auto", key[1]))
    return [_row(groups[key], groups[key[0], PLAIN]) for key in order]


def _row(mine: dict[tuple[str, str], BeamRun], plain: dict[tuple[str, str], BeamRun]) -> Row:
    runs, bases = list(mine.values()), [plain[key] for key in mine]
    steps, tested = sum(run.steps for run in runs), sum(run.tested for run in runs)
    gaps = [abs(a - b) for run, base in zip(runs, bases, strict=True) for a, b in zip(run.scores, base.scores, strict=False)]
    return Row(
        width=runs[0].width,
        drafted=runs[0].drafted,
        prompts=len(runs),
        steps_per_pass=steps / sum(run.passes for run in runs),
        acceptance=sum(run.accepted for run in runs) / tested if tested else None,
        scored_per_step=sum(run.scored for run in runs) / steps,
        seconds={phase: sum(run.seconds[phase] for run in runs) / steps for phase in runs[0].seconds if phase != "prefill"},
        speedup=paired_ratios([run.rate for run in runs], [base.rate for base in bases]),
        identical=sum(run.texts == base.texts for run, base in zip(runs, bases, strict=True)),
        score_gap=max(gaps, default=0.0),
    )
