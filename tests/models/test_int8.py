"""8-bit linear layers by torch's kernels: near the exact product, each token by itself, the same bits in any company."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from outrider.models.transformers_model import TransformersModel
from outrider.models.weights import int8_linear
from outrider.models.weights.int8_linear import Int8Linear, RowScale, has_tiles, largest_weight
from outrider.models.weights.quantized import quantize_to_int8
from tests.helpers.ragged import score, some_tokens
from tests.helpers.tiny_models import module, record_now

pytestmark = pytest.mark.skipif(largest_weight() is None, reason="this build of torch has no 8-bit kernels")


TILES = [False, *([True] if has_tiles() else [])]


def layer(bias: bool, tiles: bool = False) -> tuple[Int8Linear, nn.Linear]:
    torch.manual_seed(0)
    plain = nn.Linear(96, 64, bias=bias)
    return Int8Linear(plain.weight, plain.bias, RowScale(), tiles), plain


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_very_different_size_are_all_near_the_product(bias: bool, dtype: torch.dtype, tiles: bool) -> None:
    quantized, plain = layer(bias, tiles)
    x = (torch.randn(2, 5, 96) * torch.tensor([1.0, 1e-3, 1e3, 7.0, 0.0])[:, None]).to(dtype)
    with torch.inference_mode():
        got, want = quantized(x), plain(x.float())
    assert got.dtype == dtype
    error = (got.float() - want).square().mean(-1).sqrt()
    spread = (want - (plain.bias if bias else 0.0)).square().mean(-1).sqrt()
    assert (error <= 0.02 * spread + 0.01 * want.abs().mean(-1)).all()


@pytest.mark.parametrize("tiles", TILES)
def test_a_rows_bits_do_not_depend_on_its_neighbours(tiles: bool) -> None:
    quantized, _ = layer(True, tiles)
    x = torch.randn(17, 96) * torch.rand(17, 1) * 100
    with torch.inference_mode():
        together = quantized(x)
        for width in (1, 2, 3, 5, 8):
            for at in range(0, 17, width):
                assert torch.equal(quantized(x[at : at + width].clone()), together[at : at + width])


@pytest.mark.skipif(not has_tiles(), reason="this processor has no tiles of integers")
@pytest.mark.parametrize("size", [(64, 96), (576, 1536), (1536, 8960)])
def test_both_kernels_give_the_same_bits(size: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(size, generator=generator) * torch.rand(size[0], 1, generator=generator)
    bias = torch.randn(size[0], generator=generator)
    layers = [Int8Linear(weight, bias, RowScale(), tiles) for tiles in (False, True)]
    for width in (1, 2, 7, 16, 33):
        x = torch.randn(1, width, size[1], generator=generator) * 30
        with torch.inference_mode():
            assert torch.equal(*(one(x) for one in layers))


@pytest.mark.skipif(not has_tiles(), reason="this processor has no tiles of integers")
def test_a_model_with_both_kernels_gives_the_bits_of_one(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large layers by tiles, recorded as well."""
    monkeypatch.setattr("outrider.models.weights.quantized.kernels", lambda: None)
    rows = [some_tokens(30, 1)]
    found = []
    for least in (1 << 30, 0, 1536):  # none, all, and some layers of this model
        monkeypatch.setattr(int8_linear, "TILES_FROM", least)
        quantized = module("Llama", dtype=torch.float32)
        quantize_to_int8(quantized)
        model = TransformersModel(quantized)
        for record in (False, True):
            if record:
                record_now(model)
                assert model.recorded is not None
            sequence = model.open()
            found.append(torch.cat([score(model, [sequence], [rows[0][at : at + 5]])[0] for at in range(0, 30, 5)]))
            sequence.close()
    assert all(torch.equal(found[0], one) for one in found[1:])


def test_layers_side_by_side_share_the_quantized_input_and_never_a_stale_one() -> None:
    rows = RowScale()
    first, second = (Int8Linear(torch.randn(8, 32), None, rows) for _ in range(2))
    alone = Int8Linear.__new__(Int8Linear)
    alone.__dict__.update(copy.deepcopy(second).__dict__)
    alone._rows = RowScale()
    with torch.inference_mode():
        for seed in range(3):
            x = torch.randn(2, 32, generator=torch.Generator().manual_seed(seed))
            first(x)
            assert torch.equal(second(x), alone(x))


@pytest.mark.parametrize(("largest_sum", "largest"), [(1 << 30, 127), (32767, 64), (30000, None)])
def test_kernels_that_saturate_get_weights_that_they_add_up(
    largest_sum: int, largest: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processors without VNNI cut sums of two products at 32767."""

    def multiply(x: torch.Tensor, scale: float, zero: int, packed: object) -> torch.Tensor:
        weight, _ = torch.ops.quantized.linear_unpack(packed)
        pairs = ((x.round() + zero).unsqueeze(-2) * weight.int_repr()).unflatten(-1, (-1, 2)).sum(-1)
        product = pairs.clamp(-largest_sum, largest_sum).sum(-1) - zero * weight.int_repr().sum(-1)
        out: torch.Tensor = product * scale * weight.q_per_channel_scales().float()
        return out

    monkeypatch.setattr("outrider.models.weights.int8_linear._multiply", multiply)
    assert largest_weight.__wrapped__() == largest


def test_no_two_products_exceed_what_the_kernel_adds_up() -> None:
    """Whole rows of the largest numbers: in a kernel that cuts sums, every one of them would be cut."""
    signs = torch.tensor([1.0, -1.0]).repeat(8)
    weight, x = signs.unsqueeze(1).repeat(1, 640), signs[:6].unsqueeze(1).repeat(1, 640)
    with torch.inference_mode():
        got = Int8Linear(weight, None, RowScale())(x)
    torch.testing.assert_close(got, 640.0 * torch.outer(signs[:6], signs))
