"""Our kernels: exact products of rounded numbers, in any company; what happens where they can't be built."""

from __future__ import annotations

import logging
import platform
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.kernels import build as build_module
from outrider.kernels import models as models_module
from outrider.kernels.build import LEVELS, UnbuiltError, level_here
from outrider.kernels.models import Kernels, build, kernels
from outrider.models.weights.int8_linear import Int8Linear, RowScale, largest_weight
from outrider.models.weights.kernel_linear import Int4Kernel, Int8Kernel
from tests.helpers.kernels import HERE, product, rounded, rows_of
from tests.helpers.marks import slow

SIZES = [(1, 1), (16, 32), (33, 31), (300, 500), (64, 1030), (17, 160), (20, 288), (40, 448)]
GROUP = 32  # columns that share a scale, in 4 bits
pytestmark = pytest.mark.skipif(kernels() is None, reason="this machine builds no kernels")


def groups_of(packed: Tensor) -> int:
    """Groups of columns that share a scale in a 4-bit layout"""
    return next(count for count in range(1, 9) if 4 * count + (count + 1) // 2 + 1 == packed.shape[2])


def unpacked(packed: Tensor, outputs: int, columns: int) -> Tensor:
    """The weights [out, in] that a 4-bit layout [blocks, .., lines, 64] stands for, float64"""
    blocks, supers, lines = packed.shape[:3]
    groups = groups_of(packed)
    pairs = (groups + 1) // 2
    bytes_ = packed.reshape(blocks, supers, lines * 64)
    numbers = bytes_[..., : 64 * pairs].reshape(blocks, supers, 2, pairs, 16, 2)
    factors, offsets = (
        numbers.permute(2, 0, 4, 1, 3, 5).reshape(2, blocks * 16, supers, -1)[..., :groups].double().unsqueeze(-1)
    )
    halves = bytes_[..., 64 * pairs : 64 * pairs + 64].contiguous().view(torch.float16).view(blocks, supers, 2, 16)
    scale, step = halves.permute(2, 0, 3, 1).reshape(2, blocks * 16, supers, 1, 1).double()
    values = bytes_[..., 64 * pairs + 64 :].reshape(blocks, supers, groups * 4, 16, 4)
    steps = torch.stack([values & 15, values >> 4], 3).permute(0, 4, 1, 2, 3, 5).reshape(blocks * 16, supers, groups, GROUP)
    weights: Tensor = (scale * factors * steps - step * offsets).reshape(blocks * 16, -1)
    return weights[:outputs, :columns]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bias", [True, False])
def test_8_bit_products_are_those_of_the_rounded_numbers(built: Kernels, size: tuple[int, int], bias: bool) -> None:
    weight, x = torch.randn(size, generator=torch.Generator().manual_seed(1)), rows_of(size[1])
    more = torch.randn(size[0]) if bias else None
    layer = Int8Kernel(weight, more, built)
    scales = layer.get_buffer("scales")[: size[0]]
    steps = (weight * (1 / scales.double()).float().unsqueeze(1)).round().double()
    want = product(x, steps, 256) * scales
    with torch.inference_mode():
        got = layer(x).double()
    torch.testing.assert_close(got, want if more is None else want + more, rtol=1e-6, atol=1e-6 * float(want.abs().max()))
    if size[1] <= 256:  # one block: nothing is added in floating point but the bias
        values, scale = rounded(x)
        whole = (values @ steps.T).float() * scale * scales
        assert torch.equal(got.float(), whole if more is None else whole + more)
    assert (weight - steps * scales.unsqueeze(1)).abs().max() <= scales.max() * 0.51


@pytest.mark.skipif(largest_weight() is None, reason="torch has no such kernel here")
@pytest.mark.parametrize("size", SIZES[1:])
def test_torchs_8_bit_kernel_has_the_same_integers(size: tuple[int, int]) -> None:
    """Of rows that are rounded by one scale; ours have one for each 256 columns."""
    ours = kernels()
    if ours is None or ours.largest != largest_weight():
        pytest.skip("ours has other weights, or none")
    weight, x = torch.randn(size, generator=torch.Generator().manual_seed(1)), rows_of(size[1])
    for at in range(256, size[1], 256):
        x[..., at] = x.abs().amax(-1)
    x[..., 0] = x.abs().amax(-1)
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    x = (x / scale).round() * scale  # between two integers torch's versions choose differently
    with torch.inference_mode():
        got, want = Int8Kernel(weight, None, ours)(x), Int8Linear(weight, None, RowScale(), tiles=False)(x)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6 * float(want.abs().max()))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bias", [True, False])
def test_4_bit_products_are_those_of_the_rounded_numbers(built: Kernels, size: tuple[int, int], bias: bool) -> None:
    weight, x = torch.randn(size, generator=torch.Generator().manual_seed(1)), rows_of(size[1])
    more = torch.randn(size[0]) if bias else None
    layer = Int4Kernel(weight, more, built)
    stored = unpacked(layer._packed, *size)
    assert float((stored - weight).square().sum().sqrt() / weight.square().sum().sqrt()) < 0.08
    want = product(x, stored, GROUP * groups_of(layer._packed))
    with torch.inference_mode():
        got = layer(x)
    torch.testing.assert_close(
        got.double(), want if more is None else want + more, rtol=1e-5, atol=1e-5 * float(want.abs().max())
    )


@pytest.mark.parametrize("kind", [Int8Kernel, Int4Kernel])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_rows_bits_depend_on_nothing_beside_it(built: Kernels, kind: type[Int8Kernel | Int4Kernel], threads: int) -> None:
    layer = kind(torch.randn(99, 130), torch.randn(99), built)
    x = rows_of(130).flatten(0, 1)
    before = torch.get_num_threads()
    try:
        with torch.inference_mode():
            together = layer(x)
            torch.set_num_threads(threads)
            for width in (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 15, 16, 17, 26):
                for at in range(0, len(x), width):
                    assert torch.equal(layer(x[at : at + width]), together[at : at + width])
            strided = x.T.contiguous().T
            assert not strided.is_contiguous()
            assert torch.equal(layer(strided), together)
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(len(HERE) < 2, reason="this processor has one level")
def test_levels_agree_to_the_bit() -> None:
    """A layer in 4 bits is the same on another processor."""
    layers = [
        Int4Kernel(torch.randn(70, 300, generator=torch.Generator().manual_seed(2)), None, build(level)) for level in HERE
    ]
    with torch.inference_mode():
        results = [layer(rows_of(300)) for layer in layers]
    assert all(torch.equal(one._packed, layers[0]._packed) for one in layers)
    assert all(torch.equal(one, results[0]) for one in results)


@pytest.mark.parametrize("kind", [Int8Kernel, Int4Kernel])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_results_have_the_type_of_what_was_given(
    built: Kernels, kind: type[Int8Kernel | Int4Kernel], dtype: torch.dtype
) -> None:
    layer = kind(torch.randn(40, 64), None, built)
    x = rows_of(64, dtype)
    with torch.inference_mode():
        assert torch.equal(layer(x), layer(x.float()).to(dtype))


@pytest.mark.parametrize("kind", [Int8Kernel, Int4Kernel])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_seen_and_its_neighbours_are_not_touched(
    built: Kernels, kind: type[Int8Kernel | Int4Kernel], bad: float
) -> None:
    layer, x = kind(torch.randn(40, 64), None, built), torch.randn(3, 64)
    with torch.inference_mode():
        plain = layer(x)
        x[1, 17] = bad
        got = layer(x)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2]], plain[[0, 2]])


def test_weights_that_were_in_4_bits_are_found_again(built: Kernels) -> None:
    generator = torch.Generator().manual_seed(3)
    steps = torch.randint(0, 16, (48, 10, GROUP), generator=generator)
    steps[:, 1] = steps[:, 1].clamp(3, 11)  # not all steps are in use
    scale, least = (torch.rand(48, 10, 1, generator=generator).half().float() * size for size in (0.01, -0.1))
    weight = (steps * scale + least).reshape(48, -1)
    packed, errors = built.ops.pack_int4(weight)
    most = (15 * 0.01 + 0.1) / 255 / 2  # by rounding scales and offsets to 8 bits
    assert float((unpacked(packed, 48, 320) - weight).abs().max()) < 1.05 * most
    assert float(errors.sum() / weight.square().sum()) < 1e-6


@pytest.mark.parametrize("value", [1.0, 0.3, -1.0, 0.0])
def test_equal_weights_stay_what_they_are(built: Kernels, value: float) -> None:
    """A last column alone in its group among them."""
    for size in ((3, 32), (16, 1), (2, 33)):
        weight = torch.full(size, value)
        torch.testing.assert_close(unpacked(built.ops.pack_int4(weight)[0], *size).float(), weight, rtol=2e-3, atol=0.0)


def test_a_group_that_is_small_beside_another_keeps_its_mean(built: Kernels) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 256, generator=generator)
    weight[:, 7] = 1e4
    stored = unpacked(built.ops.pack_int4(weight)[0], 64, 256).float()
    assert float((stored - weight)[:, 32:].square().mean().sqrt()) < 1.1  # as if they were zeros


@pytest.mark.parametrize("kind", [Int8Kernel, Int4Kernel])
def test_numbers_that_are_large_in_some_columns_leave_the_others_as_they_are(
    built: Kernels, kind: type[Int8Kernel | Int4Kernel]
) -> None:
    """As in the activations of language models: columns far from them have a scale of their own."""
    layer, x = kind(torch.randn(40, 512), None, built), torch.randn(5, 512)
    x[:, 3] *= 1000.0
    still = x.clone()
    still[:, :256] = 0.0
    with torch.inference_mode():
        got, first = layer(x) - layer(x - still), layer(still)
    torch.testing.assert_close(got, first, rtol=1e-3, atol=0.05)


@pytest.mark.parametrize("kind", [Int8Kernel, Int4Kernel])
def test_rows_that_threads_round_have_the_same_bits(built: Kernels, kind: type[Int8Kernel | Int4Kernel]) -> None:
    layer, x = kind(torch.randn(40, 1100), None, built), torch.randn(64, 1100)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with torch.inference_mode():
            together = layer(x)
            assert all(torch.equal(layer(x[at : at + 5]), together[at : at + 5]) for at in range(0, 64, 5))
    finally:
        torch.set_num_threads(before)


def test_what_torch_makes_by_default_does_not_matter(built: Kernels) -> None:
    weight, x = torch.randn(33, 64), torch.randn(3, 64)
    want = [kind(weight, None, built)(x) for kind in (Int8Kernel, Int4Kernel)]
    torch.set_default_dtype(torch.bfloat16)
    try:
        built._try()
        got = [kind(weight, None, built)(x) for kind in (Int8Kernel, Int4Kernel)]
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(one, other) for one, other in zip(want, got, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e10])
def test_weights_that_have_no_scale_in_4_bits_are_told(built: Kernels, bad: float) -> None:
    weight = torch.randn(40, 64)
    assert Int4Kernel(weight, None, built).found
    weight[3, 5] = bad
    assert not Int4Kernel(weight, None, built).found


def test_other_scales_biases_and_weights_are_refused(built: Kernels) -> None:
    """They would be read as they are not, or beyond their end."""
    x, weight = torch.randn(2, 64), torch.randn(40, 64)
    eight, four = Int8Kernel(weight, torch.zeros(40), built), Int4Kernel(weight, torch.zeros(40), built)
    scales, bias, p8, p4 = eight.get_buffer("scales"), eight.bias, eight._packed, four._packed
    assert bias is not None
    built.ops.linear_int8(x, p8, scales, bias, 40)
    built.ops.linear_grouped(x, p4, bias, 40)
    for wrong in (scales.bfloat16(), scales[:40], scales.repeat_interleave(2)[::2]):
        with pytest.raises(RuntimeError, match="scales"):
            built.ops.linear_int8(x, p8, wrong, bias, 40)
    for wrong in (bias.bfloat16(), bias[:39], torch.zeros(80)[::2]):
        with pytest.raises(RuntimeError, match="bias"):
            built.ops.linear_int8(x, p8, scales, wrong, 40)
        with pytest.raises(RuntimeError, match="bias"):
            built.ops.linear_grouped(x, p4, wrong, 40)
    for wrong in (p8[..., :8], p8.to(torch.int8), p8.transpose(1, 2)):
        with pytest.raises(RuntimeError):
            built.ops.linear_int8(x, wrong, scales, None, 40)
    for wrong in (p4[..., :8], p4[:, :, :4], p4[:, :, :6].contiguous(), p4.to(torch.int8)):
        with pytest.raises(RuntimeError):
            built.ops.linear_grouped(x, wrong, None, 40)
    for wrong in (weight.T, weight.double(), weight[0]):
        with pytest.raises(RuntimeError, match="float32"):
            built.ops.pack_int4(wrong)
    for wrong in (weight.to(torch.int8).T, weight):
        with pytest.raises(RuntimeError, match="int8"):
            built.ops.pack_int8(wrong)


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder without any library."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_damaged_library_is_built_again(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def opened(level: str, library: Path) -> str:
        tried.append(library.read_text())
        if tried == ["built"]:
            raise OSError("file too short")
        return "kernels"

    monkeypatch.setattr(models_module, "Kernels", opened)
    monkeypatch.setattr(build_module, "_compile", lambda folder, *_: (folder / "kernels.so").write_text("built"))
    assert build("avx2") == "kernels"  # type: ignore[comparison-overlap]
    assert tried == ["built", "built"]
    assert len(list(empty.glob("kernels/*"))) == 1


def test_wrong_shapes_are_refused(built: Kernels) -> None:
    layer = Int4Kernel(torch.randn(40, 64), None, built)
    for x in (torch.randn(2, 65), torch.randn(2, 0), torch.randn(2, 64).double()):
        with pytest.raises(RuntimeError):
            built.ops.linear_grouped(x, layer._packed, None, 40)
    for size in (32, 63, 65):
        with pytest.raises(RuntimeError, match=f"64 columns, got {size}"):
            layer(torch.randn(2, size))
    with pytest.raises(RuntimeError):
        built.ops.linear_grouped(torch.randn(2, 64), layer._packed, None, 64)


@pytest.mark.parametrize(
    "what",
    [
        "no compiler",
        "no such compiler",
        "an odd compiler",
        "a compiler that fails",
        slow("wrong products"),
        "a folder that can't be written",
    ],
)
def test_machines_that_cannot_build_them_say_so_and_go_on(
    what: str, empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    if what == "no compiler":
        monkeypatch.setattr(shutil, "which", lambda name: None)
    elif what == "no such compiler":
        monkeypatch.setenv("CXX", str(tmp_path / "none"))
    elif what == "an odd compiler":
        monkeypatch.setenv("CXX", "g++ 'x")
    elif what == "a compiler that fails":
        broken = tmp_path / "c++"
        broken.write_text("#!/bin/sh\necho 'kernel.cpp:1: error: no such thing' >&2\nexit 1\n")
        broken.chmod(0o755)
        monkeypatch.setenv("CXX", str(broken))
    elif what == "wrong products":
        monkeypatch.setattr(Kernels, "_try", lambda self: (_ for _ in ()).throw(UnbuiltError("8-bit products are wrong")))
    else:
        (tmp_path / "file").touch()
        monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file" / "folder"))
    with caplog.at_level(logging.WARNING):
        assert kernels.__wrapped__() is None
    reason = {
        "no compiler": "install g++",
        "no such compiler": "No such file",
        "an odd compiler": r"$CXX can't be read",
        "a compiler that fails": "no such thing",
        "wrong products": "products are wrong",
    }
    assert reason.get(what, "can't be written") in caplog.text
    assert not list(empty.glob("kernels/*")) or what == "wrong products"


def test_processors_that_they_are_not_written_for_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "fma3": True})
    assert level_here() is None
    assert kernels.__wrapped__() is None
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(LEVELS["avx2"], True))
    assert level_here() == "avx2"
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert level_here() is None
