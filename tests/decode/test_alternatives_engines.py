"""Alternatives in engines: they get the logits that they would have got had they stood there, and nothing of what was
rejected is left behind; who can't score any is given none.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.decode import Request, decode
from outrider.draft_length import FixedLength
from outrider.drafters import ChoiceDrafter, Drafter, EarlyExitDrafter, ModelDrafter, PromptLookupDrafter
from outrider.drafters.base import check_alternatives
from outrider.errors import ParameterError
from outrider.models.base import LanguageModel, scores_alternatives
from outrider.models.transformers_model import TransformersModel
from outrider.randomness import RandomStream
from outrider.sampling import SamplingSettings
from outrider.support.device_data import pad_rows
from tests.helpers.marks import slow
from tests.helpers.ragged import reference, some_tokens
from tests.helpers.samples import V
from tests.helpers.tiny_models import CONFIGS, VOCABULARY, module, record_now, tiny, tiny_encoder_decoder
from tests.helpers.toys import table

SINGLE_PRECISION_INSIDE = {"GPTJ", "Gemma2"}  # of the attention, where a token's own key lies in another column here


@pytest.mark.parametrize("architecture", CONFIGS)
def test_alternatives_get_the_logits_that_they_would_have_in_their_places(architecture: str) -> None:
    model = tiny(architecture)
    assert scores_alternatives(model)
    close = 1e-4 if architecture in SINGLE_PRECISION_INSIDE else 1e-9
    compare(model, close)


@pytest.mark.parametrize("architecture", ["Llama", slow("Gemma3"), "GPT2"])
def test_recorded_passes_and_padded_widths_score_them_as_well(architecture: str) -> None:
    model = TransformersModel(module(architecture, seed=1))
    record_now(model)
    assert model.recorded is not None
    compare(model, 1e-9)
    model.pad_widths(lambda n, context: n + 3)
    compare(model, 1e-9)


def compare(model: TransformersModel, close: float) -> None:
    """Two rows of different length, one opened after a third that is closed again, so that slots are out of order."""
    rows = [some_tokens(30, 1), some_tokens(23, 2)]
    lengths, others, places = [4, 3], [[9, 8, 7], [6, 5]], [[0, 2, 3], [1, 1]]
    third, second, first = model.open(), model.open(), model.open()
    third.close()  # its slot goes to the first row: not in order any more
    sequences = [first, second] if first.slot > second.slot else [second, first]
    try:
        before = [len(row) - count for row, count in zip(rows, lengths, strict=True)]
        model.score(sequences, *pad_rows([row[:n] for row, n in zip(rows, before, strict=True)], model.device), "none")
        new, counts = pad_rows([row[n:] for row, n in zip(rows, before, strict=True)], model.device)
        out = model.score_beside(sequences, new, counts, pad_rows(others, model.device)[0], places).clone()
        for i, row in enumerate(rows):
            plain = reference(model, row)
            assert torch.allclose(out[i, : lengths[i]], plain[before[i] :], atol=close)
            for m, (token, place) in enumerate(zip(others[i], places[i], strict=True)):
                there = [*row[: before[i] + place], token]
                assert torch.allclose(out[i, lengths[i] + m], reference(model, there)[-1], atol=close)
        for i, m in ((0, 1), (1, 0)):
            model.take_alternative(sequences[i], before[i] + places[i][m], m)
            assert sequences[i].length == before[i] + places[i][m] + 1
        more, counts = pad_rows([[11, 12], [13]], model.device)
        after = model.score(sequences, more, counts)
        assert after is not None
        for i, m in ((0, 1), (1, 0)):
            whole = [*rows[i][: before[i] + places[i][m]], others[i][m], *more[i, : counts[i]].tolist()]
            assert torch.allclose(after[i, : counts[i]], reference(model, whole)[-counts[i] :], atol=close)
    finally:
        for sequence in sequences:
            sequence.close()


@pytest.mark.parametrize("layers", [(), (1,)])
def test_kept_states_follow_the_alternative(layers: tuple[int, ...]) -> None:
    model = TransformersModel(module("Llama", seed=2))
    model.keep_states(layers)
    row, plain = model.open(), model.open()
    tokens = torch.tensor([some_tokens(12, 3)])
    model.score([row], tokens[:, :8], [8], "none")
    model.score_beside([row], tokens[:, 8:], [4], torch.tensor([[5, 6]]), [[1, 2]])
    model.take_alternative(row, 10, 1)
    model.score([plain], torch.cat([tokens[:, :10], torch.tensor([[6]])], 1), [11], "none")
    assert torch.allclose(model.states(row, 0, 11, layers), model.states(plain, 0, 11, layers), atol=1e-9)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_of_a_model_are_its_own(temperature: float) -> None:
    """Greedy: the very tokens of plain decoding. Sampled: by the target's law along the text, every token is possible."""
    target, draft = tiny("Llama"), tiny("Llama", seed=5)
    prompt = some_tokens(9, 4)
    drafters: list[Drafter] = [ModelDrafter(draft), EarlyExitDrafter(1), ModelDrafter(target)]
    sampling = SamplingSettings(temperature=temperature, top_k=3 if temperature else 0)
    plain = decode(target, [Request(prompt, 60, RandomStream(1))], sampling)[0][0]
    for drafter in drafters:
        request = Request(prompt, 60, RandomStream(1))
        (tokens,), (rounds,) = decode(target, [request], sampling, drafter, FixedLength(2), alternatives=8)
        if temperature == 0.0:
            assert tokens == plain
            continue
        whole = reference(target, [*prompt, *tokens])[len(prompt) - 1 : -1]
        assert all(token in law.topk(3).indices for token, law in zip(tokens, whole, strict=True))
        if drafter is not drafters[2]:
            assert sum(record.taken for record in rounds) > 2


def test_misuse_is_refused_in_one_line() -> None:
    model = tiny("Llama")
    row = model.open()
    new, others = torch.tensor([[1, 2]]), torch.tensor([[3]])
    try:
        with pytest.raises(ParameterError, match=r"places must be in 0 … 1, those of appended tokens, got 2"):
            model.score_beside([row], new, [2], others, [[2]])
        with pytest.raises(ParameterError, match=r"places must be at most 1 a row"):
            model.score_beside([row], new, [2], others, [[0, 1]])
        model.score_beside([row], new, [2], others, [[1]])
        with pytest.raises(ParameterError, match=r"alternative must be one of the 1"):
            model.take_alternative(row, 1, 1)
        with pytest.raises(ParameterError, match=r"position must be in 0 … 1"):
            model.take_alternative(row, 2, 0)
        model.score([row], new, [2], "none")
        with pytest.raises(ParameterError, match=r"alternative must be one of the 0"):
            model.take_alternative(row, 1, 0)
    finally:
        row.close()


def test_who_can_score_none_is_not_given_any() -> None:
    other = tiny_encoder_decoder("T5")
    assert not scores_alternatives(other)
    drafter = ModelDrafter(table(2, V))
    assert check_alternatives(None, other, drafter) == 0
    assert check_alternatives(0, other, drafter) == 0
    assert check_alternatives(None, table(1, V), drafter) is None
    assert check_alternatives(None, table(1, V), ChoiceDrafter([PromptLookupDrafter(), drafter])) is None
    assert check_alternatives(None, table(1, V), PromptLookupDrafter()) == 0
    with pytest.raises(ParameterError, match=r"alternatives must be 0 for .*, got 2: decoder-only models"):
        check_alternatives(2, other, drafter)
    with pytest.raises(ParameterError, match=r"alternatives must be a whole number in 0 … 16, got 17"):
        check_alternatives(17, table(1, V), drafter)
    with pytest.raises(ParameterError, match=r"alternatives must be 0 with prompt-lookup, got 2: they are what a model"):
        check_alternatives(2, table(1, V), PromptLookupDrafter())
    with pytest.raises(ParameterError, match=r"alternatives must be 0 without a draft, got 1"):
        check_alternatives(1, table(1, V), None)


def test_a_model_that_reads_masks_in_its_own_way_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TransformersModel(module("Llama", seed=3))
    arguments = model.pass_arguments

    def blind(tokens: Tensor, positions: Tensor, longest: int, cache: Any, source: Any, at: Tensor | None = None) -> Any:
        del at
        return arguments(tokens, positions, longest, cache, source)

    monkeypatch.setattr(model, "pass_arguments", blind)
    assert not model.scores_alternatives


class OfMoreTokens(ModelDrafter):
    """Takes for granted that the tokens mean the same, where tokenizers would tell."""

    def bind(self, target: LanguageModel) -> None:
        del target


def test_the_vocabulary_bounds_them() -> None:
    """A draft with more entries than the target proposes none of the surplus ones."""
    target, draft = tiny("Llama"), TransformersModel(module("Llama", seed=1, vocab_size=VOCABULARY + 3))
    (tokens,), (rounds,) = decode(
        target,
        [Request(some_tokens(5, 1), 30, RandomStream(1))],
        SamplingSettings(temperature=1.0),
        OfMoreTokens(draft),
        FixedLength(2),
        alternatives=16,
    )
    assert max(tokens) < VOCABULARY
    assert all(record.alternatives == 16 * record.drafted for record in rounds if record.drafted)
