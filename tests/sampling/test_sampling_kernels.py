"""Our kernels for sampling beside independent arithmetic in float64: laws, draws, the acceptance rule; and doing without."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.acceptance.verify import Uniforms, Verdict, verify, verify_on_device, verify_on_host
from outrider.draft_steps.signals import EDGES, token_signals
from outrider.kernels import sampling as module
from outrider.kernels.sampling import SamplingKernels, build, reading, sampling_kernels
from outrider.sampling import SamplingSettings, draw, standardize
from outrider.sampling.standardize import greedy_on_host
from outrider.support.cache_folder import warn_unkept
from tests.helpers.laws import by_sorting, distance, sparse_rows
from tests.helpers.toys import SETTINGS, law_of, table

pytestmark = pytest.mark.skipif(sampling_kernels() is None, reason="this machine builds no kernels")
BUILT: Any = sampling_kernels()
SIZES = [1, 2, 7, 8, 9, 63, 64, 65, 500, 1030]


@pytest.fixture(scope="module")
def ours() -> SamplingKernels:
    return build()


def logits_of(seed: int, rows: int, vocabulary: int, sharpness: float) -> Tensor:
    """Many excluded in the second row, many ties in the third. float32"""
    x = sharpness * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))
    if rows > 2:
        x[1, vocabulary // 3 + 1 :] = -math.inf
        x[2] = x[2].round()
    return x


@settings(deadline=None)  # the first call reads libraries
@given(
    st.integers(0, 10**6),
    st.sampled_from(SIZES),
    st.sampled_from([0, 1, 5, 40, 499, 2000]),
    st.sampled_from([0.01, 0.3, 0.8, 0.95, 0.999, 1.0]),
    st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    st.sampled_from([0.1, 0.8, 1.0, 3.0]),
    st.floats(0.1, 12.0),
)
def test_laws_are_those_that_sorting_finds(
    seed: int, vocabulary: int, top_k: int, top_p: float, min_p: float, temperature: float, sharpness: float
) -> None:
    logits = logits_of(seed, 3, vocabulary, sharpness)
    got = BUILT.laws(logits, temperature, top_k, top_p, min_p)
    for row, law in zip(logits, got, strict=True):
        wanted = by_sorting(row.double(), temperature, top_k, top_p, min_p)
        assert float(law.double().sum()) == pytest.approx(1.0, abs=2e-7)
        at_the_edge = (law > 0) != (wanted > 1e-37)
        if at_the_edge.any():  # a sum that reaches top_p, or a weight that reaches min_p, but for rounding
            near = by_sorting(row.double(), temperature, top_k, min(1.0, top_p * (1 + 1e-6)), min_p * (1 - 1e-6))
            fewer = by_sorting(row.double(), temperature, top_k, top_p * (1 - 1e-6), min_p * (1 + 1e-6))
            assert bool(((law > 0) >= (fewer > 1e-37)).all())
            assert bool(((law > 0) <= (near > 0)).all())
        else:
            torch.testing.assert_close(law.double(), wanted, rtol=2e-5, atol=1e-30)


@pytest.mark.parametrize("how", [(1.0, 0, 1.0, 0.0), (0.8, 0, 0.95, 0.0), (1.0, 50, 0.9, 0.01)])
def test_a_rows_bits_depend_on_nothing_beside_it(ours: SamplingKernels, how: tuple[float, int, float, float]) -> None:
    x = logits_of(1, 9, 20_001, 4.0)
    together = ours.laws(x, *how)
    wide = torch.full((9, 20_011), math.nan)
    wide[:, 3:20_004] = x
    assert torch.equal(ours.laws(wide[:, 3:20_004], *how), together)  # nothing beside a row is read
    assert torch.equal(ours.laws(x.T.contiguous().T, *how), together)
    for at in range(9):
        assert torch.equal(ours.laws(x[at : at + 1], *how)[0], together[at])
    short = x.bfloat16()
    assert torch.equal(ours.laws(short, *how), ours.laws(short.float(), *how))
    assert ours.laws(x[:0], *how).shape == (0, 20_001)


def test_flat_laws_and_ties_are_kept_whole(ours: SamplingKernels) -> None:
    flat = torch.zeros(1, 150_000)
    assert int((ours.laws(flat, 1.0, 0, 0.4, 0.0) > 0).sum()) == 150_000
    assert int((ours.laws(flat, 1.0, 3, 1.0, 0.0) > 0).sum()) == 150_000
    even = torch.linspace(0, 1e-3, 150_000).unsqueeze(0)
    assert int((ours.laws(even, 1.0, 0, 0.5, 0.0) > 0).sum()) == pytest.approx(75_000, rel=1e-3)


@pytest.mark.parametrize("vocabulary", [3, 70, 5000])
def test_rows_without_a_law_are_nan_and_draw_nothing(ours: SamplingKernels, vocabulary: int) -> None:
    rows = torch.zeros(4, vocabulary)
    rows[0] = -math.inf
    rows[1, -1] = math.nan
    rows[2, 1] = math.inf
    for each in (SamplingSettings(temperature=1.0), SamplingSettings(temperature=0.5, top_k=2, top_p=0.5, min_p=0.1)):
        laws = standardize(rows, each)
        assert laws.isnan().all(-1).tolist() == [True, True, True, False]
        assert draw(laws, torch.full((4,), 0.3).double())[:3].tolist() == [-1, -1, -1]
    assert ours.best(rows).tolist() == [-1, -1, 1, 0]
    assert ours.best(rows.bfloat16()).tolist() == [-1, -1, 1, 0]
    assert token_signals(rows, torch.zeros(4, dtype=torch.long)) == [0, 0, 0, 0 if vocabulary > 4 else 1]


@given(st.integers(0, 10**6), st.sampled_from(SIZES), st.sampled_from([torch.float32, torch.bfloat16]))
def test_the_best_token_is_the_first_of_equal_ones(seed: int, vocabulary: int, dtype: torch.dtype) -> None:
    logits = logits_of(seed, 3, vocabulary, 1.0).to(dtype)
    assert greedy_on_host(logits, SamplingSettings()) == logits.float().numpy().argmax(-1).tolist()
    biased = SamplingSettings(logit_bias={vocabulary - 1: 100.0})
    assert greedy_on_host(logits[:1], biased) == [vocabulary - 1]


@given(st.integers(0, 10**6), st.sampled_from(SIZES), st.sampled_from([0.02, 0.5, 1.0]))
def test_draws_are_inversion_of_the_cumulative_sum(seed: int, vocabulary: int, support: float) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.random(vocabulary).astype(np.float32) ** 8 * (rng.random(vocabulary) < support)
    weights[rng.integers(vocabulary)] += 1e-20
    uniforms = np.concatenate([rng.random(50), [0.0, 1.0 - 2.0**-53]])
    drawn = BUILT.draw(torch.from_numpy(weights).expand(len(uniforms), -1), torch.from_numpy(uniforms)).numpy()
    reached = np.cumsum(weights, dtype=np.float64)
    point, slack = uniforms * reached[-1], 1e-13 * reached[-1]
    assert (weights[drawn] > 0).all()
    assert ((point < reached[drawn] + slack) & (point >= reached[drawn] - weights[drawn] - slack)).all()


@given(st.integers(0, 10**6), st.sampled_from([1, 3, 9, 64, 130]), st.integers(0, 3), st.booleans())
def test_rows_are_decided_as_by_numpy(seed: int, vocabulary: int, length: int, point_mass: bool) -> None:
    target, draft, tokens, numbers, offered = sparse_rows(seed, vocabulary, length, point_mass, torch.float32)
    tokens[torch.arange(length) >= offered.unsqueeze(-1)] = vocabulary + 7  # nobody looks at these
    got = verify(target, draft, tokens, numbers, offered)
    host = verify_on_host(target, draft, tokens, numbers, offered)
    assert got.num_accepted.tolist() == host.num_accepted.tolist()
    assert got.next_token.tolist() == host.next_token.tolist()


@pytest.mark.parametrize("point_mass", [False, True], ids=["model draft", "point mass"])
def test_rows_without_a_law_are_decided_as_on_a_device(point_mass: bool) -> None:
    nan, good = [torch.nan] * 3, [0.5, 0.25, 0.25]
    cases = [(good, good, nan), (nan, good, good), (good, nan, good), ([0.0] * 3, good, good), (good, [0.0] * 3, good)]
    target = torch.tensor([[first, last] for first, _, last in cases])
    draft = None if point_mass else torch.tensor([[offered] for _, offered, _ in cases])
    one = torch.ones(len(cases), dtype=torch.long)
    for uniform in (0.0, 0.6):
        randomness = Uniforms(torch.full((len(cases), 1), uniform).double(), torch.full((len(cases),), 0.7).double())
        got = verify(target, draft, one.view(-1, 1), randomness, one)
        wanted = verify_on_device(target, draft, one.view(-1, 1), randomness, one)
        assert got.num_accepted.tolist() == wanted.num_accepted.tolist()
        assert got.next_token.tolist() == wanted.next_token.tolist()


def in_float32(target: Tensor, draft: Tensor | None, *others: Any) -> Verdict:
    """The rule with laws as those of models are."""
    return verify(target.float(), None if draft is None else draft.float(), *others)


@pytest.mark.parametrize("point_mass", [False, True], ids=["model draft", "point mass"])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_law_is_the_targets(name: str, point_mass: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By enumeration."""
    called: list[str] = []
    real = build()

    class Counted:
        def __getattr__(self, operation: str) -> Callable[..., object]:
            called.append(operation)
            function: Callable[..., object] = getattr(real, operation)
            return function

    monkeypatch.setattr(module, "sampling_kernels", Counted)
    target, draft = (law_of(table(seed, 3), SETTINGS[name]) for seed in (1, 2))
    assert distance(in_float32, target, 1 if point_mass else draft, 3, 2) < 1e-6
    assert "verify" in called


def test_counts_and_tokens_may_be_any_whole_numbers() -> None:
    target, draft = (torch.rand(2, n, 20, generator=torch.Generator().manual_seed(n)) for n in (3, 2))
    tokens, offered = torch.tensor([[3, 4], [5, 6]]), torch.tensor([1, 2])
    for kind in (torch.int32, torch.int16):
        same = [
            verify(target, draft, tokens.to(one), torch.Generator().manual_seed(1), offered.to(one))
            for one in (kind, torch.long)
        ]
        assert torch.equal(same[0].next_token, same[1].next_token)
        assert torch.equal(same[0].num_accepted, same[1].num_accepted)


def test_signals_are_the_classes_of_the_drafts_own_probability() -> None:
    logits = logits_of(3, 40, 900, 6.0)
    tokens = logits.argmax(-1)
    shares = logits.double().softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    assert token_signals(logits, tokens) == [sum(edge < share for edge in EDGES) for share in shares.tolist()]


def test_only_what_they_can_read_goes_by_them() -> None:
    x = torch.zeros(1, 3)
    assert reading(x, None, x.bfloat16()) is sampling_kernels()
    for other in (x.double(), x.half(), x.to("meta"), torch.zeros(1, 3, requires_grad=True)):
        assert reading(x, other) is None
    weights = torch.zeros(1, 3, requires_grad=True)
    standardize(weights, SamplingSettings(temperature=1.0))[0, 0].backward()  # type: ignore[no-untyped-call]
    assert weights.grad is not None


def test_wrong_shapes_and_tokens_are_refused(ours: SamplingKernels) -> None:
    """They would be read beyond their end."""
    x, points = torch.full((2, 8), 0.125), torch.zeros(2).double()
    wrong: list[Callable[[], object]] = [
        lambda: ours.laws(x[0], 1.0, 0, 1.0, 0.0),
        lambda: ours.laws(x.double(), 1.0, 0, 1.0, 0.0),
        lambda: ours.laws(x, 0.0, 0, 1.0, 0.0),
        lambda: ours.draw(x, points[:1]),
        lambda: ours.draw(x, points.float()),
        lambda: ours.shares(x, torch.tensor([0, 8])),
        lambda: ours.shares(x, torch.tensor([0])),
    ]
    pair, one, end = x.view(1, 2, 8), torch.zeros(1, 1, dtype=torch.long), torch.zeros(1).double()
    for parts in (
        (pair, pair, one, one[0], end.view(1, 1), end),
        (pair, None, one + 8, one[0] + 1, end.view(1, 1), end),
        (pair, None, one, one[0] + 2, end.view(1, 1), end),
        (pair, None, one[:, :0], one[0], end.view(1, 1), end),
        (pair, None, one, one[0], end.view(1, 1), end.float()),
    ):
        wrong.append(lambda parts=parts: ours.verify(*parts))  # type: ignore[misc]
    for call in wrong:
        with pytest.raises(RuntimeError):
            call()


@pytest.mark.parametrize(
    ("folder", "said"), [(None, "it goes by NumPy"), ("/proc/none", "nothing is kept and no kernels are built")]
)
def test_without_them_numpy_goes_on(
    folder: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logits = logits_of(5, 3, 5000, 5.0)
    nucleus = SamplingSettings(temperature=0.8, top_p=0.9)
    points = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    with_them = standardize(logits, nucleus)
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setenv("OUTRIDER_CACHE", folder or str(tmp_path))
    warn_unkept.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert sampling_kernels.__wrapped__() is None
    assert said in caplog.text
    monkeypatch.setattr(module, "sampling_kernels", lambda: None)
    without = standardize(logits, nucleus)
    torch.testing.assert_close(without, with_them, rtol=1e-5, atol=1e-9)
    assert draw(without, points).tolist() == draw(with_them, points).tolist()
    assert greedy_on_host(logits, SamplingSettings()) == logits.numpy().argmax(-1).tolist()


def test_a_copy_of_the_library_defines_nothing_twice(tmp_path: Path) -> None:
    """As after the cache folder was moved: torch ends the process where an operation is defined again."""
    copied = tmp_path / "sampling.so"
    copied.write_bytes(module._opened[0].read_bytes())
    again = SamplingKernels(copied)
    assert again.calls.step(torch.eye(3), (0.0, 0, 1.0, 0.0)).tokens == [0, 1, 2]
