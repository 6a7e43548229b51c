"""The experiment of the toyllm article (ai-glimpse, *LLM Speculative Sampling*, 2025): same prompt, lengths and models.

GPT-2 XL with GPT-2 as its draft, K = 4, T = 266 tokens in all, temperature 0. Both sides keep their caches, and the time is
of the whole generation, as there: reading the prompt included. The article's own prediction is
r'(K + 1) t_target / (K t_draft + t_target), with r' = tokens per round / (K + 1), and takes a pass over K + 1 tokens to cost
what a pass over one does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Literal

from outrider.audit.greedy import Divergence, first_divergence
from outrider.bench.contest import WARM_UP_TOKENS
from outrider.bench.resumed import Resumed
from outrider.bench.statistics import Spread, paired_ratios
from outrider.costs import measured_costs
from outrider.draft_length.predicted import plain_seconds, predicted_seconds
from outrider.drafters import Drafter
from outrider.errors import ParameterError
from outrider.generation import generate
from outrider.models.base import TextModel
from outrider.records import Round, summarise
from outrider.request.prompts import encode
from outrider.support.run_log import RunLog
from outrider.theory import walltime_factor

PROMPT = "Alan Turing theorized that computers would one day become"
Side = Literal["plain", "speculative"]
SIDES: tuple[Side, ...] = ("plain", "speculative")


@dataclass(frozen=True)
class Article:
    """What the article states. Seconds; milliseconds a token; r' is `efficiency`; 16.8244 s / 7.9031 s is given as 2.12."""

    plain_seconds: float = 16.8244
    speculative_seconds: float = 7.9031
    speedup: float = 2.12
    target_ms: float = 73.3
    draft_ms: float = 11.9
    efficiency: float = 0.8125
    predicted: float = 2.46


@dataclass(frozen=True)
class Run:
    """One generation. seconds: prompt included. draft_seconds: of all drafts. rounds: [kept, drafted, accepted] each."""

    side: Side
    repetition: int
    tokens: list[int]
    text: str
    seconds: float
    decode_seconds: float
    draft_seconds: float
    rounds: list[list[int]]

    @property
    def key(self) -> tuple[str, int]:
        return self.side, self.repetition


def new_tokens(target: TextModel, total: int) -> int:
    """How many tokens follow the prompt. Raises `ParameterError` if they don't fit."""
    prompt = len(encode(target, PROMPT))
    if total <= prompt:
        raise ParameterError(f"total_tokens must be more than the prompt's {prompt}, got {total}")
    if target.max_length is not None and total > target.max_length:
        raise ParameterError(f"total_tokens must be {target.max_length} at most, the context of {target.name}, got {total}")
    return total - prompt


def measure(target: TextModel, draft: Drafter, lookahead: int, total: int, repetitions: int, log: RunLog) -> Iterator[Run]:
    """Both sides in turn, after a warm-up of each; what the log holds is not run again."""
    count = new_tokens(target, total)
    runs = Resumed(log, Run)
    for side in SIDES:
        if any(runs.held((side, i)) is None for i in range(repetitions)):
            _generate(target, draft, lookahead, side, 0, min(WARM_UP_TOKENS, count))
    for repetition in range(repetitions):
        for side in SIDES if repetition % 2 == 0 else SIDES[::-1]:
            yield runs.run((side, repetition), partial(_generate, target, draft, lookahead, side, repetition, count))


def _generate(target: TextModel, draft: Drafter, lookahead: int, side: Side, repetition: int, count: int) -> Run:
    result = generate(
        target,
        PROMPT,
        draft=draft if side == "speculative" else None,
        num_draft_tokens=lookahead,
        max_new_tokens=count,
        temperature=0.0,
        ignore_eos=True,
        seed=0,
    )
    return Run(
        side=side,
        repetition=repetition,
        tokens=result.tokens,
        text=result.text,
        seconds=sum(result.stats.seconds.values()),
        decode_seconds=result.stats.decode_seconds,
        draft_seconds=result.stats.seconds["draft"],
        rounds=[r.counts for r in result.rounds],
    )


@dataclass(frozen=True)
class Reproduction:
    """Our figures in the article's terms.

    target_ms: plain decoding, a token. draft_ms: a drafted token. predicted_article: its formula with our r', target_ms and
    draft_ms. predicted_costs: our rounds by the measured cost table. predicted_closed: Leviathan Theorem 3.8 from alpha and
    c = draft_ms / target_ms. divergence: where the two texts part, if they do.
    """

    tokens: int
    plain_seconds: float
    speculative_seconds: float
    speedup: Spread
    target_ms: float
    draft_ms: float
    rounds: int
    acceptance_rate: float | None
    efficiency: float
    predicted_article: float
    predicted_costs: float
    predicted_closed: float | None
    identical: bool
    divergence: Divergence | None
    text: str


def reproduce(runs: Sequence[Run], target: TextModel, draft: Drafter, lookahead: int) -> Reproduction:
    """All runs of both sides, summed up; medians over the repetitions."""
    plain, drafted = ([run for run in runs if run.side == side] for side in SIDES)
    first = drafted[0]
    prompt = encode(target, PROMPT)
    records = [Round((0,) * kept, offered, accepted, draft.name) for kept, offered, accepted in first.rounds]
    stats = summarise(records)
    efficiency = stats.mean_acceptance_length / (lookahead + 1)
    target_ms = median(1000 * run.decode_seconds / len(run.tokens) for run in plain)
    draft_ms = median(1000 * run.draft_seconds / stats.drafted for run in drafted) if stats.drafted else 0.0
    costs, steps = measured_costs(target), draft.part_seconds()
    by_costs = plain_seconds(records, costs, len(prompt)) / predicted_seconds(records, costs, steps, len(prompt))
    alpha = stats.acceptance_rate
    return Reproduction(
        tokens=len(first.tokens),
        plain_seconds=median(run.seconds for run in plain),
        speculative_seconds=median(run.seconds for run in drafted),
        speedup=paired_ratios([run.seconds for run in plain], [run.seconds for run in drafted]),
        target_ms=target_ms,
        draft_ms=draft_ms,
        rounds=stats.rounds,
        acceptance_rate=alpha,
        efficiency=efficiency,
        predicted_article=efficiency * (lookahead + 1) * target_ms / (lookahead * draft_ms + target_ms),
        predicted_costs=by_costs,
        predicted_closed=None if alpha is None else walltime_factor(alpha, lookahead, draft_ms / target_ms),
        identical=plain[0].tokens == first.tokens,
        divergence=first_divergence(target, prompt, plain[0].tokens, first.tokens),
        text=first.text,
    )
