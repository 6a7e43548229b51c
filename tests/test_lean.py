"""Lean passes by Triton's interpreter, which runs their kernels on the host: the model's own numbers, in every setting.

On a GPU `captured_trial` compares them anew for each model; here in float32, to rounding.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.models.base import LAST
from outrider.models.lean.layout import layout_of
from outrider.models.lean.run import LeanPass, lean_pass
from outrider.models.pass_graph import run_pass
from outrider.models.tracing import Inputs
from outrider.models.transformers_model import TransformersModel
from tests.tiny_models import module

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
PASSES = ((1, 1, 5), (1, 1, 0), (1, 3, 100), (2, 5, 130), (3, 4, 200), (1, 16, 64))  # rows, tokens, context
NEAR = 5e-4
TRITON = Path(sys.prefix) / "triton"  # where `make test` puts it


def opened(architecture: str, **more: Any) -> TransformersModel:
    made = module(architecture, 3, torch.float32, **{**SIZES, **ARCHITECTURES.get(architecture, {}), **more})
    torch.manual_seed(1)
    for weight in made.parameters():  # norms and biases that are seen
        if weight.dim() == 1:
            weight.data += 0.1 * torch.randn_like(weight)
    return TransformersModel(made, name=architecture)


def off(model: TransformersModel, lean: LeanPass, rows: int, width: int, context: int, columns: int = 256) -> float:
    """By how much logits, states, keys and values of a pass differ at most. The rows are of other lengths each; of four
    tokens or more the last one stands in the place of the second.
    """
    sequences = [model.open(400) for _ in range(rows)]
    draw = torch.Generator().manual_seed(context)
    for number, sequence in enumerate(sequences):
        count = max(0, context - 7 * number)
        if count:
            model.score([sequence], torch.randint(V, (1, count), generator=draw), [count], "none")
    at = torch.tensor([[sequence.length] for sequence in sequences]) + torch.arange(width)
    tokens, positions = torch.randint(V, (rows, width), generator=draw), at.clone()
    if width >= 4:
        positions[:, -1] = positions[:, 1]
    ours, theirs = ([each.clone() for each in model.cache_rows(slice(0, rows))] for _ in range(2))
    found = lean.run(tokens, positions, at, columns, ours, (1, LAST))
    wanted = run_pass(model, (1, LAST), True, Inputs(columns, [tokens, positions, at], theirs, {}))
    for sequence in sequences:
        sequence.close()
    pairs = list(zip((*found, *ours), (*wanted, *theirs), strict=True))
    assert all(a.shape == b.shape for a, b in pairs)
    return max(float((a - b).abs().max()) for a, b in pairs)


def try_all() -> None:
    """In a process of its own: whether kernels are interpreted is decided when they are defined."""
    found: dict[str, float] = {}
    with torch.inference_mode():
        for architecture in ARCHITECTURES:
            model = opened(architecture)
            layout = layout_of(model)
            assert layout is not None
            lean = LeanPass(layout, 4)
            for rows, width, context in PASSES:
                found[f"{architecture} {rows} × {width} after {context}"] = off(model, lean, rows, width, context)
        # Columns that are read in larger chunks, and one more token of a row than is left of a chunk.
        found["more columns"] = off(model, lean, 1, 2, 255, columns=512)
        # A kernel that forgets something is told apart: positions that are one off.
        lean._layout.cos.copy_(lean._layout.cos.roll(1, 0))
        found["broken"] = off(model, lean, 1, 3, 100)
    print(json.dumps(found))


@pytest.fixture(scope="module")
def differences() -> dict[str, float]:
    if find_spec("triton") is None and not TRITON.exists():
        pytest.skip("Triton is not installed: `make test` does that on Linux")
    paths = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(TRITON)]).strip(os.pathsep)
    threads = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    run = subprocess.run(
        [sys.executable, "-c", "from tests.test_lean import try_all; try_all()"],
        env={**os.environ, **threads}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    return dict(json.loads(run.stdout.splitlines()[-1]))


def test_they_give_the_models_logits_states_keys_and_values(differences: dict[str, float]) -> None:
    assert differences.pop("broken") > 20 * NEAR
    assert len(differences) == len(ARCHITECTURES) * len(PASSES) + 1
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


def test_without_a_gpu_there_are_none() -> None:
    assert lean_pass(opened("Llama")) is None
