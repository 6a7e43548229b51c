"""Heads in 8 bits: nearly what the network says, and laws and texts as ever."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.decode import decode
from outrider.draft_length import FixedLength
from outrider.drafters import HeadDrafter
from outrider.errors import ModelError, ParameterError
from outrider.heads.opening import open_head
from outrider.models.transformers_model import TransformersModel
from outrider.models.weights.quantized import can_quantize, quantization_of
from tests.helpers.heads import KINDS, Shape, exact_joint, first_draft, sample, small_target, write_head
from tests.helpers.marks import thinned
from tests.helpers.openvino_engine import opened
from tests.helpers.requests import GREEDY, WARM, requests
from tests.helpers.samples import ALARM, SAMPLES, V, p_value_of
from tests.helpers.tiny_models import module
from tests.helpers.toys import SETTINGS

needs_kernels = pytest.mark.skipif(not can_quantize(), reason="this build of torch has no 8-bit kernels")


@needs_kernels
@pytest.mark.parametrize("kind", thinned(KINDS))
def test_quantized_heads_follow_the_targets_law(kind: Shape, tmp_path: Path) -> None:
    target, settings = small_target(), SETTINGS["temperature 1"]
    drafter = HeadDrafter(write_head(tmp_path, kind, V, [0, 2]), step_seconds=0.1, dtype="int8")
    written, rounds = sample(target, drafter, settings, FixedLength(3))
    assert drafter.model.quantized
    assert p_value_of(written, exact_joint(target, settings)) > ALARM
    assert sum(record.drafted for record in rounds) > SAMPLES // 3


@needs_kernels
def test_a_head_is_rounded_beside_any_target_but_those_for_checking(tmp_path: Path, cache: Path) -> None:
    path = write_head(tmp_path, "blockwise")
    exact = TransformersModel(module("Llama", 1, dtype=torch.float64))
    assert not open_head(exact, path).quantized
    assert open_head(exact, path, "int8").quantized
    for dtype, share in ((torch.float32, 0.5), (torch.bfloat16, 0.8)):
        target = TransformersModel(module("Llama", 1, dtype=dtype))
        assert open_head(target, path).quantized
        assert not open_head(target, path, "float").quantized
        assert open_head(target, path).weight_bytes < share * open_head(target, path, "float").weight_bytes
    assert quantization_of(open_head(opened("Llama", "int8")[0], path).network.modules()) == "int8"


@needs_kernels
def test_output_beside_a_quantized_target_is_that_of_plain_decoding(cache: Path, tmp_path: Path) -> None:
    target, _ = opened("Llama", "int8")
    drafter = HeadDrafter(write_head(tmp_path, "layered"), step_seconds=0.1)
    ours, rounds = decode(target, requests(), GREEDY, drafter, FixedLength(3))
    assert drafter.model.quantized
    assert ours == decode(target, requests(), GREEDY)[0]
    assert max(one.drafted for row in rounds for one in row) == 3


@needs_kernels
def test_a_quantized_head_says_nearly_what_the_network_says(tmp_path: Path) -> None:
    path = write_head(tmp_path, "layered", intermediate_size=4096)
    target = TransformersModel(module("Llama", 1, dtype=torch.float32))
    tokens = [5, 6, 7, 8, 9]
    ours, wanted = (first_draft(target, path, tokens, 3, dtype)[2] for dtype in ("int8", "float"))
    assert 0 < float((ours[0] - wanted[0]).abs().sum()) < 0.1  # later ones follow tokens that may differ


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_single_rows_when_sampling_too(kind: Shape, tmp_path: Path) -> None:
    """To the bit: a last bit's difference in the attention would be a step in the quantized layers after it."""
    target = TransformersModel(module("Llama", 1))
    path = write_head(tmp_path, kind, intermediate_size=512)
    drafter = HeadDrafter(path, 0.1, "int8")
    batch, _ = decode(target, requests(), WARM, drafter, FixedLength(3))
    for i, request in enumerate(requests()):
        assert decode(target, [request], WARM, drafter, FixedLength(3))[0][0] == batch[i]


def test_what_a_heads_dtype_may_be_is_said(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="draft head's dtype must be auto, float or int8, got 'int3'"):
        HeadDrafter(write_head(tmp_path, "blockwise"), dtype="int3")


def test_without_kernels_a_head_is_not_rounded(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.heads.opening.can_quantize", lambda: False)
    path = write_head(tmp_path, "blockwise", V)
    with pytest.raises(ModelError, match="can't be quantized to int8 on cpu"):
        open_head(small_target(), path, "int8")
    assert not open_head(opened("Llama", "int8")[0], write_head(tmp_path / "own", "blockwise")).quantized
