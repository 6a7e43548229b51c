"""Which neurons of a model's layers are left, and what is made of them: least squares along some text.

With a the values of a layer's neurons and y what its network should have added, the output weights of any set of neurons
by least squares are G⁻¹ C with G = Σ a aᵀ and C = Σ a yᵀ, and leaving out one more costs |w|² / (G⁻¹)ⱼⱼ (Hassibi and
Stork 1993). The cheapest go, in a few steps. Layers are narrowed one after the other, y being what leads from the narrowed
stream to the whole model's, so later layers make up for what earlier ones lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import ModelError

RIDGE = 1e-2  # of the median square, towards the weights that there were: keeps the fit sound where positions are few
SOME = 1e-3  # of the mean square at least, where most neurons say nothing; a few with large values would rule the mean
STEPS = 3  # in which neurons go; what is left is weighed anew after each
POSITIONS = 2048  # of a pass
TOLERANCE = 0.05  # of what a network adds: bfloat16 rounds to .01


@torch.no_grad()
def narrowed(layers: Any, module: Any, size: int, windows: list[Tensor]) -> Iterator[int]:
    """Leave `size` neurons in each layer, in place; yields how many layers are done."""
    if not windows:
        for done, layer in enumerate(layers):
            _keep(layer.mlp, torch.arange(size), layer.mlp.down_proj.weight[:, :size])
            yield done + 1
        return
    was_training = module.training
    module.eval()
    streams = _Streams.along(module, layers, windows)
    for number, layer in enumerate(layers):
        kept, weight = streams.choose(layer, number, size)
        streams.advance(layer, number, kept, weight)
        yield number + 1
    module.train(was_training)


@torch.no_grad()
def check_adds(layers: Any, module: Any, tokens: Tensor) -> bool:
    """Whether each layer adds what its network says to its stream, and nothing is done to it on the way.

    tokens: int64 [L], some to try it with.
    """
    streams = _Streams.along(module, layers, [tokens])
    for number, layer in enumerate(layers):
        seen = _seen(layer, streams.whole[0], streams.given[number])
        added = layer.mlp.down_proj(seen.values).float()
        off = (seen.after.float() - seen.before.float() - added).norm(dim=-1)
        rounding = torch.finfo(seen.after.dtype).eps * seen.after.float().norm(dim=-1)
        if not bool((off <= TOLERANCE * added.norm(dim=-1) + rounding).float().mean() > 0.5):
            return False
        streams.whole[0] = seen.after
    return True


@dataclass
class _Streams:
    """What goes from layer to layer, by pass, in the whole model and in the narrowed one: [n, L, W] each.

    given: what a layer is called with beside that (positions, masks), layer by layer.
    """

    whole: list[Tensor]
    narrow: list[Tensor]
    given: list[dict[str, Any]]

    @classmethod
    def along(cls, module: Any, layers: Any, windows: list[Tensor]) -> _Streams:
        """At the first layer. Windows that don't fill a pass are left out, unless there is none beside them."""
        device = module.get_input_embeddings().weight.device
        together = len(windows) // -(-len(windows) * len(windows[0]) // POSITIONS) or 1
        passes = [torch.stack(windows[i : i + together]) for i in range(0, len(windows) - together + 1, together)]
        given: list[dict[str, Any]] = []
        first: list[Tensor] = []

        def called(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given.append({name: value for name, value in kwargs.items() if name != "hidden_states"})
            if len(given) == 1:
                first.append(args[0] if args else kwargs["hidden_states"])

        with _removed([layer.register_forward_pre_hook(called, with_kwargs=True) for layer in layers]):
            module.get_decoder()(input_ids=passes[0].to(device), use_cache=False)
        for tokens in passes[1:]:
            first.append(_stream(module, layers[0], tokens.to(device)))
        return cls(first, list(first), given)

    def choose(self, layer: Any, number: int, size: int) -> tuple[Tensor, Tensor]:
        """The neurons that are left, ascending, and their output weights. → int64 [size], [W, size]"""
        down = layer.mlp.down_proj
        neurons, width = down.in_features, down.out_features
        gram, cross = torch.zeros(neurons, neurons, dtype=torch.float64), torch.zeros(neurons, width, dtype=torch.float64)
        for part, (whole, narrow) in enumerate(zip(self.whole, self.narrow, strict=True)):
            self.whole[part] = _call(layer, whole, self.given[number])
            seen = _seen(layer, narrow, self.given[number])
            values, before = seen.values.flatten(0, 1).float(), seen.before.flatten(0, 1).float()
            wanted = self.whole[part].flatten(0, 1).float() - before
            if down.bias is not None:
                wanted = wanted - down.bias.float()
            gram += (values.T @ values).double().cpu()
            cross += (values.T @ wanted).double().cpu()
        if not bool(gram.isfinite().all() and cross.isfinite().all()):
            raise ModelError(
                f"layer {number} of the body has values that are not finite along the data: load it in another dtype"
            )
        return _least_squares(gram, cross, down.weight.double().cpu().T, size)

    def advance(self, layer: Any, number: int, kept: Tensor, weight: Tensor) -> None:
        """Narrow a layer and take the narrowed stream through it."""
        _keep(layer.mlp, kept, weight)
        self.narrow = [_call(layer, narrow, self.given[number]) for narrow in self.narrow]


def _least_squares(gram: Tensor, cross: Tensor, before: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Of G [n, n], which is changed, C [n, W] and the output weights that there were [n, W], float64. → the neurons left,
    their weights [W, size]
    """
    count, squares = len(gram), gram.diagonal()
    ridge = RIDGE * max(float(squares.median()), SOME * float(squares.mean()), torch.finfo(gram.dtype).tiny ** 0.5)
    squares.add_(ridge)
    cross = cross + ridge * before
    kept = torch.arange(count)
    for step in range(1, STEPS + 1):
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
        costs = (inverse @ cross).square().sum(1) / inverse.diagonal()
        left = size if step == STEPS else int(count * (size / count) ** (step / STEPS))
        some = costs.topk(left).indices.sort().values
        kept, gram, cross = kept[some], gram[some][:, some], cross[some]
    return kept, torch.cholesky_solve(cross, torch.linalg.cholesky(gram)).T


class _ReachedError(Exception):
    """The first layer: what would follow is not wanted."""


def _stream(module: Any, first: Any, tokens: Tensor) -> Tensor:
    """What goes into the first layer. [B, L] → [B, L, W]"""
    found: list[Tensor] = []

    def reached(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(args[0] if args else kwargs["hidden_states"])
        raise _ReachedError

    with _removed([first.register_forward_pre_hook(reached, with_kwargs=True)]), suppress(_ReachedError):
        module.get_decoder()(input_ids=tokens, use_cache=False)
    return found[0]


@dataclass(frozen=True)
class _Seen:
    """values: of a layer's neurons [.., n]. before, after: the stream that its network adds to [.., W]."""

    values: Tensor
    before: Tensor
    after: Tensor


def _seen(layer: Any, stream: Tensor, given: dict[str, Any]) -> _Seen:
    """What goes through the network of a layer."""
    seen: dict[str, Tensor] = {}

    def first(name: str) -> Callable[..., None]:
        return lambda _, args: seen.__setitem__(name, args[0])

    hooks = [
        layer.mlp.down_proj.register_forward_pre_hook(first("values")),
        layer.post_attention_layernorm.register_forward_pre_hook(first("before")),
    ]
    with _removed(hooks):
        out = _call(layer, stream, given)
    return _Seen(seen["values"], seen["before"], out)


@contextmanager
def _removed(hooks: list[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _call(layer: Any, stream: Tensor, given: dict[str, Any]) -> Tensor:
    out = layer(stream, **given)
    after: Tensor = out[0] if isinstance(out, tuple) else out
    return after


def _keep(mlp: Any, kept: Tensor, weight: Tensor) -> None:
    """Leave some neurons of a network, with new output weights [W, kept]."""
    for name in ("gate_proj", "up_proj"):
        old = getattr(mlp, name)
        new = nn.Linear(
            old.in_features, len(kept), bias=old.bias is not None, dtype=old.weight.dtype, device=old.weight.device
        )
        new.weight.copy_(old.weight[kept.to(old.weight.device)])
        if old.bias is not None:
            new.bias.copy_(old.bias[kept.to(old.bias.device)])
        setattr(mlp, name, new)
    old = mlp.down_proj
    new = nn.Linear(len(kept), old.out_features, bias=old.bias is not None, dtype=old.weight.dtype, device=old.weight.device)
    new.weight.copy_(weight)
    if old.bias is not None:
        new.bias.copy_(old.bias)
    mlp.down_proj = new
