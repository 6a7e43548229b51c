"""What can be known of a GPU without one: devices are not mixed, a round waits once, texts are those of the host.

Captured passes: `test_captured`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import outrider
from outrider.costs import Costs
from outrider.decode import Request, decode
from outrider.draft_length import AdaptiveLength, FixedLength
from outrider.drafters import (
    ChoiceDrafter,
    Drafter,
    EarlyExitDrafter,
    HeadDrafter,
    IntersectionDrafter,
    ModelDrafter,
    PromptLookupDrafter,
    RandomDrafter,
    SpeculativeDrafter,
    TextDrafter,
)
from outrider.models.encoder_decoder import EncoderDecoderModel
from outrider.models.transformers_model import TransformersModel
from outrider.randomness import RandomStream
from outrider.round import Extras
from outrider.sampling import SamplingSettings
from outrider.support.device_data import moved
from tests.helpers.device_texts import PROMPTS, SETTINGS, flat, given, opened, write
from tests.helpers.folders import make_tokenizer
from tests.helpers.heads import write_head
from tests.helpers.marks import slow, thinned
from tests.helpers.published_heads import CHECKPOINTS
from tests.helpers.real_gpu import GPU
from tests.helpers.simulated_gpu import SimulatedGPU
from tests.helpers.tiny_models import VOCABULARY, module

DRAFTS: dict[str, Callable[[Path, str], Drafter | None]] = {
    "none": lambda *_: None,
    "model": given,
    "prompt lookup": lambda *_: PromptLookupDrafter(),
    "early exit": lambda *_: EarlyExitDrafter(1),
    "random": lambda *_: RandomDrafter(),
    "several": lambda folder, device: ChoiceDrafter([PromptLookupDrafter(), given(folder, device)]),
}
ELSEWHERE: dict[str, Callable[[Path, Path, str], Drafter]] = {
    "model": lambda draft, _, device: given(draft, device),
    "another tokenizer": lambda _, foreign, device: IntersectionDrafter(opened(foreign, device), step_seconds=0.01),
    "another tokenizer's text": lambda _, foreign, device: TextDrafter(opened(foreign, device), step_seconds=0.01),
    "accelerated": lambda draft, _, device: SpeculativeDrafter(
        opened(draft, device), PromptLookupDrafter(), FixedLength(2), step_seconds=0.01
    ),
}


WAITING: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda a: a[1].item(),
    "bool": lambda a: bool((a > 1).any()),
    "if": lambda a: 1 if a[0] else 2,
    "float": lambda a: float(a[1]),
    "int": lambda a: int(a[1]),
    "tolist": lambda a: a.tolist(),
    "cpu": lambda a: a.cpu(),
    "to": lambda a: a.to("cpu"),
    "to, without waiting": lambda a: a.to("cpu", non_blocking=True),
    "from": lambda a: torch.ones(3).to("cuda"),
    "tensor": lambda a: torch.tensor([1.0], device="cuda"),
    "copied there": lambda a: a.copy_(torch.ones(3)),
    "copied here": lambda a: torch.ones(3).copy_(a),
    "one number copied here": lambda a: torch.ones(()).copy_(a[0]),
    "nonzero": lambda a: a.nonzero(),
    "where": lambda a: torch.where(a > 1),
    "mask": lambda a: a[a > 1],
    "written by a mask": lambda a: a.__setitem__(a > 1, 0.0),
    "masked_select": lambda a: a.masked_select(a > 1),
    "equal": lambda a: torch.equal(a, a + 1),
    "allclose": lambda a: torch.allclose(a, a + 1),
    "unique": torch.ops.aten.unique_consecutive,
    "repeated": lambda a: a.repeat_interleave(a.long()),
    "indices of the host": lambda a: a[torch.tensor([0])],
    "synchronize": lambda a: torch.cuda.synchronize(),
    "stream": lambda a: torch.cuda.current_stream().synchronize(),
}


class TestItself:
    """The simulation notices what a GPU would."""

    def test_numbers_are_computed_and_views_are_views(self, simulated: SimulatedGPU) -> None:
        a = torch.arange(5, device="cuda")
        a[1:3] = 7
        a.add_(1)
        assert a.device == torch.device("cuda", 0)
        assert a.is_cuda
        assert torch.cat([a, a[:1]]).tolist() == [1, 8, 8, 4, 5, 1]
        assert simulated.waits == ["read back"]

    def test_devices_are_not_mixed(self, simulated: SimulatedGPU) -> None:
        with pytest.raises(RuntimeError, match="same device"):
            torch.arange(3, device="cuda") + torch.arange(3)
        with pytest.raises(TypeError, match="device type"):
            torch.arange(3, device="cuda").numpy()
        assert not simulated.waits

    def test_what_waits_is_counted(self, simulated: SimulatedGPU) -> None:
        there = torch.tensor([1, 2, 3]).to("cuda")
        pinned = torch.tensor([0, 2]).pin_memory().to("cuda", non_blocking=True)
        assert simulated.waits == ["copy from pageable memory"]
        assert there[pinned].sum().item() == 4
        assert there[there > 1].tolist() == [2, 3]
        assert simulated.waits[1:] == ["aten::_local_scalar_dense", "aten::index", "read back"]

    @pytest.mark.parametrize("name", WAITING)
    def test_each_way_to_read_back_is_counted(self, name: str, simulated: SimulatedGPU) -> None:
        a = torch.arange(3, device="cuda").float()
        WAITING[name](a)
        assert len(simulated.waits) == 1


@pytest.mark.parametrize("setting", [slow("bias"), "all"])
@pytest.mark.parametrize("name", thinned(DRAFTS))
def test_a_round_waits_once_for_the_device(
    name: str, setting: str, gpu: GPU, target_folder: Path, draft_folder: Path
) -> None:
    make = DRAFTS[name]
    wanted, _ = write(opened(target_folder, "cpu"), make(draft_folder, "cpu"), setting)
    target, draft = opened(target_folder, "cuda"), make(draft_folder, "cuda")
    write(target, draft, count=2)  # what is tried when it is first used
    gpu.waits.clear()
    found, rounds = write(target, draft, setting)
    assert found == wanted
    assert gpu.waits == ["read back"] * max(map(len, rounds))


@pytest.mark.parametrize("architecture", ["Lfm2", slow("Qwen3_5"), slow("Mamba2")])
def test_states_of_recurrent_layers_stay_there(architecture: str, gpu: GPU, tmp_path: Path) -> None:
    """Nobody waits for them, nor for the tokens that may have to be scored again."""
    saved = module(architecture, dtype=torch.float32)
    saved.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    texts = {}
    for device in ("cpu", "cuda"):
        target = opened(tmp_path, device)
        drafter = ModelDrafter(target, SamplingSettings(temperature=3.0), step_seconds=0.01)
        write(target, drafter, count=2)
        gpu.waits.clear()
        texts[device], rounds = write(target, drafter)
    assert texts["cuda"] == texts["cpu"]
    assert gpu.waits == ["read back"] * max(map(len, rounds))


@pytest.mark.parametrize("setting", [slow("greedy"), "all"])
def test_what_is_reported_needs_no_further_wait(setting: str, gpu: GPU, target_folder: Path, draft_folder: Path) -> None:
    reported = Extras(logprobs=True, betas=True, drafts=True)
    found = {}
    for device in ("cpu", "cuda"):
        target, draft = opened(target_folder, device), given(draft_folder, device)
        write(target, draft, count=2)
        gpu.waits.clear()
        found[device], rounds = write(target, draft, setting, extras=reported)
        if device == "cuda":
            assert gpu.waits == ["read back"] * max(map(len, rounds))
    assert found["cuda"] == found["cpu"]


def test_lenience_needs_no_further_wait(gpu: GPU, target_folder: Path, draft_folder: Path) -> None:
    target, draft = opened(target_folder, "cuda"), given(draft_folder, "cuda")
    write(target, draft, count=2)
    gpu.waits.clear()
    found, rounds = write(target, draft, "temperature 1", lenience=0.3)
    assert gpu.waits == ["read back"] * max(map(len, rounds))
    assert found == write(opened(target_folder, "cpu"), given(draft_folder, "cpu"), "temperature 1", lenience=0.3)[0]


@pytest.mark.parametrize("setting", ["temperature 1", slow("all")])
def test_what_is_decided_by_position_needs_no_further_wait(
    setting: str, gpu: GPU, target_folder: Path, draft_folder: Path
) -> None:
    wanted, _ = write(opened(target_folder, "cpu"), None, setting, by_position=True)
    target = opened(target_folder, "cuda")
    for draft in (None, given(draft_folder, "cuda"), RandomDrafter()):
        write(target, draft, setting, count=2, by_position=True)
        gpu.waits.clear()
        found, rounds = write(target, draft, setting, by_position=True, extras=Extras(betas=True))
        assert found == wanted
        assert gpu.waits == ["read back"] * max(map(len, rounds))


@pytest.mark.parametrize("device", ["cpu", slow("cuda")])
@pytest.mark.parametrize("name", thinned(ELSEWHERE))
def test_a_draft_may_run_elsewhere(
    name: str, device: str, gpu: GPU, target_folder: Path, draft_folder: Path, foreign_folder: Path
) -> None:
    """On the host beside a target on the GPU, as all of llama.cpp and OpenVINO, and the other way round."""
    make, other = ELSEWHERE[name], {"cpu": "cuda", "cuda": "cpu"}[device]
    found, rounds = write(opened(target_folder, device), make(draft_folder, foreign_folder, other), "all")
    wanted, _ = write(opened(target_folder, "cpu"), make(draft_folder, foreign_folder, "cpu"), "all")
    assert found == wanted
    assert any(record.drafted for row in rounds for record in row)


def test_alternatives_are_scored_there(gpu: GPU, target_folder: Path) -> None:
    texts, options = {}, dict[str, Any](setting="temperature 1", alternatives=3)
    for device in ("cpu", "cuda"):
        texts[device], rounds = write(opened(target_folder, device), flat(target_folder, device), **options)
        assert any(record.taken for row in rounds for record in row)
    assert texts["cuda"] == texts["cpu"]


@pytest.mark.parametrize("kind", ["autoregressive", "blockwise"])
def test_a_head_drafts_there(kind: Any, gpu: GPU, tmp_path: Path) -> None:
    folder = write_head(tmp_path, kind, VOCABULARY)
    texts = {}
    for device in ("cpu", "cuda"):
        target, draft = TransformersModel(module("Llama", 4).to(device)), HeadDrafter(folder, step_seconds=0.01)
        write(target, draft, count=2)
        gpu.waits.clear()
        texts[device], rounds = write(target, draft, "temperature 1")
    assert gpu.waits == ["read back"] * max(map(len, rounds))
    assert texts["cuda"] == texts["cpu"]


@pytest.mark.parametrize("captured", [False, slow(True)])
@pytest.mark.parametrize("what", thinned(CHECKPOINTS))
def test_a_published_head_drafts_there(what: str, captured: bool, gpu: GPU, tmp_path: Path) -> None:
    made, name = CHECKPOINTS[what]
    folder = made(VOCABULARY).write(tmp_path, name)
    texts = {}
    for device in ("cpu", "cuda"):
        target = TransformersModel(module("Llama", 4, num_hidden_layers=6).to(device))
        if captured:
            target.record()
        draft = HeadDrafter(folder, step_seconds=0.01)
        write(target, draft, count=2)
        gpu.waits.clear()
        texts[device], rounds = write(target, draft, "temperature 1")
    assert captured or gpu.waits == ["read back"] * max(map(len, rounds))
    assert texts["cuda"] == texts["cpu"]


def test_a_head_that_costs_something_is_not_asked_after_each_token(gpu: GPU, tmp_path: Path) -> None:
    """Asking how sure it is would wait for the device each time."""
    target, draft = (
        TransformersModel(module("Llama", 4).to("cuda")),
        HeadDrafter(write_head(tmp_path, "autoregressive", VOCABULARY), step_seconds=0.01),
    )
    requests = [Request(PROMPTS[0], 12, RandomStream(0))]
    length = AdaptiveLength(Costs({1: 1.0, 5: 1.1}), longest=3)
    decode(target, requests, SETTINGS["greedy"], draft, length)
    gpu.waits.clear()
    _, (rounds,) = decode(target, requests, SETTINGS["greedy"], draft, length)
    assert any(record.drafted > 1 for record in rounds)
    assert gpu.waits == ["read back"] * len(rounds)


@pytest.mark.parametrize("architecture", ["T5", slow("Bart")])
def test_an_encoder_decoder_runs_there(architecture: str, gpu: GPU) -> None:
    texts = []
    for device in ("cpu", "cuda"):
        target, draft = (EncoderDecoderModel(module(architecture, seed).to(device)) for seed in (0, 1))
        requests = [Request([0], 10, RandomStream(0, row), source=prompt) for row, prompt in enumerate(PROMPTS)]
        drafter = ModelDrafter(draft, step_seconds=0.01)
        texts.append(decode(target, requests, SETTINGS["temperature 1"], drafter, FixedLength(3))[0])
        assert device == "cpu" or target.recorded is None
    assert texts[0] == texts[1]


def test_beams_are_searched_there(gpu: GPU, target_folder: Path, draft_folder: Path) -> None:
    options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 10, "num_draft_tokens": 3}
    found = [
        outrider.beam_search(opened(target_folder, device), PROMPTS[0], draft=opened(draft_folder, device), **options)
        for device in ("cpu", "cuda")
    ]
    assert [one.tokens for one in found[0].sequences] == [one.tokens for one in found[1].sequences]


def test_moved(gpu: GPU) -> None:
    held = torch.ones(2)
    assert moved(held, held.device) is held
    there = moved(held, torch.device("cuda", 0))
    assert there.is_cuda
    assert not gpu.waits
    assert moved(there, torch.device("cpu")).tolist() == [1.0, 1.0]
