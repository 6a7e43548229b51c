"""The modules of a model that keep a state (its *mixers*), found by watching a pass, and run so that each token leaves one.

Every layer of the kind in transformers asks the cache for its states by one interface. So any mixer can be taken token by
token, whatever it computes in between; what it does with weights alone, the projections of its input and of its output, is
done for all tokens at once, since most of its time is reading those. Where its rule is known (`recurrent.rules`), its own
code runs over all tokens, and the rule alone goes step by step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from outrider.models.cache.runs import Run, RunStates
from outrider.models.recurrent.rules import Ruled, ruled, steps_of
from outrider.support.device_data import index


@dataclass(frozen=True)
class Mixer:
    """inputs: its linear layers that read what it is given, once. output: the one that makes what it returns, if it is one.

    argument: the name of the hidden states among its arguments. ruled: its code for many tokens that leaves all states.
    """

    module: nn.Module
    argument: str
    inputs: tuple[nn.Module, ...]
    output: nn.Module | None
    ruled: Ruled | None


@dataclass(eq=False)
class _Call:
    """A module at work: what it was given, and which linear layers read just that or made which output."""

    module: nn.Module
    given: Any
    read_by: list[nn.Module] = field(default_factory=list)
    made_by: list[tuple[Any, nn.Module]] = field(default_factory=list)


class _Watch:
    """Which modules ask the cache for states, and what their linear layers do."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._asking: dict[nn.Module, set[str]] = {}
        self.found: list[Mixer] = []

    def asked(self, kind: str) -> None:
        """The module at work is a mixer, which keeps such a state."""
        self._asking.setdefault(self._calls[-1].module, set()).add(kind)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module begins."""
        name = _first_argument(module)
        given = args[0] if args else kwargs.get(name)
        if is_linear(module):
            for call in self._calls:
                if call.given is given:
                    call.read_by.append(module)
        self._calls.append(_Call(module, given))

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """A module ends."""
        del args, kwargs
        call = self._calls.pop()
        if is_linear(module):
            for outer in self._calls:
                outer.made_by.append((out, module))
        if module in self._asking:
            kinds = self._asking.pop(module)
            made = [linear for made, linear in call.made_by if made is out]
            often = [linear for _, linear in call.made_by]
            once = {linear for linear in often if often.count(linear) == 1}
            inputs = tuple(linear for linear in call.read_by if linear in once and linear not in made)
            output = made[0] if made and made[0] in once else None
            whole = ruled(module, convolves=kinds == {"conv"})
            self.found.append(Mixer(module, _first_argument(module), inputs, output, whole))


def is_linear(module: nn.Module) -> bool:
    """Whether it is a linear layer, in whatever form (`packed_linear`, `side_by_side`): each row of its own."""
    return hasattr(module, "in_features") and hasattr(module, "out_features")


def find_mixers(module: nn.Module, cache: RunStates, run: Callable[[], object]) -> list[Mixer]:
    """Those of a model. run: scores one token."""
    watch = _Watch()
    with ExitStack() as hooks:
        for part in module.modules():
            hooks.callback(part.register_forward_pre_hook(watch.before, with_kwargs=True).remove)
            hooks.callback(part.register_forward_hook(watch.after, with_kwargs=True).remove)
        cache.asked = watch.asked
        try:
            run()
        finally:
            cache.asked = None
    return watch.found


@contextmanager
def stepping(mixers: Many[Mixer], cache: RunStates) -> Iterator[None]:
    """Until the block ends, mixers do the runs that the cache has begun."""
    with ExitStack() as replaced:
        for mixer in mixers:
            replaced.enter_context(_instead(mixer.module, partial(_forward, mixer, mixer.module.forward, cache)))
        yield


@dataclass(frozen=True)
class _Given:
    """What a mixer is called with, for all rows and tokens of a pass, [R, N, ..] where there is an entry for each."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    argument: str

    @property
    def hidden(self) -> Tensor:
        """The hidden states, [R, N, W]."""
        found: Tensor = self.args[0] if self.args else self.kwargs[self.argument]
        return found

    def of(self, rows: tuple[int, ...], columns: slice) -> _Given:
        """What of it belongs to some rows and tokens."""
        part = partial(_part, shape=self.hidden.shape[:2], rows=rows, columns=columns)
        return _Given(tuple(map(part, self.args)), {name: part(one) for name, one in self.kwargs.items()}, self.argument)

    def to(self, forward: Callable[..., Any]) -> Tensor:
        """What a mixer makes of it. → [R, N, W]"""
        out = forward(*self.args, **self.kwargs)
        if not isinstance(out, Tensor):
            raise TypeError(f"its recurrent layers return {type(out).__name__}, not hidden states alone")
        return out


def _part(value: Any, shape: Many[int], rows: tuple[int, ...], columns: slice) -> Any:
    if isinstance(value, tuple):
        return tuple(_part(one, shape, rows, columns) for one in value)
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != shape[1] or value.shape[0] not in (1, shape[0]):
        return value
    if value.shape[0] == shape[0] and len(rows) < shape[0]:
        value = value[_which(rows, value.device)]
    return value[:, columns]


def _which(rows: tuple[int, ...], device: torch.device) -> slice | Tensor:
    """Some rows, as a slice if they follow each other."""
    together = rows[-1] - rows[0] + 1 == len(rows)
    return slice(rows[0], rows[-1] + 1) if together else index(rows, device)


def _forward(mixer: Mixer, forward: Callable[..., Any], cache: RunStates, /, *args: Any, **kwargs: Any) -> Tensor:
    """What `forward` gives, for the rows and tokens of all runs. [R, N, W] → [R, N, W]

    What nobody asked for, padding, is 0.
    """
    given = _Given(args, kwargs, mixer.argument)
    hidden = given.hidden
    if len(cache.runs) == 1 and cache.runs[0].width == hidden.shape[1]:
        cache.run = cache.runs[0]
        return _run(mixer, forward, cache.run, given)
    every: Tensor | None = None
    for run in cache.runs:
        cache.run = run
        out = _run(mixer, forward, run, given.of(run.rows, slice(0, run.width)))
        if every is None:
            every = out.new_zeros(*hidden.shape[:2], out.shape[-1])
        every[_which(run.rows, every.device), : run.width] = out
    assert every is not None
    return every


def _run(mixer: Mixer, forward: Callable[..., Any], run: Run, given: _Given) -> Tensor:
    if run.steps and mixer.ruled is not None and (run.width > 1 or mixer.ruled.alone):
        return _by_rule(mixer.ruled, run, given)
    if run.steps and run.width > 1:
        return _in_steps(mixer, forward, run, given)
    out = given.to(forward)
    run.end_step()
    return out


def _by_rule(ruled: Ruled, run: Run, given: _Given) -> Tensor:
    run.whole = True
    try:
        with ruled.on(run):
            return given.to(ruled.forward)
    finally:
        run.whole, run.lent, run.lent_as, run.made = False, None, None, None


def _in_steps(mixer: Mixer, forward: Callable[..., Any], run: Run, given: _Given) -> Tensor:
    projected = [(linear, linear(given.hidden)) for linear in mixer.inputs]
    rows = tuple(range(len(run.rows)))
    outs = []
    for step in steps_of(run.width):
        columns = slice(step, step + 1)
        with ExitStack() as replaced:
            for linear, of_all in projected:
                replaced.enter_context(_instead(linear, partial(_computed, of_all[:, columns])))
            if mixer.output is not None:
                replaced.enter_context(_instead(mixer.output, _as_it_is))
            outs.append(given.of(rows, columns).to(forward))
        run.end_step()
    every = torch.cat(outs, dim=1)
    made: Tensor = every if mixer.output is None else mixer.output(every)
    return made


def _computed(out: Tensor, hidden: Tensor) -> Tensor:
    del hidden
    return out


def _as_it_is(hidden: Tensor) -> Tensor:
    return hidden


@contextmanager
def _instead(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Until the block ends, the module does something else; what it did before may have been set on itself, too."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before


def _first_argument(module: nn.Module) -> str:
    return next(iter(inspect.signature(module.forward).parameters), "")
