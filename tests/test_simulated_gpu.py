"""What can be known of a GPU without one: devices are not mixed, a round waits once, graphs replay what was captured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import outrider
from outrider.costs import Costs
from outrider.decode import Request, decode
from outrider.device_data import moved
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
from outrider.models.captured import MOST_GRAPHS, MOST_ROWS, CapturedPasses, Graphs, captured_pass, columns_captured
from outrider.models.encoder_decoder import EncoderDecoderModel
from outrider.models.loading import load_transformers
from outrider.models.transformers_model import TransformersModel
from outrider.randomness import RandomStream
from outrider.records import Round
from outrider.round import Extras
from outrider.sampling import SamplingSettings
from tests.simulated_gpu import SimulatedGPU, simulated_gpu
from tests.test_heads import write_head
from tests.tiny_models import VOCABULARY, module
from tests.toys import SETTINGS as LAWS

PROMPTS = [[5, 6, 7, 5, 6], [9, 10, 11, 9, 10, 11, 9], [4]]
SETTINGS = {name: LAWS[name] for name in ("greedy", "temperature 1", "bias", "all")}
Written = tuple[list[list[int]], list[list[Round]]]


@pytest.fixture(scope="module")
def machine(target_folder: Path) -> Iterator[SimulatedGPU]:
    load_transformers(target_folder, dtype="float32")  # what transformers makes when it is first used is no pretence
    with simulated_gpu() as made:
        yield made
    opened.cache_clear()


@pytest.fixture
def gpu(machine: SimulatedGPU) -> SimulatedGPU:
    machine.waits.clear()
    return machine


@cache
def opened(folder: Path, device: str, captured: bool = False) -> Any:
    return outrider.load(folder, dtype="float32", device=device, pack=captured)


def write(
    target: Any, drafter: Drafter | None, setting: str = "greedy", prompts: Any = PROMPTS, count: int = 12, **options: Any
) -> Written:
    """With a fixed length and given costs, since measuring them takes hundreds of passes."""
    requests = [Request(prompt, count, RandomStream(0, row)) for row, prompt in enumerate(prompts)]
    return decode(target, requests, SETTINGS[setting], drafter, FixedLength(3), **options)


class TestItself:
    """The simulation notices what a GPU would."""

    def test_numbers_are_computed_and_views_are_views(self, gpu: SimulatedGPU) -> None:
        a = torch.arange(5, device="cuda")
        a[1:3] = 7
        a.add_(1)
        assert a.device == torch.device("cuda", 0)
        assert a.is_cuda
        assert torch.cat([a, a[:1]]).tolist() == [1, 8, 8, 4, 5, 1]
        assert gpu.waits == ["read back"]

    def test_devices_are_not_mixed(self, gpu: SimulatedGPU) -> None:
        with pytest.raises(RuntimeError, match="same device"):
            torch.arange(3, device="cuda") + torch.arange(3)
        with pytest.raises(TypeError, match="device type"):
            torch.arange(3, device="cuda").numpy()
        assert not gpu.waits

    def test_what_waits_is_counted(self, gpu: SimulatedGPU) -> None:
        there = torch.tensor([1, 2, 3]).to("cuda")
        pinned = torch.tensor([0, 2]).pin_memory().to("cuda", non_blocking=True)
        assert gpu.waits == ["copy from pageable memory"]
        assert there[pinned].sum().item() == 4
        assert there[there > 1].tolist() == [2, 3]
        assert gpu.waits[1:] == ["aten::_local_scalar_dense", "aten::index", "read back"]

    def test_a_graph_does_not_wait(self, gpu: SimulatedGPU) -> None:
        graphs = Graphs(lambda columns, about, memory: (about[0] * columns + int(memory[0].sum()),))
        with pytest.raises(RuntimeError, match="capturing"):
            graphs(2, [torch.ones(2, device="cuda")], [torch.ones(1, device="cuda")])
        assert gpu.graph is None


class TestGraphs:
    def test_a_replay_computes_anew_and_writes_into_the_memory(self, gpu: SimulatedGPU) -> None:
        calls = []

        def run(columns: int, about: Any, memory: Any) -> tuple[torch.Tensor, ...]:
            calls.append(columns)
            memory[0].index_copy_(0, about[1], about[0])
            return (memory[0][:columns].sum(0, keepdim=True) * 2,)

        graphs, memory = Graphs(run), torch.zeros(6, device="cuda")
        for at, value in ((0, 1.0), (1, 5.0), (2, 7.0), (0, 2.0)):
            given = [torch.tensor([value], device="cuda"), torch.tensor([at], device="cuda")]
            (out,) = graphs(4, given, [memory])
        assert out.tolist() == [28.0]
        assert memory.tolist() == [2.0, 5.0, 7.0, 0.0, 0.0, 0.0]
        assert len(calls) == 4  # three to warm up and the one that is captured
        graphs(3, given, [memory])
        graphs(3, given, [torch.zeros(6, device="cuda")])
        assert len(calls) == 12

    def test_few_are_kept(self, gpu: SimulatedGPU) -> None:
        calls = []

        def run(columns: int, about: Any, memory: Any) -> tuple[torch.Tensor, ...]:
            del memory
            calls.append(columns)
            return (about[0] + columns,)

        graphs, given, memory = Graphs(run), [torch.ones(1, device="cuda")], [torch.ones(1, device="cuda")]
        for columns in [*range(MOST_GRAPHS), 0, MOST_GRAPHS, 0]:
            assert graphs(columns, given, memory)[0].tolist() == [1 + columns]
        assert len(calls) == 4 * (MOST_GRAPHS + 1)  # the one that was used last is still there
        assert graphs(1, given, memory)[0].tolist() == [2]
        assert len(calls) == 4 * (MOST_GRAPHS + 2)  # the one that was not, is not

    def test_a_compiled_pass_is_told_the_capacity(self, gpu: SimulatedGPU) -> None:
        def run(columns: int, capacity: int, ids: Any, at: Any, *read: Any) -> tuple[torch.Tensor, ...]:
            return ids + at, read[0][:, :, :columns].sum() * capacity

        keys = torch.ones(1, 2, 8, 4, device="cuda")
        one, two = (torch.tensor([[n]], device="cuda") for n in (1, 2))
        out = captured_pass(run)(4, 8, one, two, keys)
        assert [each.tolist() for each in out] == [[[3]], 32 * 8]

    @pytest.mark.parametrize("longest", [1, 255, 256, 257, 1024, 1025, 2049, 5000, 100_000])
    def test_columns(self, longest: int) -> None:
        found = columns_captured(longest)
        assert longest <= found <= longest + max(255, longest / 4)
        assert found % 32 == 0


def given(folder: Path, device: str) -> ModelDrafter:
    return ModelDrafter(opened(folder, device), step_seconds=0.01)


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


@pytest.mark.parametrize("setting", ["greedy", "bias", "all"])
@pytest.mark.parametrize("name", DRAFTS)
def test_a_round_waits_once_for_the_device(
    name: str, setting: str, gpu: SimulatedGPU, target_folder: Path, draft_folder: Path
) -> None:
    make = DRAFTS[name]
    wanted, _ = write(opened(target_folder, "cpu"), make(draft_folder, "cpu"), setting)
    target, draft = opened(target_folder, "cuda"), make(draft_folder, "cuda")
    write(target, draft, count=2)  # what is tried when it is first used
    gpu.waits.clear()
    found, rounds = write(target, draft, setting)
    assert found == wanted
    assert gpu.waits == ["read back"] * max(map(len, rounds))


@pytest.mark.parametrize("setting", ["greedy", "all"])
def test_what_is_reported_needs_no_further_wait(
    setting: str, gpu: SimulatedGPU, target_folder: Path, draft_folder: Path
) -> None:
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


def test_lenience_needs_no_further_wait(gpu: SimulatedGPU, target_folder: Path, draft_folder: Path) -> None:
    target, draft = opened(target_folder, "cuda"), given(draft_folder, "cuda")
    write(target, draft, count=2)
    gpu.waits.clear()
    found, rounds = write(target, draft, "temperature 1", lenience=0.3)
    assert gpu.waits == ["read back"] * max(map(len, rounds))
    assert found == write(opened(target_folder, "cpu"), given(draft_folder, "cpu"), "temperature 1", lenience=0.3)[0]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_draft_may_run_elsewhere(
    name: str, device: str, gpu: SimulatedGPU, target_folder: Path, draft_folder: Path, foreign_folder: Path
) -> None:
    """On the host beside a target on the GPU, as all of llama.cpp and OpenVINO, and the other way round."""
    make, other = ELSEWHERE[name], {"cpu": "cuda", "cuda": "cpu"}[device]
    found, rounds = write(opened(target_folder, device), make(draft_folder, foreign_folder, other), "all")
    wanted, _ = write(opened(target_folder, "cpu"), make(draft_folder, foreign_folder, "cpu"), "all")
    assert found == wanted
    assert any(record.drafted for row in rounds for record in row)


def flat(folder: Path, device: str) -> ModelDrafter:
    """The target itself, but undecided: what it drafts is often rejected, what it holds likely comes."""
    return ModelDrafter(opened(folder, device), SamplingSettings(temperature=3.0), step_seconds=0.01)


def test_alternatives_are_scored_there(gpu: SimulatedGPU, target_folder: Path) -> None:
    texts, options = {}, dict[str, Any](setting="temperature 1", alternatives=3)
    for device in ("cpu", "cuda"):
        texts[device], rounds = write(opened(target_folder, device), flat(target_folder, device), **options)
        assert any(record.taken for row in rounds for record in row)
    assert texts["cuda"] == texts["cpu"]


@pytest.mark.parametrize("kind", ["autoregressive", "blockwise"])
def test_a_head_drafts_there(kind: Any, gpu: SimulatedGPU, tmp_path: Path) -> None:
    folder = write_head(tmp_path, kind, VOCABULARY)
    texts = {}
    for device in ("cpu", "cuda"):
        target, draft = TransformersModel(module("Llama", 4).to(device)), HeadDrafter(folder, step_seconds=0.01)
        write(target, draft, count=2)
        gpu.waits.clear()
        texts[device], rounds = write(target, draft, "temperature 1")
    assert gpu.waits == ["read back"] * max(map(len, rounds))
    assert texts["cuda"] == texts["cpu"]


def test_a_head_that_costs_something_is_not_asked_after_each_token(gpu: SimulatedGPU, tmp_path: Path) -> None:
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


class TestCapturedPasses:
    def test_they_write_what_ordinary_passes_write(self, gpu: SimulatedGPU, target_folder: Path, draft_folder: Path) -> None:
        wanted, _ = write(opened(target_folder, "cpu"), given(draft_folder, "cpu"), "temperature 1")
        target, draft = (opened(folder, "cuda", captured=True) for folder in (target_folder, draft_folder))
        for _ in range(2):
            gpu.waits.clear()
            found, rounds = write(target, ModelDrafter(draft, step_seconds=0.01), "temperature 1")
            assert found == wanted
        assert gpu.waits == ["read back"] * max(map(len, rounds))  # once they are captured
        assert isinstance(target.recorded, CapturedPasses)
        assert target.recorded._graphs._held
        assert draft.recorded._graphs._held

    def test_alternatives_are_captured(self, gpu: SimulatedGPU, target_folder: Path) -> None:
        options: dict[str, Any] = {"setting": "temperature 1", "alternatives": 3}
        wanted, _ = write(opened(target_folder, "cpu"), flat(target_folder, "cpu"), **options)
        found, rounds = write(opened(target_folder, "cuda", captured=True), flat(target_folder, "cuda"), **options)
        assert found == wanted
        assert any(record.taken for row in rounds for record in row)

    def test_heads_read_the_states_of_captured_passes(self, gpu: SimulatedGPU, tmp_path: Path) -> None:
        texts = []
        for captured in (False, True):
            target = TransformersModel(module("Llama", 4).to("cuda"))
            if captured:
                target.record()
            head = HeadDrafter(write_head(tmp_path, "autoregressive", VOCABULARY), step_seconds=0.01)
            texts.append(write(target, head, "temperature 1", PROMPTS[:1])[0])
            assert isinstance(target.recorded, CapturedPasses) == captured
        assert texts[0] == texts[1]

    def test_a_cache_that_grows_is_captured_anew(self, gpu: SimulatedGPU) -> None:
        """Graphs hold addresses: what was given back must not be read or written any more."""
        texts = []
        for captured in (False, True):
            target = TransformersModel(module("Llama", 4, max_position_embeddings=600).to("cuda"))
            if captured:
                target.record()
            texts.append(write(target, None, "temperature 1", [list(range(3, 43)) * 6], 24)[0])
        assert texts[0] == texts[1]
        assert isinstance(target.recorded, CapturedPasses)
        assert len(target.recorded._graphs._held) == 2

    def test_more_rows_than_that_run_without(self, gpu: SimulatedGPU, target_folder: Path) -> None:
        target = opened(target_folder, "cuda", captured=True)
        assert target.recorded.of(MOST_ROWS) is not None
        assert target.recorded.of(MOST_ROWS + 1) is None
        assert write(target, None, prompts=PROMPTS * 4, count=4)[0] == write(target, None, count=4)[0] * 4

    def test_a_model_that_waits_in_its_passes_runs_without(
        self, gpu: SimulatedGPU, target_folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        wanted, _ = write(opened(target_folder, "cpu"), None)
        target = load_transformers(target_folder, dtype="float32", device="cuda")
        kind = type(target.module.model.norm)
        ordinary = kind.forward

        def reads_back(self: Any, states: Any) -> Any:
            assert bool(states.isfinite().all())
            return ordinary(self, states)

        with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
            patch.setattr(kind, "forward", reads_back)
            target.record()
            assert write(target, None)[0] == wanted
            assert target.recorded is None
        assert "can't be captured" in caplog.text

    def test_passes_that_give_other_logits_are_not_used(
        self, gpu: SimulatedGPU, target_folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """As if a graph had kept a number of the pass that was captured."""
        target = load_transformers(target_folder, dtype="float32", device="cuda")
        target.record()
        with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
            patch.setattr("tests.simulated_gpu.Graph.replay", lambda graph: None)
            assert target.recorded is None
        assert "give other logits" in caplog.text

    def test_replaced_weights_are_captured_anew(self, gpu: SimulatedGPU, target_folder: Path, draft_folder: Path) -> None:
        target: Any = outrider.load(target_folder, dtype="float32", device="cuda")
        write(target, None, count=4)
        before = target.recorded
        target.module.lm_head.weight = opened(draft_folder, "cuda").module.lm_head.weight
        found, _ = write(target, None)
        assert target.recorded is not before
        target.recorded = None
        assert write(target, None)[0] == found


@pytest.mark.parametrize("architecture", ["T5", "Bart"])
def test_an_encoder_decoder_runs_there(architecture: str, gpu: SimulatedGPU) -> None:
    texts = []
    for device in ("cpu", "cuda"):
        target, draft = (EncoderDecoderModel(module(architecture, seed).to(device)) for seed in (0, 1))
        requests = [Request([0], 10, RandomStream(0, row), source=prompt) for row, prompt in enumerate(PROMPTS)]
        drafter = ModelDrafter(draft, step_seconds=0.01)
        texts.append(decode(target, requests, SETTINGS["temperature 1"], drafter, FixedLength(3))[0])
        assert device == "cpu" or target.recorded is None
    assert texts[0] == texts[1]


def test_beams_are_searched_there(gpu: SimulatedGPU, target_folder: Path, draft_folder: Path) -> None:
    options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 10, "num_draft_tokens": 3}
    found = [
        outrider.beam_search(opened(target_folder, device), PROMPTS[0], draft=opened(draft_folder, device), **options)
        for device in ("cpu", "cuda")
    ]
    assert [one.tokens for one in found[0].sequences] == [one.tokens for one in found[1].sequences]


def test_moved(gpu: SimulatedGPU) -> None:
    held = torch.ones(2)
    assert moved(held, held.device) is held
    there = moved(held, torch.device("cuda", 0))
    assert there.is_cuda
    assert not gpu.waits
    assert moved(there, torch.device("cpu")).tolist() == [1.0, 1.0]
