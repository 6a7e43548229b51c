"""What a round is asked for, and what it gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from outrider.models.base import LanguageModel
from outrider.sampling import SamplingSettings
from outrider.settings.extras import Extras
from outrider.support.clock import PhaseClock


@dataclass(frozen=True)
class Outcome:
    """One row's result on the host: the accepted tokens and the one after them, and the extras asked for.

    The token after them is -1 if there is no law for it, which matters only if the sequence goes on that far.
    laws: [accepted + 1, V], the distributions that these tokens follow; stays on the device; None if they are point masses,
    or were neither asked for nor made.
    lenient: accepted tokens, by position, that the exact rule would have rejected.
    told: log-probabilities as they were read back (`round.told`), `Extras.told` numbers a token.
    taken: the recovered token was an alternative, so one token more follows it; the sequence ends with the recovered one.
    """

    tokens: list[int]
    accepted: int
    told: list[float] | None
    betas: list[float] | None
    drafts: list[int] | None
    laws: Tensor | None
    lenient: tuple[int, ...] = ()
    taken: bool = False


@dataclass(frozen=True)
class Scorer:
    """How a round is scored. vocab_size: the width of the laws, if not the model's. phase: what the pass is timed as.

    lenience: below 1 the round is lossy (`lenience`); a drafter's own rounds never are.
    """

    model: LanguageModel
    sampling: SamplingSettings
    clock: PhaseClock
    extras: Extras = field(default_factory=Extras)
    vocab_size: int | None = None
    phase: str = "verify"
    lenience: float = 1.0

    @cached_property
    def tokens_alone(self) -> bool:
        """Whether tokens are all that is wanted of a round, by the exact rule, of logits as they are."""
        extras, sampling = self.extras, self.sampling
        written = extras.logprobs or extras.betas or (extras.laws and not sampling.greedy)
        return sampling.as_they_are and self.lenience == 1.0 and not written
