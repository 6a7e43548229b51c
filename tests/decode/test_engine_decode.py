"""Decoding with real engines on tiny models, float64: speculative is plain, batched is single, limits are kept."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tokenizers import normalizers

from outrider.costs import Costs
from outrider.decode import Decoder, Request, decode
from outrider.draft_length import AdaptiveLength, FixedLength, Plan, SimplePlan
from outrider.drafters import Drafter, ModelDrafter, PromptLookupDrafter
from outrider.drafters.base import DraftContext
from outrider.errors import ContextLengthError, NumericalError, ParameterError, VocabularyMismatchError
from outrider.models.compatibility import check_same_tokens
from outrider.models.table import TableModel
from outrider.models.transformers_model import TransformersModel
from outrider.proposal import DraftRow, Proposal
from outrider.randomness import RandomStream
from outrider.round import Extras
from outrider.sampling import SamplingSettings
from tests.helpers.folders import make_tokenizer
from tests.helpers.marks import thinned
from tests.helpers.requests import GREEDY, PROMPTS, WARM, requests
from tests.helpers.tiny_models import VOCABULARY, module, tiny
from tests.helpers.toys import table

PENALTY = SamplingSettings(repetition_penalty=1.3)


def drafter(kind: str, like: str = "Llama") -> Drafter:
    return PromptLookupDrafter() if kind == "lookup" else ModelDrafter(tiny(like, 1 if kind == "model" else 0))


@pytest.mark.parametrize(
    ("architecture", "kind", "settings"),
    thinned(["Llama", "GPT2", "Gemma3", "Mistral"], ["lookup", "model", "self"], [GREEDY, PENALTY], every=4),
)
def test_greedy_is_plain_for_every_length_single_and_batched(
    architecture: str, kind: str, settings: SamplingSettings
) -> None:
    target = tiny(architecture)
    plain = [decode(target, [request], settings)[0][0] for request in requests()]
    assert decode(target, requests(), settings)[0] == plain
    for length in (0, 1, 3, 5):
        tokens, rounds = decode(target, requests(), settings, drafter(kind, architecture), FixedLength(length))
        assert tokens == plain
        if kind == "self" and length and settings is GREEDY:
            assert all(r.accepted == r.drafted for row in rounds for r in row)
    adaptive = AdaptiveLength(Costs({1: 1.0, 2: 1.2, 8: 2.0}))
    assert decode(target, requests(), settings, drafter(kind, architecture), adaptive)[0] == plain


@pytest.mark.parametrize("kind", ["lookup", "model", "self"])
@pytest.mark.parametrize("length", [0, 3])
def test_greedy_rounds_are_those_of_the_acceptance_rule_on_laws_written_out(kind: str, length: int) -> None:
    """Betas need the laws, so with them a round goes the general way."""
    settings = SamplingSettings(repetition_penalty=1.2, logit_bias={7: 0.5})
    short, general = (
        decode(
            tiny("Llama"),
            requests(),
            settings,
            drafter(kind),
            FixedLength(length),
            Extras(logprobs=True, drafts=True, betas=betas),
        )
        for betas in (False, True)
    )
    assert short[0] == general[0]
    for mine, theirs in zip(short[1], general[1], strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert (one.tokens, one.drafted, one.accepted) == (other.tokens, other.drafted, other.accepted)
            assert one.drafts == other.drafts
            assert one.logprobs == pytest.approx(other.logprobs)
    if kind == "lookup" and length:
        assert any(0 < made.accepted < made.drafted for row in short[1] for made in row)


@pytest.mark.parametrize("kind", ["lookup", "model"])
def test_a_rows_samples_do_not_depend_on_its_neighbours(kind: str) -> None:
    target = tiny("Llama")
    batch, _ = decode(target, requests(), WARM, drafter(kind), FixedLength(3))
    for i, request in enumerate(requests()):
        alone, _ = decode(target, [request], WARM, drafter(kind), FixedLength(3))
        assert alone[0] == batch[i]


def test_the_same_seed_gives_the_same_tokens_and_another_does_not() -> None:
    target = tiny("Llama")
    first, again, other = (decode(target, requests(seed=s), WARM, drafter("model"), FixedLength(3))[0] for s in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 7])
@pytest.mark.parametrize("kind", ["lookup", "model", "self"])
def test_length_is_exact(new_tokens: int, kind: str) -> None:
    tokens, rounds = decode(tiny("Llama"), requests(new_tokens), WARM, drafter(kind), FixedLength(5))
    assert [len(row) for row in tokens] == [new_tokens] * 3
    assert all(row[-1].finish_reason == "length" for row in rounds)


def test_end_of_sequence_inside_an_accepted_block_ends_there() -> None:
    target = tiny("Llama")
    plain = decode(target, requests(), GREEDY)[0]
    eos = frozenset({plain[0][5], plain[2][9]})
    wanted = [row[: min((row.index(t) for t in eos if t in row), default=len(row)) + 1] for row in plain]
    tokens, rounds = decode(target, requests(eos=eos), GREEDY, drafter("self"), FixedLength(5))
    assert tokens == wanted
    assert rounds[0][-1].finish_reason == "eos"
    assert any(len(row[-1].tokens) <= row[-1].accepted for row in rounds)  # it was inside


def test_token_zero_is_a_token() -> None:
    always_zero = TableModel(torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64))
    tokens, rounds = decode(
        always_zero, [Request([1], 6, RandomStream(0))], GREEDY, ModelDrafter(always_zero), FixedLength(2)
    )
    assert tokens == [[0] * 6]
    assert all(record.accepted == record.drafted for record in rounds[0])
    ended, _ = decode(always_zero, [Request([1], 6, RandomStream(0), frozenset({0}))], GREEDY)
    assert ended == [[0]]


def test_the_context_is_filled_and_never_overrun() -> None:
    target = tiny("GPT2")
    prompt = [3 + i % 50 for i in range(90)]
    plain, rounds = decode(target, [Request(prompt, 50, RandomStream(0))], GREEDY)
    assert len(plain[0]) == 6
    assert rounds[0][-1].finish_reason == "context"
    for kind in ("lookup", "model"):
        tokens, rounds = decode(
            target, [Request(prompt, 50, RandomStream(0))], GREEDY, drafter(kind, "GPT2"), FixedLength(5)
        )
        assert tokens == plain
        assert rounds[0][-1].finish_reason == "context"


def test_a_draft_with_a_shorter_context_stops_drafting() -> None:
    target = tiny("Llama")
    short = ModelDrafter(TransformersModel(module("Llama", max_position_embeddings=12)))
    plain = decode(target, requests(), GREEDY)[0]
    tokens, rounds = decode(target, requests(), GREEDY, short, FixedLength(3))
    assert tokens == plain
    assert rounds[0][0].drafted == 3
    assert rounds[0][-1].drafted == 0


@pytest.mark.parametrize("size", [VOCABULARY - 4, VOCABULARY + 6])
def test_padded_draft_vocabularies_work(size: int) -> None:
    """Same tokens, embeddings padded to another size: the surplus is never proposed, what is missing never needed."""

    class SameTokens(ModelDrafter):
        def bind(self, target: object) -> None:
            """Their tokenizers would agree."""

    target = tiny("Llama")
    draft = SameTokens(TransformersModel(module("Llama", 1, vocab_size=size)))
    tokens, rounds = decode(target, requests(), GREEDY, draft, FixedLength(3))
    assert tokens == decode(target, requests(), GREEDY)[0]
    assert sum(r.drafted for row in rounds for r in row) > 0
    sampled, _ = decode(target, requests(), WARM, draft, FixedLength(3))
    assert all(token < VOCABULARY for row in sampled for token in row)


def test_different_vocabularies_are_refused_with_both_names() -> None:
    draft = ModelDrafter(TransformersModel(module("Llama", 1, vocab_size=50), name="other-draft"))
    with pytest.raises(VocabularyMismatchError, match=r"other-draft and target tiny-Llama-0 .* 50 and 61"):
        Decoder(tiny("Llama"), requests(), GREEDY, draft, FixedLength(2))


def test_a_tokenizer_that_changes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compared once is not read again in every generation, unless it has grown."""
    target, draft = (SimpleNamespace(name=name, tokenizer=make_tokenizer(), vocab_size=400) for name in ("big", "small"))
    check_same_tokens(target, draft)
    with monkeypatch.context() as patched:
        for one in (target, draft):
            patched.setattr(one.tokenizer, "get_vocab", lambda: pytest.fail("read again"))
        check_same_tokens(target, draft)
    draft.tokenizer.add_tokens(["<new>"])
    with pytest.raises(VocabularyMismatchError, match=r"small and target big .*1 entries differ"):
        check_same_tokens(target, draft)
    draft.tokenizer = make_tokenizer()
    draft.tokenizer.backend_tokenizer.normalizer = normalizers.Replace("1234", "")
    with pytest.raises(VocabularyMismatchError, match="split the same text differently"):
        check_same_tokens(target, draft)
    draft.tokenizer.backend_tokenizer.normalizer = normalizers.Replace("none", "such")
    check_same_tokens(target, draft)


@pytest.mark.parametrize(
    ("prompt", "new_tokens", "error", "message"),
    [
        ([], 5, ParameterError, "prompt must hold at least one token"),
        ([3, 99], 5, ParameterError, r"prompt tokens must be in 0 … 60, got 99"),
        ([-1], 5, ParameterError, "got -1"),
        ([3], 0, ParameterError, "max_new_tokens"),
        ([3] * 96, 5, ContextLengthError, "prompt has 96 tokens, the context of tiny-Llama-0 holds 96"),
    ],
)
def test_bad_requests_are_refused(prompt: list[int], new_tokens: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Decoder(tiny("Llama"), [Request(prompt, new_tokens, RandomStream(0))], GREEDY)


def test_logprobs_are_those_of_the_raw_logits() -> None:
    target = tiny("Llama")
    tokens, rounds = decode(target, requests(), WARM, drafter("model"), FixedLength(3), Extras(logprobs=True))
    for prompt, new, row in zip(PROMPTS, tokens, rounds, strict=True):
        with torch.inference_mode():
            logits = target.module(input_ids=torch.tensor([[*prompt, *new]]), use_cache=False).logits[0]
        wanted = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(-1, torch.tensor(new).unsqueeze(-1)).squeeze(-1)
        assert [x for record in row for x in record.logprobs or ()] == pytest.approx(wanted.tolist(), abs=1e-9)


def test_records_add_up() -> None:
    tokens, rounds = decode(tiny("Llama"), requests(), WARM, drafter("self"), FixedLength(4))
    for row, records in zip(tokens, rounds, strict=True):
        assert [t for record in records for t in record.tokens] == row
        for record in records:
            assert len(record.tokens) == record.accepted + 1
            assert record.origins[: record.accepted] == ("accepted",) * record.accepted
            last = "target" if not record.drafted else "bonus" if record.accepted == record.drafted else "recovered"
            assert record.origins[-1] == last
            assert record.drafter == ("tiny-Llama-0" if record.drafted else None)


def test_cancelling_ends_all_rows_and_frees_their_sequences() -> None:
    target = TransformersModel(module("Llama"))
    calls = []

    def cancelled() -> bool:
        calls.append(1)
        return len(calls) > 6

    decoder = Decoder(target, requests(80), GREEDY, cancelled=cancelled)
    done = list(decoder.rounds())
    assert 0 < len(done) < 10
    assert [row.finish_reason for row in decoder.rows] == ["cancelled"] * 3
    assert not target._open


def test_an_abandoned_generation_frees_its_sequences() -> None:
    target = TransformersModel(module("Llama"))
    running = Decoder(target, requests(80), GREEDY, drafter("lookup"), FixedLength(2)).rounds()
    next(running)
    assert target._open
    running.close()  # type: ignore[attr-defined]
    assert not target._open


def test_logits_that_are_not_numbers_are_an_error() -> None:
    broken = TableModel(torch.full((3, 3), float("nan"), dtype=torch.float64))
    for settings in (GREEDY, WARM):
        with pytest.raises(NumericalError, match="NaN"):
            decode(broken, [Request([1], 4, RandomStream(0))], settings)


def test_a_draft_without_a_distribution_costs_nothing_but_speed() -> None:
    sound = TableModel(torch.tensor([[0.2, 0.8, 0.0]] * 3, dtype=torch.float64))
    broken = TableModel(torch.full((3, 3), float("nan"), dtype=torch.float64))
    tokens, rounds = decode(sound, [Request([1], 8, RandomStream(0))], GREEDY, ModelDrafter(broken), FixedLength(2))
    assert tokens == [[1] * 8]
    assert sum(r.accepted for r in rounds[0]) == 0


@pytest.mark.parametrize("calls", range(1, 5))
def test_a_cancellation_holds_once_it_was_said(calls: int) -> None:
    """Asked again it would say no: nothing may go on from a prompt half read."""
    asked = iter(range(100))
    long = [Request([5, 6, 7] * 25, 12, RandomStream(0))]
    decoder = Decoder(tiny("Llama"), long, GREEDY, drafter("model"), FixedLength(2), cancelled=lambda: next(asked) == calls)
    list(decoder.rounds())
    assert decoder.rows[0].finish_reason == "cancelled"
    plain = decode(tiny("Llama"), [Request([5, 6, 7] * 25, 12, RandomStream(0))], GREEDY)[0][0]
    new = decoder.rows[0].tokens[75:]
    assert new == plain[: len(new)]


def test_a_proposal_longer_than_asked_for_is_refused() -> None:
    class Overeager(PromptLookupDrafter):
        def propose(self, rows: list[DraftRow], plans: list[Plan], context: DraftContext) -> Proposal:  # type: ignore[override]
            return super().propose(rows, [SimplePlan(limit=plan.limit + 2) for plan in plans], context)

    with pytest.raises(ParameterError, match=r"prompt-lookup proposed \d+ tokens where \d+ were allowed"):
        decode(tiny("Llama"), requests(), GREEDY, Overeager(), FixedLength(2))


def test_streams_of_different_seeds_and_rows_differ() -> None:
    """NumPy's seeding drops trailing zeros of its words: (5, 1) and (5 + 2^32, 0) must not be one stream."""
    pairs = [(seed, row) for seed in (0, 1, 5, 5 + 2**32, 2**32, 2**40) for row in (0, 1, 5, 2**20)]
    assert len({tuple(RandomStream(seed, row).take(3)) for seed, row in pairs}) == len(pairs)


def test_a_drafter_that_fails_at_the_end_leaks_nothing() -> None:
    class Fails(ModelDrafter):
        def end(self, row: DraftRow) -> None:
            super().end(row)
            raise OSError("planted")

    target, draft = tiny("Llama"), tiny("Llama", 1)
    with pytest.raises(OSError, match="planted"):
        decode(target, requests(), GREEDY, Fails(draft), FixedLength(2))
    assert target._open == []
    assert draft._open == []


@pytest.mark.parametrize("length", [0, 2])
def test_a_text_that_stops_before_a_position_without_a_law_has_ended(length: int) -> None:
    """Plain decoding never comes to such a position, so a draft that does must not fail there."""
    laws = torch.zeros(3, 3, dtype=torch.float64)
    laws[0, 1] = laws[1, 2] = 1.0
    laws[2] = torch.nan
    stop = lambda new: new.index(2) + 1 if 2 in new else None  # noqa: E731
    requests = [Request([0, 1, 2, 0], 6, RandomStream(0), stop=stop)]
    tokens, _ = decode(
        TableModel(laws), requests, SamplingSettings(temperature=1.0), PromptLookupDrafter(), FixedLength(length)
    )
    assert tokens == [[1, 2]]
    with pytest.raises(NumericalError, match="after token 5"):
        decode(TableModel(laws), [Request([0, 1, 2, 0], 6, RandomStream(0))], SamplingSettings(temperature=1.0))


def test_a_drafter_needs_a_length() -> None:
    with pytest.raises(ParameterError, match=r"length must say how much a drafter drafts, FixedLength\(4\) say, got None"):
        decode(table(1, 5), [Request([1, 2], 4, RandomStream(1))], SamplingSettings(), PromptLookupDrafter())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["plain", "model", "prompt-lookup"])
def test_the_most_probable_tokens_are_told(name: str, temperature: float) -> None:
    target = table(1, 7)
    drafters = {"model": ModelDrafter(table(2, 7), step_seconds=0.1), "prompt-lookup": PromptLookupDrafter()}
    drafter = drafters.get(name)
    asked = [Request([1, 2, 1], 30, RandomStream(i)) for i in range(2)]
    law, extras = SamplingSettings(temperature=temperature, top_k=2), Extras(logprobs=True, top_logprobs=3)
    tokens, rounds = decode(target, asked, law, drafter, FixedLength(2), extras)
    for written, row in zip(tokens, rounds, strict=True):
        own = [value for one in row for value in one.logprobs or ()]
        told = [value for one in row for value in one.top_logprobs or ()]
        assert len(own) == len(told) == len(written) == 30
        for place, (token, logprob, best) in enumerate(zip(written, own, told, strict=True)):
            laws = target.probs_after([1, 2, 1, *written[:place]]).log()
            assert logprob == pytest.approx(float(laws[token]), abs=1e-9)
            assert [which for which, _ in best] == laws.topk(3).indices.tolist()
            assert [value for _, value in best] == pytest.approx(laws.topk(3).values.tolist(), abs=1e-9)
    with pytest.raises(ParameterError, match="top_logprobs must be a whole number in 0 … 7, got 8"):
        decode(target, asked, law, None, None, Extras(logprobs=True, top_logprobs=8))
