"""A rank's share of a layer, computed by the same kernels as a whole one, with the collective call that joins the shares.

transformers cuts the weights by its plan and hooks calls of DTensor around each layer. What remains of that here is the
cut: a column-wise layer is an ordinary layer with fewer outputs; a row-wise one is an ordinary layer whose results are
summed over the ranks (two sums a layer, Shoeybi et al. 2019, section 3). So the shares can be packed for the CPU's kernels
(`models.weights.packed_linear`), and what communication takes can be measured. Layers of other styles keep transformers'
hooks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outrider.models.weights.packed_linear import PackedLinear, bytes_of, can_pack, local, plain_weight


@dataclass
class Spent:
    """What a model's collective calls took: seconds, waiting for slower ranks included, calls, and bytes handed over."""

    seconds: float = 0.0
    calls: int = 0
    bytes: int = 0

    def add(self, start: float, tensor: Tensor) -> None:
        self.seconds += time.perf_counter() - start
        self.calls += 1
        self.bytes += tensor.numel() * tensor.element_size()

    def less(self, before: Spent) -> Spent:
        """What came after `before`."""
        return Spent(self.seconds - before.seconds, self.calls - before.calls, self.bytes - before.bytes)


class RowLinear(nn.Module):
    """x's share of features → the sum over the ranks, and the bias once. [.., in / ranks] → [.., out]"""

    def __init__(self, share: nn.Module, bias: Tensor | None, spent: Spent) -> None:
        super().__init__()
        self.share = share
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self._spent = spent

    @property
    def weight(self) -> Any:
        """Of this rank: some models look at its type."""
        return self.share.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.share(x)
        start = time.perf_counter()
        dist.all_reduce(out)
        self._spent.add(start, out)
        return out if self.bias is None else out + self.bias


class HeadLinear(nn.Module):
    """The logits of a rank's share of the vocabulary, gathered on rank 0, which alone looks at them. [.., in] → [.., V]

    The other ranks return their own share in zeros: nothing may depend on it.
    """

    def __init__(self, share: nn.Module, size: int, spent: Spent) -> None:
        super().__init__()
        self.share = share
        self.out_features = size
        self._spent = spent

    @property
    def weight(self) -> Any:
        return self.share.weight

    def forward(self, x: Tensor) -> Tensor:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        width = -(-self.out_features // ranks)  # as torch cuts: the last share may be shorter
        own: Tensor = self.share(x)
        own = nn.functional.pad(own, (0, width - own.shape[-1])).contiguous()
        parts = [torch.empty_like(own) for _ in range(ranks)] if rank == 0 else None
        start = time.perf_counter()
        dist.gather(own, parts, 0)
        self._spent.add(start, own)
        if parts is None:
            return own.new_zeros(*own.shape[:-1], self.out_features)
        return torch.cat(parts, dim=-1)[..., : self.out_features]


class SplitEmbedding(nn.Module):
    """A table of which each rank holds a slice of the vocabulary; the others add zeros. int64 [..] → [.., hidden]"""

    def __init__(self, weight: Tensor, first: int, spent: Spent) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self._first = first
        self._spent = spent

    def forward(self, tokens: Tensor) -> Tensor:
        own = tokens - self._first
        inside = (own >= 0) & (own < len(self.weight))
        out = nn.functional.embedding(own.where(inside, 0), self.weight) * inside.unsqueeze(-1)
        start = time.perf_counter()
        dist.all_reduce(out)
        self._spent.add(start, out)
        return out


@dataclass(frozen=True)
class Cut:
    """What `localise` found. sums: layers that end in a sum over the ranks. shared: bytes of this rank's shares that a pass
    reads. whole: bytes that every rank reads. gathered: whether the ranks compute shares of the logits.
    """

    sums: int
    shared: int
    whole: int
    gathered: bool

    def alone(self, ranks: int) -> int:
        """Bytes that a pass of one process reads."""
        return self.shared * ranks + self.whole


def localise(module: Any, styles: dict[str, str], spent: Spent, pack: bool) -> Cut:
    """Put this rank's shares in the place of a sharded model's layers.

    styles: {module name without layer numbers: style}, transformers' plan.
    """
    from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

    packed = pack and can_pack(module.dtype, module.device)
    head, table = module.get_output_embeddings(), module.get_input_embeddings()
    sums, shared = 0, 0
    for name, layer in list(module.named_modules()):
        style = styles.get(replace_layer_number_by_wildcard(name), "replicate")
        if layer is table and style == "embedding_rowwise" and type(layer) is nn.Embedding:
            module.set_submodule(name, SplitEmbedding(local(layer.weight), _offset(layer.weight), spent))
            sums += 1
        elif type(layer) is nn.Linear and (made := _share(layer, style, layer is head, spent, packed)) is not None:
            module.set_submodule(name, made)
            sums += isinstance(made, RowLinear)
            shared += weight_bytes(made) if style != "replicate" else 0
    gathered = isinstance(module.get_output_embeddings(), HeadLinear)
    return Cut(sums, shared, weight_bytes(module.eval()) - shared, gathered)


def _share(layer: nn.Linear, style: str, is_head: bool, spent: Spent, packed: bool) -> nn.Module | None:
    """What computes this rank's part of a linear layer, None if it stays as it is."""
    weight, bias = local(layer.weight), local(layer.bias)
    if style == "colwise" or (style == "replicate" and packed and plain_weight(layer) is not None):
        return _linear(weight, bias, packed)
    if style == "rowwise":
        return RowLinear(_linear(weight, None, packed), bias, spent)
    if is_head and style in ("colwise_gather_output", "colwise_rep"):
        return HeadLinear(_linear(weight, bias, packed), layer.out_features, spent)
    return None


def _linear(weight: Tensor, bias: Tensor | None, packed: bool) -> nn.Module:
    if packed:
        with torch.inference_mode():
            return PackedLinear(weight, bias)
    made = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    made.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return made


def weight_bytes(module: nn.Module) -> int:
    """Bytes of weights on this rank that a pass of one token reads: all but tables of which it looks up a row."""
    return bytes_of(layer for layer in module.modules() if not isinstance(layer, nn.Embedding | SplitEmbedding))


def _offset(weight: Any) -> int:
    """The first row of this rank's slice."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not hasattr(weight, "device_mesh"):
        return 0
    return int(compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)[1][0])
