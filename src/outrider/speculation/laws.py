"""The laws that functions may give, and the exact rule that keeps a guess or draws again.

A *finite* law is probabilities: a tensor, an array or a list (a sample is then an index), or a mapping from outcomes to
probabilities. It is decided by `verify`, the same rule as for tokens. Any other law is a *density*: something that can be
sampled from, and whose normalised log density with respect to one base measure can be computed at a point. There the rule
is the same, accept y with min(1, p(y) / q(y)), and the residual (p - q)+ is sampled by rejection: propose y from p, keep it
with probability (1 - q(y) / p(y))+, so that what is kept has density proportional to p · (1 - q / p)+ = (p - q)+. Both are
exact, the second because *both* densities are normalised: one known only up to a factor can't be decided by a guess. A
recovery takes 1 / (1 - beta) proposals on average and happens with probability 1 - beta: one proposal a step, whatever beta.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.acceptance.verify import Uniforms, verify
from outrider.errors import NumericalError, ParameterError
from outrider.sampling.draw import draw

SUM_TOLERANCE = 1e-3  # a float32 softmax over a large vocabulary sums to 1 within 2e-5
MAX_PROPOSALS = 1_000_000


@dataclass(frozen=True)
class Finite:
    """Probabilities [V] in float64, summing to 1, of the outcomes, or of 0 … V - 1 for None."""

    probs: Tensor
    outcomes: tuple[Hashable, ...] | None = None

    def sample(self, rng: np.random.Generator) -> Any:
        """One outcome, by one uniform number."""
        index = int(draw(self.probs, torch.tensor(rng.random(), dtype=torch.float64)))
        return index if self.outcomes is None else self.outcomes[index]


@dataclass(frozen=True)
class Density:
    """A law by a sampler and its normalised log density (-inf where it is 0).

    With worker processes the slow function's law is pickled: give functions of modules or `functools.partial`s of them.
    base: what the density is with respect to, if that is known ("continuous", "discrete"); two laws must share it.
    """

    sample: Callable[[np.random.Generator], Any]
    log_density: Callable[[Any], float]
    base: str | None = None


Law = Finite | Density


@dataclass(frozen=True)
class Decision:
    """The sample to go on with. beta: sum min(target, draft), the chance that a guess is accepted; None for densities."""

    sample: Any
    accepted: bool
    beta: float | None


def as_law(value: Any, whose: str) -> Law:
    """What a function gave, as a law. whose: "slow" or "fast", for errors.

    Probabilities, a mapping, a `Density`, or a frozen scipy.stats distribution. Raises `ParameterError` for anything else,
    `NumericalError` for probabilities that are none.
    """
    if isinstance(value, Density):
        return value
    if isinstance(value, Mapping):
        return Finite(_probabilities(list(value.values()), whose), tuple(value))
    if isinstance(value, Tensor | np.ndarray | Sequence) and not isinstance(value, str | bytes):
        return Finite(_probabilities(value, whose))
    log_density = getattr(value, "logpdf", None) or getattr(value, "logpmf", None)
    if log_density is not None and hasattr(value, "rvs"):
        base = "continuous" if hasattr(value, "logpdf") else "discrete"
        return Density(lambda rng: _drawn(value, rng), log_density, base)
    raise ParameterError(
        f"{whose} must give probabilities (tensor, array, list, mapping), a Density or a frozen scipy.stats distribution, "
        f"got {type(value).__name__}"
    )


def _drawn(law: Any, rng: np.random.Generator) -> Any:
    """One sample of a frozen distribution; some of several dimensions draw a list of one."""
    sample = law.rvs(random_state=rng)
    if np.ndim(sample) > 1 and len(sample) == 1 and np.shape(law.rvs(size=2, random_state=0))[1:] == np.shape(sample)[1:]:
        return sample[0]
    return sample


def decide(target: Law, guessed: Law, guess: Any, rng: np.random.Generator) -> Decision:
    """Keep the guess, drawn from `guessed`, or draw again, so that the sample follows `target`. rng: fresh numbers."""
    if isinstance(target, Finite) and isinstance(guessed, Finite):
        return _decide_finite(target, guessed, guess, rng)
    if isinstance(target, Density) and isinstance(guessed, Density):
        if target.base and guessed.base and target.base != guessed.base:
            raise ParameterError(f"slow and fast must give distributions of one kind, got {target.base} and {guessed.base}")
        return _decide_density(target, guessed, guess, rng)
    kinds = (type(target).__name__.lower(), type(guessed).__name__.lower())
    raise ParameterError(f"slow and fast must give distributions of one kind, got {kinds[0]} and {kinds[1]}")


def _decide_finite(target: Finite, guessed: Finite, guess: Any, rng: np.random.Generator) -> Decision:
    outcomes, p, q = _aligned(target, guessed)
    index = guess if outcomes is None else outcomes.index(guess)
    accept, following = torch.from_numpy(rng.random(2))
    # The row after the guess would be for a bonus token, of which there is none here.
    verdict = verify(p.expand(2, -1), q.unsqueeze(0), torch.tensor([index]), Uniforms(accept.unsqueeze(0), following))
    beta = float(torch.minimum(p, q).sum())
    if int(verdict.num_accepted):
        return Decision(guess, True, beta)
    index = int(verdict.next_token)
    return Decision(index if outcomes is None else outcomes[index], False, beta)


def _aligned(target: Finite, guessed: Finite) -> tuple[tuple[Hashable, ...] | None, Tensor, Tensor]:
    """Both laws over the same outcomes. → the outcomes, target [V], guessed [V]"""
    if target.outcomes is None and guessed.outcomes is None:
        if len(target.probs) != len(guessed.probs):
            raise ParameterError(
                f"slow and fast must give distributions over as many outcomes, got {len(target.probs)} and "
                f"{len(guessed.probs)}"
            )
        return None, target.probs, guessed.probs
    if target.outcomes is None or guessed.outcomes is None:
        raise ParameterError("slow and fast must both give mappings, or both give bare probabilities")
    every = tuple(dict.fromkeys((*guessed.outcomes, *target.outcomes)))
    return every, _over(every, target), _over(every, guessed)


def _over(outcomes: tuple[Hashable, ...], law: Finite) -> Tensor:
    known = dict(zip(law.outcomes or (), law.probs.tolist(), strict=True))
    return torch.tensor([known.get(outcome, 0.0) for outcome in outcomes], dtype=torch.float64)


def _decide_density(target: Density, guessed: Density, guess: Any, rng: np.random.Generator) -> Decision:
    drawn_with = _log(guessed, guess, "fast")
    if drawn_with == -math.inf:
        raise NumericalError("fast drew a sample to which its own log density gives probability 0")
    if math.log1p(-rng.random()) <= _log(target, guess, "slow") - drawn_with:
        return Decision(guess, True, None)
    for _ in range(MAX_PROPOSALS):
        sample = target.sample(rng)
        mine = _log(target, sample, "slow")
        if mine == -math.inf:
            raise NumericalError("slow drew a sample to which its own log density gives probability 0")
        excess = -math.expm1(min(0.0, _log(guessed, sample, "fast") - mine))  # (1 - q / p)+
        if rng.random() < excess:
            return Decision(sample, False, None)
    raise NumericalError(
        f"nothing was left to recover in {MAX_PROPOSALS:,} proposals: are both log densities normalised? "
        "Rather an error than another distribution"
    )


def _log(law: Density, sample: Any, whose: str) -> float:
    value = float(law.log_density(sample))
    if math.isnan(value) or value == math.inf:
        raise NumericalError(f"the log density of {whose} is {value} at {sample!r}")
    return value


def _probabilities(values: Any, whose: str) -> Tensor:
    """Checked, on the host, summing to 1 as exactly as float64 can. → [V]"""
    try:
        given = values.detach() if isinstance(values, Tensor) else torch.as_tensor(values, dtype=torch.float64)
        probs = given.to("cpu", torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ParameterError(f"{whose} must give probabilities, got {type(values).__name__}: {error}") from None
    if probs.dim() != 1 or not len(probs):
        raise ParameterError(
            f"{whose} must give one distribution, a probability for each outcome, got shape {list(probs.shape)}"
        )
    total = float(probs.sum())
    if not bool((probs >= 0).all()) or not abs(total - 1.0) <= SUM_TOLERANCE:
        raise NumericalError(f"{whose} gave no probabilities: the least is {float(probs.min()):.3g}, the sum {total:.6g}")
    return probs / total
