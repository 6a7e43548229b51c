"""One sequence of a batch: its tokens, its randomness, and when it ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from traceback import clear_frames

from outrider.draft_length import LengthState
from outrider.draft_length.base import Plan, Prospect
from outrider.draft_length.previews import HORIZON, Previews
from outrider.drafters.base import Drafter
from outrider.errors import NumericalError, ParameterError, VocabularyMismatchError
from outrider.models.base import LanguageModel, Source, has_encoder, refuse_draft_only
from outrider.models.base import Sequence as ModelSequence
from outrider.models.compatibility import fingerprint
from outrider.models.engine_checks import check_prompt
from outrider.proposal import DraftRow
from outrider.randomness import RandomStream
from outrider.records import FinishReason
from outrider.sampling import SamplingSettings
from outrider.sampling.stateful import Constraint
from outrider.support.checks import check_count

_JOINED = itertools.count()  # rows, of all batches

StopCheck = Callable[[Sequence[int]], int | None]
"""Given the new tokens, how many of them to keep if the sequence ends there, else None. Called once per round."""


@dataclass(frozen=True)
class Request:
    """What to generate.

    eos: tokens that end the sequence (kept as its last). stop: a further condition, on text say. source: what the encoder of
    an encoder-decoder reads; `prompt` is then what its decoder begins with.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    stream: RandomStream
    eos: frozenset[int] = frozenset()
    stop: StopCheck | None = None
    source: Source | None = None


class Row:
    """The state of one request in the loop."""

    def __init__(
        self, number: int, request: Request, sequence: ModelSequence, length: LengthState, context: int | None
    ) -> None:
        self.number = number
        self.request = request
        self.sequence = sequence
        self.length = length
        self.tokens = list(request.prompt)
        self.draft = DraftRow(
            self.tokens, len(self.tokens), request.stream, sequence, source=request.source, ends=request.eos
        )
        self.drafter: Drafter | None = None  # that it has begun with, or was about to
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None  # why it ended, if that was it (`Decoder`, failing_alone)
        self.alone = False  # whether that was its own, and not what others failed by, too
        self.ended = False  # for its drafter
        self.reading = True  # its prompt
        self.order = next(_JOINED)
        self._previews = Previews()
        self.prefill_seconds = 0.0
        self._limit = len(self.tokens) + request.max_new_tokens
        self._full: FinishReason = "length"
        if context is not None and context < self._limit:
            self._limit, self._full = context, "context"

    def fail(self, error: Exception, alone: bool = True) -> None:
        """End by an error. What the frames that it came from hold is let go: the next pass may need that memory.

        alone: whether the others of its pass went on.
        """
        clear_frames(error.__traceback__)
        self.error, self.finish_reason, self.alone = error, "cancelled", alone

    @property
    def unread(self) -> list[int]:
        """What is to be scored before its first round: all of the prompt but its last token."""
        return self.tokens[:-1]

    @property
    def left_to_read(self) -> int:
        """How many tokens of it have not been scored."""
        return len(self.tokens) - 1 - self.sequence.length

    @property
    def remaining(self) -> int:
        """Tokens that may still be added."""
        return self._limit - len(self.tokens)

    def plan(self, prospects: Sequence[Prospect]) -> Plan:
        """What the policy wants drafted now, one place left for the token that follows the accepted ones."""
        room = max(0, self.remaining - 1)
        plan = self.length.plan(prospects, room, len(self.tokens))
        if not (0 <= plan.limit <= room and 0 <= plan.prospect < len(prospects)):
            raise ParameterError(
                f"a draft length must plan 0 to {room} tokens, all that there is room for, of prospects 0 to "
                f"{len(prospects) - 1}: {type(self.length).__qualname__} plans {plan.limit} of prospect {plan.prospect}; "
                "keep to `room`"
            )
        return plan

    def follow(self, drafter: Drafter, prospects: Sequence[Prospect], plan: Plan) -> None:
        """Note what would be proposed, or is going to be, where that is certain: the policy learns from what comes."""
        if not self.length.learns:
            return
        for i, prospect in enumerate(prospects):
            if prospect.deterministic and prospect.longest:
                limit = max(HORIZON, plan.limit) if i == plan.prospect else HORIZON
                self._previews.add(prospect, drafter.preview(self.draft, i, limit), len(self.tokens))

    def extend(self, new: list[int]) -> int:
        """Add the round's tokens up to where the sequence ends; sets `finish_reason` there. → how many were kept"""
        keep = len(new)
        for i, token in enumerate(new):
            if token in self.request.eos:
                keep, self.finish_reason = i + 1, "eos"
                break
        known = new.index(-1) if -1 in new[:keep] else keep
        cut = None if self.request.stop is None else self.request.stop(new[:known])
        if cut is not None:
            keep, self.finish_reason = cut, "stop"
        elif known < keep:
            raise NumericalError(
                f"the target gave no distribution for row {self.number} after token {len(self.tokens) + known - 1}: "
                "its logits are NaN or all excluded: loosen what must hold together (schema, regex, processors, bias; a "
                "forced end: ignore_eos, or more max_new_tokens), or try dtype float32"
            )
        self.tokens.extend(new[:keep])
        for finding in self._previews.compare(self.tokens):
            self.length.learn(finding)
        if self.finish_reason is None and self.remaining <= 0:
            self.finish_reason = self._full
        return keep


def check_request(request: Request, target: LanguageModel) -> None:
    """Raise unless the request can be served by `target`."""
    check_count("max_new_tokens", request.max_new_tokens)
    refuse_draft_only(target)
    if has_encoder(target) is not (request.source is not None):
        wanted = "a source, which its encoder is to read" if request.source is None else "no source: it has no encoder"
        raise ParameterError(f"requests for {target.name} must have {wanted}")
    if has_encoder(target) and request.source is not None:
        target.check_source(request.source)
    check_prompt(request.prompt, target)


def check_constraints(sampling: SamplingSettings, target: LanguageModel) -> None:
    """Raise `VocabularyMismatchError` unless the constraints know the target's tokens."""
    made_for = {one.tokens for one in sampling.processors if isinstance(one, Constraint)} - {None}
    if made_for and made_for != {fingerprint(target)}:
        raise VocabularyMismatchError(
            f"processors must have constraints for the tokens of {target.name}, got one that was made for another model: "
            "make it for this one"
        )
