"""Lean passes by Triton's interpreter, which runs their kernels on the host: the model's own numbers, in every setting.

On a GPU `captured_trial` compares them anew for each model; here in float32, to rounding.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from outrider.models.base import LAST
from outrider.models.lean.layout import layout_of
from outrider.models.lean.run import LeanPass, Shape, lean_pass
from outrider.models.passes.graph import run_pass
from outrider.models.passes.tracing import Inputs
from outrider.models.transformers_model import TransformersModel
from tests.helpers.tiny_models import module
from tests.helpers.triton import run_with_triton

V = 97
SIZES: dict[str, Any] = {
    "vocab_size": V, "hidden_size": 96, "intermediate_size": 200, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 512,
}  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Qwen2": {},
    "Llama": {"tie_word_embeddings": True, "rope_theta": 1000.0},
    "Mistral": {"sliding_window": None},
}
LONG: dict[str, Any] = {
    "max_position_embeddings": 4096, "num_hidden_layers": 1,
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 1000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
}  # fmt: skip
OTHER: dict[str, Any] = {
    "vocab_size": 331, "hidden_size": 288, "intermediate_size": 208, "num_attention_heads": 7, "num_key_value_heads": 1,
    "rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0},
}  # fmt: skip
PASSES = ((1, 1, 5), (1, 1, 0), (1, 3, 100), (2, 5, 130), (3, 4, 200), (1, 16, 64))  # rows, tokens, context
NEAR = 2e-4  # of the spread of the logits


def opened(architecture: str, **more: Any) -> TransformersModel:
    made = module(architecture, 3, torch.float32, **{**SIZES, **ARCHITECTURES.get(architecture, {}), **more})
    torch.manual_seed(1)
    for weight in made.parameters():  # norms and biases that are seen
        if weight.dim() == 1:
            weight.data += 0.1 * torch.randn_like(weight)
    return TransformersModel(made, name=architecture)


def off(model: TransformersModel, lean: LeanPass, rows: int, width: int, context: int, columns: int = 256) -> float:
    """By how much logits, states, keys and values of a pass differ at most, relative to the logits' spread. The rows are of
    other lengths each, the tokens a part of wider rows; of four tokens or more the last one stands in the place of the
    second. What was never written is no number.
    """
    sequences = [model.open(context + width + 1) for _ in range(rows)]
    draw = torch.Generator().manual_seed(context)
    for number, sequence in enumerate(sequences):
        count = max(0, context - 7 * number)
        if count:
            model.score([sequence], torch.randint(V, (1, count), generator=draw), [count], "none")
    at = torch.tensor([[sequence.length] for sequence in sequences]) + torch.arange(width)
    tokens = torch.randint(V, (rows, width + 1), generator=draw)[:, 1:]
    positions = at.clone()
    if width >= 4:
        positions[:, -1] = positions[:, 1]
    ours, theirs = ([widened(each, columns) for each in model.cache_rows(slice(0, rows))] for _ in range(2))
    for held in ours:
        for row, sequence in zip(held, sequences, strict=True):
            row[:, sequence.length :] = torch.nan
    found = lean.run(tokens, positions, at, columns, ours, (1, LAST))
    wanted = run_pass(model, (1, LAST), True, Inputs(columns, [tokens, positions, at], theirs, {}))
    for sequence in sequences:
        sequence.close()
    for held, others in zip(ours, theirs, strict=True):  # what is still no number is so for both
        others.masked_fill_(held.isnan(), 0.0)
        held.nan_to_num_(0.0)
    pairs = list(zip((*found, *ours), (*wanted, *theirs), strict=True))
    assert all(a.shape == b.shape for a, b in pairs)
    spread = float(wanted[0].std())
    return max(float((a - b).abs().max()) / spread for a, b in pairs)


def widened(held: torch.Tensor, columns: int) -> torch.Tensor:
    """A copy of keys or values that has so many columns at least."""
    rows, heads, capacity, size = held.shape
    wide = held.new_zeros(rows, heads, max(capacity, columns), size)
    wide[:, :, :capacity] = held
    return wide


def of(model: TransformersModel, **more: Any) -> LeanPass:
    layout = layout_of(model)
    assert layout is not None
    return LeanPass(layout, 4, **more)


def try_all() -> None:
    """In a process of its own: whether kernels are interpreted is decided when they are defined."""
    found: dict[str, float] = {}
    with torch.inference_mode():
        for architecture in ARCHITECTURES:
            model = opened(architecture)
            lean = of(model)
            for rows, width, context in PASSES if architecture == "Qwen2" else PASSES[2:4]:
                found[f"{architecture} {rows} × {width} after {context}"] = off(model, lean, rows, width, context)
        # One more token of a row than is left of a chunk; columns that are read in larger chunks.
        found["at the edge"] = off(model, lean, 1, 2, 255, columns=512)
        found["many columns"] = off(opened("Llama", **LONG), of(opened("Llama", **LONG)), 2, 3, 2200, columns=2304)
        model = opened("Qwen2", **OTHER)
        lean = of(model)
        for rows, width, context in ((1, 1, 20), (2, 5, 20), (1, 20, 20)):
            found[f"other sizes {rows} × {width}"] = off(model, lean, rows, width, context)
        lean.shapes[2 * 208, 288] = Shape(64, 128, 1)
        lean.shapes[331, 288] = Shape(64, 64, 1)
        found["wider blocks"] = off(model, lean, 1, 3, 20)
        lean = of(model, memory=1)
        found["the least of memory"] = off(model, lean, 1, 3, 20)
        model = opened("Llama")
        lean = of(model)
        # Few tokens, and few queries that share keys: three heads a key here.
        assert lean.takes(8, 8)
        assert lean.takes(1, 42)
        assert not lean.takes(9, 8)
        assert not lean.takes(1, 43)
        # A kernel that forgets something is told apart: positions that are one off.
        lean._layout.cos.copy_(lean._layout.cos.roll(1, 0))
        found["broken"] = off(model, lean, 1, 3, 100)
    print(json.dumps(found))


@pytest.fixture(scope="module")
def differences() -> dict[str, float]:
    out = run_with_triton("from tests.devices.test_lean import try_all; try_all()", interpret=True)
    return dict(json.loads(out.splitlines()[-1]))


@pytest.mark.slow
def test_they_give_the_models_logits_states_keys_and_values(differences: dict[str, float]) -> None:
    assert differences.pop("broken") > 20 * NEAR
    assert len(differences) == len(PASSES) + 2 * 2 + 7
    assert {name: value for name, value in differences.items() if not value < NEAR} == {}


@pytest.mark.parametrize(
    ("architecture", "more"),
    [
        ("Qwen3", {}),
        ("Gemma", {}),
        ("Mistral", {"sliding_window": 64}),
        ("Llama", {"hidden_act": "gelu"}),
        ("Llama", {"attention_bias": True}),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1000.0}}),
    ],
)
def test_other_models_have_none(architecture: str, more: dict[str, Any]) -> None:
    assert layout_of(opened(architecture, **more)) is None


class TestOtherCode:
    """Its shapes are a Llama's; what else it does, nobody knows."""

    def test_a_class_of_the_same_name(self) -> None:
        model = opened("Llama")
        assert layout_of(model) is not None

        class LlamaForCausalLM(type(model.module)):  # type: ignore[misc]
            pass

        model.module.__class__ = LlamaForCausalLM
        assert layout_of(model) is None

    @pytest.mark.parametrize("name", ["model", "model.layers.1", "model.layers.0.mlp", "model.norm", "model.rotary_emb"])
    def test_a_part_of_another_class(self, name: str) -> None:
        model = opened("Llama")
        part = model.module.get_submodule(name)
        part.__class__ = type(type(part).__name__, (type(part),), {})
        assert layout_of(model) is None

    def test_weights_that_are_no_plain_memory(self) -> None:
        class Wrapped(torch.nn.Parameter):
            pass

        model = opened("Llama")
        layer = model.module.model.layers[0].mlp.gate_proj
        layer.weight = Wrapped(layer.weight.data)
        assert layout_of(model) is None
        model = opened("Llama")
        model.module.model.norm.double()
        assert layout_of(model) is None


def test_without_a_gpu_there_are_none() -> None:
    assert lean_pass(opened("Llama")) is None
