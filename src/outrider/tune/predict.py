"""What a fixed draft length would take along measured texts, without assuming that chances are equal or independent.

A round that begins at t with n tokens drafted ends at t + a + 1 with the probability that exactly a are accepted, so where
rounds begin is a Markov chain along the text; each is paid for by the measured cost of a pass of n + 1 tokens and of n draft
tokens. Beside it stands Leviathan's closed form (Theorem 3.8), which knows alpha and c only.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

from outrider import theory
from outrider.costs import Costs, DraftSeconds
from outrider.tune.chances import LONGEST, Chances

LENGTHS = tuple(range(LONGEST + 1))


@dataclass(frozen=True)
class Prediction:
    """A drafter with a fixed length.

    speedup: over plain decoding by the measured costs. closed_form: Theorem 3.8 with alpha and c. operations: growth of the
    arithmetic (Theorem 3.11). tokens_per_round: mean, the recovered or bonus token included.
    """

    length: int
    tokens_per_round: float
    speedup: float
    closed_form: float
    operations: float


@dataclass(frozen=True)
class Candidate:
    """A drafter on the texts.

    alpha: mean sum min(target, draft) where it proposes; coverage: share of the positions where it does. c, c_hat: cost of a
    draft step relative to a pass of one token, in time and in bytes of weights.
    """

    name: str
    alpha: float
    coverage: float
    c: float
    c_hat: float
    predictions: tuple[Prediction, ...]

    @property
    def best(self) -> Prediction:
        return max(self.predictions, key=lambda one: (one.speedup, -one.length))


def predict(name: str, measured: Many[Chances], costs: Costs, drafting: DraftSeconds, c_hat: float) -> Candidate:
    """Every draft length for one drafter."""
    betas = [beta for one in measured for beta in one.betas]
    total = sum(one.tokens for one in measured)
    alpha = min(1.0, sum(betas) / len(betas)) if betas else 0.0
    c = drafting.token / costs.verify(1)
    plain = sum(costs.verify(1, one.prompt_length + t) for one in measured for t in range(one.tokens))
    predictions = []
    for length in LENGTHS:
        walked = [_walk(one, length, costs, drafting) for one in measured]
        rounds, seconds = (sum(column) for column in zip(*walked, strict=True))
        predictions.append(
            Prediction(
                length=length,
                tokens_per_round=total / rounds,
                speedup=plain / seconds,
                closed_form=theory.walltime_factor(alpha, length, c),
                operations=theory.operations_factor(alpha, length, c_hat),
            )
        )
    return Candidate(name, alpha, len(betas) / total, c, c_hat, tuple(predictions))


def _walk(text: Chances, length: int, costs: Costs, drafting: DraftSeconds) -> tuple[float, float]:
    """Expected rounds and seconds along one text."""
    begins = [1.0] + [0.0] * text.tokens
    rounds = seconds = 0.0
    for t in range(text.tokens):
        chance = begins[t]
        if chance == 0.0:
            continue
        # As the decoder does, leave a place for the token after the draft.
        offered = text.accept[t][: min(length, text.tokens - t - 1)]
        rounds += chance
        seconds += chance * (costs.verify(len(offered) + 1, text.prompt_length + t) + drafting.of(len(offered)))
        reached = chance
        for i, accepted in enumerate(offered):
            begins[t + i + 1] += reached * (1.0 - accepted)
            reached *= accepted
        begins[t + len(offered) + 1] += reached
    return rounds, seconds
