"""The race of `sampling.race` on a CUDA device, in one kernel: torch's operations are some 150, a launch each."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

jit: Any = triton.jit(do_not_specialize=("V", "steps"))

BLOCK = 1024  # tokens of a program at once
MOST_PARTS = 64  # programs of a row


@jit
def _words(low, high, block, position, HALF: tl.constexpr):
    """Philox4x32 with ten rounds: the four words of each block."""
    x0 = block
    x1 = position
    x2 = tl.zeros_like(block) + HALF
    x3 = tl.zeros_like(block)
    times_0 = tl.full(block.shape, 0xD2511F53, tl.uint32)
    times_1 = tl.full(block.shape, 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        first_high = tl.umulhi(times_0, x0)
        first_low = times_0 * x0
        second_high = tl.umulhi(times_1, x2)
        second_low = times_1 * x2
        x0 = second_high ^ x1 ^ low
        x1 = second_low
        x2 = first_high ^ x3 ^ high
        x3 = first_low
        low = low + tl.full(block.shape, 0x9E3779B9, tl.uint32)
        high = high + tl.full(block.shape, 0xBB67AE85, tl.uint32)
    return x0, x1, x2, x3


@jit
def _word(low, high, token, position, HALF: tl.constexpr):
    """The word of each token. uint32, as float64"""
    block = ((token // 32) * 8 + token % 8).to(tl.uint32)
    x0, x1, x2, x3 = _words(low, high, block, position, HALF)
    place = (token % 32) // 8
    word = tl.where(place == 0, x0, tl.where(place == 1, x1, tl.where(place == 2, x2, x3)))
    return word.to(tl.float64)


@jit
def _race(weights, keys, positions, times, tokens, totals, stride, V, steps, SIZE: tl.constexpr):
    """One part of one row a program → its least time, whose it is, and the sum of its weights, [N, parts] each."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    i = tl.arange(0, SIZE)
    none = tl.zeros([SIZE], tl.uint32)
    key = tl.load(keys + row)
    low = (key & 0xFFFFFFFF).to(tl.uint32) + none
    high = ((key >> 32) & 0xFFFFFFFF).to(tl.uint32) + none
    position = (tl.load(positions + row) & 0xFFFFFFFF).to(tl.uint32) + none
    best = tl.full([SIZE], float("inf"), tl.float64)
    winner = tl.zeros([SIZE], tl.int64)
    total = tl.zeros([SIZE], tl.float64)
    for step in range(steps):
        token = (part * steps + step) * SIZE + i
        inside = token < V
        weight = tl.load(weights + row.to(tl.int64) * stride + token, mask=inside, other=0.0).to(tl.float64)
        upper = _word(low, high, token, position, 0)
        lower = _word(low, high, token, position, 1)
        v = (upper * 4294967296.0 + lower + 0.5) * 5.421010862427522e-20
        v = tl.minimum(v, 0.9999999999999999)
        # -log(1 - v), where that would cancel by its series: v^9 / 10 is less than its last bit.
        series = v * (1.0 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * (1 / 5 + v * (1 / 6 + v * (1 / 7 + v * (1 / 8))))))))
        time = tl.where(v < 0.0078125, series, -tl.log(1.0 - v)) / weight
        better = (weight > 0.0) & (time < best)
        best = tl.where(better, time, best)
        winner = tl.where(better, token.to(tl.int64), winner)
        total += weight
    least = tl.min(best, 0)
    tl.store(times + row * parts + part, least)
    tl.store(tokens + row * parts + part, tl.min(tl.where(best == least, winner, V), 0))
    tl.store(totals + row * parts + part, tl.sum(total, 0))


def race_in_one(weights: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """[N, V], int64 [N], int64 [N] → int64 [N]; see `race.race_on_device`, of which it is the same."""
    count, vocabulary = weights.shape
    weights = weights if weights.stride(-1) == 1 else weights.contiguous()
    blocks = triton.cdiv(vocabulary, BLOCK)
    steps = triton.cdiv(blocks, MOST_PARTS)
    parts = triton.cdiv(blocks, steps)
    times = torch.empty(count, parts, dtype=torch.float64, device=weights.device)
    totals = torch.empty_like(times)
    tokens = torch.empty(count, parts, dtype=torch.long, device=weights.device)
    with torch.cuda.device(weights.device) if weights.is_cuda else nullcontext():  # Triton takes the current one
        _race[count, parts](
            weights, keys, positions, times, tokens, totals, weights.stride(0), vocabulary, steps, SIZE=BLOCK
        )
    total = totals.sum(-1)
    won = tokens.gather(-1, times.argmin(-1, keepdim=True)).squeeze(-1)
    return torch.where(total.isfinite() & (total > 0), won, -1)
