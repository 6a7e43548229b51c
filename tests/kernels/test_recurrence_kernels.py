"""Steps of recurrent layers: what they should be; the same bits however many are done at once, beside whom, and again."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.kernels.recurrences import RecurrenceKernels, recurrence_kernels

SHAPES = [(1, 1, 1, 1, 1), (2, 5, 3, 16, 64), (3, 4, 2, 7, 65), (1, 9, 16, 128, 128), (2, 3, 4, 33, 200)]


@pytest.fixture(scope="module")
def kernels() -> RecurrenceKernels:
    found = recurrence_kernels()
    if found is None:
        pytest.skip("no kernels here")
    return found


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def delta_inputs(rows: int, tokens: int, heads: int, keys: int, values: int, apart: bool) -> tuple[Tensor, ...]:
    q, k, v = (numbers(rows, tokens, heads, size, seed=i) for i, size in enumerate((keys, keys, values)))
    k = k / k.norm(dim=-1, keepdim=True)  # as models do, or differences grow
    decay = numbers(rows, tokens, heads, keys if apart else 1, seed=3).sigmoid()
    return q, k, v, decay, numbers(rows, tokens, heads, seed=4).sigmoid(), numbers(rows, heads, keys, values, seed=5)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_delta_rule(shape: tuple[int, int, int, int, int], apart: bool, kernels: RecurrenceKernels) -> None:
    q, k, v, decay, beta, state = delta_inputs(*shape, apart)
    out, added, last = kernels.delta(q, k, v, decay, beta, state)
    now = state.double()
    for n in range(shape[1]):
        now = now * decay[:, n].unsqueeze(-1)
        new = beta[:, n, :, None] * (v[:, n] - (now * k[:, n].unsqueeze(-1)).sum(2))
        now = now + k[:, n].unsqueeze(-1) * new.unsqueeze(2)
        torch.testing.assert_close(out[:, n].double(), (now * q[:, n].unsqueeze(-1)).sum(2), rtol=1e-3, atol=1e-3)
        first = [one[:, : n + 1] for one in (q, k, v, decay, beta)]  # not in one piece
        assert torch.equal(kernels.delta(*first, state)[2], kernels.delta_again(k, added, decay, state, n + 1))
    torch.testing.assert_close(last.double(), now, rtol=1e-3, atol=1e-3)
    assert torch.equal(kernels.delta_again(k, added, decay, state, 0), state)
    for row in range(shape[0]):
        one = slice(row, row + 1)
        alone = kernels.delta(q[one], k[one], v[one], decay[one], beta[one], state[one])
        assert all(torch.equal(a, b[one]) for a, b in zip(alone, (out, added, last), strict=True))


def outer_inputs(rows: int, tokens: int, heads: int, size: int, width: int) -> tuple[Tensor, ...]:
    groups = 2 if heads % 2 == 0 else 1
    b, c = (numbers(rows, tokens, groups, width, seed=i) for i in (2, 3))
    decay = numbers(rows, tokens, heads, seed=1).sigmoid()
    return numbers(rows, tokens, heads, size, seed=0), decay, b, c, numbers(rows, heads, size, width, seed=4)


@pytest.mark.parametrize("shape", SHAPES)
def test_mambas_rule(shape: tuple[int, int, int, int, int], kernels: RecurrenceKernels) -> None:
    x, decay, b, c, state = outer_inputs(*shape)
    out, last = kernels.outer(x, decay, b, c, state)
    now, heads = state.double(), shape[2] // b.shape[2]
    for n in range(shape[1]):
        of_heads = [one[:, n].repeat_interleave(heads, 1).unsqueeze(2).double() for one in (b, c)]
        now = now * decay[:, n, :, None, None] + x[:, n].unsqueeze(-1) * of_heads[0]
        torch.testing.assert_close(out[:, n].double(), (now * of_heads[1]).sum(-1), rtol=1e-3, atol=1e-3)
        first = [one[:, : n + 1] for one in (x, decay, b, c)]
        assert torch.equal(kernels.outer(*first, state)[1], kernels.outer_again(x, decay, b, state, n + 1))
    torch.testing.assert_close(last.double(), now, rtol=1e-3, atol=1e-3)
    for row in range(shape[0]):
        one = slice(row, row + 1)
        alone = kernels.outer(x[one], decay[one], b[one], c[one], state[one])
        assert all(torch.equal(a, b[one]) for a, b in zip(alone, (out, last), strict=True))


def scan_inputs(rows: int, tokens: int, channels: int, width: int) -> tuple[Tensor, ...]:
    x, dt = numbers(rows, tokens, channels, seed=0), numbers(rows, tokens, channels, seed=1).sigmoid()
    b, c = (numbers(rows, tokens, width, seed=i) for i in (2, 3))
    return x, dt, -numbers(channels, width, seed=4).exp(), b, c, numbers(rows, channels, width, seed=5)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 5, 300, 16), (3, 4, 7, 9), (1, 9, 64, 33)])
def test_mambas_first_rule(shape: tuple[int, int, int, int], kernels: RecurrenceKernels) -> None:
    x, dt, a, b, c, state = scan_inputs(*shape)
    out, last = kernels.scan(x, dt, a, b, c, state, False)
    now = state.double()
    for n in range(shape[1]):
        size = dt[:, n].double().unsqueeze(-1)
        now = now * (size * a).exp() + size * x[:, n].unsqueeze(-1) * b[:, n].unsqueeze(1)
        torch.testing.assert_close(out[:, n].double(), (now * c[:, n].unsqueeze(1)).sum(-1), rtol=1e-4, atol=1e-4)
        first = [one[:, : n + 1] for one in (x, dt)], [one[:, : n + 1] for one in (b, c)]
        assert torch.equal(
            kernels.scan(*first[0], a, *first[1], state, False)[1], kernels.scan_again(x, dt, a, b, state, n + 1)
        )
    torch.testing.assert_close(last.double(), now, rtol=1e-4, atol=1e-4)
    assert torch.equal(kernels.scan_again(x, dt, a, b, state, 0), state)
    for row in range(shape[0]):
        one = slice(row, row + 1)
        alone = kernels.scan(x[one], dt[one], a, b[one], c[one], state[one], False)
        assert all(torch.equal(wanted, got[one]) for wanted, got in zip(alone, (out, last), strict=True))


def test_a_state_may_be_read_as_bfloat16_has_it(kernels: RecurrenceKernels) -> None:
    """The state itself stays as it is."""
    x, dt, a, b, c, state = scan_inputs(2, 1, 30, 16)
    out, last = kernels.scan(x, dt, a, b, c, state, True)
    assert torch.equal(last, kernels.scan(x, dt, a, b, c, state, False)[1])
    want = (last.bfloat16().double() * c[:, 0, None]).sum(-1)
    torch.testing.assert_close(out[:, 0].double(), want, rtol=1e-5, atol=1e-5)


def test_steps_so_long_that_nothing_is_kept(kernels: RecurrenceKernels) -> None:
    x, dt, a, b, c, state = scan_inputs(1, 1, 8, 16)
    _, last = kernels.scan(x, 1e6 * dt, 0 * a - 1.0, b, c, state, False)
    assert torch.equal(last, (1e6 * dt * x)[:, 0, :, None] * b[:, 0, None])
    assert torch.equal(kernels.scan(x, 0 * dt, a, b, c, state, False)[1], state)
    for power in (87.0, 90.0, 500.0, math.inf):  # which models don't have
        _, last = kernels.scan(0 * x, 0 * dt + 1.0, 0 * a + power, b, c, 0 * state + 1.0, False)
        torch.testing.assert_close(last, torch.full_like(last, math.exp(min(power, 88.0))))
    assert kernels.scan(x, dt, a * math.nan, b, c, state, False)[1].isnan().all()


def test_threads_change_no_bits(kernels: RecurrenceKernels) -> None:
    before = torch.get_num_threads()
    found: list[tuple[Tensor, ...]] = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(
                (
                    *kernels.delta(*delta_inputs(2, 9, 16, 64, 128, False)),
                    *kernels.outer(*outer_inputs(2, 9, 8, 64, 128)),
                    *kernels.scan(*scan_inputs(2, 9, 300, 16), False),
                )
            )
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for one in found[1:] for a, b in zip(found[0], one, strict=True))


def test_what_does_not_fit_is_refused(kernels: RecurrenceKernels) -> None:
    good: list[Any] = list(delta_inputs(2, 3, 2, 4, 8, False))
    for i in range(6):
        for wrong in (good[i][:1], good[i].double(), good[i][..., None]):
            with pytest.raises(RuntimeError):
                kernels.delta(*good[:i], wrong, *good[i + 1 :])
    with pytest.raises(RuntimeError, match="no more steps than tokens"):
        kernels.delta_again(good[1], good[2], good[3], good[5], 4)
    good = list(outer_inputs(2, 3, 2, 4, 8))
    for i in range(5):
        for wrong in (good[i][:1], good[i].double(), good[i][..., None]):
            with pytest.raises(RuntimeError):
                kernels.outer(*good[:i], wrong, *good[i + 1 :])
    good = list(scan_inputs(2, 3, 5, 8))
    for i in range(6):
        for wrong in (good[i][:1], good[i].double(), good[i][..., None]):
            with pytest.raises(RuntimeError):
                kernels.scan(*good[:i], wrong, *good[i + 1 :], False)
    with pytest.raises(RuntimeError, match="no more steps than tokens"):
        kernels.scan_again(*good[:4], good[5], 4)
