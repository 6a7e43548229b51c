"""Texts × drafters × temperatures: adaptive drafting beside plain decoding, fixed lengths and the oracle.

Each cell runs plain decoding, the adaptive policy and some fixed lengths in turn, several times, with the same seeds; a
time is the median over the repetitions. When sampling, each policy gives a text of its own, so a cell takes several seeds;
plain and adaptive one after the other, as they are timed, fixed lengths side by side, as only their rounds are of interest.
The oracle knows beforehand how many drafted tokens will be accepted (Leviathan 3.5): its time is worked out from a run of
the longest fixed length and the measured costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from outrider.bench.tasks import Task
from outrider.costs import DraftSeconds, measured_costs
from outrider.draft_length.predicted import oracle_seconds, predicted_seconds
from outrider.drafters import Drafter
from outrider.generation import generate
from outrider.models.base import TextModel
from outrider.run_log import RunLog

FIXED = (2, 4, 8)


@dataclass(frozen=True)
class Run:
    """One generation. lengths: {tokens drafted in a round: rounds}. table_seconds: its time by the measured costs."""

    text: str
    drafter: str
    temperature: float
    policy: str
    repetition: int
    tokens: int
    seconds: float
    rounds: int
    drafted: int
    accepted: int
    tested: int
    lengths: dict[int, int]
    table_seconds: float
    oracle_seconds: float


@dataclass(frozen=True)
class Cell:
    """A text, a drafter, a temperature.

    speedup, spread: plain time / adaptive time, per token, as measured: median, least and most over the repetitions.
    table, fixed, oracle: the same by the cost tables, which the noise of the machine can't touch: of the adaptive policy, of
    each fixed length, and of the oracle. tokens_per_second: of the adaptive policy.
    """

    text: str
    drafter: str
    temperature: float
    speedup: float
    spread: tuple[float, float]
    table: float
    fixed: dict[int, float]
    oracle: float
    tokens_per_second: float
    acceptance_rate: float | None
    tokens_per_round: float
    lengths: dict[int, int]

    @property
    def against_best_fixed(self) -> float:
        """Adaptive over the best of the fixed lengths, 0 among them, chosen in hindsight."""
        return self.table / max(1.0, *self.fixed.values())

    @property
    def captured(self) -> float | None:
        """The share of the oracle's gain in time that the adaptive policy had; None where there is nothing to gain."""
        gain = 1.0 - 1.0 / self.oracle
        return (1.0 - 1.0 / self.table) / gain if gain > 0.03 else None


def measure(
    target: TextModel,
    drafters: dict[str, Drafter],
    texts: Sequence[Task],
    temperatures: Sequence[float],
    max_new_tokens: int,
    repetitions: int,
    seeds: int,
    log: Path | None,
) -> Iterator[Run]:
    """Run what `log` (JSON lines, if any) does not hold yet, append it there, and yield all runs.

    seeds: texts of each cell when sampling.
    """
    kept = RunLog(log)
    done = {_key(run): run for run in map(_read, kept.entries)}
    for text in texts:
        for temperature in temperatures:
            for repetition in range(repetitions):
                for drafter, policy in _turns(list(drafters), repetition):
                    key = (text.name, drafter, temperature, policy, repetition)
                    if key not in done:
                        plan = (temperature, policy, repetition)
                        made, count = drafters.get(drafter), seeds if temperature else 1
                        run = _run(target, (drafter, made), text, plan, max_new_tokens, count)
                        done[key] = run
                        kept.append(asdict(run))
                    yield done[key]


def count_runs(drafters: int, texts: int, temperatures: int, repetitions: int) -> int:
    """How many runs `measure` yields."""
    return texts * temperatures * repetitions * (1 + drafters * (1 + len(FIXED)))


def _turns(names: list[str], repetition: int) -> list[tuple[str, str]]:
    """Every contender once, beginning elsewhere in each repetition."""
    turns = [("", "plain")] + [(name, policy) for name in names for policy in ("adaptive", *map(str, FIXED))]
    at = (repetition * 7) % len(turns)
    return turns[at:] + turns[:at]


def _run(
    target: TextModel,
    drafter: tuple[str, Drafter | None],
    text: Task,
    plan: tuple[float, str, int],
    tokens: int,
    seeds: int,
) -> Run:
    """plan: temperature, policy, repetition."""
    temperature, policy, repetition = plan
    name, made = drafter
    fixed = policy not in ("plain", "adaptive")
    options: dict[str, Any] = {
        "draft": made,
        "num_draft_tokens": int(policy) if fixed else None,
        "max_new_tokens": tokens,
        "temperature": temperature,
        "ignore_eos": True,
    }
    numbers = [repetition * seeds + i for i in range(seeds)]
    costs = measured_costs(target)
    if fixed:
        results = generate(target, [text.prompt] * seeds, seed=numbers, **options)
    else:
        results = [generate(target, text.prompt, seed=number, **options) for number in numbers]
    steps = made.part_seconds() if made is not None else {}
    own = made.seconds if made is not None else DraftSeconds()
    every = [result.stats for result in results]
    return Run(
        text=text.name,
        drafter=name,
        temperature=temperature,
        policy=policy,
        repetition=repetition,
        tokens=sum(stats.tokens for stats in every),
        seconds=sum(stats.decode_seconds for stats in every),
        rounds=sum(stats.rounds for stats in every),
        drafted=sum(stats.drafted for stats in every),
        accepted=sum(stats.accepted for stats in every),
        tested=sum(stats.tested for stats in every),
        lengths=dict(Counter(r.drafted for result in results for r in result.rounds)),
        table_seconds=sum(predicted_seconds(r.rounds, costs, steps, r.prompt_tokens) for r in results),
        oracle_seconds=sum(oracle_seconds(r.rounds, costs, own, r.prompt_tokens) for r in results),
    )


def _key(run: Run) -> tuple[str, str, float, str, int]:
    return run.text, run.drafter, run.temperature, run.policy, run.repetition


def _read(entry: dict[str, Any]) -> Run:
    return Run(**{**entry, "lengths": {int(k): n for k, n in entry["lengths"].items()}})


def summarise(runs: Sequence[Run]) -> list[Cell]:
    """A cell per text, drafter and temperature, in the order of the runs."""
    groups: dict[tuple[str, str, float], list[Run]] = {}
    for run in runs:
        if run.drafter:
            groups.setdefault((run.text, run.drafter, run.temperature), []).append(run)
    plain = {(run.text, run.temperature, run.repetition): run for run in runs if run.policy == "plain"}
    return [_cell(group, plain) for group in groups.values()]


def _cell(runs: list[Run], plain: dict[tuple[str, float, int], Run]) -> Cell:
    def base(run: Run) -> Run:
        return plain[run.text, run.temperature, run.repetition]

    def by_table(policy: str) -> float:
        chosen = [run for run in runs if run.policy == policy]
        return median(_per_token(base(run).table_seconds, base(run)) / _per_token(run.table_seconds, run) for run in chosen)

    adaptive = [run for run in runs if run.policy == "adaptive"]
    longest = [run for run in runs if run.policy == str(max(FIXED))]
    lengths = sum((Counter(run.lengths) for run in adaptive), Counter[int]())
    tested = sum(run.tested for run in adaptive)
    own = [_per_token(base(run).seconds, base(run)) / _per_token(run.seconds, run) for run in adaptive]
    return Cell(
        text=runs[0].text,
        drafter=runs[0].drafter,
        temperature=runs[0].temperature,
        speedup=median(own),
        spread=(min(own), max(own)),
        table=by_table("adaptive"),
        fixed={length: by_table(str(length)) for length in FIXED},
        oracle=median(_per_token(base(r).table_seconds, base(r)) / _per_token(r.oracle_seconds, r) for r in longest),
        tokens_per_second=median(run.tokens / run.seconds for run in adaptive),
        acceptance_rate=sum(run.accepted for run in adaptive) / tested if tested else None,
        tokens_per_round=sum(run.tokens for run in adaptive) / sum(run.rounds for run in adaptive),
        lengths=dict(sorted(lengths.items())),
    )


def _per_token(seconds: float, run: Run) -> float:
    return seconds / run.tokens
