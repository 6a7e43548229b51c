"""The rules by which recurrent layers go over tokens, one token at a time, with the state after each.

transformers has each rule in two forms: a step from one token to the next, and another formula for many tokens, which gives
the last state alone. Where both are functions known here, a mixer's own code runs over all tokens of a pass at once, its
convolution, norms and gates included, and finds the steps in place of the formula for many.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.kernels.recurrences import RecurrenceKernels, recurrence_kernels
from outrider.models.cache.runs import Run, States, Steps
from outrider.models.passes.guards import DecidesError

Step = Callable[..., Any]


def _gated(rule: SteppedRule, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> tuple[Tensor, States]:
    """Delta rules (Qwen 3.5, Olmo hybrid, Kimi), one token or several. args: query, key, value, [R, N, heads, size] each."""
    kernels, state = recurrence_kernels(), kwargs["initial_state"]
    if kernels is None or state is None or not args[0].is_cpu:
        return _gated_by_torch(rule.step, args, kwargs)
    query, key, value = (one.float() for one in args)
    if kwargs.get("use_qk_l2norm_in_kernel"):
        query, key = (one * torch.rsqrt(one.square().sum(-1, keepdim=True) + 1e-6) for one in (query, key))
    query = query / query.shape[-1] ** 0.5
    heads = value.shape[2] // key.shape[2]
    if heads > 1:
        query, key = (one.repeat_interleave(heads, dim=2) for one in (query, key))
    decay = kwargs["g"].float().exp()
    decay = decay if decay.dim() == 4 else decay.unsqueeze(-1)
    before = state.float()
    out, added, last = kernels.delta(query, key, value, decay, kwargs["beta"].float(), before)
    return out.to(args[0].dtype), _after(key.shape[1], last, kernels.delta_again, (key, added, decay, before))


def _after(count: int, last: Tensor, again: Callable[..., Tensor], of: tuple[Tensor, ...]) -> States:
    return [last] if count == 1 else Steps(count, last, partial(_made_again, again), of)


def _made_again(again: Callable[..., Tensor], count: int, of: tuple[Tensor, ...]) -> Tensor:
    return again(*of, count)


def steps_of(count: Any) -> range:
    """The numbers of so many tokens that are gone over one by one; not where it is a symbol of a graph (`passes`)."""
    if not isinstance(count, int):
        raise DecidesError("its recurrent layers go over tokens one by one")
    return range(count)


def _gated_by_torch(step: Step, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> tuple[Tensor, States]:
    state, gates = kwargs.pop("initial_state"), {name: kwargs.pop(name) for name in ("g", "beta")}
    outs, states = [], []
    for t in steps_of(args[0].shape[1]):
        at = slice(t, t + 1)
        of_gates = {name: gate[:, at] for name, gate in gates.items()}
        out, state = step(*(one[:, at] for one in args), **of_gates, initial_state=state, **kwargs)
        outs.append(out)
        states.append(state)
    return torch.cat(outs, dim=1), states


def _mamba2(rule: SteppedRule, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> tuple[Tensor, States]:
    """args: x [R, N, heads, size], dt [R, N, heads], A [heads], B and C [R, N, groups, width].

    dt is limited as in the formula for many tokens, by which models are trained. transformers' steps do not limit it, so
    that there a text's logits depend on how it was cut into passes.
    """
    del rule
    x, dt, a, b, c = args
    state, bias, skip, gate = (kwargs[name] for name in ("initial_states", "dt_bias", "D", "z"))
    dt = F.softplus(dt + bias.to(dt.dtype)).float().clamp(*kwargs["dt_limit"])
    decay, scaled = (dt * a.float()).exp(), x.float() * dt.unsqueeze(-1)
    kernels = recurrence_kernels() if x.is_cpu else None
    if state is None:
        state = scaled.new_zeros(*x.shape[:1], *x.shape[2:], b.shape[-1])
    out, states = _outer(kernels, scaled, decay, b.float(), c.float(), state.float())
    out = out + x.float() * skip.float().unsqueeze(-1)
    out = out if gate is None else out * F.silu(gate.float())
    return out.to(x.dtype), states


def _outer(
    kernels: RecurrenceKernels | None, x: Tensor, decay: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, States]:
    """By our kernel (`recurrences.cpp`), or the same by torch."""
    if kernels is not None:
        out, last = kernels.outer(x, decay, b, c, state)
        return out, _after(x.shape[1], last, kernels.outer_again, (x, decay, b, state))
    b, c = (one.repeat_interleave(x.shape[2] // one.shape[2], dim=2) for one in (b, c))
    outs, states = [], []
    for t in steps_of(x.shape[1]):
        state = state * decay[:, t, :, None, None] + x[:, t].unsqueeze(-1) * b[:, t].unsqueeze(2)
        outs.append((state * c[:, t].unsqueeze(2)).sum(-1))
        states.append(state)
    return torch.stack(outs, dim=1), states


def _mamba2_alone(rule: SteppedRule, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Tensor:
    """args: state, x [R, heads, size], dt, A, B, C, D, those without a size of their own expanded to it."""
    state, x, dt, a, b, c, skip = args
    gate, bias = kwargs["z"], kwargs["dt_bias"]
    of_tokens = (x.unsqueeze(1), dt[..., 0].unsqueeze(1), a[:, 0, 0], b.unsqueeze(1), c.unsqueeze(1))
    own = {"initial_states": state, "dt_bias": bias[:, 0], "D": skip[:, 0], "dt_limit": rule.limits}
    own["z"] = None if gate is None else gate.unsqueeze(1)
    out, states = _mamba2(rule, of_tokens, own)
    rule.working_on.leave(states)  # it is meant to be written into the state, and nobody is told
    return out[:, 0]


def _mamba(rule: SteppedRule, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> tuple[Tensor, States]:
    """args: x and dt [R, channels, N], A [channels, width], B and C [R, width, N]. The formula for many knows of no state
    to begin with. In bfloat16 it rounds a state where that is read, and what comes of it; so does this.
    """
    kernels, lent = recurrence_kernels(), rule.working_on.lent
    assert lent is not None
    if kernels is None or not args[0].is_cpu:
        return _mamba_by_torch(rule.step, lent, args, kwargs)
    x, dt, a, b, c = args
    gate, bias, skip = kwargs["z"], kwargs["delta_bias"], kwargs["D"]
    dt = F.softplus(dt if bias is None else dt + bias.to(dt.dtype).unsqueeze(-1))
    of_tokens = [one.transpose(1, 2).float() for one in (x, dt, b, c)]
    size, state = a.float(), lent.float()
    made, last = kernels.scan(*of_tokens[:2], size, *of_tokens[2:], state, x.dtype is torch.bfloat16)
    out = made.transpose(1, 2).to(x.dtype) + x * skip.float().unsqueeze(-1)
    out = out if gate is None else out * F.silu(gate)
    each = size.unsqueeze(0).expand(x.shape[0], -1, -1)
    return out.to(x.dtype), _after(x.shape[2], last, _scanned_again(kernels), (*of_tokens[:2], each, of_tokens[2], state))


def _scanned_again(kernels: RecurrenceKernels) -> Callable[..., Tensor]:
    def again(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, state: Tensor, count: int) -> Tensor:
        found: Tensor = kernels.scan_again(x, dt, a[0], b, state, count)
        return found

    return again


def _mamba_alone(rule: SteppedRule, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Tensor:
    """args: state, x [R, channels], dt, A, B and C [R, width], D."""
    _, x, dt, a, b, c, skip = args
    gate = kwargs["z"]
    of_tokens = (x.unsqueeze(-1), dt.unsqueeze(-1), a, b.unsqueeze(-1), c.unsqueeze(-1))
    own = {"z": None if gate is None else gate.unsqueeze(-1), "delta_bias": kwargs["dt_bias"], "D": skip}
    out, states = _mamba(rule, of_tokens, own)
    rule.working_on.leave(states)  # as `_mamba2_alone` does
    return out[..., 0]


def _mamba_by_torch(step: Step, lent: Tensor, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> tuple[Tensor, States]:
    x, dt, a, b, c = args
    gate, bias, skip = kwargs["z"], kwargs["delta_bias"], kwargs["D"]
    outs, states = [], [lent]
    for t in steps_of(x.shape[2]):
        state = states[-1].clone()  # which is written over
        of_step = (x[..., t], dt[..., t], a, b[..., t], c[..., t], skip)
        outs.append(step(state, *of_step, z=gate[..., t], dt_bias=bias, dt_softplus=True))
        states.append(state)
    return torch.stack(outs, dim=-1), states[1:]


@dataclass(frozen=True)
class _Known:
    """A rule: the names of its functions for many tokens and for one, and what is done instead of either.

    instead: of the function for many, → the output and the states; alone: of the one for one, None: nothing else.
    """

    many: str
    one: str
    instead: Callable[..., tuple[Tensor, States]]
    alone: Callable[..., Any] | None = None


def _last(way: Callable[..., tuple[Tensor, States]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """What the function for many returns, the states kept for the cache (`RecurrentCache.update_recurrent_state`)."""

    def stepped(rule: SteppedRule, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        out, states = way(rule, args, kwargs)
        rule.working_on.made = states
        return out, states.last if isinstance(states, Steps) else states[-1]

    return stepped


_RULES = (
    _Known("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", _gated, _last(_gated)),
    _Known("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention", _gated),  # alone, its inputs are changed
    _Known("mamba2_chunk_scan", "mamba2_selective_state_update", _mamba2, _mamba2_alone),
    _Known("mamba_selective_scan", "mamba_selective_state_update", _mamba, _mamba_alone),
)


@dataclass(eq=False)
class SteppedRule:
    """In the place of functions of a rule. step: the function for one token. limits: of the sizes of Mamba's steps.

    run: what it works on.
    """

    step: Step
    limits: tuple[float, float] = (0.0, math.inf)
    run: Run | None = None

    @property
    def working_on(self) -> Run:
        """The run that it is called for."""
        assert self.run is not None
        return self.run

    def instead(self, way: Callable[..., Any]) -> Callable[..., Any]:
        """A function that does it this way."""

        def function(*args: Tensor, **kwargs: Any) -> Any:
            return way(self, args, kwargs)

        return function


@dataclass(frozen=True)
class Ruled:
    """A mixer's code for all tokens of a run at once. forward: instead of its own. rule: the steps in it, if it has any.

    alone: whether it is for single tokens, too.
    """

    forward: Callable[..., Any]
    rule: SteppedRule | None
    alone: bool = False

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
    known = own.__globals__
    for known_rule in _RULES:
        if known_rule.many in own.__code__.co_names and known_rule.many in known and known_rule.one in known:
            rule = SteppedRule(known[known_rule.one], getattr(mixer, "time_step_limit", SteppedRule.limits))
            replaced = {**known, known_rule.many: rule.instead(_last(known_rule.instead))}
            if known_rule.alone is not None:
                replaced[known_rule.one] = rule.instead(known_rule.alone)
            code = FunctionType(own.__code__, replaced, own.__name__, own.__defaults__, own.__closure__)
            code.__kwdefaults__ = own.__kwdefaults__
            return Ruled(MethodType(code, mixer), rule, known_rule.alone is not None)
    return None
