"""A recording: the operations of a pass, called by torch's own interpreter instead of the Python that led to them.

They are the same operations on the same sizes, so that a recorded pass gives the bits of the ordinary one; one that does
not is not used. What was recorded is kept in the cache folder as text (`graph_text`), which the next start reads in no time.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import CacheFolderError, in_one_line
from outrider.kernels.chain_calls import Piece, Place, Span
from outrider.models.kernels.fusing import fuse, fuse_operations
from outrider.models.made_of import versions
from outrider.models.passes.graph_text import UnwritableError, graph_text
from outrider.models.passes.guards import DecidesError
from outrider.models.passes.model_code import ReachedCode
from outrider.models.passes.planned import Bound, PlannedGraph
from outrider.models.passes.tracing import Cached, PassInputs, Traced
from outrider.models.weights.packed_linear import OpaqueLinear
from outrider.support.alone import OneAtATime
from outrider.support.cache_folder import cache_folder
from outrider.support.whole_files import replace_whole

_FORMAT = 14  # to be raised when what is traced changes with neither torch nor transformers
_REFUSED = "refused: "
_log = logging.getLogger(__name__)
_modules: Any = torch.nn.modules.module
_recording = OneAtATime()  # tracing changes tables of torch and transformers for a while


class Untouched:
    """Tells whether a module is still made of the same parts and tensors, and of the same code, without hooks or methods of
    its own.

    What is written into the tensors shows in a recorded pass; another tensor, an adapter, a hook or another function would
    not.

    addresses: whether the tensors must lie where they lay, too, as captured passes and plans want it: `parameter.data = …`
    is the same parameter with another memory.
    """

    def __init__(self, module: torch.nn.Module, addresses: bool = False) -> None:
        self._code = ReachedCode.to_watch(module)
        names = self._code.methods
        self._parts = [(part, _made_of(part), part.__dict__.keys() & names) for part in module.modules()]
        self._addresses = self._where() if addresses else None

    def holds(self) -> bool:
        """Less than a millisecond for 400 parts."""
        if _hooks_for_all() or not self._code.unchanged():
            return False
        names = self._code.methods
        for part, before, own in self._parts:
            now = _made_of(part)
            if _has_own(part) or len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True)):
                return False
            if part.__dict__.keys() & names != own:
                return False
        return self._addresses is None or self._where() == self._addresses

    def _where(self) -> list[int]:
        tensors = [one for _, made, _ in self._parts for one in made if isinstance(one, Tensor)]
        return [tensor.data_ptr() for tensor in tensors if tensor.layout is torch.strided]


def _made_of(part: torch.nn.Module) -> list[object]:
    packed = [part._packed] if isinstance(part, OpaqueLinear) else []
    return [*part._parameters.values(), *part._buffers.values(), *part._modules.values(), *packed]


def _has_own(part: torch.nn.Module) -> bool:
    """Whether it has what is no part of a model of its kind, and would be lost: a method of its own, or hooks."""
    return "forward" in part.__dict__ or bool(part._forward_hooks or part._forward_pre_hooks)


def _hooks_for_all() -> bool:
    """Whether something is called in the passes of every module."""
    return bool(_modules._global_forward_hooks or _modules._global_forward_pre_hooks)


class Recording:
    """One recorded pass."""

    def __init__(self, model: Cached, text: str) -> None:
        self._inputs = PassInputs(model)
        self._graph = PlannedGraph(text)
        self._untouched = Untouched(model.module, addresses=self._graph.has_plans)
        if self._graph.has_plans:  # what is in use until the next sequence, whatever memory parameters are given meanwhile
            self._inputs.keep_memory()

    def fits(self) -> bool:
        """Whether the model is still the one that was recorded."""
        return self._untouched.holds()

    def of_twin(self, model: Cached) -> Recording:
        """The same passes over the cache of another model of the same module."""
        twin = copy(self)
        twin._inputs = PassInputs(model, self._inputs.parts)
        return twin

    def run(self, slots: slice, longest: int, *about: Tensor) -> list[Tensor]:
        """What the traced function returns for these slots' rows. longest: the last position of any row + 1."""
        return self._graph.run(*self._bound(slots, longest), about)

    @property
    def in_one_call(self) -> bool:
        """Whether `call` can be used."""
        return self._graph.in_one_call

    def call(
        self,
        spans: Sequence[Span],
        about: Sequence[Piece],
        into: Sequence[Place] = (),
        without: int = 0,
    ) -> list[Tensor]:
        """The same of some slots' tokens, one after the other: see `PlannedGraph.call`."""
        longest = max(columns for _, _, columns in spans)
        bound, columns, capacity = self._bound(self._inputs.slots, longest)
        return self._graph.call(bound, columns, capacity, spans, about, into, without)

    def _bound(self, slots: slice, longest: int) -> tuple[Bound, int, int]:
        capacity, view = self._inputs.view(slots, longest)
        bound: Bound | None = view.made.get(self)
        if bound is None or not bound.in_place:
            bound = view.made[self] = self._graph.bind(view.rows, self._inputs.parts)
        return bound, longest, capacity


def record(
    model: Cached,
    name: str,
    what: object,
    make: Callable[[], Traced],
    agrees: Callable[[Recording], bool],
    still: Callable[[Recording], bool] = lambda kept: True,  # noqa: ARG005
) -> Recording | None:
    """What was recorded of a model, read from the cache folder or made now; None where it can't be.

    what: all that the graph depends on. make: traces it. agrees: whether its results are those of ordinary passes. still:
    the same of one that was kept, more quickly: the code of a model may have been changed since, under the same names.
    """
    with _recording.lock:
        return _record(model, name, what, make, agrees, still)


def _record(
    model: Cached,
    name: str,
    what: object,
    make: Callable[[], Traced],
    agrees: Callable[[Recording], bool],
    still: Callable[[Recording], bool],
) -> Recording | None:
    own = changed(model.module)
    path = None if own else _path(name, what)
    kept = _read(path)
    if kept is not None and not kept.startswith(_REFUSED):
        try:
            found = Recording(model, kept)
            if still(found):
                return found
            reason = "those that were kept give other bits"
        except Exception as error:  # what was kept has been damaged, in whatever way
            reason = _line(error)
        _log.debug("passes of %s are recorded again: %s", name, reason)
        kept = None
    if kept is None:
        kept, lasting = (_REFUSED + own, False) if own else _made(model, make, agrees)
        if lasting:
            _keep(path, kept)
    if kept.startswith(_REFUSED):
        _log.debug("passes of %s are not recorded: %s", name, kept.removeprefix(_REFUSED))
        return None
    return Recording(model, kept)


def changed(module: torch.nn.Module) -> str:
    """Which part of it can't be recorded or captured (`_has_own`). Empty if there is none."""
    if _hooks_for_all():
        return "there is a hook for all modules"
    own = next((name for name, part in module.named_modules() if _has_own(part)), None)
    return "" if own is None else f"{own or 'the model'} has a method or a hook of its own"


def _made(model: Cached, make: Callable[[], Traced], agrees: Callable[[Recording], bool]) -> tuple[str, bool]:
    """The text of its graph, or why there is none; and whether that will be so in the next start, too."""
    try:
        with _quiet(), torch.inference_mode(False):  # whoever asks: in that mode nothing can be traced
            graph = make().graph
            text = graph_text(graph)
            fewer = _fused(graph)
        for fused in fewer:
            if fused != text and _fits_fused(lambda told: agrees(Recording(model, told)), fused):
                return fused, True
        if not agrees(Recording(model, text)):
            return _REFUSED + "its recorded passes give other bits", True
    except Exception as error:  # models raise anything when they are traced; the ordinary pass is always there
        return _REFUSED + _line(error), isinstance(error, _lasting_errors())
    return text, True


def _fused(graph: Any) -> list[str]:
    """Texts of the same graph with fewer operations, the fewest first: as far as they can be put together."""
    texts: list[str] = []
    try:
        for change in (fuse_operations, fuse):
            change(graph)
            texts.insert(0, graph_text(graph))
    except Exception as error:  # a graph of a kind that was not foreseen
        _log.debug("its operations stay apart: %s", _line(error))
    return texts


def _fits_fused(agrees: Callable[[str], bool], text: str) -> bool:
    """Whether the recording with fewer operations gives the same bits; if not, the one with all of them may."""
    try:
        fits = agrees(text)
        reason = "other bits"
    except RuntimeError as error:  # an operation of ours refuses what it is given
        fits, reason = False, _line(error)
    if not fits:
        _log.debug("its operations stay apart: %s", reason)
    return fits


def _lasting_errors() -> tuple[type[Exception], ...]:
    """What a model's code is the reason of, and not the moment: memory, an interrupt before, another thread."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return (
        DecidesError,
        UnwritableError,
        DataDependentOutputException,
        DynamicOutputShapeException,
        GuardOnDataDependentSymNode,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch writes on standard error about operations that it can't trace: they end in an error anyway."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


def _line(error: Exception) -> str:
    return in_one_line(error, 200)


def kernels_allowed() -> tuple[object, ...]:
    """What decides which kernels passes take, the model apart. Those of attention hold for CPUs, too."""
    backends: Any = torch.backends
    return backends.cpu.get_cpu_capability(), backends.cuda.flash_sdp_enabled()


def _path(name: str, what: object) -> Path | None:
    about = repr((_FORMAT, versions(), kernels_allowed(), what))
    try:
        return cache_folder() / "recorded" / f"{hashlib.sha256(about.encode()).hexdigest()[:24]}.txt"
    except CacheFolderError as error:
        _log.debug("recorded passes of %s are not kept: %s", name, error)
        return None


def _read(path: Path | None) -> str | None:
    try:
        return None if path is None else path.read_text(encoding="utf-8") or None
    except (OSError, ValueError):
        return None


def _keep(path: Path | None, text: str) -> None:
    if path is None:
        return
    try:
        path.parent.mkdir(exist_ok=True)
        replace_whole(path, text)
    except OSError as error:
        _log.debug("recorded passes are not kept: %s", error)
