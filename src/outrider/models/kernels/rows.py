"""What a model does to each token between its linear layers, by one call of ours in place of several of torch.

Norms are replaced as modules, so that every pass has the same ones. Turning queries and keys to their positions is replaced
in recorded passes (`recording`), where it stands as single operations: ours gives the bits of these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from outrider.models.kernels.build import Kernels, namespace

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

NEAR = 1e-5  # relative, of a norm by ours and as it was
_END = 2**63 - 1
_aten = torch.ops.aten


class RmsNorm(nn.Module):
    """x → x / √(mean(x²) + eps) · (weight + more), [.., size] → [.., size], in float32."""

    def __init__(self, weight: nn.Parameter, eps: float, more: float, ours: Kernels) -> None:
        super().__init__()
        self.weight = weight
        self.eps, self.more = eps, more
        self._norm: Any = ours.ops.rms_norm

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self._norm(x, self.weight, self.eps, self.more)
        return out

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.eps}, more={self.more}"


@torch.inference_mode()
def replace_norms(module: nn.Module, ours: Kernels) -> int:
    """Replace the norms of a float32 module on a CPU that turn out to be of this kind; → how many."""
    count = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            found = _like(child, ours)
            if found is not None:
                setattr(parent, name, found)
                count += 1
    return count


def _like(norm: nn.Module, ours: Kernels) -> RmsNorm | None:
    """One that gives what this module gives; None if it is something else."""
    weight = getattr(norm, "weight", None)
    eps = next(
        (value for name in ("variance_epsilon", "eps") if isinstance(value := getattr(norm, name, None), float)), None
    )
    if not type(norm).__name__.endswith("Norm") or eps is None or not isinstance(weight, nn.Parameter):
        return None
    if weight.dim() != 1 or weight.dtype is not torch.float32 or weight.device.type != "cpu" or not weight.is_contiguous():
        return None
    if [name for name, _ in norm.named_parameters()] != ["weight"]:
        return None
    sizes = torch.tensor([[1.0], [1e-3], [30.0]], dtype=torch.float32, device="cpu")
    x = sizes * torch.randn(3, len(weight), generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    want: Tensor = norm(x)
    for more in (0.0, 1.0):
        found = RmsNorm(weight, eps, more, ours)
        if want.shape == x.shape and float((found(x) - want).abs().max()) <= NEAR * float(want.abs().max()):
            return found
    return None


def fuse_rotations(graph: GraphModule) -> int:
    """Replace what turns queries and keys in a traced pass that has our operations already; → how many."""
    level = next((found for node in graph.graph.nodes if (found := _ours(node)) is not None), None)
    if level is None:
        return 0
    rotate = getattr(torch.ops, level).rotate.default
    count = 0
    for node in list(graph.graph.nodes):
        parts = _rotated(node)
        if parts is not None:
            with graph.graph.inserting_before(node):
                made = graph.graph.call_function(rotate, parts)
            made.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(made)
            count += 1
    graph.graph.eliminate_dead_code()
    return count


def _ours(node: Node) -> str | None:
    """The namespace of one of our operations."""
    space = getattr(node.target, "namespace", "") if node.op == "call_function" else ""
    return space if space.startswith(namespace("")) else None


def _rotated(node: Node) -> tuple[Node, Node, Node] | None:
    """x, cos and sin of x · cos + cat(−x[.., half:], x[.., :half]) · sin."""
    if node.target is not _aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return None
    first, second = node.args
    for plain, turned in ((first, second), (second, first)):
        x, cos = _of(plain, _aten.mul.Tensor)
        both, sin = _of(turned, _aten.mul.Tensor)
        parts, last = _of(both, _aten.cat.default)
        if last not in (-1, 3) or not isinstance(parts, list | tuple) or len(parts) != 2:
            continue
        (upper,) = _of(parts[0], _aten.neg.default, 1)
        value = x.meta["val"]
        size = value.shape[-1]
        if value.dim() != 4 or value.dtype is not torch.float32 or not isinstance(size, int) or size % 2:
            continue
        if _of(upper, _aten.slice.Tensor, 4) == (x, 3, size // 2, _END) and _of(parts[1], _aten.slice.Tensor, 4) == (
            x,
            3,
            0,
            size // 2,
        ):
            return (x, cos, sin) if _angles(value, cos) and _angles(value, sin) else None
    return None


def _of(node: Any, target: Any, count: int = 2) -> tuple[Any, ...]:
    """The arguments of a call of this operation; Nones for anything else."""
    found = getattr(node, "target", None) is target and not node.kwargs and len(node.args) == count
    return tuple(node.args) if found else (None,) * count


def _angles(value: Tensor, node: Any) -> bool:
    """Whether this is [1 or B, 1, N, size] in float32."""
    of = node.meta["val"]
    return bool(of.dim() == 4 and of.dtype is torch.float32 and of.shape[1] == 1 and of.shape[3] == value.shape[3])
