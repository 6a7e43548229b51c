"""What the code of a model is, so that nothing that was made of other code is taken for it.

Versions don't tell: a modelling file may be edited, or lie in a model's folder beside others that it calls, and a method or
a function may be replaced while a process runs. So what `forward` reaches is followed from name to name, as it is now.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from functools import partial, partialmethod
from types import CellType, CodeType, ModuleType
from typing import Any

import torch

from outrider.models.made_of import file_digest, own_files

_LEFT_OUT = {
    *sys.stdlib_module_names,
    "torch",
    "numpy",
    "huggingface_hub",
    "safetensors",
    "tokenizers",
    "tqdm",
    "accelerate",
    "scipy",
}
"""Packages that are not followed into: they count by their names, and by their versions elsewhere."""


def describe_code(module: torch.nn.Module) -> list[object]:
    """The classes of its parts in order, the numbers that they hold, what their passes reach, the files, and ours.

    Not where the model was read from, which passes of the libraries' own classes never ask: a copy elsewhere need not be
    traced again. Others may hold what they read there, in forms that are not told here.
    """
    kinds = [type(part) for part in module.modules()]
    parents = dict.fromkeys(parent for kind in kinds for parent in kind.__mro__ if not _left_out(parent.__module__))
    files = sorted({name for parent in parents if (name := _file_of(parent.__module__)) is not None})
    names = [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds]
    known = all(kind.__module__.partition(".")[0] in ("torch", "transformers", "outrider") for kind in kinds)
    untold = {"name_or_path"} if known else set()
    held = [
        sorted((key, repr(value)) for key, value in vars(part).items() if key not in untold and _is_plain(value))
        for part in module.modules()
    ]
    return [names, held, ReachedCode(module).digest, [file_digest(name) for name in files], own_files()]


class ReachedCode:
    """What the passes of a module's parts reach: their methods, and the functions and numbers that these name.

    digest: of all of it, the same in another process. methods: their names. `unchanged` tells whether every name still
    stands for the same thing.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._named: list[tuple[Any, str, object]] = []  # (where, name, what it stood for)
        self._codes: list[tuple[Any, CodeType]] = []
        self._seen: set[int] = set()
        kinds, self._attention = _asked_of(module)
        self.methods: set[str] = set()
        told = [self._methods(kind, {"forward"}) for kind in kinds if not _left_out(kind.__module__)]
        self.digest = hashlib.sha256(repr(told).encode()).hexdigest()

    @classmethod
    def to_watch(cls, module: torch.nn.Module) -> ReachedCode:
        """For `unchanged`, from now on: found out once for modules of the same classes, of which nothing else is asked. Its
        digest may be of earlier numbers, which are not watched.
        """
        asked = _asked_of(module)
        known = _watched.get(asked)
        if known is None or not known.unchanged():
            known = _watched[asked] = cls(module)
            while len(_watched) > _MOST_WATCHED:
                _watched.pop(next(iter(_watched)), None)
        return known

    def unchanged(self) -> bool:
        """A few hundred names in some ten microseconds."""
        return all(_look_up(where, name) is what for where, name, what in self._named) and all(
            function.__code__ is code for function, code in self._codes
        )

    def _watch(self, where: Any, name: str, value: object) -> None:
        """Numbers apart: some count what a library has done, and would never be the same."""
        if not _is_plain(value):
            self._named.append((where, name, value))

    def _methods(self, kind: type, asked: set[str]) -> list[object]:
        """Of a class, those of such names and whatever of the class they name in turn."""
        told: list[object] = [f"{kind.__module__}.{kind.__qualname__}"]
        done: set[str] = set()
        while asked - done:
            name = min(asked - done)
            done.add(name)
            value = _look_up(kind, name)
            if value is None or (hasattr(value, "__code__") and _left_out(value.__module__ or "")):
                continue
            self._watch(kind, name, value)
            self.methods.add(name)
            told.append((name, self._of(value)))
            asked |= {each for code in _codes_of(value) for each in _names_in(code)}
        return told

    def _of(self, value: Any) -> object:
        """What a name stands for, without the address that it may show."""
        if _is_plain(value):
            return repr(value)
        inside = _inside(value)
        if inside is not None:
            return [self._of(each) for each in inside]
        return self._of_function(value) if hasattr(value, "__code__") else self._of_object(value)

    def _of_function(self, function: Any) -> object:
        name = f"{function.__module__}.{function.__qualname__}"
        if id(function) in self._seen or _left_out(function.__module__ or ""):
            return name
        self._seen.add(id(function))
        self._codes.append((function, function.__code__))
        cells = [cell.cell_contents for cell in function.__closure__ or () if cell != _EMPTY]
        held = [*cells, *(function.__defaults__ or ()), *sorted((function.__kwdefaults__ or {}).items())]
        return [name, _of_code(function.__code__), [self._of(each) for each in held], self._of_globals(function)]

    def _of_globals(self, function: Any) -> list[object]:
        """What it names of its module, and of modules that it names."""
        told: list[object] = []
        names = sorted(set(_names_in(function.__code__)))
        for name in names:
            value = function.__globals__.get(name)
            if value is None:
                continue
            self._watch(function.__globals__, name, value)
            if not isinstance(value, ModuleType):
                told.append((name, self._of(value)))
            elif not _left_out(value.__name__):
                for inner in (each for each in names if each in vars(value)):
                    self._watch(vars(value), inner, vars(value)[inner])
                    told.append((name, inner, self._of(vars(value)[inner])))
        return told

    def _of_object(self, value: Any) -> object:
        kind = value if isinstance(value, type) else type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if id(value) in self._seen or _left_out(kind.__module__):
            return name
        self._seen.add(id(value))
        if isinstance(value, type):
            return self._methods(kind, {"__new__", "__init__", "__call__", "forward"})
        if isinstance(value, Mapping) and self._attention in value:  # the table of attention functions
            chosen = value[self._attention]
            self._watch(value, str(self._attention), chosen)
            return [name, self._of(chosen)]
        return [name, self._methods(kind, {"__call__"})] if callable(value) else name


_Asked = tuple[tuple[type, ...], str | None]
_watched: dict[_Asked, ReachedCode] = {}
_MOST_WATCHED = 8


def _asked_of(module: torch.nn.Module) -> _Asked:
    """The classes of a module's parts, and the attention that its config names."""
    kinds = tuple(dict.fromkeys(type(part) for part in module.modules()))
    return kinds, getattr(getattr(module, "config", None), "_attn_implementation", None)


def _inside(value: Any) -> list[Any] | None:
    """What something holds that has no name of its own; None where it is no such thing."""
    if isinstance(value, staticmethod | classmethod):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget]
    if isinstance(value, partial | partialmethod):
        return [value.func, value.args, value.keywords]
    if isinstance(value, dict):
        return [each for pair in value.items() for each in pair]
    return list(value) if isinstance(value, tuple | list) else None


def _look_up(where: Any, name: str) -> object:
    """What a name stands for in a class, as it was written there, or in a table."""
    if isinstance(where, type):
        return next((vars(parent)[name] for parent in where.__mro__ if name in vars(parent)), None)
    return where.get(name)


def _codes_of(value: Any) -> Iterator[CodeType]:
    """Those of a method, of whatever it wraps and encloses."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        waiting += [getattr(each, name) for name in ("__func__", "fget", "func") if getattr(each, name, None) is not None]
        if isinstance(getattr(each, "__code__", None), CodeType):
            yield each.__code__
            waiting += [cell.cell_contents for cell in each.__closure__ or () if cell != _EMPTY]


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _left_out(module: str) -> bool:
    return module.partition(".")[0] in _LEFT_OUT or module.startswith("transformers.loss")


def _is_plain(value: object) -> bool:
    """Whether what it shows is the same in the next process."""
    if isinstance(value, tuple | list):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype)


def _of_code(code: CodeType) -> tuple[object, ...]:
    return code.co_code, code.co_names, [_of_constant(each) for each in code.co_consts]


def _of_constant(constant: object) -> object:
    if isinstance(constant, CodeType):
        return _of_code(constant)
    return sorted(map(repr, constant)) if isinstance(constant, frozenset) else repr(constant)  # a set has no order


def _file_of(module: str) -> str | None:
    return getattr(sys.modules.get(module), "__file__", None)


_EMPTY = CellType()
