"""What communication costs: measured for these ranks, predicted for others, and what was spent beside what was predicted.

A pass of tensor parallelism sums the hidden states over the ranks twice a layer (Shoeybi et al. 2019, section 3), and
gathers the logits once. Each sum of B bytes takes a + B / b seconds: a latency, which rules while few tokens are scored,
and a bandwidth. Chen et al. chose their draft's shape by the first. What ranks wait for one another is in the latency, which
is measured between pieces of work of equal size; ranks whose work is unequal wait longer.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from outrider.theory.links import Link

if TYPE_CHECKING:
    from outrider.costs import Costs
    from outrider.sharded.model import TeamModel

_SMALL, _LARGE = 1 << 10, 1 << 20  # bytes
_REPEATS = 15
_WORK_REPEATS = 40  # a second or two: on a shared machine this varies most
_WORK, _WIDTH, _MATRICES = 1 << 22, 1024, 16  # bytes of a matrix, its columns, and how many: 64 MiB


@dataclass(frozen=True)
class Shape:
    """What the communication of a pass depends on. sums: over the ranks in a pass, 2 a layer (and 1 for a cut table).
    hidden: numbers a token in each. gathered: logits a token, 0 if every rank computes all. value_bytes: of a number.
    """

    sums: int
    hidden: int
    gathered: int
    value_bytes: int


def communication_seconds(link: Link, shape: Shape, tokens: int) -> float:
    """Of a pass of `tokens` tokens: sums × (latency + tokens · hidden · bytes / bandwidth), the logits of N − 1 shares on
    their way to rank 0, and the command.
    """
    sums = shape.sums * link.sum_seconds(tokens * shape.hidden * shape.value_bytes)
    if shape.gathered:
        moved = tokens * shape.gathered * shape.value_bytes * (link.ranks - 1) / link.ranks
        sums += link.sum_seconds(moved)
    return sums + link.command


def pass_seconds(
    alone: float, shared: float, ranks: int, communication: float, fixed: float = 0.0, company: float = 1.0
) -> float:
    """Of a pass over `ranks` ranks: fixed + (alone − fixed) · company · (1 − shared + shared / ranks) + communication.

    alone: seconds in one process. fixed: those of them that go neither into weights nor into arithmetic, which are not
    shared. shared: the share of the weights that is cut, the rest being read by every rank. company: of the link.
    """
    return fixed + (alone - fixed) * company * (1 - shared + shared / ranks) + communication


def measure_link(device: torch.device) -> Link:
    """Time sums of two sizes, a command, and work alone and in company; all ranks call it together.

    On CPUs the latency is that of a sum between two pieces of work, as in a pass, in which ranks wait for one another.
    """
    small, large = (_time_sum(size, device) for size in (_SMALL, _LARGE))
    slope = max(large - small, 1e-9) / (_LARGE - _SMALL)
    message = torch.zeros(256, dtype=torch.long)
    dist.barrier()
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        dist.broadcast(message, 0)
        times.append(time.perf_counter() - start)
    idle, work = small - _SMALL * slope, _AtWork()
    if device.type == "cpu":
        work = _at_work()
    latency = max(idle, work.latency, 1e-9)
    return Link(dist.get_world_size(), latency, 1 / slope, median(times), work.reading, work.company)


@dataclass(frozen=True)
class _AtWork:
    """latency: of a sum between two pieces of work. reading, company: as in `Link`."""

    latency: float = 0.0
    reading: float = 0.0
    company: float = 1.0


def _at_work() -> _AtWork:
    """Multiply by weights: on rank 0 alone, on all ranks, and with a sum after each matrix. What rank 0 measures counts."""
    weights = [torch.ones(_WORK // 4 // _WIDTH, _WIDTH) for _ in range(_MATRICES)]  # more than caches hold
    row = torch.ones(1, _WIDTH)
    token = torch.zeros(_SMALL // 4)

    def work(sums: bool) -> float:
        start = time.perf_counter()
        for weight in weights:
            torch.nn.functional.linear(row, weight)
            if sums:
                dist.all_reduce(token)
        return (time.perf_counter() - start) / _MATRICES

    alone, together, summed = [], [], []
    for _ in range(_WORK_REPEATS):
        if dist.get_rank() == 0:
            alone.append(work(sums=False))
        dist.barrier()
        together.append(work(sums=False))
        dist.barrier()
        summed.append(work(sums=True))
    if dist.get_rank() != 0:
        return _AtWork()
    single, all_ranks = median(alone), median(together)
    return _AtWork(median(summed) - all_ranks, _WORK / single, max(1.0, all_ranks / single))


def _time_sum(size: int, device: torch.device) -> float:
    tensor = torch.zeros(size // 4, device=device)
    times = []
    for _ in range(_REPEATS + 2):
        start = time.perf_counter()
        dist.all_reduce(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return median(times[2:])


@dataclass(frozen=True)
class Share:
    """A model's passes with logits, milliseconds each on average. communication: in collective calls and in telling the
    others, None on a GPU, where calls are queued. predicted: communication by the formula. alone: a whole pass in one
    process, if that was measured on this machine; predicted_pass: one by it and the formula, with `fixed`
    of its milliseconds and the link's `company`.
    """

    model: str
    placement: str
    ranks: int
    passes: int
    milliseconds: float
    compute: float | None
    communication: float | None
    predicted: float
    collectives: float
    shared_weights: float
    alone: float | None
    predicted_pass: float | None
    fixed: float
    company: float

    def to_dict(self) -> dict[str, object]:
        """For machine-readable output."""
        return asdict(self)


def share_of(model: TeamModel, alone: Costs | None = None) -> Share:
    """What a model's passes since the last `reset` were spent on. alone: what a pass costs in one process."""
    link, shape, traffic = model.team.link(), shape_of(model), model.traffic
    passes = max(traffic.passes, 1)
    communication = traffic.commands + traffic.collectives.seconds
    predicted = sum(count * communication_seconds(link, shape, n) for n, count in traffic.tokens.items()) / passes
    cut = model.part.cut
    size = model.weight_bytes if cut is None else cut.alone(link.ranks)
    shared = 0.0 if cut is None else cut.shared * link.ranks / max(size, 1)
    fixed = max(0.0, alone.verify(1) - size / link.reading) if alone is not None and link.reading else 0.0
    single = None if alone is None else sum(count * alone.verify(n) for n, count in traffic.tokens.items()) / passes
    ours = None if single is None else 1000 * pass_seconds(single, shared, link.ranks, predicted, fixed, link.company)
    timed = model.device.type == "cpu"
    return Share(
        model=model.name,
        placement=model.placement,
        ranks=link.ranks,
        passes=traffic.passes,
        milliseconds=1000 * traffic.seconds / passes,
        compute=1000 * (traffic.seconds - communication) / passes if timed else None,
        communication=1000 * communication / passes if timed else None,
        predicted=1000 * predicted,
        collectives=traffic.collectives.calls / passes,
        shared_weights=shared,
        alone=None if single is None else 1000 * single,
        predicted_pass=ours,
        fixed=1000 * fixed,
        company=link.company,
    )


def shape_of(model: TeamModel) -> Shape:
    """Of a loaded model; a replicated one exchanges nothing."""
    cut = model.part.cut
    config = model.engine.module.config.get_text_config()
    if cut is None:
        return Shape(0, int(config.hidden_size), 0, model.dtype.itemsize)
    return Shape(cut.sums, int(config.hidden_size), model.vocab_size if cut.gathered else 0, model.dtype.itemsize)
