"""Norms and rotations by our kernels."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from outrider.kernels.models import Kernels, kernels
from outrider.models.kernels.rows import GELUS, Gelu, RmsNorm, replace_rows
from tests.helpers.kernels import turned
from tests.helpers.tiny_models import module

pytestmark = pytest.mark.skipif(kernels() is None, reason="this machine builds no kernels")


@pytest.mark.parametrize("size", [1, 7, 16, 33, 576])
@pytest.mark.parametrize("more", [0.0, 1.0])
def test_a_norm_is_one_and_a_rows_bits_are_its_own(built: Kernels, size: int, more: float) -> None:
    draw = torch.Generator().manual_seed(size)
    x = torch.randn(2, 70, size, generator=draw) * torch.rand(2, 70, 1, generator=draw) ** 6 * 1e4
    x[0, 3] = 0.0
    norm = RmsNorm(nn.Parameter(torch.randn(size, generator=draw)), 1e-5, more, built)
    with torch.inference_mode():
        got = norm(x)
        want = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * (norm.weight.double() + more)
        torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=1e-7)
        for width in (1, 3, 8):
            assert torch.equal(norm(x[:, :width]), got[:, :width])
            assert torch.equal(norm(x[1, width : 2 * width]), got[1, width : 2 * width])
        assert torch.equal(norm(x.transpose(0, 1)), got.transpose(0, 1))


@pytest.mark.parametrize(
    ("architecture", "count"),
    [("Llama", 5 + 2 + 1), ("Qwen3", 9 + 2 + 1), ("Gemma2", 9 + 2 + 1), ("Gemma3", 19 + 3), ("GPT2", 2), ("T5", 15 + 5)],
)
def test_norms_activations_and_angles_of_that_kind_are_replaced(architecture: str, count: int) -> None:
    ours = kernels()
    assert ours is not None
    plain = module(architecture, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            if "norm" in name:
                weight.copy_(torch.rand(weight.shape) + 0.5)
    replaced = copy.deepcopy(plain)
    assert replace_rows(replaced, ours) == count
    ids = torch.arange(3, 20)[None]
    given = {"input_ids": ids, "decoder_input_ids": ids} if architecture == "T5" else {"input_ids": ids}
    with torch.inference_mode():
        want, got = (one(**given, use_cache=False).logits for one in (plain, replaced))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4 * float(want.abs().max()))


def test_what_only_looks_like_such_a_norm_stays() -> None:
    class SiLUOfSomeKind(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (1.7 * x).sigmoid()

    class OddNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.rand(8) + 0.5), 1e-6

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + self.eps) * self.weight
            return out

    ours = kernels()
    assert ours is not None
    odd = (OddNorm(), SiLUOfSomeKind(), nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.Tanh(), ACT2FN["gelu_10"])
    assert replace_rows(nn.Sequential(*odd), ours) == 0
    assert replace_rows(nn.Sequential(nn.RMSNorm(8, eps=1e-6), nn.SiLU(), nn.SiLU(inplace=True)), ours) == 2


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("gelu", 0),
        ("gelu_python", 0),
        ("gelu_new", 1),
        ("gelu_fast", 1),
        ("gelu_accurate", 1),
        ("gelu_pytorch_tanh", 1),
        ("gelu_python_tanh", 1),
        ("quick_gelu", 2),
    ],
)
def test_each_gelu_is_replaced_by_the_same_one(name: str, form: int) -> None:
    ours = kernels()
    assert ours is not None
    layers, x = nn.Sequential(ACT2FN[name]), torch.linspace(-9, 9, 1001)
    want = layers(x)
    assert replace_rows(layers, ours) == 1
    assert isinstance(layers[0], Gelu)
    assert layers[0].form == form
    torch.testing.assert_close(layers(x), want, rtol=1e-6, atol=1e-6)
    assert torch.equal(layers(x.double()), GELUS[form](x.double()))


class HalfGELU(nn.Module):
    """Wants an even width, as gates in one piece do."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return nn.functional.gelu(gate) * up


class PairGELU(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        return nn.functional.gelu(x), 1.0


class TwoGELU(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.gelu(x) * y


class ScaledGELU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(x) * self.get_buffer("scale")


class FarGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(x.clamp(-40, 40))


@pytest.mark.parametrize("kind", [HalfGELU, PairGELU, TwoGELU, ScaledGELU, FarGELU])
def test_what_only_is_called_gelu_stays(kind: type[nn.Module]) -> None:
    ours = kernels()
    assert ours is not None
    assert replace_rows(nn.Sequential(kind()), ours) == 0


@pytest.mark.parametrize("form", [0, 1])
@pytest.mark.parametrize(("threads", "size"), [(1, 1037), (7, 1024)])
def test_a_rows_gelu_has_the_same_bits_beside_others(form: int, threads: int, size: int) -> None:
    """torch's with tanh has not: it has another formula for what is left over of a thread's share."""
    ours, before = kernels(), torch.get_num_threads()
    assert ours is not None
    layer, x = Gelu(form, ours), torch.randn(64, size, generator=torch.Generator().manual_seed(1)) * 3
    try:
        torch.set_num_threads(threads)
        alike = [torch.equal(torch.cat([one(x[i : i + 1]) for i in range(64)]), one(x)) for one in (layer, GELUS[form])]
        assert alike[0]
        assert form == 0 or not alike[1]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("batch", "heads", "tokens", "size"), [(1, 9, 1, 64), (3, 2, 5, 10), (2, 14, 300, 8)])
def test_a_rotation_has_the_bits_of_its_operations(built: Kernels, batch: int, heads: int, tokens: int, size: int) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(batch, tokens, heads + 1, size, generator=draw)[:, :, :heads].transpose(1, 2)
    for rows in {1, batch}:
        cos, sin = (torch.randn(rows, 1, tokens, size, generator=draw) for _ in range(2))
        with torch.inference_mode():
            assert torch.equal(built.ops.rotate(x, cos, sin), x * cos + turned(x) * sin)
    for wrong in (cos[..., :-1], cos[:, :, :0], cos.double(), cos.expand(-1, 2, -1, -1)):
        with pytest.raises(RuntimeError):
            built.ops.rotate(x, wrong, sin)


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (4,), (0, 2), (70, 9)])
@pytest.mark.parametrize("size", [1, 16, 33, 576])
def test_rows_of_a_table_have_the_bits_of_its_operations(built: Kernels, shape: tuple[int, ...], size: int) -> None:
    draw = torch.Generator().manual_seed(3)
    table = torch.randint(-128, 128, (61, size), generator=draw, dtype=torch.int8)
    scales = torch.randn(61, 1, generator=draw)
    ids = torch.randint(0, 61, shape, generator=draw)
    want = table[ids].float() * scales[ids]
    assert torch.equal(built.ops.rows_int8(table, scales, ids), want)
    assert torch.equal(built.ops.rows_int8(table, scales, ids.repeat_interleave(2, -1)[..., ::2]), want)


def test_what_is_no_row_of_a_table_is_refused(built: Kernels) -> None:
    table, scales, ids = torch.zeros(5, 4, dtype=torch.int8), torch.ones(5, 1), torch.tensor([[0, 4]])
    assert built.ops.rows_int8(table, scales, ids).shape == (1, 2, 4)
    for given, said in (
        ((table, scales, ids + 1), "outside of the table"),
        ((table, scales, ids - 1), "outside of the table"),
        ((table, scales, ids.int()), "int64"),
        ((table, scales[:4], ids), "one for each row"),
        ((table, scales.double(), ids), "one for each row"),
        ((table.float(), scales, ids), "int8"),
        ((table.T, scales[:4], ids), "in one piece"),
    ):
        with pytest.raises(RuntimeError, match=said):
            built.ops.rows_int8(*given)
