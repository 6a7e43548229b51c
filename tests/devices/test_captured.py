"""Captured passes of models and heads on the simulated GPU: they write what ordinary ones write, or are not used."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import outrider
import outrider.models.passes.captured_trial as trial
from outrider.drafters import HeadDrafter, ModelDrafter
from outrider.heads.autoregressive import AutoregressiveModel
from outrider.heads.recorded import CapturedHead
from outrider.models.loading import load_transformers
from outrider.models.passes.captured import MOST_ROWS, CapturedPasses
from outrider.models.passes.captured_trial import SAME
from outrider.models.passes.graph import run_pass
from outrider.models.passes.tracing import Inputs
from outrider.models.transformers_model import TransformersModel
from tests.helpers.device_texts import PROMPTS, flat, given, opened, write
from tests.helpers.heads import write_head
from tests.helpers.marks import slow
from tests.helpers.real_gpu import GPU, RealGPU
from tests.helpers.simulated_gpu import SimulatedGPU
from tests.helpers.simulated_graphs import Graph
from tests.helpers.tiny_models import CONFIGS, VOCABULARY, module

NOT_CAPTURED = {"Mixtral": "capturing: aten::nonzero"}  # whose experts are chosen on the host


def llama(dtype: torch.dtype = torch.float64, **options: Any) -> TransformersModel:
    return TransformersModel(module("Llama", 4, dtype, **options).to("cuda"))


def warned(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(
        record.getMessage() for record in caplog.records if record.levelno == logging.WARNING and "outrider" in record.name
    )


@pytest.mark.parametrize("architecture", [name if i % 5 == 0 else slow(name) for i, name in enumerate(CONFIGS)])
def test_each_architecture(architecture: str, gpu: GPU, caplog: pytest.LogCaptureFixture) -> None:
    """Its passes are captured, by a trial that compares logits and keys, or it says why not."""
    target = TransformersModel(module(architecture).to("cuda"))
    with caplog.at_level(logging.WARNING):
        target.record()
        assert (target.recorded is None) == (architecture in NOT_CAPTURED)
    said = NOT_CAPTURED.get(architecture, "")  # a real one does not name the operation
    assert (said.partition(":")[0] if isinstance(gpu, RealGPU) else said) in warned(caplog)
    assert len(warned(caplog).splitlines()) == (architecture in NOT_CAPTURED)


class TestPasses:
    def test_they_write_what_ordinary_passes_write(self, gpu: GPU, target_folder: Path, draft_folder: Path) -> None:
        wanted, _ = write(opened(target_folder, "cpu"), given(draft_folder, "cpu"), "temperature 1")
        target, draft = (opened(folder, "cuda", captured=True) for folder in (target_folder, draft_folder))
        for _ in range(3):
            gpu.waits.clear()
            found, rounds = write(target, ModelDrafter(draft, step_seconds=0.01), "temperature 1")
            assert found == wanted
        assert gpu.waits == ["read back"] * max(map(len, rounds))  # once they are captured
        assert target.recorded.graphs.replays
        assert draft.recorded.graphs.replays

    def test_alternatives_are_captured(self, gpu: GPU, target_folder: Path) -> None:
        options: dict[str, Any] = {"setting": "temperature 1", "alternatives": 3}
        wanted, _ = write(opened(target_folder, "cpu"), flat(target_folder, "cpu"), **options)
        found, rounds = write(opened(target_folder, "cuda", captured=True), flat(target_folder, "cuda"), **options)
        assert found == wanted
        assert any(record.taken for row in rounds for record in row)

    def test_a_cache_that_grows_is_captured_anew(self, gpu: GPU) -> None:
        """Graphs hold addresses: what was given back must not be read or written any more."""
        texts = []
        for captured in (False, True):
            target = llama(max_position_embeddings=600)
            if captured:
                target.record()
            texts.append(
                [write(target, None, "temperature 1", [prompt], 9)[0] for prompt in (PROMPTS[0], [*range(3, 43)] * 8)]
            )
        assert texts[0] == texts[1]
        assert isinstance(target.recorded, CapturedPasses)
        assert target.recorded.graphs.captures == 2
        assert len(target.recorded.graphs._held) == 1

    def test_they_come_in_few_widths(self, gpu: GPU) -> None:
        target = llama(max_position_embeddings=64)
        target.record()
        sequence = target.open()
        for width in (5, 6, 9, 10, 11, 12):
            assert target.score([sequence], torch.zeros(1, width, dtype=torch.long, device="cuda"), [width]) is not None
        assert isinstance(target.recorded, CapturedPasses)
        assert {key[1][0] for key in target.recorded.graphs._seen} == {(1, 6), (1, 12)}  # type: ignore[index]
        assert target.score([sequence], torch.zeros(1, 9, dtype=torch.long, device="cuda"), [9]) is not None
        assert (1, 9) in {key[1][0] for key in target.recorded.graphs._seen}  # type: ignore[index]
        sequence.close()

    def test_more_rows_than_that_run_without(self, gpu: GPU, target_folder: Path) -> None:
        target = opened(target_folder, "cuda", captured=True)
        assert target.recorded.of(MOST_ROWS, 2) is not None
        assert target.recorded.of(MOST_ROWS + 1, 2) is None
        assert write(target, None, prompts=PROMPTS * 4, count=4)[0] == write(target, None, count=4)[0] * 4

    def test_replaced_weights_are_captured_anew(self, gpu: GPU, target_folder: Path, draft_folder: Path) -> None:
        """Another parameter, or another memory of the same one."""
        target: Any = outrider.load(target_folder, dtype="float64", device="cuda")
        head = opened(draft_folder, "cuda").module.lm_head.weight
        for replace in ("parameter", "memory"):
            write(target, None, count=4)
            before = target.recorded
            assert before is not None
            if replace == "parameter":
                target.module.lm_head.weight = head
            else:
                target.module.lm_head.weight.data = head.detach() * 2
            found, _ = write(target, None)
            assert target.recorded is not before
            assert target.recorded is not None
        target.recorded = None
        assert write(target, None)[0] == found

    def test_without_memory_later_on_texts_are_the_same(
        self, simulated: SimulatedGPU, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wanted = write(llama(), None)[0]
        target = llama()
        target.record()
        assert target.recorded is not None

        def no_memory(graph: Graph) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(Graph, "end", no_memory)
        with caplog.at_level(logging.WARNING):
            assert write(target, None)[0] == wanted
        assert warned(caplog).count("no memory left") == 1


Fails = Callable[[int], bool]


class OwnCode:
    """In a lean pass's place, since the simulation has no Triton: the model's own code, for a few tokens.

    fails: whether it raises for so many tokens. off: added to its logits.
    """

    def __init__(self, model: TransformersModel, fails: Fails = lambda tokens: False, off: float = 0.0) -> None:
        self.model, self.fails, self.off = model, fails, off
        self.works, self.passes = True, 0

    def takes(self, rows: int, width: int) -> bool:
        return rows * width <= 8

    def run(self, tokens: Any, positions: Any, at: Any, columns: int, rows: Any, layers: Any) -> tuple[torch.Tensor, ...]:
        if self.fails(tokens.numel()):
            raise RuntimeError("out of resource: shared memory")
        self.passes += 1
        logits, *states = run_pass(self.model, layers, True, Inputs(columns, (tokens, positions, at), rows, {}))
        return logits + self.off * torch.arange(logits.shape[-1], device=logits.device), *states


class TestLeanPasses:
    def recorded(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[TransformersModel, OwnCode]:
        target = llama()
        lean = OwnCode(target.with_a_cache_of_its_own(), **options)
        monkeypatch.setattr(trial, "lean_pass", lambda model: lean)
        target.record()
        assert isinstance(target.recorded, CapturedPasses)
        return target, lean

    def test_they_are_captured_in_place_of_the_models_code(
        self, simulated: SimulatedGPU, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target, lean = self.recorded(monkeypatch)
        assert target.recorded.lean is lean  # type: ignore[union-attr]
        before = lean.passes
        assert write(target, None)[0] == write(llama(), None)[0]
        assert lean.passes > before
        assert not warned(caplog)

    @pytest.mark.parametrize(
        "fault", [slow({"fails": lambda tokens: True}), {"fails": lambda tokens: tokens > 4}, {"off": 0.01}]
    )
    def test_those_that_fail_in_the_trial_are_not_used(
        self,
        fault: dict[str, Any],
        simulated: SimulatedGPU,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        target, _ = self.recorded(monkeypatch, **fault)
        assert target.recorded.lean is None  # type: ignore[union-attr]
        assert warned(caplog).count("runs without lean passes") == 1
        assert ("shared memory" if "fails" in fault else "other logits") in warned(caplog)
        assert write(target, None)[0] == write(llama(), None)[0]

    @pytest.mark.parametrize("captured", [False, True])
    def test_those_that_fail_later_give_way_to_the_models_code(
        self,
        captured: bool,
        simulated: SimulatedGPU,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """In an ordinary call, or in the one that is captured: the pass that was wanted is there, and all after it."""
        target, lean = self.recorded(monkeypatch)
        lean.fails = lambda tokens: simulated.capturing or not captured
        assert write(target, None)[0] == write(llama(), None)[0]
        assert not lean.works
        assert not target.recorded.failed  # type: ignore[union-attr]
        assert target.recorded.graphs.replays  # type: ignore[union-attr]
        assert warned(caplog).count("runs without lean passes (out of resource: shared memory)") == 1


class TestRefused:
    def test_a_model_that_waits_in_its_passes(
        self, gpu: GPU, target_folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wanted, _ = write(opened(target_folder, "cpu"), None)
        target = load_transformers(target_folder, dtype="float32", device="cuda")
        kind = type(target.module.model.norm)
        ordinary = kind.forward

        def reads_back(self: Any, states: Any) -> Any:
            assert bool(states.isfinite().all())
            return ordinary(self, states)

        monkeypatch.setattr(kind, "forward", reads_back)
        with caplog.at_level(logging.WARNING):
            target.record()
            assert write(target, None)[0] == wanted
        assert target.recorded is None
        assert "not permitted when stream is capturing" in warned(caplog)
        assert isinstance(gpu, RealGPU) or "capturing: aten::_local_scalar_dense" in warned(caplog)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_graph_that_has_kept_something(
        self, dtype: torch.dtype, gpu: GPU, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A state of an earlier pass, a hundredth of one layer's output: half precision hides that from ordinary ones."""
        target = llama(dtype)
        mlp = target.module.model.layers[0].mlp
        ordinary = type(mlp).forward
        held: list[Any] = []

        def kept(self: Any, states: Any) -> Any:
            out = ordinary(self, states)
            if self is not mlp or out.shape[0] != 1:
                return out
            if not gpu.capturing:
                held.append(out.clone())
            return torch.lerp(out, held[-1][:, -1:] if gpu.capturing else out, 0.01)

        monkeypatch.setattr(type(mlp), "forward", kept)
        with caplog.at_level(logging.WARNING):
            target.record()
            assert target.recorded is None
        assert "a replay gives other logits" in warned(caplog)
        if dtype == torch.bfloat16:
            monkeypatch.setitem(SAME, dtype, 1.0)
            target.record()
            assert target.recorded is not None

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_one_that_replays_nothing(
        self, dtype: torch.dtype, simulated: SimulatedGPU, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target = llama(dtype)
        monkeypatch.setattr(Graph, "replay", lambda graph: None)
        with caplog.at_level(logging.WARNING):
            target.record()
            assert target.recorded is None
        assert "a replay gives other logits" in warned(caplog)

    @pytest.mark.parametrize("own", ["hook", "hook before", "forward"])
    def test_a_part_with_code_of_its_own(self, own: str, gpu: GPU, caplog: pytest.LogCaptureFixture) -> None:
        target = llama()
        part = target.module.model.layers[1].mlp
        if own == "hook":
            part.register_forward_hook(lambda *given: None)
        elif own == "hook before":
            part.register_forward_pre_hook(lambda *given: None)
        else:
            part.forward = lambda states: states
        with caplog.at_level(logging.WARNING):
            target.record()
            assert target.recorded is None
        assert "model.layers.1.mlp has a method or a hook of its own" in warned(caplog)


class TestHeads:
    @staticmethod
    def drafter(folder: Path, target: TransformersModel) -> tuple[HeadDrafter, Any]:
        drafter = HeadDrafter(write_head(folder, "autoregressive", VOCABULARY), step_seconds=0.01)
        write(target, drafter, count=2)
        return drafter, drafter.model

    def test_they_read_the_states_of_captured_passes(self, gpu: GPU, tmp_path: Path) -> None:
        texts = []
        for captured in (False, True):
            target = llama()
            if captured:
                target.record()
            drafter, head = self.drafter(tmp_path, target)
            texts.append(write(target, drafter, "temperature 1", PROMPTS[:1])[0])
            assert isinstance(target.recorded, CapturedPasses) == captured
            assert isinstance(head.recorded, CapturedHead) == captured
        assert head.recorded.graphs.replays
        assert texts[0] == texts[1]

    @pytest.mark.parametrize("packed", [False, True])
    def test_they_follow_their_target(self, packed: bool, gpu: GPU, tmp_path: Path, target_folder: Path) -> None:
        """`pack=False` turns off both."""
        target = outrider.load(target_folder, dtype="float32", device="cuda", pack=packed)
        assert isinstance(target, TransformersModel)
        folder = write_head(tmp_path, "autoregressive", target.vocab_size)
        drafter = HeadDrafter(folder, step_seconds=0.01)
        drafter.bind(target)
        assert isinstance(drafter.model, AutoregressiveModel)
        assert (drafter.model.recorded is None) == (not packed)

    def test_one_that_is_refused_says_so(
        self, simulated: SimulatedGPU, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target = llama()
        target.record()
        monkeypatch.setattr(Graph, "replay", lambda graph: None)
        drafter = HeadDrafter(write_head(tmp_path, "autoregressive", VOCABULARY), step_seconds=0.01)
        with caplog.at_level(logging.WARNING):
            drafter.bind(target)
        assert isinstance(drafter.model, AutoregressiveModel)
        assert drafter.model.recorded is None
        assert "passes of the autoregressive head are not captured" in warned(caplog)

    def test_replaced_weights_are_captured_anew(self, gpu: GPU, tmp_path: Path) -> None:
        target = llama()
        target.record()
        drafter, head = self.drafter(tmp_path, target)
        before = head.recorded
        write(target, drafter, count=2)
        assert head.recorded is before
        weight = next(head.network.parameters())
        weight.data = weight.detach() * 2
        write(target, drafter, count=2)
        assert head.recorded is not before
        assert head.recorded is not None
