"""What a sweep over draft lengths shows: figures of each K, and what they should have been.

Three predictions, since they fail for different reasons. *By the costs*: the recorded rounds by what passes cost around
each run (`moment`; by the standing cost table in logs without), added up by `draft_length.predicted`; off where these passes
do not describe the rounds. *By the formula*: from one alpha and these costs, E[tokens] · t(1) / (K t_draft + t(K + 1)); off,
too, where acceptances are not independent. *Closed form*: Leviathan Theorem 3.8 from alpha and c alone; off, too, where
scoring K + 1 tokens costs more than scoring one. Both let every round draft K tokens, so alpha counts a position where
nothing was offered as rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev

import numpy as np

from outrider.audit.greedy import Divergence, first_divergence
from outrider.bench.moment import Moment, mean_moment
from outrider.bench.settings import Setting
from outrider.bench.statistics import Spread, paired_ratios
from outrider.bench.sweep import SweepRun
from outrider.costs import Costs, DraftSeconds
from outrider.draft_length.predicted import plain_seconds, predicted_seconds
from outrider.models.base import TextModel
from outrider.request.prompts import Asked, prepare
from outrider.theory import measured_speedup, walltime_factor

FEWEST_ROUNDS = 8  # through which a line is drawn


@dataclass(frozen=True)
class Percentiles:
    """Milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float


def percentiles(milliseconds: Sequence[float], weights: Sequence[int] | None = None) -> Percentiles:
    """weights: how often each value counts; once if not given."""
    values = np.repeat(np.asarray(milliseconds), 1 if weights is None else np.asarray(weights))
    return Percentiles(float(values.mean()), *(float(x) for x in np.quantile(values, [0.5, 0.9, 0.99])))


@dataclass(frozen=True)
class Prediction:
    """What a K should have given. ratio: predicted / measured time per token.

    speedup: over plain decoding, by the costs. formula: by alpha and the costs. closed_form: by Theorem 3.8.
    """

    ms_per_token: float
    ratio: float
    loop_ms: float
    speedup: float
    formula: float
    closed_form: float


@dataclass(frozen=True)
class LengthRow:
    """One K at one setting.

    ms_per_token, ms_deviation: mean over prompts and standard deviation between them. loop: of rounds. token: of tokens,
    each given an equal part of its round. efficiency: tokens per round / (K + 1), Chen's "acceptance rate".
    acceptance_rate: accepted / tested. speedup: K = 0's time per token over this one's, prompt by prompt. identical: prompts
    with the tokens of K = 0, at temperature 0; divergences: {prompt: verdict} of the others.
    """

    setting: str
    length: int
    prompts: int
    tokens: int
    ms_per_token: float
    ms_deviation: float
    loop: Percentiles
    token: Percentiles
    acceptance_rate: float | None
    tokens_per_round: float
    efficiency: float
    speedup: Spread
    predicted: Prediction
    identical: int | None
    divergences: dict[str, Divergence]


@dataclass(frozen=True)
class Sweep:
    """One setting. alpha: over all K, for the closed form. c: a drafted token's seconds over a plain pass, by the tables.

    slope_ms: what a further drafted token adds to a round, the least-squares line through the rounds that were drafted in
    full, with its standard error; step_ms: what the tables say that drafting one costs. Chen: "the gradient is slightly
    higher than the sampling speed of the draft model".
    """

    setting: str
    alpha: float | None
    c: float
    slope_ms: float | None
    slope_error_ms: float | None
    step_ms: float
    rows: list[LengthRow]


@dataclass(frozen=True)
class Tables:
    """What the predictions are made from. steps: {drafter: seconds}. own: of the draft that they belong to."""

    costs: Costs
    steps: dict[str, DraftSeconds]
    own: DraftSeconds

    def at(self, moment: Moment | None) -> Tables:
        """As they were at that moment; what was not timed then stays."""
        if moment is None:
            return self
        steps = {**self.steps, **{name: DraftSeconds(step) for name, step in moment.steps.items()}}
        own = DraftSeconds(fmean(moment.steps.values())) if moment.steps else self.own
        return Tables(replace(moment.costs, change=self.costs.change), steps, own)


def moment_of(run: SweepRun) -> Moment | None:
    """What passes cost at the time of the run, if that was timed."""
    return None if run.moment is None else Moment.from_dict(run.moment)


def tables_of(runs: Sequence[SweepRun], standing: Tables) -> Tables:
    """The means of what was timed around the runs, if it was at all of them; else the standing tables."""
    moments = [moment for run in runs if (moment := moment_of(run)) is not None]
    return standing.at(mean_moment(moments)) if runs and len(moments) == len(runs) else standing


def summarise(
    runs: Sequence[SweepRun],
    settings: Sequence[Setting],
    tables: Tables,
    prompts: dict[tuple[str, str], Asked],
    target: TextModel,
) -> list[Sweep]:
    """A sweep per setting. prompts: {(example, digest): token ids}, to judge divergences by."""
    return [_sweep(setting, [r for r in runs if r.setting == setting.name], tables, prompts, target) for setting in settings]


def _sweep(
    setting: Setting, runs: list[SweepRun], tables: Tables, prompts: dict[tuple[str, str], Asked], target: TextModel
) -> Sweep:
    by_length: dict[int, list[SweepRun]] = {}
    for run in sorted(runs, key=lambda run: (run.length, run.example, run.digest)):
        by_length.setdefault(run.length, []).append(run)
    alpha = _alpha(runs)
    tables = tables_of(runs, tables)
    c = tables.own.token / tables.costs.verify(1)
    rows = []
    for length, chosen in by_length.items():
        parted = _divergences(chosen, by_length[0], prompts, target) if setting.temperature == 0 and length else {}
        formula, closed_form = _from_alpha(alpha or 0.0, length, tables), walltime_factor(alpha or 0.0, length, c)
        rows.append(_row(setting, length, chosen, by_length[0], tables, (formula, closed_form), parted))
    return Sweep(setting.name, alpha, c, *_slope(runs), 1000 * tables.own.token, rows)


def _row(
    setting: Setting,
    length: int,
    runs: list[SweepRun],
    plain: list[SweepRun],
    tables: Tables,
    from_alpha: tuple[float, float],
    divergences: dict[str, Divergence],
) -> LengthRow:
    rounds = [r for run in runs for r in run.rounds]
    loops = [1000 * seconds for _, _, _, seconds, _ in rounds]
    kept = [int(count) for count, *_ in rounds]
    paces, plain_paces = _paces(runs), _paces(plain)
    per_round = sum(kept) / len(rounds)
    same = sum(a.tokens == b.tokens for a, b in zip(runs, plain, strict=True))
    return LengthRow(
        setting=setting.name,
        length=length,
        prompts=len(runs),
        tokens=sum(kept),
        ms_per_token=fmean(paces),
        ms_deviation=pstdev(paces),
        loop=percentiles(loops),
        token=percentiles([loop / count for loop, count in zip(loops, kept, strict=True)], kept),
        acceptance_rate=_acceptance(runs),
        tokens_per_round=per_round,
        efficiency=per_round / (length + 1),
        speedup=paired_ratios(plain_paces, paces),
        predicted=_predict(runs, tables, fmean(paces), *from_alpha),
        identical=same if setting.temperature == 0 else None,
        divergences=divergences,
    )


def _predict(runs: list[SweepRun], tables: Tables, measured: float, formula: float, closed_form: float) -> Prediction:
    made = [(run.records(), tables.at(moment_of(run)), run.prompt_tokens) for run in runs]
    seconds = [predicted_seconds(rounds, by.costs, by.steps, prompt) for rounds, by, prompt in made]
    plain = [plain_seconds(rounds, by.costs, prompt) for rounds, by, prompt in made]
    pace = fmean(1000 * took / len(run.tokens) for took, run in zip(seconds, runs, strict=True))
    loop = 1000 * sum(seconds) / sum(len(run.rounds) for run in runs)
    return Prediction(pace, pace / measured, loop, sum(plain) / sum(seconds), formula, closed_form)


def _from_alpha(alpha: float, length: int, tables: Tables) -> float:
    """Speed-up by the formula."""
    costs = {n: tables.costs.verify(n) for n in (1, length + 1)}
    return measured_speedup(alpha, length, tables.own.of(length) / max(1, length), costs)


def _paces(runs: Sequence[SweepRun]) -> list[float]:
    """Milliseconds per token of each prompt."""
    return [1000 * run.seconds / len(run.tokens) for run in runs]


def _acceptance(runs: Sequence[SweepRun]) -> float | None:
    records = [record for run in runs for record in run.records()]
    tested = sum(record.tested for record in records)
    return sum(record.used for record in records) / tested if tested else None


def _alpha(runs: Sequence[SweepRun]) -> float | None:
    """The maximum likelihood estimate for a capped geometric number of accepted tokens (Leviathan 3.1).

    Every round but one that accepted K ends with a failure: a rejection, or a draft that fell short. The last round of a
    text is left out, since the text's own end cuts its draft.
    """
    rounds = [(run.length, r[2]) for run in runs if run.length for r in run.rounds[:-1]]
    accepted = sum(count for _, count in rounds)
    failed = sum(count < length for length, count in rounds)
    return accepted / (accepted + failed) if rounds else None


def _slope(runs: Sequence[SweepRun]) -> tuple[float | None, float | None]:
    """Milliseconds that a further drafted token adds to a round, over rounds with K ≥ 1 tokens drafted, and their error."""
    full = [(run.length, 1000 * r[3]) for run in runs for r in run.rounds if run.length and r[1] == run.length]
    if len({length for length, _ in full}) < 2 or len(full) < FEWEST_ROUNDS:
        return None, None
    lengths, loops = np.asarray(full).T
    line, covariance = np.polyfit(lengths, loops, 1, cov=True)
    return float(line[0]), float(covariance[0, 0] ** 0.5)


def _divergences(
    runs: list[SweepRun], plain: list[SweepRun], prompts: dict[tuple[str, str], Asked], target: TextModel
) -> dict[str, Divergence]:
    found = {}
    for run, base in zip(runs, plain, strict=True):
        seen = prepare(target, prompts[run.example, run.digest])
        parted = first_divergence(target, seen.tokens, base.tokens, run.tokens, seen.source)
        if parted is not None:
            found[run.example] = parted
    return found
