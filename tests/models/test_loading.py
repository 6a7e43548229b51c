"""Models from folders and GGUF files: dtypes, the conversion cache, packed layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import outrider
from outrider.errors import ModelError, ParameterError
from outrider.models.loading import load_tokenizer, load_transformers
from outrider.models.names import DEFAULT_MODEL
from outrider.models.weights.packed_linear import PackedLinear, can_pack, pack_linears
from outrider.support.cache_folder import cache_folder
from tests.helpers.tiny_models import module


@pytest.mark.usefixtures("unrecorded")
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


@pytest.mark.slow
def test_the_default_model_is_converted_once_and_speaks() -> None:
    model = outrider.load(dtype="float32")
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    result = outrider.generate(model, asked, draft=None, max_new_tokens=16)  # for which no costs are measured
    assert "Paris" in result.text
    folders = list((cache_folder() / "models").glob("SmolLM2*float32"))
    before = [path.stat().st_mtime_ns for path in folders]
    outrider.load(dtype="float32")
    assert [path.stat().st_mtime_ns for path in folders] == before


def test_the_default_model_goes_by_its_name_unless_a_folder_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_tokenizer(DEFAULT_MODEL).get_vocab() == load_tokenizer().get_vocab()
    (tmp_path / DEFAULT_MODEL).mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="has no config"):
        load_tokenizer(DEFAULT_MODEL)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_tokens": "x"}, "num_tokens must be a whole number, got 'x'"),
        ({"num_tokens": True}, "num_tokens must be a whole number, got True"),
        ({"num_tokens": 0}, r"num_tokens must be a whole number in 1 … \d+, got 0"),
        ({"compile": "no"}, "compile must be true or false, got 'no'"),
        ({"pack": None}, "pack must be true or false, got None"),
        ({"pack": False, "engine": "openvino"}, "pack can't be False with the openvino engine"),
        ({"pack": False, "engine": "llama.cpp"}, "pack can't be False with the llama.cpp engine"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], said: str, target_folder: Path) -> None:
    with pytest.raises(ParameterError, match=said):
        outrider.load(target_folder, **options)


@pytest.mark.parametrize("architecture", ["Llama", "GPT2"])
def test_packed_layers_compute_the_same(architecture: str) -> None:
    plain, packed = module(architecture, dtype=torch.float32), module(architecture, dtype=torch.float32)
    assert pack_linears(packed) > 4
    assert not [layer for layer in packed.modules() if type(layer) is nn.Linear]
    ids = torch.arange(3, 20).unsqueeze(0)
    with torch.inference_mode():
        assert torch.allclose(plain(ids).logits, packed(ids).logits, atol=1e-4)


def test_bfloat16_packed_layers_differ_by_a_step_of_their_type_at_most() -> None:
    if not can_pack(torch.bfloat16, torch.device("cpu")):
        assert not can_pack(torch.float16, torch.device("cpu"))
        return
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator).bfloat16()
    for rows in (1, 3, 8):
        x = torch.randn(rows, 64, generator=generator).bfloat16()
        with torch.inference_mode():
            packed, plain = PackedLinear(weight, None)(x), nn.functional.linear(x, weight)
        torch.testing.assert_close(packed.float(), plain.float(), rtol=2**-7, atol=1e-3)


def test_packing_can_be_left_out(target_folder: Path) -> None:
    model = load_transformers(target_folder, pack=False)
    assert isinstance(model.module, transformers.LlamaForCausalLM)
    assert not [layer for layer in model.module.modules() if isinstance(layer, PackedLinear)]
