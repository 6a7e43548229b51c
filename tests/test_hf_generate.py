"""The drop-in: `model.generate(custom_generate=outrider.transformers_generate)` gives what `generate` gives."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from scipy import stats
from transformers import EosTokenCriteria, LogitsProcessor, MaxLengthCriteria, StoppingCriteriaList, TextStreamer

import outrider
from outrider.choices import make_length
from outrider.errors import ParameterError
from tests.conftest import make_tokenizer
from tests.tiny_models import VOCABULARY, module

IDS = torch.tensor([[5, 6, 7, 5, 6]])
PADDED = torch.tensor([[0, 0, 9, 10, 11], [5, 6, 7, 5, 6]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


@pytest.fixture(scope="module")
def model() -> Any:
    return module("Llama")


@pytest.fixture(scope="module")
def draft() -> Any:
    return module("Llama", 1)


def ours(model: Any, *args: Any, **kwargs: Any) -> Any:
    return model.generate(*args, custom_generate=outrider.transformers_generate, **kwargs)


OPTIONS: list[dict[str, Any]] = [
    {"max_new_tokens": 20},
    {"max_length": 17},
    {"max_new_tokens": 20, "repetition_penalty": 1.3},
    {"max_new_tokens": 20, "eos_token_id": list(range(3, 40, 3))},
    {"max_new_tokens": 20, "min_new_tokens": 12, "eos_token_id": list(range(3, 40, 3))},
    {"max_new_tokens": 20, "no_repeat_ngram_size": 2},
    {"max_new_tokens": 12, "suppress_tokens": [3, 4, 5, 30]},
]


@pytest.mark.parametrize("options", OPTIONS, ids=[",".join(o) for o in OPTIONS])
@pytest.mark.parametrize("with_draft", [True, False], ids=["assistant", "lookup"])
def test_greedy_is_what_generate_gives(model: Any, draft: Any, options: dict[str, Any], with_draft: bool) -> None:
    options = {"do_sample": False, "pad_token_id": 0, **options}
    extra = {"assistant_model": draft} if with_draft else {}
    for ids, mask in ((IDS, None), (PADDED, MASK)):
        if mask is not None and "min_new_tokens" in options:
            with pytest.raises(ParameterError, match="counts the padding"):
                ours(model, ids, attention_mask=mask, **options, **extra)
            continue
        inputs = {"attention_mask": mask if mask is not None else torch.ones_like(ids)}
        wanted = model.generate(ids, **inputs, **options)
        assert torch.equal(ours(model, ids, **inputs, **options, **extra), wanted)


def test_the_assistant_is_really_used(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers drops assistant_model on the way; a draft that is the target itself must be accepted throughout."""
    seen: list[str] = []

    def spy(number: int | None, target: Any, drafter: Any) -> Any:
        seen.append(type(drafter).__name__)
        return make_length(number, target, drafter)

    monkeypatch.setattr("outrider.hf_generate.make_length", spy)
    ours(model, IDS, max_new_tokens=8, do_sample=False, assistant_model=module("Llama", 1), pad_token_id=0)
    ours(model, IDS, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert seen == ["SameTokensDrafter", "PromptLookupDrafter"]


def test_draft_and_length_can_be_named_in_the_call(model: Any) -> None:
    wanted = model.generate(IDS, max_new_tokens=12, do_sample=False, pad_token_id=0)
    got = ours(model, IDS, max_new_tokens=12, do_sample=False, pad_token_id=0, draft="prompt-lookup", num_draft_tokens=3)
    assert torch.equal(got, wanted)


def test_stopping_criteria_and_output_objects(model: Any) -> None:
    def at_ten(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(ids),), ids.shape[1] >= 10)

    options = {"do_sample": False, "max_new_tokens": 30, "pad_token_id": 0, "stopping_criteria": [at_ten]}
    wanted = model.generate(IDS, return_dict_in_generate=True, **options)
    got = ours(model, IDS, return_dict_in_generate=True, num_draft_tokens=4, **options)
    assert torch.equal(got.sequences, wanted.sequences)
    assert got.sequences.shape[1] == 10


def test_the_callers_own_ends_and_limits_replace_those_of_the_config(model: Any) -> None:
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 20, "eos_token_id": 1}
    plain = model.generate(IDS, **options)[0].tolist()
    later = plain[len(IDS[0]) + 6]
    for criterion in (MaxLengthCriteria(9), EosTokenCriteria(later)):
        wanted = model.generate(IDS, stopping_criteria=StoppingCriteriaList([criterion]), **options)
        got = ours(model, IDS, stopping_criteria=StoppingCriteriaList([criterion]), **options)
        assert got.tolist() == wanted.tolist()
        assert got.shape[1] < len(plain)


def test_a_streamer_gets_the_text(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = make_tokenizer()
    streamer = TextStreamer(tokenizer, skip_prompt=True)
    got = ours(model, IDS, max_new_tokens=16, do_sample=False, pad_token_id=0, streamer=streamer)
    assert capsys.readouterr().out.strip("\n") == tokenizer.decode(got[0, 5:]).strip("\n")


def test_several_sequences_per_prompt_differ(model: Any) -> None:
    torch.manual_seed(0)
    got = ours(model, IDS, max_new_tokens=12, do_sample=True, num_return_sequences=3, pad_token_id=0)
    assert got.shape == (3, 17)
    assert len({tuple(row) for row in got.tolist()}) == 3


def test_sampling_is_governed_by_torchs_seed(model: Any, draft: Any) -> None:
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(ours(model, IDS, max_new_tokens=12, do_sample=True, assistant_model=draft, pad_token_id=0))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_sampling_follows_the_law_of_generate(model: Any, draft: Any) -> None:
    """Two tokens jointly, top-k 3, chi-square against the exact law; rejects a correct run with odds of 1e-6."""
    options = {"max_new_tokens": 2, "do_sample": True, "top_k": 3, "top_p": 1.0, "temperature": 0.9, "pad_token_id": 0}

    def law(tokens: list[int]) -> dict[int, float]:
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([tokens])).logits[0, -1] / 0.9
        best = logits.topk(3)
        return dict(zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True))

    prompt = IDS[0].tolist()
    exact = {(a, b): p * q for a, p in law(prompt).items() for b, q in law([*prompt, a]).items()}
    torch.manual_seed(3)
    samples = 1500
    got = ours(model, IDS.expand(samples, -1), assistant_model=draft, num_draft_tokens=2, **options)
    counts = Counter((row[-2], row[-1]) for row in got.tolist())
    assert set(counts) <= set(exact)
    assert VOCABULARY**2 > len(exact) == 9
    p_value = stats.chisquare([counts[k] for k in exact], [samples * p for p in exact.values()]).pvalue
    assert p_value > 1e-6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2, "do_sample": True}, "beam_sample is not available"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states is not available"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions is not available"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive_search is not available"),
        ({"synced_gpus": True}, "synced_gpus is not available"),
        ({"guidance_scale": 1.7}, "ClassifierFreeGuidance"),
        ({"inputs_embeds": torch.zeros(1, 5, 32, dtype=torch.float64)}, "inputs_embeds is not available"),
        ({"position_ids": torch.arange(5).unsqueeze(0) + 2}, "position_ids must count"),
    ],
)
def test_what_is_not_supported_is_refused(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        ours(model, IDS, max_new_tokens=4, pad_token_id=0, **{"do_sample": False, **options})


def test_constraints_by_row_are_honoured_alone_and_refused_in_batches(model: Any) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    options["prefix_allowed_tokens_fn"] = lambda row, ids: [40, 41, 42 + row]
    assert torch.equal(ours(model, IDS, **options), model.generate(IDS, **options))
    with pytest.raises(ParameterError, match="PrefixConstrainedLogitsProcessor must be used with one prompt, got 2"):
        ours(model, PADDED, attention_mask=MASK, **options)


def test_a_processor_may_write_in_place_or_force_a_token(model: Any) -> None:
    class Bans(LogitsProcessor):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            scores[:, ::2] = -float("inf")
            if input_ids.shape[1] % 3 == 0:
                scores[:, 7] = float("inf")
            return scores

    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "logits_processor": [Bans()]}
    wanted = model.generate(IDS, **options)
    assert torch.equal(ours(model, IDS, **options), wanted)
    assert 7 in wanted[0, 5:]


def test_a_model_changed_after_a_call_is_opened_anew() -> None:
    changing = module("Llama", 3)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    ours(changing, IDS, **options)
    changing.set_attn_implementation("eager")
    assert torch.equal(ours(changing, IDS, **options), changing.generate(IDS, **options))
    changing.float()
    assert torch.equal(ours(changing, IDS, **options), changing.generate(IDS, **options))


def test_pairs_of_options_cover_batches(model: Any, draft: Any) -> None:
    for penalty, length in itertools.product((1.0, 1.5), (1, 6)):
        options = {"do_sample": False, "max_new_tokens": length, "repetition_penalty": penalty, "pad_token_id": 0}
        wanted = model.generate(PADDED, attention_mask=MASK, **options)
        assert torch.equal(ours(model, PADDED, attention_mask=MASK, assistant_model=draft, **options), wanted)
