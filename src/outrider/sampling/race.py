"""Drawing a token by the numbers of its position: the exponential race, in which no draft has a say.

Each position has a number of its own for every token of the vocabulary, E_1 … E_V, independent and exponential; the token
drawn from weights w is the one whose E / w is least (the Gumbel-max trick, in another scale). It is drawn with probability
w / sum w, and two laws that are alike mostly draw the same token: with probability (1 - D) / (1 + D) at least, for D their
total variation (Daliri, Musco, Suresh 2025, "Coupling without communication and drafter-invariant speculative decoding").
So a draft that races with the target's own numbers is mostly right, and the target need not know its law: see
`acceptance.by_position`.

Numbers are Philox4x32's with ten rounds (Salmon et al. 2011), of 64 bits: token t's are word (t % 32) // 8 of the blocks
(t // 32) * 8 + t % 8, with the counter (block, position, half, 0) and the stream's key. So any of them can be had without
the others, on any device. Our kernels take .06 ms for a row of 49,152 tokens, with logarithms of the few that could win;
torch's operations (float64, other processors) a hundred times as long. On a GPU it is one kernel of Triton's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Many
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from outrider.errors import in_one_line
from outrider.kernels.sampling import reading
from outrider.support.device_data import to_device

_TIMES, _MORE = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_ROUNDS, _GROUP, _LANES = 10, 32, 8
_log = logging.getLogger(__name__)
_AT_ONCE = 1 << 22  # numbers, of some 60 bytes each on their way


def race(weights: Tensor, keys: Many[int], positions: Many[int]) -> Tensor:
    """Who wins at each row's position. [N, V], N keys of streams, N positions → int64 [N], on the weights' device

    -1 for a row that is not a distribution (NaN, infinite or zero total); a token of weight 0 is never drawn. Weights need
    not be normalised.
    """
    assert len(weights) == len(keys) == len(positions)
    own, places = (to_device(values, weights.device, torch.long) for values in (keys, positions))
    ours = reading(weights)
    if ours is not None and weights.dtype is torch.float32:
        tokens: Tensor = ours.race(weights, own, places)
        return tokens
    fused = _on_cuda() if weights.device.type == "cuda" else None
    if fused is not None:
        return fused(weights, own, places)
    some = max(1, _AT_ONCE // weights.shape[-1])
    parts = zip(*(torch.split(x, some) for x in (weights, own, places)), strict=True)
    return torch.cat([race_on_device(*part) for part in parts])


@cache
def _on_cuda() -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """One kernel for a race there, tried once beside torch's operations; None where Triton can't make it."""
    if find_spec("triton") is None:
        return None
    try:
        from outrider.sampling.race_triton import race_in_one

        weights = torch.arange(2 * 1500, device="cuda", dtype=torch.float32).view(2, 1500)
        keys = torch.tensor([2**62 + 5, 7], device="cuda")
        positions = torch.tensor([3, 2**31], device="cuda")
        if torch.equal(race_in_one(weights, keys, positions), race_on_device(weights, keys, positions)):
            return race_in_one
        why: object = "it gave another token"
    except Exception as error:  # of the compiler, the driver or the launch
        why = in_one_line(error)
    _log.warning("Triton's kernel for drawing by position can't be used (%s): torch's operations are slower", why)
    return None


def race_on_device(weights: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """The same by torch's operations, with nothing read back. [N, V], int64 [N], int64 [N] → int64 [N]"""
    wide = weights.double()
    total = wide.sum(-1)
    times = _exponentials(keys, positions, weights.shape[-1]) / wide  # a weight of 0: infinite
    winner = times.argmin(-1)
    return torch.where(total.isfinite() & (total > 0), winner, -1)


def _exponentials(keys: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """int64 [N], int64 [N] → float64 [N, V]"""
    groups = -(-vocabulary // _GROUP)
    blocks = torch.arange(groups * _LANES, device=keys.device)
    upper, lower = _philox(keys, positions, blocks).unbind(1)
    uniform = (upper.double() * 2.0**32 + lower.double() + 0.5) * 2.0**-64
    return -torch.log1p(-uniform.clamp(max=1.0 - 2.0**-53))[:, :vocabulary]


def _philox(keys: Tensor, positions: Tensor, blocks: Tensor) -> Tensor:
    """The words of these blocks, in the order of the tokens, of both halves. int64 [N], [N], [B] → int64 [N, 2, 4 B], of 32
    bits each
    """
    low, high = (keys & _WORD).view(-1, 1, 1), ((keys >> 32) & _WORD).view(-1, 1, 1)
    zeros = torch.zeros(len(keys), 2, len(blocks), dtype=torch.long, device=keys.device)
    halves = torch.arange(2, device=keys.device).view(1, 2, 1)
    x = [zeros + blocks, zeros + (positions & _WORD).view(-1, 1, 1), zeros + halves, zeros]
    for _ in range(_ROUNDS):
        first, second = x[0] * _TIMES[0], x[2] * _TIMES[1]  # modulo 2^64, whatever their sign
        x = [
            ((second >> 32) & _WORD) ^ x[1] ^ low,
            second & _WORD,
            ((first >> 32) & _WORD) ^ x[3] ^ high,
            first & _WORD,
        ]
        low, high = (low + _MORE[0]) & _WORD, (high + _MORE[1]) & _WORD
    words = torch.stack([word.view(len(keys), 2, len(blocks) // _LANES, _LANES) for word in x], dim=3)
    return words.flatten(2)
