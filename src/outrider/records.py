"""What a round did, and the figures that follow from rounds. Every reported number derives from these records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

Origin = Literal["prompt", "accepted", "lenient", "recovered", "bonus", "target"]
"""Where a token came from: accepted from the draft, or accepted by lenience alone (lossy); drawn after a rejection
(recovered), after a fully accepted draft or a recovered token that had been scored (bonus), or in a round without a draft
(target)."""

FinishReason = Literal["eos", "stop", "length", "context", "cancelled"]
"""Why a sequence ended: end-of-sequence token, stop string, `max_new_tokens`, the model's context is full, cancelled."""

TopLogprobs = tuple[tuple[int, float], ...]
"""The most probable tokens of a position, (token, log-probability), the best first."""

PHASES = ("prefill", "draft", "verify", "sampling", "other")
"""prefill: both models reading the prompt; draft, verify: forward passes of draft and target; sampling: standardisation,
drawing and acceptance; other: the loop, tokens to text, bookkeeping."""


@dataclass(frozen=True)
class Round:
    """One pass of the target for one sequence.

    tokens: the tokens kept, at least one: the accepted ones, the recovered or bonus token, and after a recovered one that
    was among the alternatives the bonus token; fewer only where the sequence ended inside them.
    drafted: tokens offered. accepted: how many of them the rule accepted. drafter: who proposed, None without a draft.
    alternatives: tokens scored beside the draft (`proposal.Alternatives`). taken: whether the recovered token was one.
    seconds: by phase, this row's share of the round. logprobs: of the kept tokens, under the target's raw logits;
    top_logprobs: the most probable tokens in each one's place, (token, log-probability), if asked for.
    drafts, betas: the offered tokens, and sum min(target, draft) at each offered position, if asked for; where tokens are
    decided by position, how often a draft that draws by the same numbers says the same (`race_acceptance_probability`).
    signals: how sure the draft was of each token, in classes (`draft_steps.signals`), if the policy asked.
    finish_reason: set in the sequence's last round.
    lenience: of the rule that decided; below 1 the round is lossy, and `betas` are the probabilities that this rule accepts.
    lenient: positions of accepted tokens that the exact rule would have rejected.
    """

    tokens: tuple[int, ...]
    drafted: int
    accepted: int
    drafter: str | None
    seconds: dict[str, float] = field(default_factory=dict)
    logprobs: tuple[float, ...] | None = None
    betas: tuple[float, ...] | None = None
    drafts: tuple[int, ...] | None = None
    signals: tuple[int, ...] | None = None
    finish_reason: FinishReason | None = None
    lenience: float = 1.0
    lenient: tuple[int, ...] = ()
    alternatives: int = 0
    taken: bool = False
    top_logprobs: tuple[TopLogprobs, ...] | None = None

    @property
    def lossy(self) -> bool:
        """Whether the tokens need not follow the target's law."""
        return self.lenience < 1.0

    @property
    def counts(self) -> list[int]:
        """[tokens, drafted, accepted], as files hold rounds (`audit.sources.read_rounds`)."""
        return [len(self.tokens), self.drafted, self.accepted]

    @property
    def scored(self) -> int:
        """Tokens in the target's pass: the newest one, the draft and its alternatives."""
        return 1 + self.drafted + self.alternatives

    @property
    def tested(self) -> int:
        """Positions of the text at which the rule decided: the accepted ones and the rejected one, if any.

        Not those behind the end of a text that ended inside its draft: there both models go on from nothing.
        """
        return min(self.accepted + 1, self.drafted, len(self.tokens))

    @property
    def used(self) -> int:
        """Accepted tokens that the text kept."""
        return min(self.accepted, len(self.tokens))

    @property
    def origins(self) -> tuple[Origin, ...]:
        """The origin of each kept token."""
        last: Origin = "target" if not self.drafted else "bonus" if self.accepted == self.drafted else "recovered"
        accepted: list[Origin] = ["lenient" if i in self.lenient else "accepted" for i in range(self.accepted)]
        further: list[Origin] = ["bonus"] if self.taken else []
        return (*accepted, last, *further)[: len(self.tokens)]


@dataclass(frozen=True)
class Stats:
    """Figures of one generated sequence.

    tested, accepted: within the text. acceptance_rate: accepted / tested, the estimate of alpha (None without drafts).
    draft_acceptance_rate: accepted / drafted, which is lower, since nothing after a rejection is tested.
    mean_acceptance_length: tokens per round, the recovered or bonus token included. overhead: share of the decoding time
    outside the models' forward passes.
    lenience: below 1 the output is lossy. lenient: tokens that are there by lenience alone. alternatives: tokens scored
    beside drafts. taken: recovered tokens among them, a token more each but where a text ended.
    """

    rounds: int
    tokens: int
    drafted: int
    accepted: int
    tested: int
    seconds: dict[str, float]
    lenience: float = 1.0
    lenient: int = 0
    alternatives: int = 0
    taken: int = 0

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.tested if self.tested else None

    @property
    def draft_acceptance_rate(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_acceptance_length(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def decode_seconds(self) -> float:
        """Seconds from the first round on, reading the prompt left out."""
        return sum(self.seconds[phase] for phase in PHASES if phase != "prefill")

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.decode_seconds if self.decode_seconds > 0 else 0.0

    @property
    def overhead(self) -> float:
        outside = self.seconds["sampling"] + self.seconds["other"]
        return outside / self.decode_seconds if self.decode_seconds > 0 else 0.0

    def to_dict(self) -> dict[str, object]:
        """For machine-readable output."""
        lossy = {"lenience": self.lenience, "lossy": True, "lenient": self.lenient} if self.lenience < 1.0 else {}
        return {
            **lossy,
            "rounds": self.rounds,
            "tokens": self.tokens,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "tested": self.tested,
            "alternatives": self.alternatives,
            "taken": self.taken,
            "acceptance_rate": self.acceptance_rate,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
            "tokens_per_second": self.tokens_per_second,
            "overhead": self.overhead,
            "seconds": {**self.seconds, "total": sum(self.seconds.values())},
        }


class Timed(Protocol):
    """What has taken time, by phase."""

    @property
    def seconds(self) -> Mapping[str, float]: ...


def seconds_by_phase(rounds: Iterable[Timed], phases: Iterable[str] = PHASES) -> dict[str, float]:
    """What all of them took."""
    rounds = list(rounds)
    return {phase: sum(one.seconds.get(phase, 0.0) for one in rounds) for phase in phases}


def summarise(rounds: Iterable[Round], prefill_seconds: float = 0.0) -> Stats:
    """Add up the rounds of one sequence."""
    rounds = list(rounds)
    seconds = seconds_by_phase(rounds)
    seconds["prefill"] += prefill_seconds
    return Stats(
        rounds=len(rounds),
        tokens=sum(len(r.tokens) for r in rounds),
        drafted=sum(r.drafted for r in rounds),
        accepted=sum(r.used for r in rounds),
        tested=sum(r.tested for r in rounds),
        seconds=seconds,
        lenience=min((r.lenience for r in rounds), default=1.0),
        lenient=sum(origin == "lenient" for r in rounds for origin in r.origins),
        alternatives=sum(r.alternatives for r in rounds),
        taken=sum(r.taken for r in rounds),
    )


def acceptance_by_position(rounds: Sequence[Round]) -> list[tuple[int, int]]:
    """(tested, accepted) at each position of the draft, over all rounds."""
    longest = max((r.drafted for r in rounds), default=0)
    return [(sum(r.tested > i for r in rounds), sum(r.used > i for r in rounds)) for i in range(longest)]
