"""Linear layers put together: the bits of the layers apart, in any pass, and only where their input is the same."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from outrider.models.transformers_model import TransformersModel
from outrider.models.weights import packed_linear
from outrider.models.weights.packed_linear import bytes_of, can_pack, pack_linears
from outrider.models.weights.quantized import can_quantize, quantize_to_int8
from outrider.models.weights.side_by_side import Share, Together
from tests.helpers.ragged import score, some_tokens
from tests.helpers.tiny_models import module

KINDS = [
    *(kind for kind in ("float32", "bfloat16") if can_pack(getattr(torch, kind), torch.device("cpu"))),
    *(["int8"] if can_quantize() else []),
]


def made(architecture: str, kind: str) -> nn.Module:
    # Functions of each number have other last bits where a row ends within a vector: rows of whole vectors, like real ones.
    size = {} if architecture in ("OPT", "Bart") else {"intermediate_size": 64}
    found: nn.Module = module(architecture, dtype=torch.bfloat16 if kind == "bfloat16" else torch.float32, **size)
    (quantize_to_int8 if kind == "int8" else pack_linears)(found)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["Llama", "Qwen2", "Gemma3", "Starcoder2", "OPT"])
def test_the_bits_are_those_of_the_layers_apart(architecture: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    together = TransformersModel(made(architecture, kind))
    assert sum(isinstance(part, Share) for part in together.module.modules()) >= 6
    monkeypatch.setattr(packed_linear, "groups_of", lambda children: [])
    apart = TransformersModel(made(architecture, kind))
    assert not any(isinstance(part, Share) for part in apart.module.modules())
    assert bytes_of(together.module.modules()) == bytes_of(apart.module.modules())
    row = some_tokens(60, 1)
    found = []
    for model in (together, apart):
        sequences = [model.open(), model.open()]
        out = score(model, sequences, [row[:20], row[5:12]])
        for width in (1, 2, 7):
            out += score(model, sequences[:1], [row[sequences[0].length : sequences[0].length + width]])
        found.append(out)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_only_layers_that_are_alike_are_put_together() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(32, 16), nn.Linear(32, 16, bias=False)
            self.gate_proj, self.up_proj = nn.Linear(32, 16), nn.Linear(16, 16)
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, size) for size in (32, 8, 8))

    parts = Parts().eval()
    x = torch.randn(1, 3, 32)
    with torch.inference_mode():
        wanted = [getattr(parts, name)(x) for name in ("q_proj", "k_proj", "v_proj", "gate", "up")]
        if pack_linears(parts) == 0:
            pytest.skip("this build of torch can't pack")
        got = [getattr(parts, name)(x) for name in ("q_proj", "k_proj", "v_proj", "gate", "up")]
    assert [name for name, part in parts.named_children() if isinstance(part, Share)] == ["q_proj", "k_proj", "v_proj"]
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(wanted, got, strict=True))
    bias = parts.k_proj.bias
    assert bias is not None
    assert bias.shape == (8,)
    assert (parts.k_proj.in_features, parts.k_proj.out_features, parts.k_proj.weight.shape) == (32, 8, (8, 32))


def test_attention_to_a_source_stays_apart() -> None:
    """Its keys and values are of the source, and computed once."""
    assert not any(isinstance(part, Share) for part in made("Bart", "float32").modules())


def test_a_new_input_is_never_answered_by_the_last_ones_product() -> None:
    class Doubled(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return torch.cat([x, 2 * x], -1)

    product = Doubled()
    together = Together(product, 2)
    like = nn.Linear(2, 2)
    first, second = Share(together, 0, 2, like), Share(together, 2, 4, like)
    for value in (1.0, 2.0):
        x = torch.full((1, 2), value)
        assert torch.equal(first(x), x)
        assert torch.equal(second(x), 2 * x)
        assert together._out is None  # nothing of a long prompt stays
    assert product.calls == 2
    other = copy.deepcopy(nn.ModuleList([first, together]))
    assert torch.equal(other[0](torch.ones(1, 2)), torch.ones(1, 2))
