"""Fixtures: a cache folder for the measured costs of tiny models, model folders with a real tokenizer, a simulated GPU."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.costs import Costs
from outrider.kernels.chain_calls import ChainPlan
from outrider.kernels.models import Kernels, build
from outrider.models import transformers_model
from outrider.models.loading import load_transformers
from outrider.models.passes.recording import Recording
from tests.helpers import encoder_decoder, heads, published_heads, real_gpu
from tests.helpers.device_texts import opened
from tests.helpers.folders import save_encoder_decoder, save_model, share_cache
from tests.helpers.kernels import HERE
from tests.helpers.real_gpu import GPU, RealGPU
from tests.helpers.simulated_gpu import SimulatedGPU, simulated_gpu


def pytest_collection_finish() -> None:
    """What the imports have made stays; going through it in each full collection would take a tenth of the run.

    What they make later, and tests keep, is gone through more seldom (EXPERIMENTS.md).
    """
    gc.enable()
    gc.collect()
    gc.freeze()
    # pytest gives its handlers to loggers that hand nothing on, and torch writes a report of each tracing for any handler.
    logging.getLogger("torch.__trace").propagate = True
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 200)


def pytest_unconfigure() -> None:
    """The process ends, and what there is with it."""
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _what_a_module_keeps(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let go of it after its last test: models that have written a thousand texts side by side hold a gigabyte of keys and
    values each, and two processes had 12 GB between them in the end.
    """
    yield
    modules = {request.module.__name__, heads.__name__, published_heads.__name__, encoder_decoder.__name__}
    kept = [value for value in vars(request.module).values() if hasattr(value, "cache_clear")]
    mine = [value for value in kept if getattr(value, "__module__", "") in modules]
    for value in mine:
        value.cache_clear()
    if mine:
        gc.collect()


@pytest.fixture(scope="session", autouse=True)
def _the_users_cache_is_left_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No costs of tiny models are kept there, and none that an earlier run measured are read."""
    folder = share_cache(tmp_path_factory.mktemp("cache") / "outrider", tmp_path_factory, "models", "tokenizers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_CACHE", str(folder))
        yield


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "target", 0)


@pytest.fixture(scope="session")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "draft", 1)


@pytest.fixture(scope="session")
def foreign_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer of its own."""
    return save_model(tmp_path_factory.mktemp("models") / "foreign", 1, "wholly other words zzz qqq zzz qqq" * 20)


@pytest.fixture(scope="session")
def small_t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder_decoder(tmp_path_factory.mktemp("t5") / "draft", "T5", 1, num_layers=1, num_decoder_layers=1)


@pytest.fixture(scope="session")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder_decoder(tmp_path_factory.mktemp("whisper") / "target", "Whisper")


@pytest.fixture(scope="session")
def flat_costs() -> Costs:
    return Costs({1: 1.0, 17: 1.5})


@pytest.fixture(params=HERE)
def built(request: pytest.FixtureRequest) -> Kernels:
    """Our kernels, at each level that this processor has."""
    return build(request.param)


@pytest.fixture
def unrecorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes as they are, for what has nothing to do with them: recording those of models of one test takes seconds."""
    monkeypatch.setattr(transformers_model, "record_passes", lambda *_: None)


@pytest.fixture
def cache(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, without any measured costs."""
    folder = share_cache(tmp_path / "cache", tmp_path_factory)
    monkeypatch.setenv("OUTRIDER_CACHE", str(folder))
    return folder


@pytest.fixture(scope="module")
def machine(target_folder: Path) -> Iterator[GPU]:
    load_transformers(target_folder, dtype="float32")  # what transformers makes when it is first used is no pretence
    if real_gpu.WANTED:
        yield RealGPU()
    else:
        with simulated_gpu() as made:
            yield made
    opened.cache_clear()


@pytest.fixture
def gpu(machine: GPU) -> Iterator[GPU]:
    """The simulated GPU, or the real one if that is asked for (`real_gpu`)."""
    machine.waits.clear()
    if isinstance(machine, SimulatedGPU):
        yield machine
    else:
        with machine.watched():
            yield machine


@pytest.fixture
def simulated(gpu: GPU) -> SimulatedGPU:
    """For what only the simulation can show."""
    if not isinstance(gpu, SimulatedGPU):
        pytest.skip("this is about the simulated GPU")
    return gpu


@pytest.fixture
def chains_called(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each call of a chain had (`kernels.chain_calls`), and of recorded passes by torch's interpreter -1."""
    seen: list[int] = []
    call, run = ChainPlan.run, Recording.run

    def counted(self: ChainPlan, spans: list[tuple[int, int, int]], *others: Any) -> None:
        seen.append(sum(count for _, count, _ in spans))
        call(self, spans, *others)

    def interpreted(self: Recording, *given: Any) -> list[torch.Tensor]:
        seen.append(-1)
        return run(self, *given)

    monkeypatch.setattr(ChainPlan, "run", counted)
    monkeypatch.setattr(Recording, "run", interpreted)
    return seen
