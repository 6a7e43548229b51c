"""Compiled passes: of one row and a few tokens, for which Python and small operations take a third of the time on a CPU.

`torch.compile` traces a model in every process before it finds what it has compiled, 20 s and more for 30 layers and four
widths. Here each pass is traced once (`tracing`), compiled by the same compiler and kept in the cache folder; the next
process reads it. A width is used only where it was measured to be quicker than the ordinary pass, a decision that is kept
beside it: like cost tables, it must be the same in the next run for the same seed to give the same tokens.

A compiled pass computes what the ordinary one computes, but rounds otherwise where operations are fused, as a pass of
another width does. Quantized models promise the same bits in any pass (`models.weights.quantized`): they are not compiled.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.errors import CacheFolderError, ParameterError, in_one_line
from outrider.models.made_of import versions
from outrider.models.passes.captured import captured_pass, columns_captured
from outrider.models.passes.compiled_trial import difference, gain
from outrider.models.passes.graph import describe_pass, trace_pass
from outrider.models.passes.guards import check_free
from outrider.models.passes.own_ops import lower_packed
from outrider.models.passes.tracing import STEP, PassInputs
from outrider.models.probe import tolerance
from outrider.support.cache_folder import cache_folder
from outrider.support.whole_files import replace_whole

if TYPE_CHECKING:
    from outrider.models.transformers_model import TransformersModel

WIDTHS = (1, 2, 4, 8)
GAIN = 0.97  # used only if it takes at most this share of the ordinary pass's time
GAINS = "gains.json"
_FORMAT = 3  # to be raised when what is compiled changes with neither torch nor transformers
_OPTIONS = {"size_asserts": False, "alignment_asserts": False}  # packed weights have no strides to be asserted
_log = logging.getLogger(__name__)
Pass = Callable[..., Any]


class CompiledPasses:
    """Passes of a model by their number of tokens, and what they read.

    tried: further widths, whose compiled passes are not worth it: what would be padded up to one is not compiled at all,
    since what a wider one gains over the ordinary pass of its own width says nothing of narrower passes.
    """

    def __init__(self, model: TransformersModel, passes: dict[int, Pass], tried: Sequence[int] = ()) -> None:
        self._passes = passes
        self._tried = sorted({*passes, *tried})
        self.widths = tuple(sorted(passes))
        self._inputs = PassInputs(model)

    def width(self, tokens: int) -> int | None:
        """The compiled width that so many tokens are padded up to, None where they are not compiled."""
        least = next((width for width in self._tried if width >= tokens), None)
        return least if least in self._passes else None

    def run(self, slot: int, tokens: Tensor, positions: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Score tokens [1, N] of a slot's row at its positions [1, N], N a compiled width; longest: the last one + 1.

        Returns logits [1, N, V] and the states that the head read [1, N, width], overwritten by the next call.
        """
        columns = columns_captured(longest) if tokens.device.type == "cuda" else rounded_up(longest)
        capacity, read = self._inputs.of(slice(slot, slot + 1), columns)
        logits, states = self._passes[tokens.shape[1]](columns, capacity, tokens, positions, *read)
        return logits, states


def rounded_up(longest: int) -> int:
    """The columns that a compiled pass reads: more than needed, and masked."""
    return -(-longest // STEP) * STEP


def check_compilable(model: TransformersModel) -> None:
    """Raise `ParameterError` for models that are never compiled."""
    if model.has_encoder:
        raise ParameterError(f"compile is for decoder-only models, {model.name} is an encoder-decoder: leave compile out")
    if model.quantized:
        raise ParameterError(
            f"compile can't be used with dtype {model.dtype_name}, whose logits have the same bits in any pass: use dtype "
            "bfloat16 or float32, or leave compile out"
        )


def compile_passes(model: TransformersModel, widths: Sequence[int] = WIDTHS) -> CompiledPasses | None:
    """The model's passes of so many tokens, read from the cache folder or compiled now, of those that are worth it.

    None, with a warning, where it can't be compiled or nothing is gained. First `check_compilable`.
    """
    check_compilable(model)
    try:
        folder = _folder(model)
        gains = _kept_gains(folder)
        wanted = [width for width in widths if gains.get(width, 0.0) <= GAIN]
        with _compiler(folder.parent / "inductor"):
            passes = {width: _made(model, width, wanted, folder / f"{width}.bin") for width in wanted}
        if not gains.keys() >= set(widths):
            gains = {width: gain(model, CompiledPasses(model, {width: one})) for width, one in passes.items()}
            _keep_gains(folder, gains)
            _say(f"compiled passes of {model.name} take {_told(gains)} times as long as ordinary ones")
    except Exception as error:  # compilers raise anything; an ordinary pass is always there
        reason = in_one_line(error, 200)
        _log.warning("%s can't be compiled (%s): it runs without", model.name, reason)
        return None
    worth = {width: passes[width] for width in wanted if gains[width] <= GAIN}
    if worth:
        return CompiledPasses(model, worth, widths)
    _log.warning("compiled passes of %s are no quicker here (%s times as long): it runs without", model.name, _told(gains))
    return None


def _told(gains: dict[int, float]) -> str:
    return ", ".join(f"{gain:.2f} ({width} token{'s'[: width > 1]})" for width, gain in sorted(gains.items()))


def _say(line: str) -> None:
    sys.stderr.write(f"outrider: {line}\n")
    sys.stderr.flush()


def _folder(model: TransformersModel) -> Path:
    """Where a model's compiled passes are kept, by all that they depend on."""
    device = model.device
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    about = [_FORMAT, place, torch.get_num_threads(), model.recorded is not None, versions(), *describe_pass(model)]
    name = hashlib.sha256(repr(about).encode()).hexdigest()[:24]
    try:
        folder = cache_folder() / "compiled" / name
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CacheFolderError(f"compiled passes can't be kept: {error}") from None
    return folder


@contextmanager
def _compiler(folder: Path) -> Iterator[None]:
    """The compiler's own files beside ours, unless $TORCHINDUCTOR_CACHE_DIR says where; its warnings kept quiet."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)  # read first: importing the compiler sets it
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    before = None if before == default_cache_dir() else before
    os.environ[name] = before or str(folder)
    headers = shutil.which("openssl") is not None  # with which it finds the headers that it has compiled before
    try:
        with warnings.catch_warnings(), config.patch(cpp_cache_precompile_headers=headers):
            warnings.simplefilter("ignore")
            yield
    finally:
        if before is None:
            os.environ.pop(name, None)


def _made(model: TransformersModel, width: int, widths: Sequence[int], path: Path) -> Pass:
    """One pass, from its file or compiled into it, and checked."""
    found = _read(path)
    if found is None:
        at = f"{list(widths).index(width) + 1} of {len(widths)}"
        _say(f"compiling {model.name} for passes of {width} token{'s'[: width > 1]} ({at}) …")
        found = _compile(model, width, path)
    if model.device.type == "cuda" and model.wants_recorded:
        found = captured_pass(found, model.name)
    off = difference(model, CompiledPasses(model, {width: found}))
    if not off <= tolerance(model.dtype):
        path.unlink(missing_ok=True)
        raise RuntimeError(f"its compiled pass of {width} gives other logits, off by {off:.2g} of their spread")
    return found


def _read(path: Path) -> Pass | None:
    """What was kept, None if there is nothing that this torch can read."""
    from torch._inductor.standalone_compile import CompiledArtifact

    if not path.is_file():
        return None
    try:
        return CompiledArtifact.load(path=str(path), format="binary")
    except Exception as error:  # a damaged file, or the compiler's own files are gone
        _log.debug("%s is compiled again: %s", path, error)
        return None


def _compile(model: TransformersModel, width: int, path: Path) -> Pass:
    from torch._guards import TracingContext, tracing
    from torch._inductor import standalone_compile

    traced = trace_pass(model, width)
    if model.device.type == "cpu":
        lower_packed()
    with torch.no_grad(), tracing(TracingContext(traced.mode)):
        made: Any = standalone_compile(
            traced.graph, traced.inputs, dynamic_shapes="from_tracing_context", options={"config_patches": _OPTIONS}
        )
    check_free(traced.mode.shape_env)
    try:
        made.save(path=str(path), format="binary")
    except (RuntimeError, OSError) as error:
        _log.warning("the compiled pass of %s can't be kept: %s", model.name, in_one_line(error, 200))
    return made  # type: ignore[no-any-return]


def _kept_gains(folder: Path) -> dict[int, float]:
    """{tokens: seconds of the compiled pass / seconds of the ordinary one} as measured on this machine, {} before."""
    try:
        return {int(width): float(gain) for width, gain in json.loads((folder / GAINS).read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _keep_gains(folder: Path, gains: dict[int, float]) -> None:
    """A file that can't be written is no reason to throw away what minutes were spent on."""
    try:
        replace_whole(folder / GAINS, json.dumps(gains))
    except OSError as error:
        _log.warning("what compiled passes gain can't be kept: %s", error)
