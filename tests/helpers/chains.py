"""Layers whose recorded passes become chains, and what of a pass became one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import GraphModule

from outrider.kernels.chain_calls import ChainPlan
from outrider.kernels.models import LIBRARY, Kernels, chain_calls, kernels
from outrider.models.weights.kernel_linear import Int4Kernel, Int8Kernel

WIDTH = 24


def of_here() -> Kernels:
    ours = kernels()
    assert ours is not None
    return ours


def layers(ours: Kernels) -> tuple[Int8Kernel, Int4Kernel, Callable[[Tensor], Tensor]]:
    draw = torch.Generator().manual_seed(5)
    weights = [torch.randn(WIDTH, WIDTH, generator=draw) for _ in range(2)]
    norm = torch.rand(WIDTH, generator=draw)

    def normed(x: Tensor) -> Tensor:
        out: Tensor = ours.ops.rms_norm(x, norm, 1e-5, 0.5)
        return out

    return Int8Kernel(weights[0], None, ours), Int4Kernel(weights[1], torch.randn(WIDTH, generator=draw), ours), normed


def kept_of(built: Kernels) -> list[Tensor]:
    """What plans are made of in these tests."""
    layer = Int8Kernel(torch.randn(WIDTH, WIDTH), None, built)
    weights = [torch.ones(WIDTH), torch.ones(WIDTH + 1), layer._packed, layer.get_buffer("scales")]
    return [*weights, torch.randn(2, 1, 3, 8), torch.randn(2, 1, 4, 8), torch.randn(5, WIDTH)]


def norm_plan(built: Kernels, kept: list[Tensor]) -> ChainPlan:
    """A norm of what is given, and of its last token. kept: has to outlive it."""
    plan = built.ops.chain_plan(kept, [2, -2, 0, 0, 7, -3, -2], [1e-5, 0.0], [WIDTH, 0], 2, 2)
    return ChainPlan(chain_calls[LIBRARY.within(built.level)], plan)


ONE_CALL = ("Llama", "Qwen2", "Qwen3", "Mistral", "Phi3")


def calls(graph: GraphModule) -> Counter[str]:
    return Counter(node.target.__name__ for node in graph.graph.nodes if node.op == "call_function")
