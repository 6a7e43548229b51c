"""The modules of a model that keep a state (its *mixers*), found by watching a pass, and run token by token.

Every layer of the kind in transformers asks the cache for its states by one interface, and goes over one token exactly as
over many. So a mixer is taken token by token where states are needed after each of them, whatever it computes in between.
What it does with weights alone, the projections of its input and of its output, is done for all tokens at once: most of its
time is reading those.
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

from outrider.models.cache.recurrent_cache import RecurrentCache, Run


@dataclass(frozen=True)
class Mixer:
    """inputs: its linear layers that read what it is given, once. output: the one that makes what it returns, if it is one.

    argument: the name of the hidden states among its arguments.
    """

    module: nn.Module
    argument: str
    inputs: tuple[nn.Module, ...]
    output: nn.Module | None


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
        self._asking: set[nn.Module] = set()
        self.found: list[Mixer] = []

    def asked(self) -> None:
        """The module at work is a mixer."""
        self._asking.add(self._calls[-1].module)

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
            self._asking.remove(module)
            made = [linear for made, linear in call.made_by if made is out]
            often = [linear for _, linear in call.made_by]
            once = {linear for linear in often if often.count(linear) == 1}
            inputs = tuple(linear for linear in call.read_by if linear in once and linear not in made)
            output = made[0] if made and made[0] in once else None
            self.found.append(Mixer(module, _first_argument(module), inputs, output))


def is_linear(module: nn.Module) -> bool:
    """Whether it is a linear layer, in whatever form (`packed_linear`, `side_by_side`): each row of its own."""
    return hasattr(module, "in_features") and hasattr(module, "out_features")


def find_mixers(module: nn.Module, cache: RecurrentCache, run: Callable[[], object]) -> list[Mixer]:
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
def stepping(mixers: Many[Mixer], cache: RecurrentCache) -> Iterator[None]:
    """Until the block ends, mixers do the runs that the cache has begun."""
    if len(cache.runs) == 1 and cache.runs[0].width == 1:  # one token of each row: nothing to do otherwise
        yield
        return
    with ExitStack() as replaced:
        for mixer in mixers:
            replaced.enter_context(_instead(mixer.module, partial(_forward, mixer, mixer.module.forward, cache)))
        yield


def _forward(mixer: Mixer, forward: Callable[..., Any], cache: RecurrentCache, *args: Any, **kwargs: Any) -> Any:
    """What `forward` gives, for the rows and tokens of all runs. [R, N, W] → [R, N, W]

    What nobody asked for, padding, is 0.
    """
    hidden: Tensor = args[0] if args else kwargs[mixer.argument]
    whole: Tensor | None = None
    for run in cache.runs:
        cache.run = run
        part = partial(_part, shape=hidden.shape[:2], rows=run.rows)
        of_run = (
            _in_steps(mixer, forward, run, part, args, kwargs) if run.steps else _at_once(forward, run, part, args, kwargs)
        )
        if len(cache.runs) == 1 and of_run.shape[:2] == hidden.shape[:2]:
            return of_run
        if whole is None:
            whole = of_run.new_zeros(*hidden.shape[:2], of_run.shape[-1])
        whole[list(run.rows), : run.width] = of_run
    return whole


Part = Callable[..., Any]


def _at_once(forward: Callable[..., Any], run: Run, part: Part, args: Any, kwargs: Any) -> Tensor:
    columns = slice(0, run.width)
    out = forward(*(part(one, columns=columns) for one in args), **{k: part(v, columns=columns) for k, v in kwargs.items()})
    run.end_step()
    return _only(out)


def _in_steps(mixer: Mixer, forward: Callable[..., Any], run: Run, part: Part, args: Any, kwargs: Any) -> Tensor:
    hidden = part(args[0] if args else kwargs[mixer.argument], columns=slice(0, run.width))
    projected = [(linear, linear(hidden)) for linear in mixer.inputs]
    outs = []
    for step in range(run.width):
        columns = slice(step, step + 1)
        with ExitStack() as replaced:
            for linear, of_all in projected:
                replaced.enter_context(_instead(linear, partial(_given, of_all[:, columns])))
            if mixer.output is not None:
                replaced.enter_context(_instead(mixer.output, _as_it_is))
            of_step = {name: part(value, columns=columns) for name, value in kwargs.items()}
            out = forward(*(part(one, columns=columns) for one in args), **of_step)
        run.end_step()
        outs.append(_only(out))
    every = torch.cat(outs, dim=1)
    made: Tensor = every if mixer.output is None else mixer.output(every)
    return made


def _part(value: Any, shape: Many[int], rows: tuple[int, ...], columns: slice) -> Any:
    """What of an argument belongs to some rows and tokens; all of what has not one entry for each token, [R, N, ..]."""
    if isinstance(value, tuple):
        return tuple(_part(one, shape, rows, columns) for one in value)
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != shape[1] or value.shape[0] not in (1, shape[0]):
        return value
    if value.shape[0] == shape[0] and len(rows) < shape[0]:
        value = value[list(rows)]
    return value[:, columns]


def _only(out: Any) -> Tensor:
    """The hidden states among what a mixer returns."""
    if isinstance(out, Tensor):
        return out
    raise TypeError(f"its recurrent layers return {type(out).__name__}, not hidden states alone")


def _given(out: Tensor, hidden: Tensor) -> Tensor:
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
