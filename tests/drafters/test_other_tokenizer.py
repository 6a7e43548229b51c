"""Drafts with another tokenizer: exact output and law, the right text read, vocabularies matched by their bytes."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

import outrider
from outrider.costs import Costs
from outrider.decode import Request, decode
from outrider.draft_length import FixedLength
from outrider.drafters import Drafter, IntersectionDrafter, ModelDrafter, TextDrafter
from outrider.errors import VocabularyMismatchError
from outrider.models.loading import load_transformers
from outrider.models.token_bytes import token_bytes
from outrider.models.transformers_model import TransformersModel
from outrider.proposal import Proposal
from outrider.randomness import RandomStream
from outrider.request.choices import make_drafter
from outrider.sampling import SamplingSettings, standardize
from tests.helpers.folders import make_tokenizer
from tests.helpers.samples import ALARM
from tests.helpers.tiny_models import module
from tests.helpers.toys import table

TEXT = "the quick brown fox jumps over the lazy dog"
KINDS: dict[str, type[IntersectionDrafter] | type[TextDrafter]] = {"intersection": IntersectionDrafter, "text": TextDrafter}


@pytest.fixture(scope="module")
def target(target_folder: Path) -> TransformersModel:
    return load_transformers(target_folder)


@pytest.fixture(scope="module")
def foreign(foreign_folder: Path) -> TransformersModel:
    return load_transformers(foreign_folder)


@pytest.mark.parametrize("kind", KINDS)
def test_what_its_drafts_take_is_what_those_of_other_models_do(
    kind: str, foreign: TransformersModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first pass finds the caches full of the target's weights, those after it their own."""
    costs = Costs({1: 0.010}, warm=0.004)
    drafters: list[Drafter] = [KINDS[kind](foreign), ModelDrafter(foreign)]
    for module_name, drafter in zip(("other_tokenizer", "model"), drafters, strict=True):
        monkeypatch.setattr(f"outrider.drafters.{module_name}.measured_costs", lambda _: costs)
        drafter.measure()
        assert drafter.seconds.of(5) == pytest.approx(0.034)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_output_is_that_of_plain_decoding(
    kind: str, penalty: float, target: TransformersModel, foreign: TransformersModel
) -> None:
    settings = SamplingSettings(repetition_penalty=penalty)
    prompts = [target.tokenizer.encode(t) for t in (TEXT, "def f(x): return 🙂", "0")]
    requests = [Request(p, 24, RandomStream(0, i)) for i, p in enumerate(prompts)]
    plain = decode(target, requests, settings)[0]
    tokens, rounds = decode(target, requests, settings, KINDS[kind](foreign), FixedLength(3))
    assert tokens == plain
    assert sum(r.drafted for row in rounds for r in row) > 10
    assert foreign._open == []


@dataclass(frozen=True)
class Writer:
    """A target that writes words, and a draft model whose law differs by `noise`, the same tokens under other ids.

    Words, since the texts of random models are cut otherwise than they were written: hardly anything would be accepted.
    """

    target: TransformersModel
    draft: TransformersModel
    words: list[int]


def writer(tokenizer: Any, noise: float) -> Writer:
    words = [i for i in tokenizer.encode(" quick brown fox jumps over lazy dog return") if tokenizer.decode([i])[0] == " "]
    assert len(words) >= 4
    made = module("Llama", 0, torch.float32, vocab_size=len(tokenizer), max_position_embeddings=256)
    shuffled = RenumberedTokenizer(tokenizer)
    with torch.no_grad():
        others = [i for i in range(len(tokenizer)) if i not in words]
        made.lm_head.weight[others] = 0.0
        twin = copy.deepcopy(made)
        twin.model.embed_tokens.weight.copy_(made.model.embed_tokens.weight[shuffled.old_of_new])
        head = made.lm_head.weight.clone()
        head[words] += noise * torch.randn(len(words), head.shape[1], generator=torch.Generator().manual_seed(5))
        twin.lm_head.weight.copy_(head[shuffled.old_of_new])
    return Writer(TransformersModel(made, tokenizer, "writer"), TransformersModel(twin, shuffled, "renumbered"), words)


def p_value(target: TransformersModel, drafter: Drafter) -> tuple[float, float]:
    """Chi-square of the first two tokens of many texts against the target's own law of them. → p, accepted / tested"""
    settings = SamplingSettings(temperature=0.8, top_k=3)
    prompt = target.tokenizer.encode(TEXT)

    def law(tokens: list[int]) -> dict[int, float]:
        with torch.inference_mode():
            logits = target.module(input_ids=torch.tensor([tokens])).logits[:, -1]
        probs = standardize(logits, settings)[0]
        return {i: float(probs[i]) for i in probs.nonzero().flatten().tolist()}

    exact = {(a, b): p * q for a, p in law(prompt).items() for b, q in law([*prompt, a]).items()}
    samples = 1200
    requests = [Request(prompt, 2, RandomStream(8, i)) for i in range(samples)]
    tokens, rounds = decode(target, requests, settings, drafter, FixedLength(1))
    records = [r for row in rounds for r in row]
    assert sum(r.drafted for r in records) > samples / 4
    rate = sum(r.accepted for r in records) / sum(r.tested for r in records)
    counts = Counter(tuple(row) for row in tokens)
    assert set(counts) <= set(exact)
    total = sum(exact.values())  # 1 up to float32
    found = stats.chisquare([counts[k] for k in exact], [samples * p / total for p in exact.values()])
    return float(found.pvalue), rate


@pytest.mark.parametrize("kind", KINDS)
def test_samples_follow_the_targets_law(kind: str, target: TransformersModel) -> None:
    made = writer(target.tokenizer, 0.3)
    p, rate = p_value(made.target, KINDS[kind](made.draft))
    assert p > ALARM
    assert 0.1 < rate < 0.98


class IntersectionAsItWas(IntersectionDrafter):
    """A planted fault: what the cut took away counts as drawn from, too, nineteen twentieths of all."""

    def propose(self, *args: Any) -> Proposal:
        proposal = super().propose(*args)
        assert proposal.probs is not None
        return replace(proposal, probs=0.05 * proposal.probs + 0.95 / proposal.probs.shape[-1])


class TextWithALaw(TextDrafter):
    """A planted fault: claims to have drawn what it is certain of."""

    def propose(self, *args: Any) -> Proposal:
        proposal = super().propose(*args)
        shape = (*proposal.tokens.shape, args[-1].vocab_size)
        return replace(proposal, probs=torch.full(shape, 1 / shape[-1], dtype=torch.float64))


@pytest.mark.parametrize("wrong", [IntersectionAsItWas, TextWithALaw])
def test_a_draft_that_claims_another_law_is_rejected(
    wrong: type[IntersectionAsItWas] | type[TextWithALaw], target: TransformersModel
) -> None:
    made = writer(target.tokenizer, 0.3)
    assert p_value(made.target, wrong(made.draft))[0] < ALARM


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_model_behind_a_renumbered_vocabulary_is_always_accepted(kind: str, target: TransformersModel) -> None:
    """The draft reads the right text and its tokens mean the right things: only then is everything accepted."""
    tokenizer = target.tokenizer
    # A model that writes words with a space before them: such text is always cut into the tokens it was written in.
    made = writer(tokenizer, 0.0)
    drafter: Drafter = KINDS[kind](made.draft)
    request = Request(tokenizer.encode(TEXT), 30, RandomStream(1))
    tokens, rounds = decode(made.target, [request], SamplingSettings(), drafter, FixedLength(3))
    assert set(tokens[0]) <= set(made.words)
    accepted, tested = sum(r.accepted for r in rounds[0]), sum(r.tested for r in rounds[0])
    assert tested > 15
    assert accepted / tested > 0.95


class RenumberedTokenizer:
    """The same tokens under other ids."""

    def __init__(self, tokenizer: object) -> None:
        self._real = tokenizer
        size = len(tokenizer)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(3)
        self.old_of_new = torch.randperm(size, generator=generator)
        self._new_of_old = {int(old): new for new, old in enumerate(self.old_of_new.tolist())}
        self.all_special_ids = [self._new_of_old[i] for i in tokenizer.all_special_ids]  # type: ignore[attr-defined]
        self.added_tokens_decoder: dict[int, object] = {}
        self.eos_token_id = self._new_of_old[tokenizer.eos_token_id]  # type: ignore[attr-defined]
        self.backend_tokenizer = tokenizer.backend_tokenizer  # type: ignore[attr-defined]

    def get_vocab(self) -> dict[str, int]:
        return {text: self._new_of_old[i] for text, i in self._real.get_vocab().items()}  # type: ignore[attr-defined]

    def encode(self, text: str, **options: object) -> list[int]:
        return [self._new_of_old[i] for i in self._real.encode(text, **options)]  # type: ignore[attr-defined]

    def decode(self, ids: list[int], **options: object) -> str:
        return self._real.decode([int(self.old_of_new[i]) for i in ids], **options)  # type: ignore[attr-defined, no-any-return]


def test_tokens_are_known_by_their_bytes() -> None:
    tokenizer = make_tokenizer()
    found = token_bytes(tokenizer)
    for raw, number in found.items():
        assert tokenizer.decode([number]).encode() == raw or b"\xef\xbf\xbd" in tokenizer.decode([number]).encode()
    assert b" " in found
    assert b"\xf0" in found  # a byte that is no text by itself
    assert not {tokenizer.eos_token_id, tokenizer.pad_token_id} & set(found.values())


def test_a_model_of_another_vocabulary_is_chosen_for_and_useless_ones_are_refused(
    target: TransformersModel, foreign: TransformersModel, draft_folder: Path
) -> None:
    assert isinstance(make_drafter(foreign, target), TextDrafter)
    assert isinstance(make_drafter(outrider.load(draft_folder), target), ModelDrafter)
    with pytest.raises(VocabularyMismatchError, match="must both have tokenizers"):
        IntersectionDrafter(foreign).bind(TransformersModel(module("Llama")))
    with pytest.raises(VocabularyMismatchError, match=r"61 tokens|vocabularies"):
        ModelDrafter(table(1, 5)).bind(table(1, 9))
