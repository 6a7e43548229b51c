"""The drop-in with encoder–decoders, with several beams, and with scores: what `generate` gives, whoever drafts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from scipy import stats
from torch import Tensor

from outrider.errors import ModelError, ParameterError
from outrider.hf_generate.engines import engine_of
from outrider.models.encoder_decoder import EncoderDecoderModel
from tests.helpers.drop_in import ours
from tests.helpers.encoder_decoder import FOUR, ruled, some_source
from tests.helpers.marks import thinned
from tests.helpers.tiny_models import module

LENGTHS = (9, 21, 4)
KINDS = ("itself", "another", "decoder-only", "copies")


def inputs(architecture: str, count: int, side: str = "right") -> dict[str, Tensor]:
    """A padded batch of sources, as a tokenizer or a feature extractor makes it."""
    engine = ruled(architecture)
    sources = [some_source(engine, i, length) for i, length in enumerate(LENGTHS[:count])]
    if engine.hears:
        return {"input_features": torch.stack([source for source in sources if isinstance(source, Tensor)])}
    rows = [list(map(int, source)) for source in sources]
    width = max(map(len, rows))
    pads = [[0] * (width - len(row)) for row in rows]
    joined = [pad + row if side == "left" else row + pad for row, pad in zip(rows, pads, strict=True)]
    ones = [[1] * len(row) for row in rows]
    mask = [pad + one if side == "left" else one + pad for one, pad in zip(ones, pads, strict=True)]
    return {"input_ids": torch.tensor(joined), "attention_mask": torch.tensor(mask)}


def plain(model: Any, given: dict[str, Tensor], **options: Any) -> Any:
    # A decoder with more layers than its encoder can't have a cache there.
    return model.generate(**given, use_cache=False, **options)


def drafting(architecture: str, kind: str) -> dict[str, Any]:
    if kind == "itself":
        return {"draft": ruled(architecture).module}
    if kind == "another":
        return {"draft": module(architecture, 1)}
    return {"draft": [module("Llama", 1), "prompt-lookup"]} if kind == "decoder-only" else {}


@pytest.mark.parametrize(("architecture", "kind"), thinned(FOUR, KINDS))
def test_greedy_batches_are_those_of_generate(architecture: str, kind: str) -> None:
    """Under forced and forbidden tokens, with sources of several lengths."""
    model, options = ruled(architecture).module, {"do_sample": False, "max_new_tokens": 14, "num_beams": 1}
    if kind == "decoder-only" and architecture == "Whisper":
        kind = "copies"  # it could not read the source
    given = inputs(architecture, 3)
    wanted = plain(model, given, **options)
    got = ours(model, **given, **options, **drafting(architecture, kind), num_draft_tokens=3)
    assert torch.equal(got, wanted)
    assert len(set(wanted.flatten().tolist())) > 6
    assert not engine_of(model)._open


@pytest.mark.parametrize("architecture", ["T5", "Bart"])
def test_padding_on_the_left_is_honoured_as_generate_honours_it(architecture: str) -> None:
    """BART's encoder counts it as positions, and `generate` has read the source before we see it."""
    model, given = ruled(architecture).module, inputs(architecture, 3, "left")
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 14, "num_beams": 1}
    assert torch.equal(ours(model, **given, **options, draft=module(architecture, 1)), plain(model, given, **options))


def test_the_encoder_is_not_run_again() -> None:
    model = module("T5")
    calls: list[int] = []
    hook = model.get_encoder().register_forward_hook(lambda *_: calls.append(1))
    try:
        ours(model, **inputs("T5", 3), do_sample=False, max_new_tokens=2)  # measures what passes cost
        calls.clear()
        ours(model, **inputs("T5", 3), do_sample=False, max_new_tokens=6)
    finally:
        hook.remove()
    assert len(calls) == 1  # by `generate` itself, for all rows
    assert not len(engine_of(model)._states)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_sampling_follows_the_law_of_generate() -> None:
    """Two tokens jointly, top-k 3, chi-square against the exact law; rejects a correct run with odds of 1e-6."""
    model, samples = module("T5"), 1200
    given = {"input_ids": torch.tensor([[5, 6, 7, 5, 6]])}

    def law(tokens: list[int]) -> dict[int, float]:
        with torch.inference_mode():
            logits = model(**given, decoder_input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1] / 0.9
        best = logits.topk(3)
        return dict(zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True))

    exact = {(a, b): p * q for a, p in law([0]).items() for b, q in law([0, a]).items()}
    torch.manual_seed(3)
    options = {"max_new_tokens": 2, "do_sample": True, "top_k": 3, "top_p": 1.0, "temperature": 0.9, "eos_token_id": None}
    got = ours(model, **given, **options, num_return_sequences=samples, draft=module("T5", 1), num_draft_tokens=2)
    counts = Counter((row[-2], row[-1]) for row in got.tolist())
    assert set(counts) <= set(exact)
    assert len(exact) == 9
    assert stats.chisquare([counts[key] for key in exact], [samples * p for p in exact.values()]).pvalue > 1e-6


SEARCHES: list[dict[str, Any]] = [
    {"num_beams": 2},
    {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 2.0},
    {"num_beams": 3, "num_return_sequences": 3, "early_stopping": True, "no_repeat_ngram_size": 2},
    {"num_beams": 4, "early_stopping": "never", "length_penalty": 0.3, "repetition_penalty": 1.2},
]


def _said(value: Any) -> str | None:
    return ",".join(value) if isinstance(value, dict) else None


@pytest.mark.parametrize(
    ("architecture", "drafted", "options"), thinned(["Llama", "T5", "Bart", "Marian"], [True, False], SEARCHES), ids=_said
)
def test_beams_are_those_of_generate(architecture: str, drafted: bool, options: dict[str, Any]) -> None:
    """Texts and scores of two prompts."""
    if architecture == "Llama":
        model: Any = module("Llama")
        given = {"input_ids": torch.tensor([[5, 6, 7, 5, 6], [9, 10, 11, 4, 3]])}
    else:
        model, given = ruled(architecture).module, inputs(architecture, 2)
    options = {"do_sample": False, "max_new_tokens": 10, "return_dict_in_generate": True, "pad_token_id": 0, **options}
    wanted = plain(model, given, output_scores=True, **options)
    draft = {"assistant_model": module(architecture, 1), "num_draft_tokens": 2} if drafted else {}
    got = ours(model, **given, **options, **draft)
    assert torch.equal(got.sequences, wanted.sequences)
    assert got.sequences_scores.tolist() == pytest.approx(wanted.sequences_scores.tolist(), abs=1e-4)
    assert torch.equal(got.beam_indices, wanted.beam_indices)
    assert type(got) is type(wanted)


@pytest.mark.parametrize(("architecture", "options"), thinned(["Llama", "T5"], SEARCHES), ids=_said)
def test_scores_of_beams_are_those_of_generate(architecture: str, options: dict[str, Any]) -> None:
    """Each hypothesis of each step, and what `compute_transition_scores` makes of them."""
    if architecture == "Llama":
        model: Any = module("Llama")
        given = {"input_ids": torch.tensor([[5, 6, 7, 5, 6], [9, 10, 11, 4, 3]])}
    else:
        model, given = ruled(architecture).module, inputs(architecture, 2)
    asked = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    options = {"do_sample": False, "max_new_tokens": 10, "pad_token_id": 0, **asked, **options}
    wanted = plain(model, given, **options)
    got = ours(model, **given, **options, assistant_model=module(architecture, 1), num_draft_tokens=2)
    assert torch.equal(got.beam_indices, wanted.beam_indices)
    transitions = [
        model.compute_transition_scores(one.sequences, one.scores, one.beam_indices, normalize_logits=False)
        for one in (got, wanted)
    ]
    assert torch.allclose(transitions[0], transitions[1], atol=1e-4)
    for row in range(2):  # a search that has ended goes on in `generate` until the other ends
        alone = {name: value[row : row + 1] for name, value in given.items()}
        single, mine = plain(model, alone, **options), ours(model, **alone, **options)
        assert len(single.scores) == len(mine.scores) == len(mine.logits)
        for step in range(len(single.scores)):
            assert torch.allclose(mine.scores[step], single.scores[step], atol=1e-4)
            assert torch.allclose(mine.logits[step], single.logits[step], atol=1e-4)


@pytest.mark.parametrize("architecture", ["Llama", "T5"])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_scores_and_logits_are_those_along_the_text(architecture: str, sampled: bool) -> None:
    """Against `generate` along the same tokens; rows that end early are certain of their padding."""
    model = module(architecture)
    given = {"input_ids": torch.tensor([[5, 6, 7, 5, 6], [9, 10, 11, 4, 3]])}
    options: dict[str, Any] = {
        "do_sample": sampled,
        "max_new_tokens": 9,
        "pad_token_id": 0,
        "eos_token_id": [3, 30, 41],
        "repetition_penalty": 1.3,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        **({"top_k": 5} if sampled else {}),
    }
    torch.manual_seed(5)
    got = ours(model, **given, **options, num_draft_tokens=3)
    start = got.sequences.shape[1] - len(got.scores)

    def follow(row: int, ids: Tensor) -> list[int]:
        return [int(got.sequences[row, ids.shape[-1]])]

    for row in range(2):
        tokens = got.sequences[row, start:].tolist()
        ends = [i + 1 for i, token in enumerate(tokens) if token in options["eos_token_id"]]
        count = min(ends, default=len(tokens))
        forced = {**options, "max_new_tokens": count, "do_sample": False}
        one = {"input_ids": given["input_ids"][row : row + 1]}
        along = plain(model, one, **forced, prefix_allowed_tokens_fn=lambda _, ids, row=row: follow(row, ids))
        assert along.sequences[0, start:].tolist() == tokens[:count]
        for i in range(count):
            assert torch.allclose(got.logits[i][row], along.logits[i][0], atol=1e-4)
            chosen = got.scores[i][row, tokens[i]]
            assert chosen == pytest.approx(float(along.scores[i][0, tokens[i]]), abs=1e-4)
            assert int((got.scores[i][row] > -torch.inf).sum()) == (5 if sampled else 61)
        for i in range(count, len(tokens)):
            assert tokens[i] == 0
            assert got.scores[i][row].softmax(-1)[0] == 1
    transitions = model.compute_transition_scores(got.sequences, got.scores, normalize_logits=True)
    assert transitions.shape == (2, len(got.scores))
    assert bool((transitions <= 0).all())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2, "do_sample": True}, "beam_sample is not available"),
        ({"num_beams": 2, "output_attentions": True, "return_dict_in_generate": True}, "output_attentions is not available"),
        ({"num_beams": 2, "draft": "prompt-lookup"}, "can't draft for beam search"),
        (
            {"num_beams": 2, "stopping_criteria": [lambda ids, _: ids.sum(-1) < 0]},
            "must be lengths and ends for beam search",
        ),
        ({"decoder_attention_mask": torch.tensor([[0, 1]]), "decoder_input_ids": torch.tensor([[0, 5]])}, "all ones"),
        ({"cross_attn_head_mask": torch.ones(2, 4)}, "not used by the model|is not available"),
        ({"draft": "auto", "assistant_model": module("T5", 1)}, "must not both be given"),
    ],
)
def test_what_can_not_be_had_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ParameterError, ValueError), match=message):
        ours(module("T5"), input_ids=torch.tensor([[5, 6, 7]]), max_new_tokens=4, **options)


def test_the_same_source_padded_otherwise_is_refused_where_that_matters() -> None:
    """BART's encoder counts padding as positions; T5's does not."""
    given = {
        "input_ids": torch.tensor([[5, 6, 7, 0, 0], [0, 0, 5, 6, 7]]),
        "attention_mask": torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1]]),
    }
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6, "num_beams": 1}
    with pytest.raises(ParameterError, match="must be padded alike"):
        ours(ruled("Bart").module, **given, **options)
    model = ruled("T5").module
    assert torch.equal(ours(model, **given, **options), plain(model, given, **options))


def test_models_that_lend_each_other_their_encoder() -> None:
    one, other = module("T5"), module("T5")
    given = inputs("T5", 2)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6}
    wanted = plain(one, given, **options)
    for target, draft in ((one, other), (other, one), (one, other)):
        assert torch.equal(ours(target, **given, **options, draft=draft, num_draft_tokens=2), wanted)
    for used in (one, other):
        engine = engine_of(used)
        assert isinstance(engine, EncoderDecoderModel)
        engine.open(source=[5, 6, 7]).close()
        assert not len(engine._states)


def test_two_models_in_one_are_refused_by_name() -> None:
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    parts = [transformers.BertConfig(**size) for _ in range(2)]
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    model = transformers.EncoderDecoderModel(config).eval()
    with pytest.raises(ModelError, match="two models with a configuration each"):
        ours(model, input_ids=torch.tensor([[5, 6, 7]]), decoder_start_token_id=1, pad_token_id=0, max_new_tokens=3)


def test_half_a_whisper_is_refused() -> None:
    """transformers takes it as an assistant; here an equal encoder is found by its weights."""
    half = transformers.WhisperForCausalLM(module("Whisper").config)
    with pytest.raises(ParameterError, match="load it as WhisperForConditionalGeneration"):
        ours(ruled("Whisper").module, **inputs("Whisper", 1), max_new_tokens=4, draft=half)


def test_states_without_a_source_are_refused() -> None:
    """A draft could not read them."""
    model = module("T5")
    states = model.get_encoder()(input_ids=torch.tensor([[5, 6, 7]]))
    with pytest.raises(ParameterError, match="give input_ids, too"):
        ours(model, encoder_outputs=states, max_new_tokens=4)
    with pytest.raises(ParameterError, match="inputs_embeds is not available"):
        ours(model, inputs_embeds=torch.zeros(1, 3, 32, dtype=torch.float64), max_new_tokens=4)
