"""Graphs of one function on the simulated GPU: replayed on what they were captured with, few of them, never in the way."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from outrider.models.base import LAST
from outrider.models.passes.captured import captured_pass, columns_captured, width_captured
from outrider.models.passes.compiled import CompiledPasses
from outrider.models.passes.compiled_trial import difference
from outrider.models.passes.cuda_graphs import MOST_GRAPHS, WARM_UP, Graphs
from outrider.models.passes.graph import run_pass
from outrider.models.passes.tracing import Inputs
from outrider.models.transformers_model import TransformersModel
from tests.helpers.real_gpu import GPU, RealGPU
from tests.helpers.simulated_gpu import SimulatedGPU
from tests.helpers.simulated_graphs import Graph, Stream
from tests.helpers.tiny_models import module

ONCE = 1 + WARM_UP + 1  # calls of a function until its graph is replayed: an ordinary one, warming up, the capture
Tensors = tuple[torch.Tensor, ...]


def ones(count: int = 1) -> torch.Tensor:
    return torch.ones(count, device="cuda")


class Counted:
    """A function that tells how often it was called: memory written, summed up and doubled."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, columns: int, about: Any, memory: Any) -> Tensors:
        self.calls += 1
        memory[0].index_copy_(0, about[1], about[0])
        return (memory[0][:columns].sum(0, keepdim=True) * 2,)


def at(value: float, place: int) -> list[torch.Tensor]:
    return [torch.tensor([value], device="cuda"), torch.tensor([place], device="cuda")]


class TestSimulatedCapture:
    def test_it_computes_nothing(self, simulated: SimulatedGPU) -> None:
        memory, graph = ones(3), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            memory.mul_(5)
            out = memory + torch.arange(3, device="cuda")
        assert memory.tolist() == [1, 1, 1]
        assert bool(out.isnan().all())
        graph.replay()
        assert memory.tolist() == [5, 5, 5]
        assert out.tolist() == [5, 6, 7]
        memory.fill_(2)
        graph.replay()
        assert out.tolist() == [10, 11, 12]

    def test_what_is_made_without_reading_anything_is_in_it(self, simulated: SimulatedGPU) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = torch.zeros(2, device="cuda")
            made += torch.full((2,), 3.0, device="cuda")
        for _ in range(2):
            graph.replay()
            assert made.tolist() == [3, 3]

    def test_kernels_of_another_stream_are_not(self, simulated: SimulatedGPU) -> None:
        graph = torch.cuda.CUDAGraph()
        with simulated.on(1), torch.cuda.graph(graph):
            ones().add_(1)
        assert isinstance(graph, Graph)
        assert not graph.launches

    def test_it_waits_for_the_device(self, simulated: SimulatedGPU) -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            ones()
        assert simulated.waits == ["capture"]


class TestGraphs:
    def test_a_replay_computes_anew_and_writes_into_the_memory(self, gpu: GPU) -> None:
        run, memory = Counted(), torch.zeros(6, device="cuda")
        graphs = Graphs(run, "toy")
        for place, value in ((3, 9.0), (0, 1.0), (1, 5.0), (2, 7.0), (0, 2.0), (3, 0.0)):
            (out,) = graphs(4, at(value, place), [memory])
        assert out.tolist() == [28.0]
        assert memory.tolist() == [2.0, 5.0, 7.0, 0.0, 0.0, 0.0]
        assert (run.calls, graphs.captures, graphs.replays) == (ONCE, 1, 5)

    def test_what_comes_once_is_not_captured(self, gpu: GPU) -> None:
        run, memory = Counted(), torch.zeros(6, device="cuda")
        graphs = Graphs(run, "toy")
        for columns in range(1, 6):
            graphs(columns, at(1.0, 0), [memory])
        assert (run.calls, graphs.captures) == (5, 0)
        assert "capture" not in gpu.waits

    def test_other_memory_is_captured_anew(self, gpu: GPU) -> None:
        """Also memory of other sizes at the same address."""
        run, memory = Counted(), torch.zeros(12, device="cuda")
        graphs = Graphs(run, "toy")
        for held in (memory, memory[:6], memory[::2], torch.zeros(12, device="cuda")):
            for value in (2.0, 3.0, 4.0):
                (out,) = graphs(6, at(value, 1), [held])
                assert out.tolist() == [2 * value]
            held.zero_()
        assert graphs.captures == 4
        assert len(graphs._held) == 1  # the old memory's are forgotten

    def test_few_are_kept(self, gpu: GPU) -> None:
        graphs, memory = Graphs(lambda columns, about, memory: (about[0] + columns,), "toy"), [ones()]
        for columns in range(MOST_GRAPHS + 1):
            for _ in range(2):
                assert graphs(columns, [ones()], memory)[0].tolist() == [1 + columns]
            graphs(0, [ones()], memory)  # the one that was used last
        assert graphs.captures == MOST_GRAPHS + 1
        assert len(graphs._held) == MOST_GRAPHS
        graphs(1, [ones()], memory)  # the one that was used least
        assert graphs.captures == MOST_GRAPHS + 2

    def test_one_is_forgotten_before_the_next_is_captured(self, gpu: GPU) -> None:
        held: list[int] = []
        graphs = Graphs(lambda columns, about, memory: (held.append(len(graphs._held)) or about[0] + 1,), "toy")  # type: ignore[func-returns-value]
        memory = [ones()]
        for columns in range(MOST_GRAPHS + 2):
            for _ in range(2):
                graphs(columns, [ones()], memory)
        assert held[-1] == MOST_GRAPHS - 1

    def test_there_is_one_stream_beside_the_current_one(self, simulated: SimulatedGPU) -> None:
        graphs, memory = Graphs(lambda columns, about, memory: (about[0] + columns,), "toy"), [ones()]
        graphs(0, [ones()], memory)
        graphs(0, [ones()], memory)
        before, current = Stream.made, torch.cuda.current_stream()
        for columns in (1, 1, 2, 2):
            graphs(columns, [ones()], memory)
        assert Stream.made == before
        assert torch.cuda.current_stream() == current

    def test_another_device_than_the_current_one(self, simulated: SimulatedGPU) -> None:
        with simulated.on(1):
            graphs, memory = Graphs(lambda columns, about, memory: (about[0] * columns,), "toy"), [ones()]
            assert [graphs(2, [ones() * n], memory)[0].tolist() for n in (1, 2, 3)] == [[2], [4], [6]]
            assert graphs.replays == 2
        assert torch.cuda.current_device() == 0


class TestFailures:
    def test_what_waits_for_the_device_runs_as_it_is(self, gpu: GPU, caplog: pytest.LogCaptureFixture) -> None:
        """And the capture that failed leaves the current stream and device, and its own reason."""
        graphs = Graphs(lambda columns, about, memory: (about[0] * columns + int(memory[0].sum()),), "toy")
        current, memory = torch.cuda.current_stream(), ones()
        with caplog.at_level(logging.WARNING):
            assert [graphs(2, [ones() * n], [memory])[0].tolist() for n in (1, 2, 3)] == [[3], [5], [7]]
        assert "not permitted when stream is capturing" in graphs.failed
        assert isinstance(gpu, RealGPU) or "capturing: aten::_local_scalar_dense" in graphs.failed
        assert torch.cuda.current_stream() == current
        assert len(caplog.records) == 1
        assert not gpu.capturing
        assert torch.cuda.current_device() == 0

    @pytest.mark.parametrize("error", [ValueError, RuntimeError, KeyError])
    def test_whatever_is_raised_meanwhile(self, error: type[Exception], gpu: GPU) -> None:
        def run(columns: int, about: Any, memory: Any) -> Tensors:
            if gpu.capturing:
                raise error("not while it is captured")
            return (about[0] + columns,)

        graphs, memory = Graphs(run, "toy"), [ones()]
        assert [graphs(2, [ones() * n], memory)[0].tolist() for n in (1, 2, 3)] == [[3], [4], [5]]
        assert "not while it is captured" in graphs.failed
        assert not gpu.capturing

    def test_without_memory_for_another_all_are_given_back(self, gpu: GPU, caplog: pytest.LogCaptureFixture) -> None:
        def run(columns: int, about: Any, memory: Any) -> Tensors:
            if gpu.capturing and columns == 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return (about[0] + columns,)

        graphs, memory = Graphs(run, "toy"), [ones()]
        with caplog.at_level(logging.WARNING):
            for columns in (1, 1, 2, 2, 2, 1):
                assert graphs(columns, [ones()], memory)[0].tolist() == [1 + columns]
        assert graphs.failed == "the device has no memory left for them"
        assert not graphs._held
        assert [record.levelname for record in caplog.records] == ["WARNING"]

    def test_the_functions_own_errors_are_raised(self, gpu: GPU) -> None:
        def run(columns: int, about: Any, memory: Any) -> Tensors:
            raise ValueError("its own")

        graphs, memory = Graphs(run, "toy"), [ones()]
        for _ in range(2):
            with pytest.raises(ValueError, match="its own"):
                graphs(1, [ones()], memory)


class TestCompiledPass:
    """As the compiler would give it: a function of the pass."""

    def test_it_is_told_the_capacity(self, gpu: GPU) -> None:
        def run(columns: int, capacity: int, ids: Any, at: Any, *read: Any) -> Tensors:
            return ids + at, read[0][:, :, :columns].sum() * capacity

        keys = torch.ones(1, 2, 8, 4, device="cuda")
        call = captured_pass(run, "toy")
        for n in (1, 2, 3):
            out = call(4, 8, *(torch.tensor([[each]], device="cuda") for each in (n, 2)), keys)
            assert [each.tolist() for each in out] == [[[n + 2]], 32 * 8]

    @pytest.mark.parametrize("place", [0, 1])
    @pytest.mark.parametrize("kept", [False, True])
    def test_the_check_replays_other_tokens(self, place: int, kept: bool, gpu: GPU) -> None:
        """kept: a graph that has kept the tokens of the pass that was captured. Of the second device, as of the first."""
        with gpu.on(place):
            target = TransformersModel(module("Llama").to("cuda"))
            held: list[torch.Tensor] = []

            def run(columns: int, capacity: int, ids: Any, at: Any, *read: Any) -> Tensors:
                if not gpu.capturing:
                    held.append(ids.clone())
                elif kept:
                    ids = held[-1]
                return run_pass(target, (LAST,), False, Inputs(columns, (ids, at), read[:4], {}))

            off = difference(target, CompiledPasses(target, {2: captured_pass(run, "toy")}))
        assert (off > 0.1) == kept


@pytest.mark.parametrize("longest", [1, 255, 256, 257, 1024, 1025, 2049, 5000, 100_000])
def test_columns(longest: int) -> None:
    found = columns_captured(longest)
    assert longest <= found <= longest + max(255, longest / 4)
    assert found % 32 == 0


@pytest.mark.parametrize("tokens", range(1, 65))
def test_widths(tokens: int) -> None:
    assert tokens <= width_captured(tokens) <= tokens * 1.5
