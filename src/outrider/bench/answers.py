"""Plain and speculative answers to a task's prompts in one run: quality, time per token, acceptance (Leviathan Table 2, Chen
Table 1).

Every way of drafting answers every prompt with the same seed, the order rotating from prompt to prompt, after a warm-up.
Times are of decoding: reading the prompt is the same work on all sides and is kept apart. Speed-ups are ratios prompt by
prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Any

from outrider.audit.greedy import Divergence, first_divergence
from outrider.bench.asking import asked_of, stops
from outrider.bench.contest import WARM_UP_TOKENS, in_turn
from outrider.bench.examples import Answer, Example, TaskKind
from outrider.bench.quality import Estimate, Metric, difference, estimate
from outrider.bench.resumed import Resumed
from outrider.bench.settings import Setting
from outrider.bench.statistics import Spread, paired_ratios, spread
from outrider.drafters import Drafter
from outrider.generation import generate
from outrider.models.base import TextModel
from outrider.request.prompts import Asked, prepare
from outrider.support.run_log import RunLog

PLAIN = "plain"
_SAMPLE_STRIDE = 1_000_003


@dataclass(frozen=True)
class Drafting:
    """One way of drafting. length: fixed, or None for the adaptive one."""

    name: str
    draft: Drafter | None
    length: int | None = None


@dataclass(frozen=True)
class Plan:
    """What is asked: a task, its examples, how to sample, so many samples of each where there is chance in it."""

    kind: TaskKind
    examples: Sequence[Example]
    settings: Sequence[Setting]
    max_new_tokens: int
    samples: int = 1

    def count(self, draftings: int) -> int:
        """How many runs `measure` yields."""
        return draftings * len(self.examples) * sum(self.samples_of(setting) for setting in self.settings)

    def samples_of(self, setting: Setting) -> int:
        return self.samples if setting.temperature else 1


@dataclass(frozen=True)
class AnswerRun:
    """One answer. sums: of the metric, None without one. seconds: of decoding."""

    example: str
    digest: str
    sample: int
    setting: str
    drafting: str
    tokens: list[int]
    text: str
    rounds: int
    drafted: int
    accepted: int
    tested: int
    seconds: float
    prefill_seconds: float
    sums: list[float] | None

    @property
    def key(self) -> tuple[str, str, int, str, str]:
        return self.example, self.digest, self.sample, self.setting, self.drafting


def measure(
    target: TextModel, draftings: Sequence[Drafting], plan: Plan, metric: Metric | None, log: RunLog
) -> Iterator[AnswerRun]:
    """Run what the log does not hold yet, append it there, and yield all runs."""
    runs = Resumed(log, AnswerRun)
    for number, example in enumerate(plan.examples):
        for setting in plan.settings:
            for sample in range(plan.samples_of(setting)):
                for drafting in in_turn(draftings, number):
                    made = partial(_generate, target, drafting, plan, example, setting, sample)
                    key = (example.name, example.digest, sample, setting.name, drafting.name)
                    yield runs.run(
                        key, partial(made, plan.max_new_tokens, metric), drafting.name, partial(made, WARM_UP_TOKENS)
                    )


def _generate(
    target: TextModel,
    drafting: Drafting,
    plan: Plan,
    example: Example,
    setting: Setting,
    sample: int,
    tokens: int,
    metric: Metric | None = None,
) -> AnswerRun:
    prompt = asked_of(target, plan.kind, example)
    result = generate(
        target,
        prompt,
        draft=drafting.draft,
        num_draft_tokens=drafting.length,
        max_new_tokens=tokens,
        stop=stops(target, plan.kind, example),
        seed=seed_of(example, sample),
        **setting.sampling.options(),
    )
    return make_run(drafting.name, example, setting, sample, prompt, result.to_dict(), metric)


def seed_of(example: Example, sample: int) -> int:
    """Of an example's sample: the same whatever else is asked for."""
    return example.number + sample * _SAMPLE_STRIDE


def make_run(
    drafting: str,
    example: Example,
    setting: Setting,
    sample: int,
    prompt: Asked,
    result: Mapping[str, Any],
    metric: Metric | None,
) -> AnswerRun:
    """From a result's dictionary."""
    answer, stats = Answer(example, prompt, result["tokens"], result["text"]), result["stats"]
    return AnswerRun(
        example=example.name,
        digest=example.digest,
        sample=sample,
        setting=setting.name,
        drafting=drafting,
        tokens=result["tokens"],
        text=result["text"],
        rounds=stats["rounds"],
        drafted=stats["drafted"],
        accepted=stats["accepted"],
        tested=stats["tested"],
        seconds=stats["seconds"]["total"] - stats["seconds"]["prefill"],
        prefill_seconds=stats["seconds"]["prefill"],
        sums=metric.sums(answer) if metric is not None else None,
    )


@dataclass(frozen=True)
class Row:
    """One way of drafting at one setting.

    quality: None without a metric. against_plain: its quality less plain decoding's, paired. ms_per_token: over all tokens.
    ms_spread: over prompts. speedup: plain time per token over its own, prompt by prompt. acceptance_rate: accepted /
    tested. identical: prompts with the tokens of plain decoding, of a greedy setting. divergences: {prompt: verdict} of the
    others.
    """

    setting: str
    drafting: str
    prompts: int
    tokens: int
    quality: Estimate | None
    against_plain: Estimate | None
    ms_per_token: float
    ms_spread: Spread
    speedup: Spread | None
    acceptance_rate: float | None
    tokens_per_round: float
    prefill_seconds: float
    identical: int | None
    divergences: dict[str, Divergence]


def summarise(runs: Sequence[AnswerRun], plan: Plan, target: TextModel, metric: Metric | None) -> list[Row]:
    """A row per setting and drafting, in the order of the plan."""
    rows = []
    for setting in plan.settings:
        groups: dict[str, list[AnswerRun]] = {}
        for run in runs:
            if run.setting == setting.name:
                groups.setdefault(run.drafting, []).append(run)
        plain = groups.get(PLAIN)
        names = sorted(groups, key=lambda name: name != PLAIN)
        rows += [_row(setting, name, groups[name], plain, plan, target, metric) for name in names]
    return rows


def _row(
    setting: Setting,
    name: str,
    runs: list[AnswerRun],
    plain: list[AnswerRun] | None,
    plan: Plan,
    target: TextModel,
    metric: Metric | None,
) -> Row:
    paced, baseline = _paces(runs), _paces(plain or [])
    own = metric is not None and [*_sums(runs).values()]
    base = metric is not None and plain is not None and name != PLAIN and [*_sums(plain).values()]
    greedy = setting.temperature == 0 and plain is not None and name != PLAIN
    parted = _divergences(runs, plain or [], plan, target) if greedy else {}
    differ = sum(a.tokens != b.tokens for a, b in _pairs(runs, plain or [])) if greedy else 0
    tested = sum(run.tested for run in runs)
    tokens = sum(len(run.tokens) for run in runs)
    return Row(
        setting=setting.name,
        drafting=name,
        prompts=len(paced),
        tokens=tokens,
        quality=estimate(metric, own) if metric is not None and own else None,
        against_plain=difference(metric, own, base) if metric is not None and own and base else None,
        ms_per_token=1000 * sum(run.seconds for run in runs) / tokens,
        ms_spread=spread([1000 * pace for pace in paced.values()]),
        speedup=paired_ratios([baseline[key] for key in paced], [*paced.values()]) if plain and name != PLAIN else None,
        acceptance_rate=sum(run.accepted for run in runs) / tested if tested else None,
        tokens_per_round=tokens / sum(run.rounds for run in runs),
        prefill_seconds=mean(run.prefill_seconds for run in runs),
        identical=len(runs) - differ if greedy else None,
        divergences=parted,
    )


def _prompt_key(run: AnswerRun) -> tuple[str, str]:
    return run.example, run.digest


def _paces(runs: Sequence[AnswerRun]) -> dict[tuple[str, str], float]:
    """Seconds per token of each prompt, over its samples."""
    seconds: dict[tuple[str, str], float] = {}
    tokens: dict[tuple[str, str], int] = {}
    for run in runs:
        key = _prompt_key(run)
        seconds[key] = seconds.get(key, 0.0) + run.seconds
        tokens[key] = tokens.get(key, 0) + len(run.tokens)
    return {key: seconds[key] / tokens[key] for key in seconds}


def _sums(runs: Sequence[AnswerRun]) -> dict[tuple[str, str], list[float]]:
    """The metric's sums of each prompt, over its samples, in the order of the prompts."""
    found: dict[tuple[str, str], list[float]] = {}
    for run in sorted(runs, key=_prompt_key):
        held = found.get(_prompt_key(run))
        found[_prompt_key(run)] = (
            [a + b for a, b in zip(held, run.sums or (), strict=True)] if held else list(run.sums or ())
        )
    return found


def _pairs(runs: Sequence[AnswerRun], plain: Sequence[AnswerRun]) -> list[tuple[AnswerRun, AnswerRun]]:
    by_key = {(*_prompt_key(run), run.sample): run for run in plain}
    return [(by_key[(*_prompt_key(run), run.sample)], run) for run in runs]


def _divergences(
    runs: Sequence[AnswerRun], plain: Sequence[AnswerRun], plan: Plan, target: TextModel
) -> dict[str, Divergence]:
    examples = {(example.name, example.digest): example for example in plan.examples}
    found = {}
    for base, run in _pairs(runs, plain):
        if base.tokens != run.tokens:
            seen = prepare(target, asked_of(target, plan.kind, examples[_prompt_key(run)]))
            parted = first_divergence(target, seen.tokens, base.tokens, run.tokens, seen.source)
            if parted is not None:
                found[run.example] = parted
    return found
