"""Attention by our kernel: what float64 gives, and bits that depend on nothing beside a query and what it sees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.kernels.models import Kernels, build, kernels
from outrider.models.attention.in_float64 import STEADY
from outrider.models.kernels.attention import KERNEL, attend
from outrider.models.weights.quantized import quantize_to_int8
from tests.helpers.kernels import HERE
from tests.helpers.tiny_models import module

pytestmark = pytest.mark.skipif(kernels() is None, reason="this machine builds no kernels")
# heads, heads of keys, size
SHAPES = [(9, 3, 64), (12, 2, 128), (14, 2, 8), (4, 4, 24), (2, 1, 80)]


def drawn(shape: tuple[int, int, int], batch: int, tokens: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries as models have them (heads beside each other), keys and values as in a cache with room behind."""
    heads, groups, size = shape
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(batch, tokens, heads, size, generator=draw).transpose(1, 2) * 3
    key, value = (torch.randn(batch, groups, columns + 7, size, generator=draw)[:, :, :columns] for _ in range(2))
    return query, key, value


def causal(tokens: int, columns: int) -> Tensor:
    return torch.ones(tokens, columns, dtype=torch.bool).tril(columns - tokens)[None, None]


def exact(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    times = query.shape[1] // key.shape[1]
    scores = query.double() @ key.double().repeat_interleave(times, 1).transpose(2, 3) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    out: Tensor = (scores.softmax(-1) @ value.double().repeat_interleave(times, 1)).transpose(1, 2)
    return out


KEPT = (torch.float32, torch.float16)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("tokens", "columns"), [(1, 1), (1, 255), (2, 256), (5, 257), (40, 700)])
@pytest.mark.parametrize("sees", ["all", "what was before", "a window", "some"])
def test_it_is_attention(built: Kernels, shape: tuple[int, int, int], tokens: int, columns: int, sees: str) -> None:
    query, key, value = drawn(shape, 2, tokens, columns)
    mask = {
        "all": None,
        "what was before": causal(tokens, columns),
        "a window": causal(tokens, columns) & ~torch.ones(tokens, columns, dtype=torch.bool).tril(columns - tokens - 30),
        "some": (torch.rand(2, 1, tokens, columns, generator=torch.Generator().manual_seed(1)) < 0.3)
        | torch.eye(tokens, columns, dtype=torch.bool),
    }[sees]
    with torch.inference_mode():
        got = built.ops.attend(query, key, value, mask, 0.3)
    assert got.shape == (2, tokens, shape[0], shape[2])
    torch.testing.assert_close(got.double(), exact(query, key, value, mask, 0.3), rtol=0, atol=2e-5)
    key, value = key.half(), value.half()
    with torch.inference_mode():
        got = built.ops.attend(query, key, value, mask, 0.3)
        assert torch.equal(got, built.ops.attend(query, key.float(), value.float(), mask, 0.3))  # read as what they are


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("columns", [3, 64, 256, 300, 1100])
@pytest.mark.parametrize("kept", KEPT)
def test_a_querys_bits_depend_on_nothing_beside_it(
    built: Kernels, shape: tuple[int, int, int], columns: int, kept: torch.dtype
) -> None:
    query, key, value = drawn(shape, 3, min(columns, 33), columns)
    key, value = key.to(kept), value.to(kept)
    tokens, before = query.shape[2], torch.get_num_threads()
    mask = causal(tokens, columns).expand(3, -1, -1, -1)
    with torch.inference_mode():
        together = built.ops.attend(query, key, value, mask, 0.1)
        try:
            for threads in (1, 2):
                torch.set_num_threads(threads)
                for width in (1, 2, 3, 5, 8):
                    for first in range(0, tokens, width):
                        part = slice(first, min(first + width, tokens))
                        seen = columns - tokens + part.stop  # later columns do not exist yet
                        for row in (slice(0, 3), slice(1, 2)):
                            own = (query[row, :, part], key[row, :, :seen], value[row, :, :seen])
                            got = built.ops.attend(*own, mask[row, :, part, :seen].contiguous(), 0.1)
                            assert torch.equal(got, together[row, part])
        finally:
            torch.set_num_threads(before)


@pytest.mark.parametrize("kept", KEPT)
def test_levels_agree_to_the_bit(kept: torch.dtype) -> None:
    query, key, value = drawn(SHAPES[0], 1, 7, 600)
    key, value = key.to(kept), value.to(kept)
    with torch.inference_mode():
        results = [build(level).ops.attend(query, key, value, causal(7, 600), 0.2) for level in HERE]
    assert all(torch.equal(one, results[0]) for one in results)


def test_extreme_scores(built: Kernels) -> None:
    query, key, value = drawn((3, 1, 16), 1, 4, 520)
    with torch.inference_mode():
        for size in (0.0, 1e-30, 1e3, 1e18):
            got = built.ops.attend(query * size, key, value, None, 1.0)
            torch.testing.assert_close(got.double(), exact(query * size, key, value, None, 1.0), rtol=0, atol=1e-4)
        blind = causal(4, 520).clone()
        blind[0, 0, 2] = False
        got = built.ops.attend(query, key, value, blind, 1.0)
        assert torch.equal(got[:, 2], torch.zeros_like(got[:, 2]))
        assert torch.equal(got[:, [0, 1, 3]], built.ops.attend(query, key, value, causal(4, 520), 1.0)[:, [0, 1, 3]])
        query[:, :, 1] = torch.nan
        bad = built.ops.attend(query, key, value, blind, 1.0)
        assert bad[:, 1].isnan().all()
        assert torch.equal(bad[:, [0, 2, 3]], got[:, [0, 2, 3]])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["key", "value"])
def test_what_a_query_does_not_see_may_be_no_number(built: Kernels, part: str, bad: float) -> None:
    query, key, value = drawn((6, 2, 24), 2, 5, 300)
    mask = causal(5, 300)
    with torch.inference_mode():
        want = built.ops.attend(query, key, value, mask, 0.3)
        (key if part == "key" else value)[0, 1, 297, 3] = bad  # the third token is the first to see it
        got = built.ops.attend(query, key, value, mask, 0.3)
    assert torch.equal(got[:, :2], want[:, :2])
    assert torch.equal(got[1], want[1])
    assert torch.equal(got[0, :, :3], want[0, :, :3])  # heads with other keys
    if part == "value":
        assert not got[0, 2:, 3:, 3].isfinite().any()


def test_scores_that_are_all_without_bounds_make_no_number(built: Kernels) -> None:
    """As softmax: nothing of what is seen has a weight. A row that sees nothing is zero."""
    query = torch.full((1, 1, 2, 8), 1e20)
    key, value = torch.full((1, 1, 600, 8), -1e20), torch.ones(1, 1, 600, 8)
    with torch.inference_mode():
        assert built.ops.attend(query, key, value, None, 1.0).isnan().all()
        key[0, 0, 520] = 1e-20  # 8
        assert torch.equal(built.ops.attend(query, key, value, None, 1.0), torch.ones(1, 2, 1, 8))
        blind = torch.ones(1, 1, 2, 600, dtype=torch.bool)
        blind[0, 0, 0] = False
        blind[0, 0, 1, 520] = False
        got = built.ops.attend(query, key, value, blind, 1.0)
    assert torch.equal(got[0, 0], torch.zeros(1, 8))
    assert got[0, 1].isnan().all()


def test_anything_else_is_refused(built: Kernels) -> None:
    query, key, value = drawn((6, 2, 16), 2, 3, 10)
    mask = causal(3, 10)
    wrong: list[tuple[Any, ...]] = [
        (query.double(), key, value, None),
        (query, key[:1], value, None),
        (query, key, value[:, :, :9], None),
        (query, key[..., :8], value[..., :8], None),
        (query[..., :9], key[..., :9], value[..., :9], None),
        (query[:, :5], key, value, None),
        (query, key, value, mask[..., :9]),
        (query, key, value, mask[:, :, :2]),
        (query, key, value, mask.float()),
        (query, key, value, mask[0]),
        (query[0], key[0], value[0], None),
    ]
    for given in wrong:
        with pytest.raises(RuntimeError):
            built.ops.attend(*given, 1.0)


def test_models_call_it_and_what_it_is_not_for_is_computed_in_float64() -> None:
    query, key, value = drawn((6, 2, 16), 2, 3, 10)
    plain, encoder = SimpleNamespace(is_causal=True), SimpleNamespace(is_causal=False)
    with torch.inference_mode():
        for of, mask in ((plain, causal(3, 10)), (encoder, None)):
            got = attend(of, query, key, value, None)[0]
            torch.testing.assert_close(got.double(), exact(query, key, value, mask, 0.25), rtol=0, atol=1e-5)
        wide = torch.ones(2, 1, 1, 10, dtype=torch.bool)
        wide[1, ..., 7:] = False
        together = attend(encoder, query, key, value, wide)[0]  # of a source, one mask for all tokens
        torch.testing.assert_close(together.double(), exact(query, key, value, wide, 0.25), rtol=0, atol=1e-5)
        for i in range(3):
            assert torch.equal(attend(encoder, query[:, :, i : i + 1], key, value, wide)[0], together[:, i : i + 1])
        capped = attend(plain, query, key, value, causal(3, 10), softcap=2.0)[0]
        assert float((capped - attend(plain, query, key, value, causal(3, 10))[0]).abs().max()) > 0.01
    for architecture, taken in (("Llama", KERNEL), ("GPT2", KERNEL), ("Gemma2", STEADY)):
        made = module(architecture, dtype=torch.float32)
        quantize_to_int8(made)
        assert made.config._attn_implementation == taken
