"""What a model does to each token between its linear layers, by one call of ours in place of several of torch.

Norms, SiLU, GELU and rotary angles are replaced as modules, so that every pass has the same ones; `fusing` finds them in
recorded passes.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.kernels.models import Kernels

NEAR = 1e-5  # relative, of a norm or an angle by ours and as it was
FAR = ((1, 1001, 2100), (5, 4200, 9000), (3, 33_000, 140_000))  # positions, one pass each: some modules look at the largest
STEADY = ("default", "linear", "llama3", "yarn")  # kinds of rotary positions whose frequencies do not depend on the context
GELUS: tuple[Callable[[Tensor], Tensor], ...] = (
    F.gelu,
    lambda x: F.gelu(x, approximate="tanh"),
    lambda x: x * torch.sigmoid(1.702 * x),
)
"""By the number by which the kernel knows them."""


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


class Silu(nn.Module):
    """x → x / (1 + e^−x), in x's type; ours in float32 on a CPU."""

    def __init__(self, ours: Kernels) -> None:
        super().__init__()
        self._silu: Any = ours.ops.silu

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is not torch.float32 or x.device.type != "cpu":
            return F.silu(x)
        out: Tensor = self._silu(x)
        return out


class Gelu(nn.Module):
    """x · Φ(x), or one of its approximations (`GELUS`), in x's type; ours in float32 on a CPU.

    What is left over of a thread's share torch computes by another formula where it is that with tanh, so that its bits
    depend on what is beside it.
    """

    def __init__(self, form: int, ours: Kernels) -> None:
        super().__init__()
        self.form = form
        self._gelu: Any = ours.ops.gelu

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is not torch.float32 or x.device.type != "cpu":
            return GELUS[self.form](x)
        out: Tensor = self._gelu(x, self.form)
        return out

    def extra_repr(self) -> str:
        return ("erf", "tanh", "quick")[self.form]


class RotaryAngles(nn.Module):
    """Rotary positions of a model: int64 [R, N] → cosines and sines [R, N, size], in x's type; ours in float32 on a CPU."""

    def __init__(self, own: Any, ours: Kernels) -> None:
        super().__init__()
        self.own = own
        self.times = float(getattr(own, "attention_scaling", 1.0))
        self._angles: Any = ours.ops.angles

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        if x.dtype is not torch.float32 or x.device.type != "cpu" or position_ids.dim() != 2:
            return self.own(x, position_ids)  # type: ignore[no-any-return]
        cos, sin = self._angles(position_ids, self.own.inv_freq, self.times)
        return cos, sin

    def __getattr__(self, name: str) -> Any:
        """Whatever else a model reads of it."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "own":
                raise
            return getattr(self.own, name)


@torch.inference_mode()
def replace_rows(module: nn.Module, ours: Kernels) -> int:
    """Replace the activation functions of a module, and of float32 on a CPU the norms and rotary positions, that turn out to
    be of these kinds; → how many.
    """
    count = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            found = _acting_like(child, ours) or _like(child, ours) or _turning_like(child, ours)
            if found is not None:
                setattr(parent, name, found)
                count += 1
    return count


@torch.inference_mode()
def _acting_like(child: nn.Module, ours: Kernels) -> nn.Module | None:
    """The same activation function by ours: of torch's and those of transformers; None if it is something else."""
    kind = type(child).__name__
    if not (kind.startswith("SiLU") or "GELU" in kind) or getattr(child, "inplace", False):
        return None
    if any(True for _ in (*child.parameters(), *child.buffers())):
        return None
    far = torch.tensor([-1e4, -1e3, -100.0, 100.0, 1e3, 1e4], dtype=torch.float32, device="cpu")
    x = torch.cat([torch.linspace(-30.0, 30.0, 602, dtype=torch.float32, device="cpu"), far])
    try:
        given = child(x.clone())
    except Exception:  # it is called in another way
        return None
    if not isinstance(given, Tensor) or (given.shape, given.dtype) != (x.shape, x.dtype):
        return None
    if kind.startswith("SiLU"):
        return Silu(ours) if torch.equal(given, F.silu(x)) else None
    form = next((i for i, gelu in enumerate(GELUS) if torch.allclose(given, gelu(x), rtol=NEAR, atol=NEAR)), None)
    return None if form is None else Gelu(form, ours)


def _like(norm: nn.Module, ours: Kernels) -> RmsNorm | None:
    """A norm that gives what this module gives; None if it is something else."""
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


def _turning_like(child: Any, ours: Kernels) -> RotaryAngles | None:
    """Rotary positions that give what this module gives at near and far positions; None if it is something else."""
    frequencies = getattr(child, "inv_freq", None)
    if not type(child).__name__.endswith("RotaryEmbedding") or getattr(child, "rope_type", "default") not in STEADY:
        return None
    if not isinstance(frequencies, Tensor) or frequencies.dim() != 1 or frequencies.dtype is not torch.float32:
        return None
    if frequencies.device.type != "cpu":
        return None
    x = torch.zeros(2, 3, 8, dtype=torch.float32, device="cpu")
    found = RotaryAngles(child, ours)
    try:
        tried = deepcopy(child)  # what depends on the context may change by being called
        for places in ((0, 7, 250), *FAR, (0, 7, 250)):
            at = torch.tensor([places, places[::-1]], device="cpu")
            if not all(_near(a, b) for a, b in zip(tried(x, at), found(x, at), strict=True)):
                return None
    except Exception:  # it is called in another way, or gives something else
        return None
    return found


def _near(want: Any, found: Tensor) -> bool:
    same = isinstance(want, Tensor) and (want.shape, want.dtype) == (found.shape, found.dtype)
    return same and float((found - want).abs().max()) <= NEAR * float(want.abs().max())
