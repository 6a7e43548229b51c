"""Quantized models as they lie in memory, kept in the cache folder: the next start maps a file where the first one read,
quantized and laid out several times as much.

What is kept is the module, pickled by torch beside its tensors, so that it is the same whatever architecture it is of. It is
read only if nothing that it was made of has changed: the model's files, libraries, kernels, and the code of this package.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import shutil
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from outrider.errors import CacheFolderError, in_one_line
from outrider.kernels.models import kernels
from outrider.models.attention.in_blocks import BLOCKS
from outrider.models.attention.in_float64 import register_steady_attention
from outrider.models.kernels.attention import register_kernel_attention
from outrider.models.made_of import own_files, versions
from outrider.models.weights.kernel_linear import GroupedKernel, Int8Kernel
from outrider.models.weights.packed_linear import OpaqueLinear
from outrider.support.cache_folder import build_once, cache_folder, file_name
from outrider.support.garbage import uncollected

FOLDER, FILE = "quantized", "module.pt"
LEAST = 32 * 10**6  # bytes of a model that is worth a file: smaller ones are quantized in no time
ROOM = 2 * 10**9  # bytes that stay free on the disk, at least
_log = logging.getLogger(__name__)


class KeptModel:
    """Where one quantized model is kept. Whatever goes wrong, nothing is, and the model is made as before.

    name: of the model, for whoever looks into the folder. source: what tells it from others. made: what it is made of, as it
    is now; what was kept of the same source before is taken away.
    """

    def __init__(self, name: str, source: object, made: object) -> None:
        ours = kernels()
        self._name = name
        self._stem = f"{file_name(name)}-{_digest(source)}-"
        about = () if ours is None else (versions(), ours.level, ours.digest, own_files(), made)
        self._folder = f"{FOLDER}/{self._stem}{_digest(about)}"
        self._possible = ours is not None

    def read(self) -> Any:
        """The module, its tensors mapped; None if there is none."""
        if not self._possible:
            return None
        try:
            path = cache_folder() / self._folder / FILE
            if not path.is_file():
                return None
            _read_ahead(path)
            with uncollected():
                module = torch.load(path, mmap=True, weights_only=False, map_location="cpu")
            register_kernel_attention()
            register_steady_attention()
            _introduce(module)
        except Exception as error:  # damaged, or of other code than it says: anything is raised
            _log.debug("%s is quantized again: %s", self._name, in_one_line(error, 200))
            self._take_away("")
            return None
        return module

    def keep(self, module: Any) -> None:
        """Write a module that has just been quantized."""
        if not self._possible or not _is_ours(module):
            return
        try:
            size = _bytes(module)
            if size < LEAST:
                return
            _introduce(module)  # what can't be read again is not worth a file
            if not _has_room(cache_folder(), size):
                _log.debug("%s is not kept: the disk has little room", self._name)
                return
            build_once(self._folder, lambda folder: torch.save(module, folder / FILE, pickle_module=_PICKLE))
            self._take_away(self._folder)
        except Exception as error:  # parts that can't be pickled, a disk that is full after all
            _log.debug("%s is not kept: %s", self._name, in_one_line(error, 200))

    def _take_away(self, but: str) -> None:
        with suppress(OSError, CacheFolderError):
            root = cache_folder()
            for folder in (root / FOLDER).iterdir():
                if folder.name.startswith(self._stem) and folder != root / but:
                    shutil.rmtree(folder, ignore_errors=True)


def _introduce(module: Any) -> None:
    """Make another of its kind, without weights: transformers notes what a kind can do when one is made. Raises anything."""
    with torch.device("meta"):
        type(module)(deepcopy(module.config))


def _digest(about: object) -> str:
    return hashlib.sha256(repr(about).encode()).hexdigest()[:16]


def _is_ours(module: Any) -> bool:
    """Whether its layers are kernels of ours, and its attention depends on no others: other layouts can't be written."""
    layers = [layer for layer in module.modules() if isinstance(layer, OpaqueLinear)]
    return module.config._attn_implementation != BLOCKS and all(
        isinstance(each, Int8Kernel | GroupedKernel) for each in layers
    )


def _bytes(module: nn.Module) -> int:
    packed: int = sum(layer._packed.nbytes for layer in module.modules() if isinstance(layer, OpaqueLinear))
    return packed + sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()])


def _has_room(folder: Path, size: int) -> bool:
    disk = shutil.disk_usage(folder)
    return disk.total == 0 or disk.free >= ROOM + 2 * size  # some file systems don't say what they hold


def _read_ahead(path: Path) -> None:
    """Have the file read while the module is put together."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def _operation(name: str) -> Any:
    """One of our kernels, by its name."""
    kernels()
    space, _, name = name.partition("::")
    return getattr(getattr(torch.ops, space), name)


class _Pickler(pickle.Pickler):
    """Writes operations by their names: torch can't."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch._ops.OpOverloadPacket):
            return _operation, (obj._qualified_op_name,)
        return NotImplemented


_PICKLE = SimpleNamespace(
    __name__="pickle", Pickler=_Pickler, Unpickler=pickle.Unpickler, dump=pickle.dump, load=pickle.load
)
