"""Linear layers side by side, which read the same input (query, key and value; gate and up), as one product.

A product of a few hundred rows takes as long to call as to compute: for a small model one call for three gains a tenth of a
pass. Each layer stays where the model's code looks for it, and hands out its columns of the last product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("query", "key", "value"), ("gate", "up"))


class Together(nn.Module):
    """The product for so many of them, computed when the first is asked with a new input, kept until the last has its share.

    An input is known by the tensor, not by its values: a model must not change it in place and pass it again.
    """

    def __init__(self, product: nn.Module, layers: int) -> None:
        super().__init__()
        self.product = product
        self._layers = layers
        self._input: Tensor | None = None
        self._out: Tensor | None = None
        self._asked = 0

    def forward(self, x: Tensor) -> Tensor:
        """[.., in] → [.., all their outputs]"""
        out = self._out
        if self._input is not x or out is None:
            out = self.product(x)
            self._input, self._out, self._asked = x, out, 0
        self._asked += 1
        if self._asked == self._layers:  # of a long prompt it is large
            self._input = self._out = None
        return out


class Share(nn.Module):
    """One of the layers: columns start … stop - 1 of what they are together. [.., in] → [.., out], a view."""

    def __init__(self, together: Together, start: int, stop: int, like: Any) -> None:
        super().__init__()
        self._together = (together,)  # not a child: its parent has it
        self._start, self._stop = start, stop
        self.in_features, self.out_features = int(like.in_features), stop - start
        self._dtype: torch.dtype = like.weight.dtype

    @property
    def weight(self) -> Tensor:
        """Shape and type of the weight, without its values: some models look at the type."""
        return torch.empty(self.out_features, self.in_features, dtype=self._dtype, device="meta")

    @property
    def bias(self) -> Tensor | None:
        """Its own entries, [out], None if the layers have none."""
        whole: Tensor | None = self._together[0].product.bias  # type: ignore[assignment]
        return None if whole is None else whole[self._start : self._stop]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self._together[0](x)[..., self._start : self._stop]
        return out


def groups_of(children: Mapping[str, nn.Module]) -> list[tuple[str, ...]]:
    """Which of a module's linear layers are to be put together, by their names."""
    return [names for names in GROUPS if all(name in children for name in names) and _alike([children[n] for n in names])]


def _alike(layers: Sequence[Any]) -> bool:
    """Whether one product can have all their weights and biases, [out, in] and [out]."""
    first = layers[0]
    return all(
        type(layer) is nn.Linear
        and layer.in_features == first.in_features
        and layer.weight.dtype == first.weight.dtype
        and (layer.bias is None) == (first.bias is None)
        for layer in layers
    )


def put_together(parent: nn.Module, names: Sequence[str], sizes: Sequence[int], product: nn.Module) -> None:
    """Replace the layers of these names in place. product: of all their rows, so many of each."""
    together = Together(product, len(names))
    start = 0
    for name, size in zip(names, sizes, strict=True):
        like = getattr(parent, name)
        setattr(parent, name, Share(together, start, start + size, like))
        start += size
    parent.add_module("_".join(names), together)
