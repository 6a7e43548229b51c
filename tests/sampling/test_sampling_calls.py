"""Steps in one call are the steps that take several: the same tokens and laws, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from outrider.acceptance.verify import Uniforms, verify
from outrider.draft_steps.own_tokens import OwnTokens
from outrider.draft_steps.signals import LEAST_LIKELY, MOST_OTHERS, shares_of
from outrider.draft_steps.steps import StepsInOneCall, StepsOnDevice, Wanted, steps_on
from outrider.errors import ParameterError
from outrider.kernels.sampling import sampling_kernels
from outrider.proposal import DraftRow, Proposal, padded_proposal
from outrider.randomness import RandomStream
from outrider.round import Extras, Scorer, verify_round
from outrider.sampling import SamplingSettings, greedy_on_host, standardize
from outrider.support.clock import PhaseClock

pytestmark = pytest.mark.skipif(sampling_kernels() is None, reason="no kernels here")

LAWS = [
    SamplingSettings(),
    SamplingSettings(temperature=1.0),
    SamplingSettings(temperature=0.7, top_k=5),
    SamplingSettings(temperature=1.3, top_p=0.9),
    SamplingSettings(temperature=0.8, top_k=40, top_p=0.95, min_p=0.02),
]
DTYPES = [torch.float32, torch.bfloat16]


def some_logits(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


@pytest.fixture
def calls() -> Any:
    kernels = sampling_kernels()
    assert kernels is not None
    return kernels.calls


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sampling", LAWS)
@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("vocabulary", [13, 2000])
def test_a_round_is_the_rule_on_written_laws(
    calls: Any, sampling: SamplingSettings, dtype: torch.dtype, certain: bool, vocabulary: int
) -> None:
    """Ragged drafts, positions from different places on, a wider vocabulary than is used, rows that are not contiguous."""
    generator = torch.Generator().manual_seed(vocabulary)
    rows, width, places = 5, 4, 8
    kept = 0
    for seed in range(12):
        wide = some_logits(rows, places, vocabulary + 3, dtype=dtype, seed=seed).transpose(0, 1).contiguous().transpose(0, 1)
        first, lengths = [0, 3, 1, 2, 0], [4, 3, 0, 2, 4]
        scored = torch.stack([wide[i, at : at + width + 1, :vocabulary] for i, at in enumerate(first)])
        drafts = standardize(scored[:, :-1].float() + some_logits(rows, width, vocabulary, dtype=torch.float32), LAWS[1])
        tokens = torch.where(
            torch.rand(rows, width, generator=generator) < 0.7,
            scored[:, :-1].float().argmax(-1),
            torch.randint(vocabulary, (rows, width), generator=generator),
        )
        points = torch.rand(rows, width + 1, generator=generator, dtype=torch.float64)
        uniforms = [[*points[i, :n].tolist(), float(points[i, -1])] for i, n in enumerate(lengths)]
        own = [row[:n] for row, n in zip(tokens.tolist(), lengths, strict=True)]
        laws = None if certain or sampling.greedy else drafts
        found = calls.decide(wide, first, vocabulary, sampling.law, own, uniforms, laws)
        if sampling.greedy:
            best = torch.tensor(greedy_on_host(scored, sampling)).view(rows, -1).tolist()
            agreed = [
                next((k for k, token in enumerate(d) if token != b[k]), len(d)) for d, b in zip(own, best, strict=True)
            ]
            assert found == [(k, b[k]) for k, b in zip(agreed, best, strict=True)]
        else:
            numbers = Uniforms(points[:, :-1], points[:, -1])
            want = verify(standardize(scored, sampling), laws, tokens, numbers, torch.tensor(lengths))
            assert found == list(zip(want.num_accepted.tolist(), want.next_token.tolist(), strict=True))
        kept += sum(accepted for accepted, _ in found)
    assert 0 < kept < 12 * sum(lengths)


@pytest.mark.parametrize("hole", [torch.nan, -torch.inf, torch.inf])
@pytest.mark.parametrize("sampling", LAWS[:2])
def test_a_round_without_a_law_says_so(calls: Any, sampling: SamplingSettings, hole: float) -> None:
    logits = some_logits(1, 2, 20, dtype=torch.float32)
    best = int(logits[0, 0].argmax())
    logits[0, 1] = hole
    found = calls.decide(logits, [0], 20, sampling.law, [[best]], [[0.0, 0.5]], None)
    assert found == [(1, 0 if sampling.greedy and hole == torch.inf else -1)]


def test_a_token_beyond_the_vocabulary_is_refused(calls: Any) -> None:
    logits = some_logits(2, 3, 20, dtype=torch.float32)
    for token in (20, -1, 2**40):
        with pytest.raises(ParameterError, match=rf"draft_tokens must be in 0 … 19, got {token}"):
            calls.decide(logits, [0, 0], 20, LAWS[1].law, [[3, 4], [5, token]], [[0.1, 0.2, 0.3]] * 2, None)


@pytest.mark.parametrize("sampling", LAWS[:2])
@pytest.mark.parametrize("ids", [[0, 3, 5, 8], [-1, 3, 5, 7], [0, 3, 5, 2**40], [0, 3, 5]])
def test_tokens_that_the_target_has_not_are_refused(calls: Any, sampling: SamplingSettings, ids: list[int]) -> None:
    """Nothing is written beyond a law; torch's operations find this, too."""
    model: Any = SimpleNamespace(vocab_size=4, device=torch.device("cpu"))
    steps = StepsInOneCall(calls, OwnTokens(model, 8, torch.tensor(ids), False), of_rows(1), sampling)
    with pytest.raises(ParameterError, match="ids must be"):
        steps.draw(some_logits(1, 4, dtype=torch.float32), [0], Wanted(False, 0))


def test_numbers_beyond_a_machines_are_no_others(calls: Any) -> None:
    logits = some_logits(1, 2, 20, dtype=torch.float32)
    huge = replace(LAWS[1], top_k=2**64 + 1)
    assert torch.equal(standardize(logits, huge), standardize(logits, LAWS[1]))
    found = [calls.decide(logits, [0], 20, settings.law, [[3]], [[0.9, 0.7]], None) for settings in (huge, LAWS[1])]
    assert found[0] == found[1]


def test_other_types_are_refused(calls: Any) -> None:
    logits = some_logits(1, 2, 20, dtype=torch.float64)
    with pytest.raises(ParameterError, match="float32 or bfloat16"):
        calls.decide(logits, [0], 20, LAWS[0].law, [[3]], [[0.9, 0.7]], None)
    with pytest.raises(ParameterError, match="float32 or bfloat16"):
        calls.step(logits[0], LAWS[0].law)


def test_numbers_do_not_outlive_the_tokens_that_they_are() -> None:
    made = padded_proposal([[3, 4], [5]], torch.device("cpu"))
    assert made.on_host() == [[3, 4], [5]]
    assert replace(made, lengths=[1, 0]).on_host() == [[3], []]
    assert replace(made, tokens=torch.zeros_like(made.tokens)).on_host() == [[0, 0], [0]]


def of_rows(count: int) -> list[DraftRow]:
    sequence: Any = SimpleNamespace()
    return [DraftRow([1, 2], 1, RandomStream(7, i), sequence) for i in range(count)]


def own_tokens(columns: int, vocabulary: int, few: bool) -> OwnTokens:
    model: Any = SimpleNamespace(vocab_size=columns, device=torch.device("cpu"))
    ids = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(3))[:columns].sort().values if few else None
    return OwnTokens(model, vocabulary, ids, False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sampling", LAWS)
@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("others", [None, 0, 3])
def test_steps_in_one_call_are_those_of_several(
    calls: Any, sampling: SamplingSettings, dtype: torch.dtype, few: bool, others: int | None
) -> None:
    """Rows that end at different steps, more steps than there is room for at first."""
    own = own_tokens(30, 50, few)
    kinds: list[Any] = [StepsInOneCall(calls, own, of_rows(3), sampling), StepsOnDevice(own, of_rows(3), sampling)]
    wanted = Wanted(True, others)
    actives = [[0, 1, 2], [0, 1, 2], [0, 2], [0, 2], [2], [2], [2], [2], [2]]
    for step, active in enumerate(actives):
        logits = some_logits(len(active), 30, dtype=dtype, seed=step)
        ours, theirs = [kind.draw(logits, active, wanted) for kind in kinds]
        assert list(ours) == list(theirs) == active
        assert torch.equal(kinds[0].newest(active), kinds[1].newest(active))
        for i in active:
            assert ours[i].signal == theirs[i].signal
            assert [token for token, _ in ours[i].others] == [token for token, _ in theirs[i].others]
            assert np.allclose([share for _, share in ours[i].others], [share for _, share in theirs[i].others], rtol=1e-5)
    lengths = [4, 2, 9]
    tokens, laws = kinds[0].tokens(9), kinds[0].laws(9)
    for i, length in enumerate(lengths):
        assert torch.equal(tokens[i, :length], kinds[1].tokens(9)[i, :length])
        assert kinds[0].known(lengths)[i] == tokens[i, :length].tolist()
        if not sampling.greedy:
            assert torch.equal(laws[i, :length], kinds[1].laws(9)[i, :length])
            assert not laws.isnan().any()
    assert sampling.greedy == (laws is None)


@pytest.mark.parametrize("sampling", LAWS[:3])
def test_a_row_without_a_law_ends(calls: Any, sampling: SamplingSettings) -> None:
    own = own_tokens(30, 50, True)
    logits = some_logits(2, 30, dtype=torch.float32)
    logits[1, 4] = torch.nan
    for kind in (StepsInOneCall(calls, own, of_rows(2), sampling), StepsOnDevice(own, of_rows(2), sampling)):
        assert list(kind.draw(logits, [0, 1], Wanted(True, None))) == [0]


def test_what_else_was_likely_is_what_numpy_finds(calls: Any) -> None:
    for seed in range(50):
        logits = some_logits(1, 3000, dtype=torch.float32, seed=seed) * (0.1 + seed / 20)
        for most, least, count in ((MOST_OTHERS, LEAST_LIKELY, None), (5, 0.0, 5)):
            step = calls.step(logits, LAWS[0].law, reads=True, most=most, least=least)
            (shares,) = shares_of(logits)
            want = shares.others(step.tokens[0], count)
            assert [token for token, _ in step.others[0]] == [token for token, _ in want]
            assert np.allclose([share for _, share in step.others[0]], [share for _, share in want], rtol=1e-5)


def test_the_steps_follow_what_is_asked() -> None:
    """One call only where logits become laws as they are, in a type that it reads, and where no replay aims its draws."""
    own, rows = own_tokens(30, 50, False), of_rows(1)
    logits = some_logits(1, 30, dtype=torch.float32)
    assert isinstance(steps_on(logits, own, rows, LAWS[1]), StepsInOneCall)
    for other in (
        steps_on(logits.double(), own, rows, LAWS[1]),
        steps_on(logits, own, rows, replace(LAWS[1], logit_bias={3: 1.0})),
        steps_on(logits, own, rows, replace(LAWS[1], repetition_penalty=1.1)),
    ):
        assert isinstance(other, StepsOnDevice)
    rows[0].stream.aims = True
    assert isinstance(steps_on(logits, own, rows, LAWS[1]), StepsOnDevice)


class Scores:
    """A model that has scored already."""

    device = torch.device("cpu")

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits
        self.vocab_size = logits.shape[-1]

    def score(self, *_: object) -> torch.Tensor:
        return self.logits


@pytest.mark.parametrize("sampling", LAWS)
def test_what_is_reported_does_not_change_what_is_kept(sampling: SamplingSettings) -> None:
    """A round in one call, and one that has to write its laws out."""
    clock = PhaseClock(torch.device("cpu"))
    for seed in range(20):
        logits = some_logits(2, 4, 40, dtype=torch.float32, seed=seed)
        laws = standardize(logits[:, :-1] + 1.5 * some_logits(2, 3, 40, dtype=torch.float32, seed=99), LAWS[1])
        tokens = logits[:, :-1].argmax(-1)
        proposal = Proposal(tokens, [3, 2], None if sampling.greedy else laws)
        kept = []
        for extras in (Extras(), Extras(logprobs=True), Extras(betas=True), Extras(laws=True)):
            rows = [DraftRow([1], 1, RandomStream(seed, i), SimpleNamespace(length=0)) for i in range(2)]
            model: Any = Scores(logits)
            outcomes = verify_round(Scorer(model, sampling, clock, extras), rows, proposal)
            kept.append([(one.tokens, one.accepted) for one in outcomes])
            assert all((one.laws is None) == (sampling.greedy and not extras.betas) for one in outcomes if extras.laws)
        assert all(one == kept[0] for one in kept)


def test_numbers_come_in_the_same_order_however_many_are_taken() -> None:
    whole = RandomStream(5, 2).take(500)
    stream = RandomStream(5, 2)
    parts = [number for count in (1, 2, 70, 0, 64, 3, 200, 1, 159) for number in stream.take(count)]
    assert parts == whole
    assert len(set(whole)) == 500
