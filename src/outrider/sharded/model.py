"""A model whose calls every rank makes: on rank 0 a `LanguageModel` like any other, on the others a list of what to repeat.

Each call says where its sequences stand, so that the other ranks follow roll-backs without being told of them, and what a
pass does depends on the command alone. Their results are dropped: a rank whose logits differ in a bit, or altogether,
changes nothing that rank 0 decides.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import get_args

import torch
from torch import Tensor

from outrider.errors import ParameterError
from outrider.models.base import Sequence, WhichLogits
from outrider.models.cache.slots import SlotSequence
from outrider.models.engine_checks import owned_sequences
from outrider.models.transformers_model import TransformersModel
from outrider.sharded.linear import Cut, Spent
from outrider.sharded.team import Op, Team, share_tokens

_WHICH: tuple[WhichLogits, ...] = get_args(WhichLogits)


class Whole:
    """A rank's part of a model: the engine, and the width of the pass at hand, which rank 0 chooses for all."""

    def __init__(self, engine: TransformersModel, spent: Spent, cut: Cut | None) -> None:
        self.engine = engine
        self.spent = spent
        self.cut = cut
        self._width = 0
        engine.pad_widths(lambda tokens, context: max(tokens, self._width))  # noqa: ARG005

    def score(
        self, sequences: list[SlotSequence], tokens: Tensor, lengths: Many[int], which: WhichLogits, width: int
    ) -> Tensor | None:
        """As `LanguageModel.score`, one row padded to `width`."""
        self._width = width
        return self.engine.score(sequences, tokens, lengths, which)


@dataclass
class Traffic:
    """Passes with logits since the last `reset`. commands: seconds in which rank 0 told the others. collectives: inside the
    passes. tokens: {tokens a pass: passes}.
    """

    passes: int = 0
    seconds: float = 0.0
    commands: float = 0.0
    tokens: Counter[int] = field(default_factory=Counter)
    collectives: Spent = field(default_factory=Spent)


class TeamSequence:
    """A sequence that all ranks hold. handle: its number in commands."""

    def __init__(self, model: TeamModel, handle: int, own: SlotSequence) -> None:
        self.model = model
        self.handle = handle
        self.own = own
        self.closed = False

    @property
    def length(self) -> int:
        return self.own.length

    def truncate(self, length: int) -> None:
        self.own.truncate(length)  # the others learn it with the next call

    def advance(self, count: int) -> None:
        """Pretend to hold tokens (`pass_timer.Advances`)."""
        self.own.advance(count)

    def close(self) -> None:
        self.model.release(self)


class TeamModel:
    """Rank 0's side of a model on all ranks. number: of the model in commands. placement: "sharded" or "replicated"."""

    def __init__(self, team: Team, number: int, part: Whole, placement: str) -> None:
        self.team = team
        self.number = number
        self.placement = placement
        self.traffic = Traffic()
        self.part = part
        self.tokenizer = part.engine.tokenizer
        self.dropped = False
        self._handles = 0
        self._width: Callable[[int, int], int] = lambda tokens, context: tokens  # noqa: ARG005

    @property
    def engine(self) -> TransformersModel:
        """Rank 0's part of it."""
        return self.part.engine

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def vocab_size(self) -> int:
        return self.engine.vocab_size

    @property
    def max_length(self) -> int | None:
        return self.engine.max_length

    @property
    def device(self) -> torch.device:
        return self.engine.device

    @property
    def dtype(self) -> torch.dtype:
        return self.engine.dtype

    @property
    def dtype_name(self) -> str:
        """Of its weights."""
        return self.engine.dtype_name

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that the model's generation config names as ends."""
        return self.engine.end_tokens

    @property
    def fingerprint(self) -> str:
        """What the costs of a pass depend on, the machine apart."""
        return f"{self.engine.fingerprint} {self.placement} on {self.team.size} ranks"

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a pass of one token reads on rank 0."""
        cut = self.part.cut
        return self.engine.weight_bytes if cut is None else cut.shared + cut.whole

    def pad_widths(self, width: Callable[[int, int], int]) -> None:
        """As for any engine; rank 0 tells the others how wide a pass is."""
        self._width = width

    def open(self, reserve: int = 0) -> TeamSequence:
        if self.dropped:
            raise ParameterError(f"{self.name} was dropped: load it again")
        self._handles += 1
        with self.team.together(Op.OPEN, self.number, self._handles, reserve):
            return TeamSequence(self, self._handles, self.engine.open(reserve))

    def release(self, sequence: TeamSequence) -> None:
        """Close a sequence on all ranks; nothing to do once they are out of step, since the job ends."""
        if sequence.closed:
            return
        sequence.closed = True
        if not self.team.broken and self.team.watch.reason is None:
            with self.team.together(Op.CLOSE, self.number, sequence.handle):
                sequence.own.close()

    def score(
        self, sequences: Many[Sequence], tokens: Tensor, lengths: Many[int], logits: WhichLogits = "all"
    ) -> Tensor | None:
        rows = self._check(sequences, tokens, lengths)
        wanted = tokens.shape[1]
        width = self._width(wanted, rows[0].length) if len(rows) == 1 else wanted
        words = [self.number, _WHICH.index(logits), width, len(rows), wanted]
        for row, count in zip(rows, lengths, strict=True):
            words += [row.handle, row.length, count]
        on_host = tokens.device.type == "cpu"
        if on_host:
            words += tokens.flatten().tolist()
        start, before = time.perf_counter(), Spent(**vars(self.part.spent))
        with self.team.together(Op.SCORE, *words):
            if not on_host:
                share_tokens(tokens.contiguous())
            told = time.perf_counter()
            out = self.part.score([row.own for row in rows], tokens, lengths, logits, width)
        if logits != "none":
            self._note(len(rows) * width, start, told, before)
        return out

    def _check(self, sequences: Many[Sequence], tokens: Tensor, lengths: Many[int]) -> list[TeamSequence]:
        """Refuse a wrong call before any rank hears of it."""
        rows = owned_sequences(self, TeamSequence, sequences, lengths, tokens.shape[1])
        if tokens.device.type == "cpu" and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab_size:
            raise ParameterError(
                f"tokens must be in 0 … {self.vocab_size - 1}, got {int(tokens.min())} … {int(tokens.max())}"
            )
        return rows

    def _note(self, tokens: int, start: float, told: float, before: Spent) -> None:
        now = time.perf_counter()
        spent = self.part.spent.less(before)
        traffic = self.traffic
        traffic.passes += 1
        traffic.tokens[tokens] += 1
        traffic.seconds += now - start
        traffic.commands += told - start
        total = traffic.collectives
        traffic.collectives = Spent(total.seconds + spent.seconds, total.calls + spent.calls, total.bytes + spent.bytes)

    def reset(self) -> None:
        """Count the traffic from here on."""
        self.traffic = Traffic()


class Repeater:
    """Another rank's side of a model: repeats the calls."""

    def __init__(self, part: Whole) -> None:
        self._part = part
        self._open: dict[int, SlotSequence] = {}

    def open(self, handle: int, reserve: int) -> None:
        """Rank 0 has opened a sequence."""
        self._open[handle] = self._part.engine.open(reserve)

    def close(self, handle: int) -> None:
        """Rank 0 has closed it."""
        self._open.pop(handle).close()

    def score(self, which: int, width: int, rows: int, columns: int, *rest: int) -> None:
        """Rank 0 scores. rest: handle, length and count of each row, then the tokens, if they are on the host."""
        places = [rest[3 * i : 3 * i + 3] for i in range(rows)]
        sequences = [self._open[handle] for handle, _, _ in places]
        for sequence, (_, length, _) in zip(sequences, places, strict=True):
            sequence.advance(length - sequence.length)
        tokens = self._tokens(rest[3 * rows :], rows, columns)
        self._part.score(sequences, tokens, [count for _, _, count in places], _WHICH[which], width)

    def _tokens(self, given: tuple[int, ...], rows: int, columns: int) -> Tensor:
        device = self._part.engine.device
        if device.type == "cpu":
            return torch.tensor(given, dtype=torch.long).reshape(rows, columns)
        tokens = torch.empty(rows, columns, dtype=torch.long, device=device)
        share_tokens(tokens)
        return tokens
