"""What the code of a model is, so that nothing that was made of other code is taken for it.

Versions don't tell: a modelling file may be edited, or lie in a model's folder, and a method may be replaced while a process
runs.
"""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from pathlib import Path
from types import CellType, CodeType
from typing import Any

import torch

import outrider.models


def describe_code(module: torch.nn.Module) -> list[object]:
    """The classes of its parts in order, their methods as they are now, the files that they come from, and ours."""
    kinds = [type(part) for part in module.modules()]
    each = dict.fromkeys(kinds)
    files = sorted({name for kind in each if (name := _file_of(kind.__module__)) is not None})
    names = [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds]
    return [names, [_methods(kind) for kind in each], [_digest(name) for name in files], _own_files()]


def _methods(kind: type) -> list[tuple[str, str]]:
    """By name, those of a class and of its parents, torch's own apart."""
    found: dict[str, Any] = {}
    for parent in kind.__mro__:
        if not parent.__module__.startswith("torch."):
            found = {**{name: value for name, value in vars(parent).items() if hasattr(value, "__code__")}, **found}
    return sorted((name, _fingerprint(value)) for name, value in found.items())


def _fingerprint(function: Any) -> str:
    """Of what it does, whatever it wraps and encloses included, without the address that its name shows."""
    return hashlib.sha256(repr(_of_function(function, set())).encode()).hexdigest()


def _of_function(function: Any, seen: set[int]) -> list[object]:
    if id(function) in seen:
        return []
    seen.add(id(function))
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != _EMPTY]
    held = [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    inside = [_of_function(each, seen) if hasattr(each, "__code__") else repr(each) for each in held if _is_plain(each)]
    return [_of_code(function.__code__), inside]


def _is_plain(value: object) -> bool:
    """Whether a value has a name that is the same in the next process."""
    return hasattr(value, "__code__") or value is None or isinstance(value, bool | int | float | str | bytes)


def _of_code(code: CodeType) -> tuple[object, ...]:
    return code.co_code, code.co_names, [_of_constant(each) for each in code.co_consts]


def _of_constant(constant: object) -> object:
    if isinstance(constant, CodeType):
        return _of_code(constant)
    return sorted(map(repr, constant)) if isinstance(constant, frozenset) else repr(constant)  # a set has no order


def _file_of(module: str) -> str | None:
    return getattr(sys.modules.get(module), "__file__", None)


_EMPTY = CellType()


@cache
def _digest(file: str) -> str:
    """Of the file as this process read it, or a little later."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return ""


@cache
def _own_files() -> str:
    """Of what traces, and of what is traced of ours."""
    folder = Path(outrider.models.__file__).parent
    files = [*sorted(folder.glob("*.py")), *sorted((folder.parent / "heads").glob("*.py"))]
    return hashlib.sha256("".join(_digest(str(file)) for file in files).encode()).hexdigest()
