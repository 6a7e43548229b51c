"""The candidates run: plain decoding and what was predicted to be best, in turn, on the same prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass

from outrider.bench.contest import in_turn
from outrider.bench.statistics import Spread, paired_ratios
from outrider.generation import generate
from outrider.models.base import TextModel, has_encoder
from outrider.request.choices import Draft, Length
from outrider.request.prompts import Asked
from outrider.results import Result
from outrider.sampling import SamplingSettings

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Setup:
    """A way to decode."""

    draft: Draft
    length: Length


@dataclass(frozen=True)
class Run:
    """One prompt, one way. rate: tokens per second, reading the prompt left out."""

    setup: str
    prompt: int
    rate: float
    tokens: int
    tokens_per_round: float


def run_setups(
    target: TextModel,
    setups: Mapping[str, Setup],
    prompts: Many[Asked],
    sampling: SamplingSettings,
    max_new_tokens: int,
    seed: int,
) -> Iterator[Run]:
    """Every prompt by every set-up, the order rotating; each warmed up before."""
    entries = list(setups.items())
    for _, setup in entries:
        _generate(target, setup, prompts[0], sampling, WARM_UP_TOKENS, seed)
    for number, prompt in enumerate(prompts):
        for name, setup in in_turn(entries, number):
            stats = _generate(target, setup, prompt, sampling, max_new_tokens, seed + number).stats
            yield Run(name, number, stats.tokens_per_second, stats.tokens, stats.mean_acceptance_length)


def _generate(target: TextModel, setup: Setup, prompt: Asked, sampling: SamplingSettings, tokens: int, seed: int) -> Result:
    return generate(
        target,
        prompt,
        draft=setup.draft,
        num_draft_tokens=setup.length,
        max_new_tokens=tokens,
        ignore_eos=not has_encoder(target),  # after the answer to a source comes nothing that anybody wants
        seed=seed,
        **sampling.options(),
    )


def speedup(runs: Many[Run], setup: str, over: str) -> Spread:
    """The ratio of rates, prompt by prompt."""
    rates = {name: {run.prompt: run.rate for run in runs if run.setup == name} for name in (setup, over)}
    shared = sorted(rates[setup].keys() & rates[over].keys())
    return paired_ratios([rates[setup][i] for i in shared], [rates[over][i] for i in shared])


def overall(runs: Many[Run], setup: str, over: str) -> float:
    """The ratio of the rates over all prompts together, which is what a prediction for all of them is about."""
    rates = []
    for name in (setup, over):
        own = [run for run in runs if run.setup == name]
        rates.append(sum(run.tokens for run in own) / sum(run.tokens / run.rate for run in own))
    return rates[0] / rates[1]
