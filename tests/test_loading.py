"""Models from folders and GGUF files: dtypes, the conversion cache, packed layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import outrider
from outrider.costs import Costs, forget_costs, measured_costs, review_costs
from outrider.models.loading import load_transformers
from outrider.models.packed_linear import PackedLinear, can_pack, pack_linears
from outrider.models.table import TableModel
from tests.tiny_models import module


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_dtypes_are_obeyed(target_folder: Path, dtype: str) -> None:
    model = outrider.load(target_folder, dtype=dtype)
    assert model.dtype_name == dtype
    assert outrider.generate(model, "the quick", max_new_tokens=4, ignore_eos=True).stats.tokens == 4


def test_float16_runs(target_folder: Path) -> None:
    model = outrider.load(target_folder, dtype="float16")
    assert outrider.generate(model, "the quick", max_new_tokens=4, ignore_eos=True).stats.tokens == 4


def test_auto_keeps_the_checkpoints_dtype(target_folder: Path) -> None:
    assert outrider.load(target_folder).dtype_name == "float32"


def test_the_default_model_is_converted_once_and_speaks() -> None:
    model = outrider.load(dtype="float32")
    result = outrider.generate(model, [{"role": "user", "content": "What is the capital of France?"}], max_new_tokens=16)
    assert "Paris" in result.text
    folders = list((outrider.models.cache_folder.cache_folder() / "models").glob("SmolLM2*float32"))
    before = [path.stat().st_mtime_ns for path in folders]
    outrider.load(dtype="float32")
    assert [path.stat().st_mtime_ns for path in folders] == before


@pytest.mark.parametrize("architecture", ["Llama", "GPT2"])
def test_packed_layers_compute_the_same(architecture: str) -> None:
    plain, packed = module(architecture, dtype=torch.float32), module(architecture, dtype=torch.float32)
    assert pack_linears(packed) > 4
    assert not [layer for layer in packed.modules() if type(layer) is nn.Linear]
    ids = torch.arange(3, 20).unsqueeze(0)
    with torch.inference_mode():
        assert torch.allclose(plain(ids).logits, packed(ids).logits, atol=1e-4)


def test_bfloat16_packed_layers_are_equal_to_the_bit_on_this_machine() -> None:
    if not can_pack(torch.bfloat16, torch.device("cpu")):
        assert not can_pack(torch.float16, torch.device("cpu"))
        return
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator).bfloat16()
    for rows in (1, 3, 8):
        x = torch.randn(rows, 64, generator=generator).bfloat16()
        with torch.inference_mode():
            assert torch.allclose(PackedLinear(weight, None)(x).float(), nn.functional.linear(x, weight).float(), atol=0.1)


def test_packing_can_be_left_out(target_folder: Path) -> None:
    model = load_transformers(target_folder, pack=False)
    assert isinstance(model.module, transformers.LlamaForCausalLM)
    assert not [layer for layer in model.module.modules() if isinstance(layer, PackedLinear)]


def test_widths_are_padded_where_wider_is_quicker() -> None:
    def widths(seconds: dict[int, float], slopes: dict[int, float] | None = None, context: int = 64) -> list[int]:
        return [Costs(seconds, slopes or {}).width(n, context) for n in range(1, 9)]

    assert widths({1: 3.0, 2: 3.0, 4: 2.0, 8: 4.0}) == [4, 4, 4, 4, 5, 6, 7, 8]
    assert widths({1: 1.0, 2: 1.1, 4: 1.2}) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert widths({1: 1.0, 2: 0.99}) == [1, 2, 3, 4, 5, 6, 7, 8]
    slopes = {1: 0.0, 4: 0.01}
    assert widths({1: 3.0, 4: 2.0}, slopes)[0] == 4
    assert widths({1: 3.0, 4: 2.0}, slopes, context=300)[0] == 1  # at a long context the wider pass costs more


def test_costs_grow_with_the_context() -> None:
    costs = Costs({1: 1.0, 4: 1.0}, {1: 0.001, 4: 0.003}, context=64)
    assert costs.verify(1, 1064) == pytest.approx(2.0)
    assert costs.verify(4, 1064) == pytest.approx(4.0)
    assert costs.verify(2, 1064) == pytest.approx(1.0 + 1000 * (0.001 + 0.002 / 3))
    assert costs.verify(4, 10) == costs.verify(4) == 1.0


def test_costs_are_interpolated_between_sizes() -> None:
    costs = Costs({1: 1.0, 4: 2.5, 8: 3.5})
    assert costs.verify(2) == pytest.approx(1.5)
    assert costs.verify(6) == pytest.approx(3.0)
    assert costs.verify(12) == pytest.approx(4.5)


def test_costs_see_what_a_model_takes() -> None:
    slow = TableModel(torch.full((3, 3), 1 / 3), seconds_per_call=0.004, seconds_per_token=0.002)
    quick = TableModel(torch.full((3, 3), 1 / 3))
    costs = measured_costs(slow)
    assert costs.verify(8) > costs.verify(1) >= 0.006
    assert measured_costs(quick).verify(1) < costs.verify(1)


def test_costs_are_kept_on_disk(target_folder: Path, cache: Path, monkeypatch: Any) -> None:
    from outrider.costs import kept

    monkeypatch.setattr("outrider.costs.measure.UNSETTLED", float("inf"))  # however busy the machine is
    model = outrider.load(target_folder)
    kept._measured.clear()
    first = measured_costs(model)
    assert list((cache / "costs").glob("*.json"))
    kept._measured.clear()
    assert measured_costs(model) == first


def test_a_table_that_real_passes_refute_is_forgotten(
    target_folder: Path, cache: Path, caplog: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("outrider.costs.measure.UNSETTLED", float("inf"))  # however busy the machine is
    model = outrider.load(target_folder)
    forget_costs(model)
    said = measured_costs(model).verify(1, 10)
    files = len(list((cache / "costs").glob("*.json")))
    assert not review_costs(model, [(1, 10, 1.5 * said)] * 20)
    assert not review_costs(model, [(1, 10, said + 1)] * 3)  # too few to tell
    assert review_costs(model, [(1, 10, said + 1)] * 20, at_once=False)
    assert measured_costs(model).verify(1, 10) == said  # the same seed, the same tokens, as long as the process lasts
    assert review_costs(model, [(1, 10, said + 1)] * 20)
    assert "measured again" in caplog.text
    assert len(list((cache / "costs").glob("*.json"))) == files - 1
    assert measured_costs(model).verify(1, 10) < said + 0.5


def test_a_table_measured_on_a_busy_machine_is_not_kept(target_folder: Path, cache: Path, monkeypatch: Any) -> None:

    model = outrider.load(target_folder)
    forget_costs(model)
    before = set((cache / "costs").glob("*.json"))
    found = iter([(Costs({1: 9.0}), 3.0), (Costs({1: 7.0}), 2.0), (Costs({1: 8.0}), 5.0)])
    monkeypatch.setattr("outrider.costs.measure._measure", lambda model: next(found))
    assert measured_costs(model).verify_seconds == {1: 7.0}
    assert set((cache / "costs").glob("*.json")) == before
    forget_costs(model)
