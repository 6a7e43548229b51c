"""Walltime on paper: the seconds of a pass from bytes, bandwidth, operations and all-reduces, for any number of devices.

A transformer whose layers are cut across devices (Megatron: two all-reduces a layer) is taken to need

    seconds = max((weights + cache) / bandwidth, operations / speed) + all-reduces + a fixed part,

bytes and operations shared out evenly. Weights are read once a pass, the keys and values of each row once a pass, whatever
number of tokens is scored; operations grow with the tokens. That is Chen et al. 2023, Section 2, in numbers: the three
reasons why scoring K + 1 tokens takes as long as sampling one, and what becomes of each as the batch grows.

Limits: everything runs at the printed peak; devices wait for nobody; a layer's products and its all-reduces do not overlap;
the latency of an all-reduce is that of a ring, 2 (n - 1) hops. docs/scale.md says where that is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from outrider.errors import ParameterError
from outrider.theory import expected_tokens
from outrider.theory.links import ring_link

ALL_REDUCES = 2  # of a layer: after attention, after the feed-forward part
ACTIVATION_BYTES = 2
MOST_ROWS = 1 << 16
LONGEST = 16


@dataclass(frozen=True)
class Network:
    """A transformer. cache_width: keys of one token in one layer, the model's width without grouped queries (None)."""

    parameters: float
    layers: int
    width: int
    bytes_per_weight: float = 2.0
    cache_width: int | None = None

    def __post_init__(self) -> None:
        _positive(self, ("parameters", "layers", "width", "bytes_per_weight", "cache_width"))

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.bytes_per_weight

    @property
    def cache_bytes(self) -> float:
        """Keys and values of one token."""
        return 2.0 * self.layers * (self.cache_width or self.width) * ACTIVATION_BYTES


@dataclass(frozen=True)
class Machine:
    """Devices that work as one. bandwidth: bytes/s of one device's memory. speed: its operations/s. memory: its bytes.

    hop_seconds: of a message to the next device. link: bytes/s to it. fixed_seconds: of each pass, whatever it holds.
    """

    devices: int = 16
    bandwidth: float = 1.2e12
    speed: float = 275e12
    memory: float = 32 * 2.0**30
    hop_seconds: float = 0.0
    link: float = 3e11
    fixed_seconds: float = 0.0

    def __post_init__(self) -> None:
        _positive(self, ("devices", "bandwidth", "speed", "memory", "link"))
        for name in ("hop_seconds", "fixed_seconds"):
            if not getattr(self, name) >= 0:
                raise ParameterError(f"{name} must be 0 or more, got {getattr(self, name)}: 0 leaves it out")

    def all_reduce_seconds(self, message: float) -> float:
        """Of a sum over all devices, in a ring."""
        return ring_link(self.devices, self.hop_seconds, self.link).sum_seconds(message) if self.devices > 1 else 0.0


def _positive(what: object, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(what, name)
        if value is not None and not value > 0:
            raise ParameterError(f"{name} must be above 0, got {value}")


@dataclass(frozen=True)
class Pass:
    """The parts of a pass, in seconds. Reading and operations overlap, the rest does not."""

    weights: float
    cache: float
    operations: float
    all_reduces: float
    fixed: float

    @property
    def seconds(self) -> float:
        return max(self.weights + self.cache, self.operations) + self.all_reduces + self.fixed


def forward(network: Network, machine: Machine, rows: int = 1, tokens: int = 1, context: int = 0) -> Pass:
    """A pass that scores `tokens` of each of `rows` after `context` tokens."""
    scored = rows * tokens
    attention = 4.0 * network.layers * network.width * context
    message = scored * network.width * ACTIVATION_BYTES
    return Pass(
        weights=network.weight_bytes / (machine.devices * machine.bandwidth),
        cache=rows * context * network.cache_bytes / (machine.devices * machine.bandwidth),
        operations=scored * (2.0 * network.parameters + attention) / (machine.devices * machine.speed),
        all_reduces=ALL_REDUCES * network.layers * machine.all_reduce_seconds(message) if machine.devices > 1 else 0.0,
        fixed=machine.fixed_seconds,
    )


@dataclass(frozen=True)
class Pair:
    """A target and its draft on one machine, at a batch size and context."""

    target: Network
    draft: Network
    machine: Machine
    rows: int = 1
    context: int = 0

    @property
    def target_seconds(self) -> float:
        """Of a token without a draft."""
        return forward(self.target, self.machine, self.rows, 1, self.context).seconds

    @property
    def draft_seconds(self) -> float:
        """Of a drafted token."""
        return forward(self.draft, self.machine, self.rows, 1, self.context).seconds

    def loop_seconds(self, gamma: int) -> float:
        """A round: `gamma` passes of the draft and one of the target over gamma + 1 tokens (Chen Figure 1, right)."""
        verify = forward(self.target, self.machine, self.rows, gamma + 1, self.context).seconds
        return gamma * self.draft_seconds + verify

    def token_seconds(self, alpha: float, gamma: int) -> float:
        """Of one row's tokens, on average (Chen Figure 1, left)."""
        return self.loop_seconds(gamma) / expected_tokens(alpha, gamma)

    def speedup(self, alpha: float, gamma: int) -> float:
        """Over plain decoding of the same batch."""
        return self.target_seconds / self.token_seconds(alpha, gamma)

    def best_gamma(self, alpha: float) -> int:
        """The draft length with the least time per token, the least of equals; 0 where none helps."""
        return min(range(LONGEST + 1), key=lambda gamma: (self.token_seconds(alpha, gamma), gamma))

    @property
    def fits(self) -> bool:
        """Whether weights and caches of both fit into the memory."""
        held = sum(one.weight_bytes + self.rows * self.context * one.cache_bytes for one in (self.target, self.draft))
        return held <= self.machine.devices * self.machine.memory


def stops_paying(pair: Pair, alpha: float) -> int | None:
    """The least batch size from which on no draft length helps, None if there is none up to `MOST_ROWS`.

    By bisection: where drafts help at all, more rows make operations dearer and leave the weights' share smaller. (Where a
    fixed part rules, drafts may help in large batches only: then this says None.)
    """
    if replace(pair, rows=MOST_ROWS).best_gamma(alpha):
        return None
    low, high = 0, MOST_ROWS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if replace(pair, rows=middle).best_gamma(alpha) == 0 else (middle, high)
    return high


def balance(network: Network, machine: Machine) -> float:
    """The tokens of a pass at which operations take as long as reading the weights; no speculation is free beyond."""
    return network.weight_bytes / machine.bandwidth / (2.0 * network.parameters / machine.speed)


def fit(target: Network, draft: Network, machine: Machine, target_seconds: float, draft_seconds: float) -> Machine:
    """The hop latency and the fixed part with which both of two measured times per token come out.

    Two unknowns from two numbers: what it says about these two is no test, what it says about all others is.
    """
    bare = replace(machine, hop_seconds=0.0, fixed_seconds=0.0)
    left = [seconds - forward(one, bare).seconds for one, seconds in ((target, target_seconds), (draft, draft_seconds))]
    hops = [ALL_REDUCES * one.layers * 2 * (machine.devices - 1) for one in (target, draft)]
    if hops[0] == hops[1]:
        raise ParameterError(
            "target and draft must differ in depth on several devices, or the two parts can't be told apart"
        )
    hop = (left[0] - left[1]) / (hops[0] - hops[1])
    return replace(machine, hop_seconds=hop, fixed_seconds=left[0] - hops[0] * hop)
