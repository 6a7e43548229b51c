"""A draft whose head was cut gives the whole model's logits for the tokens that are left, and its law stays exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import outrider
from outrider.errors import ModelError, ParameterError
from outrider.models.base import TextModel
from outrider.models.cut_head import cut_head
from outrider.models.weights.quantized import can_quantize
from outrider.support.device_data import pad_rows
from tests.helpers.marks import slow
from tests.helpers.tiny_models import module

LEFT = 150
PROMPT = [5, 80, 17, 200, 42, 9, 33, 120]
KINDS = [
    ("float32", "transformers"),
    *([("int8", "transformers")] if can_quantize() else []),
    ("float32", "openvino"),
    ("int4", "openvino"),
]


def logits(model: TextModel) -> Tensor:
    """Of each position of the prompt, [N, V]."""
    sequence = model.open()
    tokens, lengths = pad_rows([PROMPT], model.device)
    out = model.score([sequence], tokens, lengths, "all")
    assert out is not None
    found = out[0].clone()
    sequence.close()
    return found


@pytest.mark.parametrize(("dtype", "engine"), [*KINDS[:2], *(slow(*kind) for kind in KINDS[2:])])
def test_the_rows_that_are_left_are_the_models_own(dtype: str, engine: str, draft_folder: Path, cache: Path) -> None:
    whole = outrider.load(draft_folder, dtype=dtype, engine=engine)
    cut = outrider.load(draft_folder, dtype=dtype, engine=engine, num_tokens=LEFT)
    assert cut.name == f"{whole.name}:num_tokens={LEFT}"
    assert cut.vocab_size == whole.vocab_size
    expected, found = logits(whole), logits(cut)
    assert found.shape == expected.shape
    assert torch.allclose(found[:, :LEFT], expected[:, :LEFT], atol=1e-5)
    assert bool((found[:, LEFT:] == -torch.inf).all())
    assert cut.weight_bytes < whole.weight_bytes  # type: ignore[attr-defined]


def test_its_tokens_are_proposed_by_its_own_law_and_accepted_by_their_ratio(target_folder: Path, draft_folder: Path) -> None:
    target = outrider.load(target_folder, dtype="float64")
    draft = outrider.load(draft_folder, dtype="float64", num_tokens=LEFT)
    whole = outrider.load(draft_folder, dtype="float64")
    one = outrider.generate(
        target, PROMPT, draft=draft, num_draft_tokens=3, temperature=1.0, betas=True, drafts=True, seed=3, max_new_tokens=40
    )
    drafted = [token for r in one.rounds for token in r.drafts or ()]
    assert drafted
    assert max(drafted) < LEFT <= max(one.tokens), "the target writes tokens that the draft can't propose"
    law = logits(target)[-1].double().softmax(-1)
    own = logits(whole)[-1, :LEFT].double().softmax(-1)
    assert one.rounds[0].betas is not None
    assert one.rounds[0].betas[0] == pytest.approx(float(torch.minimum(law[:LEFT], own).sum()), abs=1e-9)


def test_greedy_texts_are_those_of_plain_decoding(target_folder: Path, draft_folder: Path) -> None:
    target = outrider.load(target_folder, dtype="float64")
    draft = outrider.load(target_folder, dtype="float64", num_tokens=LEFT)
    drafted = outrider.generate(target, PROMPT, draft=draft, num_draft_tokens=4, temperature=0.0, max_new_tokens=60)
    plain = outrider.generate(target, PROMPT, temperature=0.0, max_new_tokens=60)
    assert drafted.tokens == plain.tokens
    rate = drafted.stats.acceptance_rate
    assert rate is not None
    assert 0 < rate < 1, "its own tokens are accepted, those that it lacks are not proposed"


def test_what_can_not_be_cut_is_refused_with_one_line(draft_folder: Path, cache: Path) -> None:
    for engine in ("transformers", "openvino"):
        for count in (0, 10_000):
            with pytest.raises(ParameterError, match=rf"num_tokens must be a whole number in 1 … \d+, got {count}"):
                outrider.load(draft_folder, dtype="float32", engine=engine, num_tokens=count)
    with pytest.raises(ParameterError, match="with the llama"):
        outrider.load(draft_folder, engine="llama.cpp", num_tokens=5)
    made = module("Llama")
    made.lm_head = torch.nn.Identity()
    with pytest.raises(ModelError, match="the head of tiny can't be cut"):
        cut_head(made, 5, "tiny")


@pytest.mark.parametrize("engine", ["transformers", "openvino"])
def test_a_cut_model_is_no_target_and_one_with_all_its_rows_is(engine: str, draft_folder: Path, cache: Path) -> None:
    cut = outrider.load(draft_folder, dtype="float32", engine=engine, num_tokens=LEFT)
    with pytest.raises(ParameterError, match=f"is a draft of {LEFT} tokens and can't be a target: .* leave num_tokens out"):
        outrider.generate(cut, PROMPT, max_new_tokens=2)
    every = outrider.load(draft_folder, dtype="float32", engine=engine, num_tokens=cut.vocab_size)
    assert len(outrider.generate(every, PROMPT, max_new_tokens=2, ignore_eos=True).tokens) == 2


def test_encoder_decoders_are_not_cut(tmp_path: Path) -> None:
    from tests.helpers.folders import save_encoder_decoder

    folder = save_encoder_decoder(tmp_path / "t5", "T5")
    with pytest.raises(ParameterError, match="num_tokens is for decoder-only drafts"):
        outrider.load(folder, dtype="float32", num_tokens=5)
