"""The kernels of a lean pass, in Triton: M tokens in all, few enough that a pass takes as long as reading the weights.

Products are of a few tokens by whole weights. What is left of the other sums is done where their inputs are read anyway:
the parts of a product over K are added up by whoever reads them. Numbers are rounded to the weights' type where the model's
own code rounds them, so that a lean pass is as far from an ordinary one as that is from itself at another width.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

# These change from pass to pass: kernels made for the value 1, or for multiples of 16, would be compiled beside the others.
jit: Any = triton.jit(do_not_specialize=("M", "N", "rows", "chunks"))


@jit
def add_norm(
    residual, partials, weight, tokens, out, normed, rows, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, EMBED: tl.constexpr,
):  # fmt: skip
    """One token a program. residual [M, W] (EMBED: the table, and `tokens` [M] its rows) + the sum of partials
    [SPLITS, M, W] → out [M, W], and that by root mean square and weight → normed [M, W].
    """
    m = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    inside = i < WIDTH
    at = m.to(tl.int64)
    if EMBED:
        at = tl.load(tokens + m)
    h = tl.load(residual + at * WIDTH + i, mask=inside, other=0.0)
    kind = h.dtype
    if SPLITS > 0:
        added = tl.zeros([BLOCK], tl.float32)
        for s in tl.static_range(SPLITS):
            added += tl.load(partials + (s * rows + m) * WIDTH + i, mask=inside, other=0.0)
        h = (h.to(tl.float32) + added.to(kind).to(tl.float32)).to(kind)
    tl.store(out + m * WIDTH + i, h, mask=inside)
    x = h.to(tl.float32)
    rate = 1.0 / tl.sqrt(tl.sum(x * x, 0) / WIDTH + eps)
    scaled = (x * rate).to(kind).to(tl.float32)
    w = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + m * WIDTH + i, (w * scaled).to(kind), mask=inside)


@jit
def product(
    x, w0, w1, w2, out, M, n0, n1, n2, K,
    STEPS: tl.constexpr, MB: tl.constexpr, NB: tl.constexpr, KB: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """X [M, K] by the rows of up to three weights [n, K] below each other → out [M, n0 + n1 + n2] in x's type (WHOLE), or
    [SPLITS, M, n0 + n1 + n2] in float32: parts of STEPS blocks of K each. Programs: blocks of rows, SPLITS.
    """
    block = tl.program_id(0)
    part = tl.program_id(1)
    b0 = tl.cdiv(n0, NB)
    b1 = tl.cdiv(n1, NB)
    w = w0
    first = block * NB
    count = n0
    to = 0
    if block >= b0 + b1:
        w = w2
        first = (block - b0 - b1) * NB
        count = n2
        to = n0 + n1
    elif block >= b0:
        w = w1
        first = (block - b0) * NB
        count = n1
        to = n0
    n = first + tl.arange(0, NB)
    m = tl.arange(0, MB)
    kk = tl.arange(0, KB)
    row = n.to(tl.int64) * K
    acc = tl.zeros([MB, NB], tl.float32)
    start = part * STEPS * KB
    for j in range(STEPS):
        k = start + j * KB + kk
        a = tl.load(x + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        b = tl.load(w + row[None, :] + k[:, None], mask=(n[None, :] < count) & (k[:, None] < K), other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    total = n0 + n1 + n2
    inside = (m[:, None] < M) & (n[None, :] < count)
    if WHOLE:
        place = out + m[:, None].to(tl.int64) * total + (to + n)[None, :]
        tl.store(place, acc.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(out + (part * M + m[:, None]) * total + (to + n)[None, :], acc, mask=inside)


@jit
def gated(
    x, gate, up, out, M, inner, K,
    STEPS: tl.constexpr, MB: tl.constexpr, NB: tl.constexpr, KB: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """silu(x gateᵀ) · (x upᵀ): x [M, K], gate and up [inner, K] → out [M, inner]."""
    n = tl.program_id(0) * NB + tl.arange(0, NB)
    m = tl.arange(0, MB)
    kk = tl.arange(0, KB)
    row = n.to(tl.int64) * K
    left = tl.zeros([MB, NB], tl.float32)
    right = tl.zeros([MB, NB], tl.float32)
    for j in range(STEPS):
        k = j * KB + kk
        a = tl.load(x + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        there = (n[None, :] < inner) & (k[:, None] < K)
        g = tl.load(gate + row[None, :] + k[:, None], mask=there, other=0.0)
        left = tl.dot(a, g, left, input_precision=PRECISION)
        u = tl.load(up + row[None, :] + k[:, None], mask=there, other=0.0)
        right = tl.dot(a, u, right, input_precision=PRECISION)
    kind = out.dtype.element_ty
    g = left.to(kind).to(tl.float32)
    acted = (g / (1.0 + tl.exp(-g))).to(kind).to(tl.float32)
    h = (acted * right.to(kind).to(tl.float32)).to(kind)
    tl.store(out + m[:, None] * inner + n[None, :], h, mask=(m[:, None] < M) & (n[None, :] < inner))


@jit
def _summed(partials, bias, token, column, step, inside, SPLITS: tl.constexpr, BIAS: tl.constexpr, kind: tl.constexpr):
    """A block [A, B] of a product whose parts lie `step` apart: at (token [A, 1], column [1, B]), rounded as it would be."""
    acc = tl.load(partials + token + column, mask=inside, other=0.0)
    for s in tl.static_range(1, SPLITS):
        acc += tl.load(partials + s * step + token + column, mask=inside, other=0.0)
    if BIAS:
        acc += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    return acc.to(kind).to(tl.float32)


@jit
def _turned(
    parts, bias, token, column, step, stands, most, cos, sin, inside,
    HALF: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """Both halves [A, HALF] of a head's queries or keys, `_summed` and turned as their positions `stands` [A] say. column:
    [A or 1, HALF], of the first half. inside: [A].
    """
    angle = tl.minimum(stands, most)[:, None] * HALF + tl.arange(0, HALF)[None, :]
    c = tl.load(cos + angle, mask=inside[:, None], other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=inside[:, None], other=0.0).to(tl.float32)
    first = _summed(parts, bias, token, column, step, inside[:, None], SPLITS, BIAS, kind)
    second = _summed(parts, bias, token, column + HALF, step, inside[:, None], SPLITS, BIAS, kind)
    return (first * c - second * s).to(kind), (second * c + first * s).to(kind)


@jit
def _over_new(
    left, right, position, mine, spot, here, new_left, new_right, new_values, scale, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention over the tokens of this pass: each sees itself and what stands in a column before its position. `mine`:
    the queries' columns, `spot`: the keys'. → highest scores, totals, values, as `attend` keeps them
    """
    allowed = (spot[None, :] < position[:, None]) | (spot[None, :] == mine[:, None])
    scores = tl.dot(left, tl.trans(new_left), input_precision=PRECISION)
    scores = tl.dot(right, tl.trans(new_right), scores, input_precision=PRECISION) * scale
    scores = tl.where(allowed & here[None, :], scores, -float("inf"))
    top = tl.maximum(tl.max(scores, 1), -1e30)
    shares = tl.exp(scores - top[:, None])
    return top, tl.sum(shares, 1), tl.dot(shares.to(new_values.dtype), new_values, input_precision=PRECISION)


@jit
def _over_old(
    left, right, position, keys, values, k_column, v_column, first, begin, scale,
    QB: tl.constexpr, SIZE: tl.constexpr, CB: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention over the columns first … first + CHUNK of the cache, those before `begin`. keys, values: of a row and head.
    → highest scores, totals, values, as `attend` keeps them
    """
    HALF: tl.constexpr = SIZE // 2
    half = tl.arange(0, HALF)
    whole = tl.arange(0, SIZE)
    top = tl.full([QB], -float("inf"), tl.float32)
    total = tl.zeros([QB], tl.float32)
    acc = tl.zeros([QB, SIZE], tl.float32)
    for j in range(CHUNK // CB):
        column = first + j * CB + tl.arange(0, CB)
        old = column < begin
        held = keys + column[None, :] * k_column + half[:, None]
        near = tl.load(held, mask=old[None, :], other=0.0)
        far = tl.load(held + HALF, mask=old[None, :], other=0.0)
        scores = tl.dot(left, near, input_precision=PRECISION)
        scores = tl.dot(right, far, scores, input_precision=PRECISION) * scale
        seen = old[None, :] & (column[None, :] < position[:, None])
        scores = tl.where(seen, scores, -float("inf"))
        higher = tl.maximum(tl.maximum(top, tl.max(scores, 1)), -1e30)
        weights = tl.exp(scores - higher[:, None])
        less = tl.exp(top - higher)
        v = tl.load(values + column[:, None] * v_column + whole[None, :], mask=old[:, None], other=0.0)
        total = total * less + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * less[:, None], input_precision=PRECISION)
        top = higher
    return top, total, acc


@jit
def attend(
    parts, q_bias, k_bias, v_bias, keys, values, positions, at, cos, sin, out, highest, totals,
    M, N, chunks, scale, most, k_row, k_head, k_column, v_row, v_head, v_column,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, QB: tl.constexpr, TB: tl.constexpr, CB: tl.constexpr,
    CHUNK: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of all queries of a row that share keys, over one chunk of the cache's columns, or over the new tokens.

    parts: [SPLITS, M, (HEADS + 2 KV_HEADS) SIZE], the product by q, k and v. positions, at: int64 [M], of each token, and
    the column where it goes, one after the other in a row. Programs: rows, KV_HEADS, chunks + 1; the last chunk is the new
    tokens', whose keys and values it writes. → out [chunks + 1, M, HEADS, SIZE], not divided by totals [chunks + 1, M,
    HEADS], relative to e^highest.
    """
    row = tl.program_id(0).to(tl.int64)  # times a row of the cache, which can be gigabytes
    head = tl.program_id(1)
    chunk = tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    HALF: tl.constexpr = SIZE // 2
    kind: tl.constexpr = keys.dtype.element_ty
    width = (HEADS + 2 * KV_HEADS) * SIZE
    step = M * width
    q = tl.arange(0, QB)
    half = tl.arange(0, HALF)
    whole = tl.arange(0, SIZE)
    real = q < N * GROUP
    token = row * N + q // GROUP
    own = head * GROUP + q % GROUP
    position = tl.load(positions + token, mask=real, other=0)
    begin = tl.load(at + row * N)
    if (chunk < chunks) & (chunk * CHUNK >= begin):
        place = (chunk * M + token) * HEADS + own
        tl.store(highest + place, tl.full([QB], -float("inf"), tl.float32), mask=real)
        tl.store(totals + place, tl.zeros([QB], tl.float32), mask=real)
        tl.store(out + place[:, None] * SIZE + whole[None, :], tl.zeros([QB, SIZE], tl.float32), mask=real[:, None])
    else:
        near = (own * SIZE)[:, None] + half[None, :]
        left, right = _turned(
            parts, q_bias, token[:, None] * width, near, step, position, most, cos, sin, real, HALF, SPLITS, BIAS, kind
        )
        own_keys = keys + row * k_row + head * k_head
        own_values = values + row * v_row + head * v_head
        if chunk == chunks:
            t = tl.arange(0, TB)
            here = t < N
            new = row * N + t
            spot = tl.load(at + new, mask=here, other=0)
            stands = tl.load(positions + new, mask=here, other=0)
            base = new[:, None] * width + HEADS * SIZE
            low = head * SIZE + half[None, :]
            new_left, new_right = _turned(
                parts, k_bias, base, low, step, stands, most, cos, sin, here, HALF, SPLITS, BIAS, kind
            )
            base += KV_HEADS * SIZE
            new_values = _summed(
                parts, v_bias, base, head * SIZE + whole[None, :], step, here[:, None], SPLITS, BIAS, kind
            ).to(kind)
            to_keys = own_keys + spot[:, None] * k_column + half[None, :]
            tl.store(to_keys, new_left, mask=here[:, None])
            tl.store(to_keys + HALF, new_right, mask=here[:, None])
            tl.store(own_values + spot[:, None] * v_column + whole[None, :], new_values, mask=here[:, None])
            mine = tl.load(at + token, mask=real, other=0)
            top, total, acc = _over_new(
                left, right, position, mine, spot, here, new_left, new_right, new_values, scale, PRECISION
            )
        else:
            top, total, acc = _over_old(
                left, right, position, own_keys, own_values, k_column, v_column, chunk * CHUNK, begin, scale,
                QB, SIZE, CB, CHUNK, PRECISION,
            )  # fmt: skip
        place = (chunk * M + token) * HEADS + own
        tl.store(highest + place, top, mask=real)
        tl.store(totals + place, total, mask=real)
        tl.store(out + place[:, None] * SIZE + whole[None, :], acc, mask=real[:, None])


@jit
def combine(out, highest, totals, attended, M, chunks, HEADS: tl.constexpr, SIZE: tl.constexpr, PB: tl.constexpr):
    """The chunks of `attend` → attended [M, HEADS SIZE]. Programs: M, HEADS."""
    m = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.arange(0, PB)
    there = part < chunks
    d = tl.arange(0, SIZE)
    place = (part * M + m) * HEADS + head
    top = tl.load(highest + place, mask=there, other=-float("inf"))
    share = tl.exp(top - tl.max(top, 0))
    total = tl.sum(share * tl.load(totals + place, mask=there, other=0.0), 0)
    each = tl.load(out + place[:, None] * SIZE + d[None, :], mask=there[:, None], other=0.0)
    summed = tl.sum(each * share[:, None], 0) / total
    tl.store(attended + (m * HEADS + head) * SIZE + d, summed.to(attended.dtype.element_ty))
