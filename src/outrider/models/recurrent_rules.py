"""The rules by which recurrent layers go over tokens, one token at a time, with the state after each.

transformers has each rule in two forms: a step from one token to the next, and another formula for many tokens, which gives
the last state alone. Where both are functions known here, a mixer's own code runs over all tokens of a pass at once, its
convolution, norms and gates included, and finds the steps in place of the formula for many.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from outrider.models.cache.recurrent_cache import Run

Step = Callable[..., Any]
States = list[Tensor]


def _gated(step: Step, run: Run, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> tuple[Tensor, States]:
    """Delta rules (Qwen 3.5, Olmo hybrid, Kimi): query, key, value, [R, N, heads, size] each; g and beta, too."""
    del run
    state, gates = kwargs.pop("initial_state"), {name: kwargs.pop(name) for name in ("g", "beta")}
    outs, states = [], []
    for t in range(args[0].shape[1]):
        at = slice(t, t + 1)
        of_gates = {name: gate[:, at] for name, gate in gates.items()}
        out, state = step(*(one[:, at] for one in args), **of_gates, initial_state=state, **kwargs)
        outs.append(out)
        states.append(state)
    return torch.cat(outs, dim=1), states


def _mamba2(step: Step, run: Run, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> tuple[Tensor, States]:
    """X [R, N, heads, size], dt [R, N, heads], A [heads], B and C [R, N, groups, states]."""
    del run
    x, dt, a, b, c = args
    size, width = x.shape[3], b.shape[3]
    by_size = {name: kwargs[name][:, None].expand(-1, size) for name in ("D", "dt_bias")}
    a = a[:, None, None].expand(-1, size, width)
    outs, states = [], [kwargs["initial_states"]]
    for t in range(x.shape[1]):
        state = states[-1].clone()  # which is written over
        step_size = dt[:, t, :, None].expand(-1, -1, size)
        outs.append(step(state, x[:, t], step_size, a, b[:, t], c[:, t], z=None, dt_softplus=True, **by_size))
        states.append(state)
    return torch.stack(outs, dim=1), states[1:]


def _mamba(step: Step, run: Run, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> tuple[Tensor, States]:
    """X and dt [R, channels, N], A, B and C [R, states, N]; the formula for many knows of no state to begin with."""
    x, dt, a, b, c = args
    gate, bias, skip = kwargs["z"], kwargs["delta_bias"], kwargs["D"]
    assert run.lent is not None
    outs, states = [], [run.lent]
    for t in range(x.shape[2]):
        state = states[-1].clone()
        of_step = (x[..., t], dt[..., t], a, b[..., t], c[..., t], skip)
        outs.append(step(state, *of_step, z=gate[..., t], dt_bias=bias, dt_softplus=True))
        states.append(state)
    return torch.stack(outs, dim=-1), states[1:]


# The function for many tokens, the one for a step, and how to do the first by the second.
_RULES: tuple[tuple[str, str, Callable[..., tuple[Tensor, States]]], ...] = (
    ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", _gated),
    ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention", _gated),
    ("mamba2_chunk_scan", "mamba2_selective_state_update", _mamba2),
    ("mamba_selective_scan", "mamba_selective_state_update", _mamba),
)


@dataclass(eq=False)
class SteppedRule:
    """In the place of a function for many tokens. run: what it works on."""

    step: Step
    way: Callable[..., tuple[Tensor, States]]
    run: Run | None = None

    def __call__(self, *args: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        assert self.run is not None
        out, self.run.made = self.way(self.step, self.run, args, kwargs)
        return out, self.run.made[-1]


@dataclass(frozen=True)
class Ruled:
    """A mixer's code for all tokens of a run at once. forward: instead of its own. rule: the steps in it, if it has any."""

    forward: Callable[..., Any]
    rule: SteppedRule | None

    @contextmanager
    def on(self, run: Run) -> Iterator[None]:
        """While it works on a run."""
        if self.rule is None:
            yield
            return
        self.rule.run = run
        try:
            yield
        finally:
            self.rule.run = None


def ruled(mixer: nn.Module, convolves: bool) -> Ruled | None:
    """The same code, with the steps of its own rule; None where it knows none of these rules, or was changed.

    convolves: whether it keeps no other state than a convolution's, and so needs no rule.
    """
    if "forward" in mixer.__dict__ or any(hasattr(part, "_hf_hook") for part in mixer.modules()):
        return None
    if convolves:
        return Ruled(mixer.forward, None)
    own = inspect.unwrap(type(mixer).forward)
    if not isinstance(own, FunctionType):
        return None
    for many, step, way in _RULES:
        known = own.__globals__
        if many in own.__code__.co_names and many in known and step in known:
            rule = SteppedRule(known[step], way)
            code = FunctionType(own.__code__, {**known, many: rule}, own.__name__, own.__defaults__, own.__closure__)
            code.__kwdefaults__ = own.__kwdefaults__
            return Ruled(MethodType(code, mixer), rule)
    return None
