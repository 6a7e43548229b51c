"""Before captured passes are used: does a graph compute what was captured, wherever it is replayed?

A replay runs the kernels of the function that was captured, so it gives its bits, give or take a kernel that a library
chooses otherwise. What a graph has kept of the pass that was captured (a position, a mask, an address) shows in others: so
each is compared with the function itself, over dozens of positions, after a roll-back, and with two rows. Half precision
hides less that way than beside ordinary passes, which round otherwise. `capture_passes` makes those that passed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.models.base import has_encoder
from outrider.models.lean.run import LeanPass, lean_pass
from outrider.models.passes.captured import Captured, CapturedPasses, say_not_lean
from outrider.models.passes.compiled_trial import spread_off
from outrider.models.passes.cuda_graphs import say_uncaptured
from outrider.models.passes.recording import changed
from outrider.models.probe import tolerance
from outrider.support.device_data import pad_rows

if TYPE_CHECKING:
    from outrider.models.cache.slots import SlotSequence
    from outrider.models.transformers_model import TransformersModel

SAME = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}
"""By how much a replay may be off, relative to the spread: half a unit in the last place of a number as large as that, at
most. The function itself gives other bits there where it adds up in no fixed order."""
BEFORE = 16
ALONE, AGAIN, PAIR = (8, 1) * 3, (1, 8), (4, 4, 4)  # tokens of passes: of a row, of it rolled back, of two rows


class Trial:
    """Captured passes, each of which is compared with the function that was captured, over a copy of the cache."""

    def __init__(self, captured: Captured[Any]) -> None:
        self._captured = captured
        captured.graphs.warns = False  # whoever reads the verdict does
        self._calls = 0
        self._shapes: set[object] = set()
        self._off = 0.0

    def run(self, slots: slice, longest: int, *about: Tensor) -> list[Tensor]:
        """See `Captured.run`."""
        captured = self._captured
        if captured.failed:
            return captured.run(slots, longest, *about)
        columns, memory = captured.read(slots, longest)
        copies = [each.clone() for each in memory]
        wanted = captured.uncaptured(columns, about, copies)
        got = captured.run(slots, longest, *about)
        self._calls += 1
        self._shapes.add((columns, *(each.shape for each in about)))
        for ours, theirs in zip((*got, *memory), (*wanted, *copies), strict=True):
            self._off = max(self._off, spread_off(theirs, ours))
        return got

    def verdict(self, dtype: torch.dtype) -> str:
        """Why they should not be used, empty if they may be."""
        graphs = self._captured.graphs
        if graphs.failed:
            return graphs.failed
        if self._off > SAME.get(dtype, 4e-3):
            return f"a replay gives other logits than what was captured, off by {self._off:.2g} of their spread"
        replayed = graphs.replays > 0 and graphs.replays == self._calls - len(self._shapes)
        return "" if replayed else f"the trial replayed {graphs.replays} of {self._calls} passes"

    def judged(self, pairs: Iterable[tuple[Tensor, Tensor]], dtype: torch.dtype) -> str:
        """The same, and what the trial's passes gave beside ordinary ones. pairs: ordinary, captured."""
        off = max(spread_off(wanted, got) for wanted, got in pairs)
        reason = self.verdict(dtype)
        if reason or off <= tolerance(dtype):
            return reason
        return f"they give other logits than ordinary passes, off by {off:.2g} of their spread"


class _TriedPasses(CapturedPasses):
    """The passes of a model, on trial."""

    def __init__(self, model: TransformersModel, layers: Sequence[int], lean: LeanPass | None) -> None:
        super().__init__(model, layers, lean)
        self.trial = Trial(CapturedPasses(model, layers, lean))

    def of(self, rows: int, width: int) -> CapturedPasses:
        del rows, width
        return self

    def run(self, slots: slice, longest: int, *about: Tensor) -> list[Tensor]:
        return self.trial.run(slots, longest, *about)


def capture_passes(model: TransformersModel, layers: Sequence[int]) -> CapturedPasses | None:
    """The passes of a model on a GPU; None, with a warning, where they give other logits than ordinary ones.

    layers: whose states are handed out. They are captured when they are wanted, here only some to be tried.
    """
    if has_encoder(model):
        return None
    reason = changed(model.module)
    lean = None if reason else lean_pass(model)
    if lean is not None:
        found = try_passes(model, layers, lean)
        if lean.works and not found:
            return CapturedPasses(model, layers, lean)
        if lean.works:  # else it has been said
            say_not_lean(model.name, found)
    reason = reason or try_passes(model, layers)
    if reason:
        say_uncaptured(model.name, reason)
        return None
    return CapturedPasses(model, layers)


@torch.inference_mode()
def try_passes(model: TransformersModel, layers: Sequence[int], lean: LeanPass | None = None) -> str:
    """Why the passes of a model should not be captured, empty if they may be. layers: whose states they hand out. lean: what
    is captured instead of the model's own code.
    """
    twins = model.with_a_cache_of_its_own(), model.with_a_cache_of_its_own()
    tried = _TriedPasses(twins[1], layers, lean)
    try:
        wanted, got = (_scored(twin, passes, layers) for twin, passes in zip(twins, (None, tried), strict=True))
    except torch.OutOfMemoryError:
        return "the device has no memory left to try them"
    return tried.trial.judged(zip(wanted, got, strict=True), model.dtype)


def _scored(model: TransformersModel, passes: CapturedPasses | None, layers: Sequence[int]) -> list[Tensor]:
    """The logits of passes that follow each other by `passes`, and the states that they leave."""
    most = (model.max_length or 1 << 20) - 1
    limit = min(model.vocab_size, 50)
    one, two = rows = model.open(), model.open()  # both now: the cache would lie elsewhere afterwards
    found: list[Tensor] = []

    def score(sequences: Sequence[SlotSequence], width: int, factor: int) -> None:
        if max(each.length for each in sequences) + width > most:
            return
        ids = [[(factor * (each.length + i) + 3 + each.slot) % limit for i in range(width)] for each in sequences]
        logits = model.score(sequences, *pad_rows(ids, model.device))
        assert logits is not None
        found.append(logits)

    try:
        for sequence, count in ((one, BEFORE), (two, 3)):
            ids = [(7 * i + 3) % limit for i in range(min(count, max(1, most - 10)))]
            model.score([sequence], *pad_rows([ids], model.device), "none")
        model.recorded = passes
        for width in ALONE:
            score([one], width, 7)
        one.truncate(one.length - sum(AGAIN))
        for width in AGAIN:
            score([one], width, 11)
        for width in PAIR:
            score(rows, width, 7)
        if not model.quantized and one.length + 4 <= most:
            tokens = torch.tensor([[1, 2], [3, 4]], device=model.device)
            found.append(model.score_beside(rows, tokens, [2, 2], tokens + 1, [[0, 1], [1, 1]]))
        held = [model._cache.states[layer].keys for layer in layers]
        return [*found, *(kept[row.slot, :, : row.length] for kept in held if kept is not None for row in rows)]
    finally:
        for sequence in rows:  # which would hold the model in a cycle
            sequence.close()
