"""A model's weights in one piece of memory, of huge pages where the system has them.

Reading 130 MB through pages of 4 KB costs a twentieth of a small model's pass. And a pass that holds addresses looks whether
what they point to is still there (`planned`): three hundred pieces of memory take .1 ms of 3.
"""

from __future__ import annotations

import logging
import mmap
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outrider.models.weights.packed_linear import OpaqueLinear

MOST = 640 << 20  # bytes of weights: of larger models this gains a hundredth, and takes a second
LEAST = 1 << 20  # of fewer bytes nothing is gained
_LINE = 64  # bytes that each weight begins at a multiple of
_HUGE = 2 << 20  # bytes of a huge page
_log = logging.getLogger(__name__)


def put_in_one_piece(*modules: nn.Module) -> bool:
    """Move the weights of modules on a CPU, in place, before anything keeps their addresses; → whether they were.

    Those in a layout of another library stay where they are. A parameter stays the same parameter.
    """
    held = list(_held(modules))
    size = sum(_padded(one.tensor) for one in held)
    if not LEAST <= size <= MOST:
        return False
    try:
        room = _room(size)
    except (OSError, ValueError, RuntimeError) as error:
        _log.debug("weights stay in pieces: %s", error)
        return False
    at = 0
    with torch.no_grad():
        for one in held:
            tensor = one.tensor
            moved = room[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            setattr(one.holder, one.name, moved.copy_(tensor))
            at += _padded(tensor)
    return True


class _Held(NamedTuple):
    """A tensor, and where it is held: the data of a parameter or buffer, or a layer's own."""

    holder: Any
    name: str
    tensor: Tensor


def _held(modules: tuple[nn.Module, ...]) -> Iterator[_Held]:
    """Those that share their memory with nothing, each once."""
    found: dict[int, _Held] = {}
    for part in (part for module in modules for part in module.modules()):
        own = [*part._parameters.values(), *part._buffers.values()]
        held = [_Held(tensor, "data", tensor) for tensor in own if tensor is not None]
        if isinstance(part, OpaqueLinear):
            held.append(_Held(part, "_packed", part._packed))
        found |= {id(one.tensor): one for one in held if _plain(one.tensor)}
    shared = Counter(one.tensor.untyped_storage()._cdata for one in found.values())
    return (one for one in found.values() if shared[one.tensor.untyped_storage()._cdata] == 1)


def _plain(tensor: Any) -> bool:
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or tensor.layout is not torch.strided:
        return False
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return False
    return bool(0 < tensor.nbytes == tensor.untyped_storage().nbytes())


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _LINE) * _LINE


def _room(size: int) -> Tensor:
    """Uint8 [size], from the start of a page."""
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    memory = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # holds the memory
    start = -whole.data_ptr() % _HUGE
    return whole[start : start + size]
