"""From logits to tokens on a CPU, in few sweeps over a row: laws, drawing, the acceptance rule.

What they compute is said where they are called (`sampling`, `verify`), which do without them by NumPy: on other processors,
without a compiler, and for numbers in float64.
"""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.kernels.build import Library, UnbuiltError, built, built_here
from outrider.kernels.calls import SamplingCalls

LIBRARY = Library(
    "sampling", ("sampling", "sampling_calls"), ("rows.h", "laws.h", "race.h"), "outrider_sampling", "kernels for sampling"
)
LEVEL = "avx2"  # for every processor: there is nothing to gain, and the bits are the same on all
_READ = (torch.float32, torch.bfloat16)
_log = logging.getLogger(__name__)
_opened: list[Path] = []  # in this process


class SamplingKernels:
    """Operations of torch on rows [N, V]: `laws`, `best`, `shares` of logits in float32 or bfloat16, `draw`, `race` and
    `verify` of laws in float32. What they are given and return: see `sampling.cpp`. calls: whole steps.
    """

    def __init__(self, library: Path) -> None:
        self._space: Any = getattr(torch.ops, LIBRARY.within(LEVEL))
        if not hasattr(self._space, "verify"):  # torch ends the process if an operation is defined twice
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
            _opened.append(library)
        # One signature each, found once: half the time of a call beside a model.
        self.laws: Any = self._space.laws.default
        self.best: Any = self._space.best.default
        self.shares: Any = self._space.shares.default
        self.draw: Any = self._space.draw.default
        self.race: Any = self._space.race.default
        self.verify: Any = self._space.verify.default
        self.calls = SamplingCalls(_opened[0] if _opened else library)  # opened from elsewhere, it defines them again, too
        self._try()

    def _try(self) -> None:
        """Raise `UnbuiltError` unless small rows give what they should."""
        at: dict[str, Any] = {"device": "cpu"}
        logits = torch.tensor([[0.0, 2.0, -torch.inf, 1.0, 0.5] * 3], dtype=torch.float32, **at)
        want = (logits.double() / 0.5).softmax(-1)
        law = self.laws(logits, 0.5, 0, 1.0, 0.0)
        cut = self.laws(logits, 0.5, 12, 0.9, 0.01)
        kept = want * (want > 0.1 * want.max())
        if not torch.allclose(law.double(), want, rtol=1e-5) or not torch.allclose(
            cut.double(), kept / kept.sum(), rtol=1e-5
        ):
            raise UnbuiltError("laws are wrong")
        points = torch.tensor([0.999], dtype=torch.float64, **at)
        last = torch.tensor([14], dtype=torch.long, **at)
        if not torch.equal(self.draw(law, points), last) or int(self.best(logits)) != 1:
            raise UnbuiltError("draws are wrong")
        tokens, offered = torch.tensor([[1]], dtype=torch.long, **at), torch.tensor([1], dtype=torch.long, **at)
        pair = law.expand(1, 2, -1)
        accepted, token = self.verify(pair, None, tokens, offered, points.view(1, 1), points)
        if int(accepted) != 0 or int(token) != 14:
            raise UnbuiltError("the acceptance rule is wrong")
        how = (0.5, 0, 1.0, 0.0)
        decided = self.calls.decide(logits.expand(1, 2, -1), [0], 15, how, [[1]], [points.tolist() * 2], None)
        drawn = self.calls.step(logits, how, points.tolist(), [law.data_ptr()], 15, reads=True, most=1)
        nine = torch.tensor([9], dtype=torch.long, **at)
        won = int(self.race(law, nine, nine))
        races = [9], [9]
        same = self.calls.decide(logits.expand(1, 2, -1), [0], 15, how, [[won]], [[]], None, races)
        own = self.calls.step(logits, how, (), [law.data_ptr()], 15, races=races)
        if won != 11 or same[0][0] != 1 or own.tokens != [won]:
            raise UnbuiltError("races are wrong")
        if decided != [(0, 14)] or drawn.tokens != [14] or drawn.others[0][0][0] != 1:
            raise UnbuiltError("steps in one call are wrong")


@cache
def sampling_kernels() -> SamplingKernels | None:
    """None, with a warning, where they can't be built. Takes seconds the first time."""
    message = "kernels for sampling can't be built (%s): it goes by NumPy, which is slower"
    return built_here(lambda _: build(), _log, message)  # `LEVEL`, whichever this processor has


def build() -> SamplingKernels:
    """Raises `UnbuiltError`."""
    return built(LIBRARY, LEVEL, SamplingKernels)


def reading(*values: Tensor | None) -> SamplingKernels | None:
    """The kernels, if they can read all of these: on a CPU, in float32 or bfloat16, without a gradient."""
    for each in values:
        if each is not None and (not each.is_cpu or each.dtype not in _READ or each.requires_grad):
            return None
    return sampling_kernels()
