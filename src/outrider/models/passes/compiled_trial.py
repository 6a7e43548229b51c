"""Before a compiled pass is used: does it compute what the ordinary pass computes, and is it quicker on this machine?"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from outrider.models.passes.compiled import CompiledPasses
    from outrider.models.transformers_model import TransformersModel

CONTEXT = 64
PAIRS = 15
PASSES = 4
WARM_UP = 2


@contextmanager
def using(model: TransformersModel, passes: CompiledPasses | None) -> Iterator[None]:
    """Let the model score by these compiled passes, or by none, meanwhile."""
    before, model.compiled = model.compiled, passes
    try:
        yield
    finally:
        model.compiled = before


def difference(model: TransformersModel, passes: CompiledPasses) -> float:
    """Root mean square by which the logits of the least compiled width are off at most, relative to their spread.

    Several passes about other tokens at other positions: on a GPU the first runs as it is, the second is captured, and those
    after it tell whether a replay is about what it is given.
    """
    width = passes.widths[0]
    out: list[list[Tensor]] = []
    for each in (None, passes):
        found = []
        sequence = model.open(CONTEXT)
        try:
            with using(model, None):
                model.score([sequence], _tokens(model, 5, 0), [5], "none")
            for i in range(PASSES):
                with using(model, each):
                    logits = model.score([sequence], _tokens(model, width, 5 + i), [width])
                assert logits is not None
                found.append(logits.clone())
                sequence.truncate(min(6 + i, sequence.length))
        finally:
            sequence.close()
        out.append(found)
    return max(spread_off(wanted, got) for wanted, got in zip(*out, strict=True))


def _tokens(model: TransformersModel, count: int, start: int) -> Tensor:
    return torch.tensor([[(7 * (start + i) + 3) % min(model.vocab_size, 50) for i in range(count)]], device=model.device)


def spread_off(wanted: Tensor, got: Tensor) -> float:
    """Root mean square by which logits are off, relative to their spread."""
    wanted, got = wanted.double(), got.double()
    there = wanted.isfinite()  # the head of a draft may be cut
    if not torch.equal(there, got.isfinite()):
        return math.inf
    wanted, got = wanted[there], got[there]
    off = float((got - wanted).square().mean().sqrt() / wanted.std().clamp(min=1e-30))
    return math.inf if math.isnan(off) else off


def gain(model: TransformersModel, passes: CompiledPasses) -> float:
    """Seconds of the pass of the least compiled width / seconds of the ordinary one, after a short context.

    The median over pairs of passes that take turns, so that whatever else the machine does meets both.
    """
    width = passes.widths[0]
    tokens = torch.zeros(1, width, dtype=torch.long, device=model.device)
    context = max(1, min(CONTEXT, (model.max_length or CONTEXT + width) - width))
    sequence = model.open(context + width)
    try:
        sequence.advance(context)
        ratios = []
        for _ in range(PAIRS + WARM_UP):
            taken = []
            for each in (None, passes):
                with using(model, each):
                    start = time.perf_counter()
                    logits = model.score([sequence], tokens, [width])
                    assert logits is not None
                    logits[0, -1, 0].item()  # waits for the device
                    taken.append(time.perf_counter() - start)
                sequence.truncate(context)
            ratios.append(taken[1] / taken[0])
    finally:
        sequence.close()
    return float(f"{median(ratios[WARM_UP:]):.3g}")
