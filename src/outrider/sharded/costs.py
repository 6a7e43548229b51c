"""What communication costs: measured for these ranks, foretold for others, and what was spent beside what was foretold.

A pass of tensor parallelism sums the hidden states over the ranks twice a layer (Shoeybi et al. 2019, section 3), and
gathers the logits once. Each sum of B bytes takes a + B / b seconds: a latency, which rules while few tokens are scored,
and a bandwidth. Chen et al. chose their draft's shape by the first. The limits: what ranks wait for one another is not in
the formula, but is in what is measured, and on a shared machine it is most of it.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from outrider.links import Link

if TYPE_CHECKING:
    from outrider.costs import Costs
    from outrider.sharded.model import TeamModel

_SMALL, _LARGE = 1 << 10, 1 << 20  # bytes
_REPEATS = 15


@dataclass(frozen=True)
class Shape:
    """What the communication of a pass depends on. sums: over the ranks in a pass, 2 a layer (and 1 for a cut table).
    hidden: numbers a token in each. gathered: logits a token, 0 if every rank computes all. value_bytes: of a number.
    """

    sums: int
    hidden: int
    gathered: int
    value_bytes: int

    @classmethod
    def of_layers(cls, layers: int, hidden: int, vocab_size: int, value_bytes: int) -> Shape:
        """Of a model cut as usual: attention and feed-forward of each layer, and the head."""
        return cls(2 * layers, hidden, vocab_size, value_bytes)


def communication_seconds(link: Link, shape: Shape, tokens: int) -> float:
    """Of a pass of `tokens` tokens: sums × (latency + tokens · hidden · bytes / bandwidth), the logits of N − 1 shares on
    their way to rank 0, and the command.
    """
    sums = shape.sums * link.sum_seconds(tokens * shape.hidden * shape.value_bytes)
    if shape.gathered:
        moved = tokens * shape.gathered * shape.value_bytes * (link.ranks - 1) / link.ranks
        sums += link.sum_seconds(moved)
    return sums + link.command


def pass_seconds(alone: float, shared: float, ranks: int, communication: float) -> float:
    """Of a pass over `ranks` ranks with a memory of their own each: alone · (1 − shared + shared / ranks) + communication.

    alone: seconds in one process. shared: the share of the weights that is cut, the rest being read by every rank. Ranks on
    one machine share its memory, and gain nothing where that is the bound.
    """
    return alone * (1 - shared + shared / ranks) + communication


def measure_link(device: torch.device) -> Link:
    """Time sums of two sizes and a command between the ranks; all of them call it together."""
    small, large = (_time_sum(size, device) for size in (_SMALL, _LARGE))
    slope = max(large - small, 1e-9) / (_LARGE - _SMALL)
    message = torch.zeros(256, dtype=torch.long)
    dist.barrier()
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        dist.broadcast(message, 0)
        times.append(time.perf_counter() - start)
    return Link(dist.get_world_size(), max(small - _SMALL * slope, 1e-9), 1 / slope, median(times))


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
    process, if that was measured on this machine; foretold: a pass by it and the formula.
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
    foretold: float | None

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
    shared = 0.0 if cut is None else cut.shared * link.ranks / max(cut.alone(link.ranks), 1)
    single = None if alone is None else sum(count * alone.verify(n) for n, count in traffic.tokens.items()) / passes
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
        foretold=None if single is None else 1000 * pass_seconds(single, shared, link.ranks, predicted),
    )


def shape_of(model: TeamModel) -> Shape:
    """Of a loaded model; a replicated one exchanges nothing."""
    cut = model.part.cut
    config = model.engine.module.config.get_text_config()
    if cut is None:
        return Shape(0, int(config.hidden_size), 0, model.dtype.itemsize)
    return Shape(cut.sums, int(config.hidden_size), model.vocab_size if cut.gathered else 0, model.dtype.itemsize)
