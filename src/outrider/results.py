"""What a generation returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypedDict, Unpack

from outrider.records import FinishReason, Round, Stats, TopLogprobs, summarise


class _Known(TypedDict):
    """What the rounds do not tell."""

    text: str
    finish_reason: FinishReason
    seed: int
    prompt_tokens: int
    source_tokens: int | None
    lenience: float
    drafter_invariant: bool
    cached_tokens: int


@dataclass(frozen=True)
class Result:
    """What was generated for one prompt.

    text: special tokens and a final stop string left out. tokens: ids as generated, an end-of-sequence token included.
    logprobs: of each token under the target's raw logits, if asked for. top_logprobs: the most probable tokens in each one's
    place, (token, log-probability), if asked for. rounds: what each round did.
    prompt_tokens: those that the sequence began with; cached_tokens: of them, those that were read for others before
    (`ContinuousBatch`, prefix_cache); source_tokens: those that an encoder read.
    lenience: below 1 the output is lossy: it need not follow the target's law (`lenience`).
    drafter_invariant: whether the seed gives this text with any draft and with none.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    seed: int
    stats: Stats
    rounds: list[Round] = field(repr=False)  # pages
    prompt_tokens: int
    logprobs: list[float] | None = None
    source_tokens: int | None = None
    lenience: float = 1.0
    drafter_invariant: bool = False
    top_logprobs: list[TopLogprobs] | None = None
    cached_tokens: int = 0

    @classmethod
    def of_rounds(
        cls,
        rounds: Sequence[Round],
        prefill_seconds: float,
        *,
        logprobs: bool,
        top_logprobs: bool,
        **more: Unpack[_Known],
    ) -> Result:
        """What the rounds of one prompt came to. logprobs, top_logprobs: whether they were asked for."""
        return cls(
            tokens=[token for one in rounds for token in one.tokens],
            stats=summarise(rounds, prefill_seconds),
            rounds=list(rounds),
            logprobs=[x for one in rounds for x in one.logprobs or ()] if logprobs else None,
            top_logprobs=[x for one in rounds for x in one.top_logprobs or ()] if top_logprobs else None,
            **more,
        )

    @property
    def lossy(self) -> bool:
        """Whether the output need not follow the target's law."""
        return self.lenience < 1.0

    def to_dict(self) -> dict[str, object]:
        """The machine-readable form, which `outrider generate --json` prints."""
        out: dict[str, object] = {
            "text": self.text,
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "prompt_tokens": self.prompt_tokens,
            "stats": self.stats.to_dict(),
        }
        if self.source_tokens is not None:
            out["source_tokens"] = self.source_tokens
        if self.cached_tokens:
            out["cached_tokens"] = self.cached_tokens
        if self.lossy:
            out |= {"lossy": True, "lenience": self.lenience}
        if self.drafter_invariant:
            out["drafter_invariant"] = True
        if self.logprobs is not None:
            out["logprobs"] = self.logprobs
        if self.top_logprobs is not None:
            out["top_logprobs"] = self.top_logprobs
        return out
