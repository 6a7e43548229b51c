"""A generated text as an audit needs it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from outrider.audio import Audio
from outrider.records import Round


@dataclass(frozen=True)
class Text:
    """A prompt and what was generated after it. rounds: what each round did, where that is known.

    source: what an encoder read; the prompt is then what the decoder began with. heard: the recording that it was taken of.
    """

    tokens: tuple[int, ...]
    prompt_length: int
    rounds: tuple[Round, ...] = ()
    source: tuple[int, ...] | Tensor | None = field(default=None, compare=False)
    heard: Audio | None = None

    @property
    def new(self) -> tuple[int, ...]:
        """The generated tokens."""
        return self.tokens[self.prompt_length :]

    @property
    def places(self) -> list[int]:
        """Each new token's place within its round, -1 where that is not known."""
        if not self.rounds:
            return [-1] * len(self.new)
        return [place for record in self.rounds for place in range(len(record.tokens))]

    @property
    def tested(self) -> list[bool] | None:
        """Whether the rule decided about each new token, if that is known; see `bonus` for some of the others."""
        if not self.rounds:
            return None
        return [place < record.tested for record in self.rounds for place in range(len(record.tokens))]

    @property
    def bonus(self) -> list[bool] | None:
        """Whether each new token followed a fully accepted draft, or a recovered token that had been scored.

        That is settled before it is drawn, so it follows the target's law like any other.
        """
        if not self.rounds:
            return None
        return [
            0 < record.drafted == place or (record.taken and place == record.accepted + 1)
            for record in self.rounds
            for place in range(len(record.tokens))
        ]
