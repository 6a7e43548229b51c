"""The weights of GGUF files as they are in them: Q4_K and Q6_K, in the kernels, and found again in a model."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.errors import ModelError
from outrider.kernels.models import Kernels, kernels
from outrider.models.weights.gguf_tensors import BLOCKS, Q4_K, Q6_K, gguf_tensors, mapped
from outrider.models.weights.k_quants import KQuants
from outrider.models.weights.kernel_linear import Int4Kernel, Int8Kernel, KQuantKernel
from outrider.models.weights.packed_linear import OpaqueLinear
from outrider.models.weights.quantized import quantize_to_int4
from tests.helpers.kernels import product, rows_of
from tests.helpers.tiny_models import module

KINDS = {Q4_K: gguf.GGMLQuantizationType.Q4_K, Q6_K: gguf.GGMLQuantizationType.Q6_K}
pytestmark = pytest.mark.skipif(kernels() is None, reason="this machine builds no kernels")


def blocks(rows: int, count: int, kind: int, seed: int = 0) -> Tensor:
    """[rows, count, bytes] of any numbers, with scales of a usual size"""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (rows, count, BLOCKS[kind]), generator=generator, dtype=torch.uint8)
    for at in (0, 2) if kind == Q4_K else (208,):
        scales = (torch.rand(rows, count, 1, generator=generator) * 0.001).half()
        raw[..., at : at + 2] = scales.view(torch.uint8)
    return raw


def floats(raw: Tensor, kind: int) -> Tensor:
    """By gguf's own reader."""
    return torch.from_numpy(gguf.quants.dequantize(raw.numpy(), KINDS[kind])).reshape(len(raw), -1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "count"), [(1, 1), (16, 2), (35, 3), (70, 35)])
def test_products_are_those_of_the_files_own_weights(built: Kernels, kind: int, rows: int, count: int) -> None:
    raw, x = blocks(rows, count, kind), rows_of(count * 256)
    weight = floats(raw, kind)
    assert torch.equal(built.ops.unpack_k(raw), weight)
    more = torch.randn(rows)
    layer = KQuantKernel(weight, raw, more, built)
    want = product(x, weight.double(), 256).float() + more
    with torch.inference_mode():
        got = layer(x)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6 * float(want.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_numbers_fit(built: Kernels, kind: int) -> None:
    """What is summed in 16 bits has room for no more than it needs."""
    raw = torch.full((16, 2, BLOCKS[kind]), 0xFF, dtype=torch.uint8)
    if kind == Q4_K:
        raw[..., :4] = torch.tensor([1.0, 1.0]).half().view(torch.uint8)
    else:
        raw[..., 192:208] = 0x80  # -128
        raw[..., 208:] = torch.tensor([1.0]).half().view(torch.uint8)
    x = torch.cat([torch.full((1, 512), 127.0), torch.full((1, 512), -127.0)])
    with torch.inference_mode():
        got = KQuantKernel(floats(raw, kind), raw, None, built)(x).double()
    torch.testing.assert_close(got, x.double() @ floats(raw, kind).double().T, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_rows_bits_depend_on_nothing_beside_it(built: Kernels, kind: int, threads: int) -> None:
    raw = blocks(99, 3, kind)
    layer = KQuantKernel(floats(raw, kind), raw, torch.randn(99), built)
    x = torch.cat([rows_of(768).flatten(0, 1), torch.randn(40, 768)])  # more than use a line at once
    before = torch.get_num_threads()
    try:
        with torch.inference_mode():
            together = layer(x)
            torch.set_num_threads(threads)
            for width in (*range(1, 10), 17, 31, 32, 33):
                assert torch.equal(torch.cat([layer(x[at : at + width]) for at in range(0, len(x), width)]), together)
    finally:
        torch.set_num_threads(before)


def test_others_are_refused(built: Kernels) -> None:
    raw = blocks(16, 1, Q4_K)
    for wrong in (raw[0], raw[..., :100], raw.float(), raw.transpose(0, 1).expand(2, 16, 144)[:, ::2]):
        with pytest.raises(RuntimeError, match="K-quants"):
            built.ops.pack_k(wrong)
        with pytest.raises(RuntimeError, match="K-quants"):
            built.ops.unpack_k(wrong)
    packed = built.ops.pack_k(raw)
    for x in (torch.randn(2, 257), torch.randn(2, 512)):
        with pytest.raises(RuntimeError, match="columns"):
            built.ops.linear_grouped(x, packed, None, 16)


def file_of(path: Path, matrices: dict[str, tuple[int, Tensor]]) -> Path:
    """A GGUF file with these, in this order, beside entries of every kind and a tensor in float32."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", [f"token {i}" for i in range(300)])
    writer.add_array("some.numbers", list(range(50)))
    writer.add_bool("a.bool", True)
    writer.add_float64("a.number", 0.5)
    writer.add_tensor("norm", np.ones(7, dtype=np.float32))
    for name, (kind, raw) in matrices.items():
        writer.add_tensor(name, raw.reshape(len(raw), -1).numpy(), raw_dtype=KINDS[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_tensors_lie_where_gguf_finds_them(tmp_path: Path) -> None:
    path = file_of(tmp_path / "m.gguf", {"a": (Q4_K, blocks(5, 2, Q4_K)), "b": (Q6_K, blocks(3, 1, Q6_K))})
    with mapped(path) as data:
        found = gguf_tensors(data, path.name)
    want = gguf.GGUFReader(path).tensors
    assert [(each.name, list(each.shape), each.kind, each.start) for each in found] == [
        (each.name, [int(size) for size in each.shape], int(each.tensor_type), int(each.data_offset)) for each in want
    ]


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    ours = kernels()
    assert ours is not None
    path = file_of(tmp_path / "m.gguf", {"a": (Q4_K, blocks(5, 2, Q4_K))})
    whole = path.read_bytes()
    for bad in [*(whole[:at] for at in (0, 20, 60, 3000, len(whole) - 200)), *_changed(whole)]:
        path.write_bytes(bad)
        with pytest.raises(ModelError, match=r"model m.gguf can't be read as GGUF \(it is damaged\): download it again"):
            KQuants(path, ours, torch.float32)


def _changed(whole: bytes) -> list[bytes]:
    """With lengths, sizes and offsets that no file has."""
    tokens, table = whole.index(b"tokenizer.ggml.tokens"), whole.index(b"\x01\0\0\0\0\0\0\0a") + 9
    many, all_ones = 1 << 63, (1 << 64) - 1
    changes = [
        *((24, many), (tokens - 8, all_ones)),  # the length of a key
        (tokens + 21 + 8, many),  # of an array
        *((table + 4, count) for count in (0, 300, 1 << 40)),  # columns
        *((table + 12, count) for count in (0, 60, 1 << 62)),  # rows
        (table + 24, many),  # where it begins
    ]
    return [whole[:at] + value.to_bytes(8, "little") + whole[at + 8 :] for at, value in changes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_found_wherever_a_model_has_put_them(tmp_path: Path, dtype: torch.dtype) -> None:
    ours = kernels()
    assert ours is not None
    one, two, six = blocks(40, 3, Q4_K), blocks(24, 3, Q4_K, seed=1), blocks(30, 3, Q6_K)
    six[10] = six[3]  # twice the same
    six[11] = six[3]
    six[11, 1, 0] ^= 1  # and once nearly: the first and the last block are
    path = file_of(tmp_path / "m.gguf", {"one": (Q4_K, one), "six": (Q6_K, six), "two": (Q4_K, two)})
    rows = KQuants(path, ours, dtype)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    mixed = torch.cat([one, two])[order]
    for raw, kind in ((mixed, Q4_K), (six, Q6_K), (six[5:20], Q6_K)):
        found = rows.of(floats(raw, kind).to(dtype).float())
        assert found is not None
        assert torch.equal(floats(found, kind), floats(raw, kind))
    weight = floats(mixed, Q4_K).to(dtype).float()
    assert rows.of(torch.cat([weight, floats(six, Q6_K).to(dtype).float()])) is None  # of two formats
    assert rows.of(weight[:, :512]) is None
    weight[7, 300] += 0.5  # which is not looked at first
    assert rows.of(weight) is None


def test_a_model_has_the_weights_of_its_file(tmp_path: Path) -> None:
    """All but what is of two formats side by side, which stays in 8 bits; layers compute what its weights do."""
    ours = kernels()
    assert ours is not None
    model = module("Llama", hidden_size=256, intermediate_size=512, dtype=torch.float32)
    matrices, seed = {}, 0
    with torch.no_grad():
        for name, layer in model.named_modules():
            if isinstance(layer, torch.nn.Linear):
                six = (
                    name == "lm_head"
                    or name.endswith("layers.1.mlp.down_proj")
                    or name.endswith("layers.1.self_attn.v_proj")
                )
                kind, seed = Q6_K if six else Q4_K, seed + 1
                raw = blocks(layer.out_features, layer.in_features // 256, kind, seed)
                layer.weight.copy_(floats(raw, kind))
                matrices[name] = (kind, raw[torch.randperm(len(raw))])
    path = file_of(tmp_path / "m.gguf", matrices)
    plain = {
        name: layer.weight.detach().clone() for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)
    }
    quantize_to_int4(model, KQuants(path, ours, torch.float32))
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, OpaqueLinear)}
    eight = [name for name, layer in layers.items() if isinstance(layer, Int8Kernel)]
    assert eight == ["model.layers.1.self_attn.q_proj_k_proj_v_proj.product"]
    assert not any(isinstance(layer, Int4Kernel) for layer in layers.values())
    assert [name for name, layer in layers.items() if layer.quantization == "int6"] == [
        "model.layers.1.mlp.down_proj",
        "lm_head",
    ]
    x = torch.randint(-126, 128, (3, 512)).float()
    x[:, ::256] = 127.0  # so that whole numbers stay what they are
    with torch.inference_mode():
        got = layers["model.layers.0.mlp.down_proj"](x)
    torch.testing.assert_close(got, x @ plain["model.layers.0.mlp.down_proj"].T, rtol=1e-4, atol=1e-3)
