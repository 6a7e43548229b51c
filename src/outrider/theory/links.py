"""What a sum over several devices costs: a latency, and a bandwidth. Measured ones and those on paper are the same kind."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """Between `ranks` ranks. latency: seconds of a sum over them of next to nothing, on CPUs measured between two pieces of
    work. bandwidth: bytes of the summed tensor that each further second sums. command: seconds until rank 0 has told
    the others what to do. reading: bytes of weights a second that a process by itself multiplies by, 0 if not measured.
    company: how much longer that takes while all ranks do it; 1 where each has a memory and processors of its own.
    """

    ranks: int
    latency: float
    bandwidth: float
    command: float
    reading: float = 0.0
    company: float = 1.0

    def sum_seconds(self, size: float) -> float:
        """Of a sum over the ranks of a tensor of `size` bytes."""
        return self.latency + size / self.bandwidth


def ring_link(ranks: int, hop: float, wire: float, command: float = 0.0) -> Link:
    """The link that a ring of such hops would give: 2(N − 1) hops, in which 2(N − 1)/N of the tensor passes each wire.

    hop: seconds of a message of nothing between neighbours. wire: bytes a second between neighbours. ranks ≥ 2.
    """
    return Link(ranks, 2 * (ranks - 1) * hop, wire * ranks / (2 * (ranks - 1)), command)
