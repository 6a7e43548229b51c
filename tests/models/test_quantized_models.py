"""Models in 8 and 4 bits: near what they were, and a token's logits have the same bits in any pass."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import outrider
from outrider.errors import ModelError, ParameterError
from outrider.kernels.models import kernels
from outrider.models.loading import load_transformers
from outrider.models.transformers_model import TransformersModel
from outrider.models.weights.int8_linear import Int8Linear, largest_weight
from outrider.models.weights.kernel_linear import Int4Kernel, Int8Kernel
from outrider.models.weights.quantized import Int8Embedding, can_quantize, quantize_to_int4, quantize_to_int8
from outrider.support.device_data import pad_rows
from tests.helpers.marks import thinned
from tests.helpers.tiny_models import module

WAYS = [
    pytest.param("int8", marks=pytest.mark.skipif(not can_quantize(), reason="there are no 8-bit kernels")),
    pytest.param("int4", marks=pytest.mark.skipif(not can_quantize(4), reason="there are no 4-bit kernels")),
]
WITH_TORCHS = [
    *WAYS,
    pytest.param("torch's int8", marks=pytest.mark.skipif(largest_weight() is None, reason="torch has no 8-bit kernels")),
]


@pytest.fixture
def _kernels(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "torch's int8":
        monkeypatch.setattr("outrider.models.weights.quantized.kernels", lambda: None)


def test_the_embedding_table_is_near() -> None:
    weight = torch.randn(50, 32) * torch.rand(50, 1)
    table = Int8Embedding(weight, torch.float32)
    ids = torch.tensor([[0, 49], [7, 7]])
    assert table(ids).shape == (2, 2, 32)
    assert ((table(ids) - weight[ids]).abs() <= weight.abs().amax(1, keepdim=True)[ids] / 254 * 1.01).all()


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize(
    ("architecture", "way"), thinned(["Llama", "GPT2", "Gemma2", "Gemma3", "Olmo", "OPT", "Qwen3"], WITH_TORCHS)
)
def test_models_stay_near_and_logits_have_the_same_bits_in_any_pass(architecture: str, way: str) -> None:
    plain = module(architecture, dtype=torch.float32)
    quantized = copy.deepcopy(plain)
    assert (quantize_to_int4 if way == "int4" else quantize_to_int8)(quantized) > 6
    kinds = {type(layer) for layer in quantized.modules()} & {Int8Linear, Int8Kernel, Int4Kernel}
    int8 = Int8Linear if kernels() is None else Int8Kernel
    assert kinds == {"int8": {int8}, "int4": {Int4Kernel, Int8Kernel}, "torch's int8": {Int8Linear}}[way]
    model = TransformersModel(quantized)
    assert model.dtype_name == ("int4" if way == "int4" else "int8")
    tokens = [(7 * i + 3) % 60 for i in range(48)]
    with torch.inference_mode():
        want = plain(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    first: torch.Tensor | None = None
    for width in (1, 3, 8, 48):
        sequence = model.open()
        parts = [model.score([sequence], *pad_rows([tokens[at : at + width]], model.device)) for at in range(0, 48, width)]
        got = torch.cat([part[0] for part in parts if part is not None])
        first = got if first is None else first
        assert torch.equal(got, first)
        assert float((got - want).square().mean().sqrt() / want.std()) < (0.4 if way == "int4" else 0.15)
        sequence.close()
    beside, sequence = model.open(), model.open()
    parts = [model.score([beside, sequence], *pad_rows([[5, 6], [token]], model.device)) for token in tokens]
    assert first is not None
    assert torch.equal(torch.stack([part[1, 0] for part in parts if part is not None]), first)


@pytest.mark.skipif(kernels() is None, reason="this machine builds no kernels")
@pytest.mark.parametrize(("size", "kept"), [(1.0, torch.float16), (1e4, torch.float32)])
def test_keys_and_values_are_kept_in_float16_where_they_fit(size: float, kept: torch.dtype) -> None:
    made = module("Qwen2", dtype=torch.float32)
    for layer in made.model.layers:
        layer.self_attn.k_proj.bias.data[3] = 3.0 * size
    quantize_to_int8(made)
    model = TransformersModel(made)
    model.record()
    assert model.recorded is not None
    tokens = [(7 * i + 3) % 60 for i in range(20)]
    with torch.inference_mode():
        want = made(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    sequence = model.open()
    got = torch.cat([model.score([sequence], torch.tensor([[token]]), [1])[0] for token in tokens])  # type: ignore[index]
    assert {tensor.dtype for tensor in model.cache_rows(slice(0, 1))} == {kept}
    assert float((got - want).square().mean().sqrt() / want.std()) < 0.1
    if kept == torch.float32:  # 3e4 lies within float16, but near to its end
        assert torch.equal(got, want)


@pytest.mark.parametrize("way", thinned(WAYS))
def test_greedy_output_is_the_same_with_and_without_a_draft(target_folder: Path, draft_folder: Path, way: str) -> None:
    target, draft = (outrider.load(folder, dtype=way) for folder in (target_folder, draft_folder))
    assert isinstance(target, TransformersModel)
    prompt = "the quick brown fox jumps over the quick"
    plain = outrider.generate(target, prompt, draft=None, max_new_tokens=80, ignore_eos=True)
    for name in ("prompt-lookup", draft, "early-exit:layers=1"):
        result = outrider.generate(target, prompt, draft=name, num_draft_tokens=4, max_new_tokens=80, ignore_eos=True)
        assert result.tokens == plain.tokens


@pytest.mark.parametrize("way", WAYS)
def test_quantized_weights_need_a_cpu(target_folder: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.models.loading.parse_device", torch.device)  # there may be no such device here
    with pytest.raises(ParameterError, match=f"{way} needs a CPU, got device cuda"):
        load_transformers(target_folder, dtype=way, device="cuda")


@pytest.mark.skipif(not can_quantize(4), reason="there are no 4-bit kernels")
@pytest.mark.parametrize("before", ["float", "in groups of 4 bits", "one matrix in more"])
def test_what_was_in_more_bits_than_the_rest_keeps_8(before: str) -> None:
    """As the makers of GGUF files mix them; weights that were never quantized are all quantized to 4."""
    model = module("Llama", dtype=torch.float32)
    down = [layer for name, layer in model.named_modules() if name.endswith("down_proj")]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in (part for part in model.modules() if isinstance(part, torch.nn.Linear)):
            if before == "float" or (before == "one matrix in more" and layer is down[1]):
                continue
            rows, columns = layer.weight.shape
            steps = torch.randint(0, 16, (rows, columns), generator=generator).float()
            scales = torch.rand(rows, -(-columns // 32), generator=generator).repeat_interleave(32, 1)[:, :columns] * 0.02
            layer.weight.copy_((steps * scales - 7 * scales).bfloat16())
    quantize_to_int4(model)
    kinds = {name: type(layer) for name, layer in model.named_modules() if isinstance(layer, Int4Kernel | Int8Kernel)}
    in_8 = [name for name, kind in kinds.items() if kind is Int8Kernel]
    assert in_8 == ["lm_head"] if before != "one matrix in more" else in_8 == ["model.layers.1.mlp.down_proj", "lm_head"]


@pytest.mark.parametrize("way", ["int8", "int4"])
def test_without_kernels_there_is_another_engine_and_a_line_that_names_it(
    target_folder: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.models.loading.can_quantize", lambda bits=8: False)
    with pytest.raises(ModelError, match=rf"{way} can't be used by the transformers engine here: .*g\+\+.*openvino"):
        outrider.load(target_folder, dtype=way, engine="transformers")
