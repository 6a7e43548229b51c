"""The processes that hold one model: what rank 0 says to the others, and how the end of one ends all.

A command is one broadcast of a few hundred integers from rank 0, over gloo on the host; a pass of many tokens needs a second
one. Tokens on a GPU are broadcast where they are, so that rank 0 need not wait for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from outrider.errors import OutriderError
from outrider.sharded.watch import LeaderWatch

if TYPE_CHECKING:
    from pathlib import Path

    from outrider.models.base import TextModel
    from outrider.sharded.model import TeamModel
    from outrider.theory.links import Link

WORDS = 256  # integers of a command's first message
_KNOWN = 2.0  # seconds until the end of a rank has shown for certain


class TeamError(OutriderError):
    """A rank of the job has ended."""


class Op(IntEnum):
    """What rank 0 asks the others to do."""

    STOP, LOAD, DROP, OPEN, CLOSE, SCORE, LINK = range(7)


def send(op: Op, *words: int) -> None:
    """Rank 0: say it to all others. The first word is the length of what follows it."""
    content = [op, *words]
    size = max(WORDS, 1 + len(content))
    message = torch.zeros(size, dtype=torch.long)
    message[: 1 + len(content)] = torch.tensor([len(content), *content])
    dist.broadcast(message[:WORDS], 0)
    if size > WORDS:
        dist.broadcast(message[WORDS:], 0)


def receive() -> tuple[Op, list[int]]:
    """Another rank: wait for the next command. → what, with which words"""
    message = torch.zeros(WORDS, dtype=torch.long)
    dist.broadcast(message, 0)
    length = int(message[0])
    if 1 + length > WORDS:
        rest = torch.zeros(1 + length - WORDS, dtype=torch.long)
        dist.broadcast(rest, 0)
        message = torch.cat([message, rest])
    words = message[1 : 1 + length].tolist()
    return Op(words[0]), words[1:]


def share(value: Any = None) -> Any:
    """Rank 0's object on every rank."""
    box = [value]
    dist.broadcast_object_list(box, 0, device=torch.device("cpu"))
    return box[0]


def share_tokens(tokens: Tensor) -> None:
    """Rank 0's tokens into the other ranks' tensors, on the device where they are."""
    dist.broadcast(tokens, 0)


class Team:
    """Rank 0's hold on all ranks: loads models over them. Made by `lead`."""

    def __init__(self, device: torch.device, watch: LeaderWatch) -> None:
        self.size = dist.get_world_size()
        self.device = device
        self.watch = watch
        self.broken = False
        self._link: Link | None = None

    def load(
        self, model: str | Path | None = None, *, dtype: str = "auto", engine: str = "auto", pack: bool = True
    ) -> TextModel:
        """A model sharded over all ranks by its tensor-parallel plan; arguments as for `outrider.load`.

        Raises `ModelError` for a model without a plan, `ParameterError` for engines and types that can't be sharded.
        """
        from outrider.sharded.placement import place

        return place(self, model, dtype, engine, "sharded", pack)

    def load_draft(
        self,
        model: str | Path | None = None,
        *,
        placement: str = "auto",
        dtype: str = "auto",
        engine: str = "auto",
        pack: bool = True,
    ) -> TextModel:
        """A model to draft with. placement: "sharded" as the target is, "replicated" on every rank, on "rank0" alone, or
        "auto": where a drafted token is measured to take least (`placement.cheapest`).
        """
        from outrider.sharded.placement import place

        return place(self, model, dtype, engine, placement, pack)

    def drop(self, model: TeamModel) -> None:
        """Give a model's memory back on the other ranks; it can't be used again."""
        model.dropped = True
        self.tell(Op.DROP, model.number)

    def link(self) -> Link:
        """What collective calls cost between these ranks, measured once."""
        from outrider.sharded.costs import measure_link

        if self._link is None:
            with self.together(Op.LINK):
                self._link = measure_link(self.device)
        return self._link

    def tell(self, op: Op, *words: int) -> None:
        """A command that takes no part of rank 0."""
        with self.together(op, *words):
            pass

    @contextmanager
    def together(self, op: Op, *words: int) -> Iterator[None]:
        """Give a command and do rank 0's part of it in the block. Whatever goes wrong there leaves the ranks out of step."""
        self.check()
        try:
            send(op, *words)
            yield
        except BaseException as error:
            self.broken = True
            if may_be_loss(error) and (reason := self.watch.wait(_KNOWN)) is not None:
                self.watch.tell()
                raise TeamError(reason) from error
            raise

    def check(self) -> None:
        """Raise `TeamError` once a rank is known to have ended."""
        if self.watch.reason is not None:
            self.broken = True
            self.watch.tell()
            raise TeamError(self.watch.reason)
        if self.broken:
            raise TeamError("the ranks are out of step after an interruption: start the job again")


def may_be_loss(error: BaseException) -> bool:
    """Whether a broken connection could be behind it: torch raises `RuntimeError`s for those, whoever wraps them."""
    return isinstance(error, RuntimeError) or (
        isinstance(error, OutriderError) and isinstance(error.__cause__, RuntimeError)
    )
