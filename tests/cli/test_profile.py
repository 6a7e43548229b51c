"""Where the time went: the phases add up, and the bytes of a pass are those of the weights it multiplies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.bench.profile import memory_bandwidth
from outrider.cli.main import run
from outrider.models.openvino.convert import converted
from outrider.models.openvino.engine import OpenVinoModel
from outrider.models.transformers_model import TransformersModel
from outrider.models.weights.packed_linear import pack_linears
from outrider.models.weights.quantized import can_quantize, quantize_to_int8
from tests.helpers.tiny_models import module


def multiplied(model: Any) -> int:
    """Weights without the table of embeddings, which is counted if it is the head, too."""
    table = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is table
    return int(sum(p.numel() for p in model.parameters())) - (0 if tied else int(table.numel()))


@pytest.mark.parametrize("tied", [False, True])
def test_a_pass_reads_all_weights_but_the_table_of_embeddings(tied: bool) -> None:
    made = module("Llama", dtype=torch.float32, tie_word_embeddings=tied)
    wanted = multiplied(made)
    assert TransformersModel(made).weight_bytes == 4 * wanted
    pack_linears(made)
    assert TransformersModel(made).weight_bytes == 4 * wanted


@pytest.mark.skipif(not can_quantize(), reason="this processor's 8-bit kernel saturates")
def test_quantized_weights_count_a_byte_each() -> None:
    made = module("Llama", dtype=torch.float32)
    linear = sum(layer.weight.numel() for layer in made.modules() if isinstance(layer, torch.nn.Linear))
    rest = multiplied(made) - linear
    quantize_to_int8(made)
    assert TransformersModel(made).weight_bytes == linear + 4 * rest


@pytest.mark.parametrize("tied", [False, True])
def test_a_converted_model_reads_as_much(tied: bool, cache: Path) -> None:
    made = module("Llama", dtype=torch.float32, tie_word_embeddings=tied)
    model = OpenVinoModel(converted(lambda: (made, None), f"profile {tied}", "Llama", "float32"))
    assert model.weight_bytes == pytest.approx(4 * multiplied(made), rel=0.05)


def test_the_command_reports_phases_and_bandwidths(
    target_folder: Path, draft_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["generate", "the quick", "--target", str(target_folder), "--draft", str(draft_folder), "--dtype", "float32"]
    options += ["--num-draft-tokens", "3", "--max-new-tokens", "16", "--ignore-eos", "--profile"]
    assert run([*options, "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    found, stats = got["profile"], got["stats"]
    phases = found["seconds_per_round"]
    assert set(phases) == {"draft", "verify", "sampling", "other"}
    decoding = stats["seconds"]["total"] - stats["seconds"]["prefill"]
    assert sum(phases.values()) * stats["rounds"] == pytest.approx(decoding)
    target, draft = found["readings"]
    assert (target["passes"], draft["passes"]) == (stats["rounds"], stats["drafted"])
    assert target["bytes_per_second"] == pytest.approx(target["weight_bytes"] * stats["rounds"] / stats["seconds"]["verify"])
    assert run(options) == 0
    shown = capsys.readouterr().err
    assert "GB of weights" in shown
    assert "sampling" in shown


def test_of_several_drafters_each_model_is_reported(
    target_folder: Path, draft_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["generate", "the quick brown the quick", "--target", str(target_folder), "--dtype", "float32", "--ignore-eos"]
    options += ["--num-draft-tokens", "3", "--max-new-tokens", "24", "--profile", "--json"]
    assert run([*options, "--draft", str(draft_folder), "--draft", "prompt-lookup"]) == 0
    got = json.loads(capsys.readouterr().out)
    _, draft = got["profile"]["readings"]
    assert 0 < draft["passes"] <= got["stats"]["drafted"]
    assert draft["weight_bytes"] > 0


def test_profile_and_compare_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "x", "--profile", "--compare"]) == 2
    assert "exclude each other" in capsys.readouterr().err


def test_the_memory_is_measured() -> None:
    assert memory_bandwidth(torch.device("cpu")) > 1e8
