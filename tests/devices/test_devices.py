"""What holds on a CPU holds on a GPU: the same tests on each device that is there, with the engine's own models and drafts.

Without a GPU those for it are skipped; that they can fail shows on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

import outrider
from outrider.costs import Costs
from outrider.decode import Request, decode
from outrider.draft_length import AdaptiveLength, DraftLength, FixedLength
from outrider.drafters import Drafter, EarlyExitDrafter, ModelDrafter, PromptLookupDrafter
from outrider.drafters.head import HeadDrafter
from outrider.models.transformers_model import TransformersModel
from outrider.randomness import RandomStream
from tests.helpers.heads import exact_joint, small_target, write_head
from tests.helpers.marks import thinned
from tests.helpers.samples import ALARM, SAMPLES, V, p_value_of
from tests.helpers.tiny_models import module
from tests.helpers.toys import PROMPT, SETTINGS

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
COSTS = Costs({1: 1.0, 2: 1.1, 5: 1.4})
LENGTHS: dict[str, DraftLength] = {"fixed": FixedLength(3), "adaptive": AdaptiveLength(COSTS, longest=4)}


@cache
def model(device: str, seed: int) -> TransformersModel:
    """A model of three tokens, whose law can be enumerated; seed 4 is the target of `small_target`."""
    return TransformersModel(module("Llama", seed, vocab_size=V).to(device), name=f"three-{seed}")


def head(folder: Path) -> HeadDrafter:
    return HeadDrafter(write_head(folder, "autoregressive", V), step_seconds=0.05)


DRAFTERS: dict[str, Callable[[str, Path], Drafter]] = {
    "model": lambda device, _: ModelDrafter(model(device, 5), step_seconds=0.1),
    "prompt lookup": lambda _device, _folder: PromptLookupDrafter(),
    "early exit": lambda _device, _folder: EarlyExitDrafter(1),
    "head": lambda _device, folder: head(folder),
}


def write(device: str, drafter: Drafter | None, setting: str, length: DraftLength, rows: int) -> list[list[int]]:
    requests = [Request(PROMPT, 4, RandomStream(0, i)) for i in range(rows)]
    return decode(model(device, 4), requests, SETTINGS[setting], drafter, length)[0]


@pytest.mark.parametrize(("name", "length"), thinned(DRAFTERS, LENGTHS))
@pytest.mark.parametrize("device", DEVICES)
def test_the_law_is_the_targets(device: str, name: str, length: str, tmp_path: Path) -> None:
    written = write(device, DRAFTERS[name](device, tmp_path), "temperature 1", LENGTHS[length], SAMPLES // 3)
    joint = exact_joint(small_target(), SETTINGS["temperature 1"])
    assert p_value_of(written, joint) > ALARM
    elsewhere = exact_joint(model("cpu", 5), SETTINGS["temperature 1"])
    assert p_value_of(written, elsewhere) < ALARM  # the draft's law is told apart from it


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("device", DEVICES)
def test_greedy_tokens_are_those_of_plain_decoding(device: str, name: str, tmp_path: Path) -> None:
    plain = write(device, None, "greedy", FixedLength(0), 2)
    assert write(device, DRAFTERS[name](device, tmp_path), "greedy", FixedLength(3), 2) == plain
    assert plain == write("cpu", None, "greedy", FixedLength(0), 2)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_loaded_model_writes_the_same_text_with_a_draft(
    device: str, compiled: bool, target_folder: Path, draft_folder: Path
) -> None:
    """On a GPU, compiled passes are CUDA graphs."""
    if compiled and device == "cpu":
        pytest.skip("compiled for minutes; test_compiled has it")
    target, draft = (
        outrider.load(folder, dtype="float32", device=device, compile=compiled) for folder in (target_folder, draft_folder)
    )
    prompt = target.tokenizer.encode("the quick brown")
    texts = [
        outrider.generate(target, prompt, draft=one, max_new_tokens=24, ignore_eos=True).tokens
        for one in (None, draft, "prompt-lookup")
    ]
    assert texts[0] == texts[1] == texts[2]
    assert len(texts[0]) == 24
