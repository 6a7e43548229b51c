"""The drop-in: `model.generate(custom_generate=outrider.transformers_generate)` gives what `generate` gives."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    RepetitionPenaltyLogitsProcessor,
    RwkvConfig,
    RwkvForCausalLM,
    StoppingCriteriaList,
    TextStreamer,
)

from outrider.errors import ModelError, NumericalError, ParameterError
from outrider.hf_generate.engines import engine_of
from outrider.request.choices import make_length
from outrider.sampling.stateful import Constraint
from tests.helpers.drop_in import IDS, MASK, PADDED, ours
from tests.helpers.folders import make_tokenizer
from tests.helpers.marks import slow
from tests.helpers.tiny_models import VOCABULARY, module


@pytest.fixture(scope="module")
def model() -> Any:
    return module("Llama")


@pytest.fixture(scope="module")
def draft() -> Any:
    return module("Llama", 1)


OPTIONS: list[dict[str, Any]] = [
    {"max_new_tokens": 20},
    {"max_length": 17},
    {"max_new_tokens": 20, "repetition_penalty": 1.3},
    {"max_new_tokens": 20, "eos_token_id": list(range(3, 40, 3))},
    {"max_new_tokens": 20, "min_new_tokens": 12, "eos_token_id": list(range(3, 40, 3))},
    {"max_new_tokens": 20, "no_repeat_ngram_size": 2},
    {"max_new_tokens": 12, "suppress_tokens": [3, 4, 5, 30]},
    {"max_new_tokens": 20, "bad_words_ids": [[0, 9], [5, 6, 7]]},
    {"max_new_tokens": 20, "eos_token_id": list(range(3, 40, 3)), "exponential_decay_length_penalty": (3, 1.5)},
]


def test_rows_of_one_batch_keep_the_penalty_of_their_own_prompts(model: Any) -> None:
    def processors() -> LogitsProcessorList:
        ignored = torch.tensor([0, 4])
        return LogitsProcessorList([RepetitionPenaltyLogitsProcessor(5.0, prompt_ignore_length=ignored)])

    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    differ = 0
    for seed in range(4):
        ids = torch.randint(3, 61, (2, 4), generator=torch.Generator().manual_seed(seed))
        wanted = model.generate(ids, logits_processor=processors(), **options)
        assert torch.equal(ours(model, ids, logits_processor=processors(), **options), wanted)
        differ += not torch.equal(model.generate(ids, **options), wanted)
    assert differ == 4
    with pytest.raises(ParameterError, match="must differ where prompt_ignore_length does"):
        ours(model, ids[:1].expand(2, -1), logits_processor=processors(), **options)


@pytest.mark.parametrize("options", OPTIONS, ids=[",".join(o) for o in OPTIONS])
@pytest.mark.parametrize("with_draft", [True, False], ids=["assistant", "lookup"])
def test_greedy_is_what_generate_gives(model: Any, draft: Any, options: dict[str, Any], with_draft: bool) -> None:
    options = {"do_sample": False, "pad_token_id": 0, **options}
    extra = {"assistant_model": draft} if with_draft else {}
    for ids, mask in ((IDS, None), (PADDED, MASK)):
        inputs = {"attention_mask": mask if mask is not None else torch.ones_like(ids)}
        wanted = model.generate(ids, **inputs, **options)
        assert torch.equal(ours(model, ids, **inputs, **options, **extra), wanted)


def test_the_assistant_is_really_used(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers drops assistant_model on the way; a draft that is the target itself must be accepted throughout."""
    seen: list[str] = []

    def spy(number: int | None, target: Any, drafter: Any, rows: int) -> Any:
        seen.append(type(drafter).__name__)
        return make_length(number, target, drafter, rows)

    monkeypatch.setattr("outrider.hf_generate.make_length", spy)
    ours(model, IDS, max_new_tokens=8, do_sample=False, assistant_model=module("Llama", 1), pad_token_id=0)
    ours(model, IDS, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert seen == ["SameTokensDrafter", "PromptLookupDrafter"]


def test_draft_and_length_can_be_named_in_the_call(model: Any) -> None:
    wanted = model.generate(IDS, max_new_tokens=12, do_sample=False, pad_token_id=0)
    got = ours(model, IDS, max_new_tokens=12, do_sample=False, pad_token_id=0, draft="prompt-lookup", num_draft_tokens=3)
    assert torch.equal(got, wanted)


def test_statistics_of_each_row_are_appended_to_the_callers_list(model: Any) -> None:
    found: list[Any] = []
    options = {"attention_mask": MASK, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    ours(model, PADDED, draft="self", num_draft_tokens=3, stats=found, **options)
    assert [(one.tokens, one.rounds, one.drafted, one.acceptance_rate) for one in found] == [(12, 3, 9, 1.0)] * 2
    assert all(one.seconds["verify"] > 0.0 and one.seconds["prefill"] > 0.0 for one in found)
    ours(model, IDS, max_new_tokens=8, do_sample=False, pad_token_id=0, num_beams=2, stats=found)
    assert (len(found), found[2].steps) == (3, 8)
    with pytest.raises(ParameterError, match="stats must be a list, to which those of each row are appended, got dict"):
        ours(model, IDS, max_new_tokens=4, pad_token_id=0, stats={})


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


@pytest.mark.parametrize("beams", [1, 3])
def test_rows_are_filled_up_as_generate_does_it(model: Any, beams: int) -> None:
    """Without a padding token by the first end, with beams also where it is 0."""
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20, "num_beams": beams}
    options["eos_token_id"] = list(range(3, 40, 3))
    for pad in (None, 0, 7):
        config = GenerationConfig(**options, pad_token_id=pad)
        wanted = model.generate(PADDED, attention_mask=MASK, generation_config=config)
        got = ours(model, PADDED, attention_mask=MASK, generation_config=config)
        assert torch.equal(got, wanted)


def test_ids_of_another_type_become_what_generate_makes_of_them(model: Any) -> None:
    ids = torch.tensor([[5, 6, 7]], dtype=torch.int32)
    wanted = model.generate(ids, max_new_tokens=4, do_sample=False)
    found = ours(model, ids, max_new_tokens=4, do_sample=False)
    assert found.dtype is wanted.dtype is torch.int64
    assert torch.equal(found, wanted)


HOLE = torch.tensor([[1, 0, 1, 1, 1], [0, 1, 1, 1, 1]])


class Counts(LogitsProcessor):  # type: ignore[misc]
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores if input_ids.shape[1] % 4 else scores.index_fill(-1, input_ids[0, :2], 1e3)


@pytest.mark.parametrize("mask", [MASK, HOLE], ids=["left", "hole"])
@pytest.mark.parametrize("kind", ["counts", "penalties", "stops"])
def test_processors_and_criteria_see_the_padding_as_in_generate(model: Any, mask: torch.Tensor, kind: str) -> None:
    """They count it, or find its tokens."""
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 14, "pad_token_id": 0}
    further: dict[str, dict[str, Any]] = {
        "counts": {"logits_processor": [Counts()]},
        "penalties": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
        "stops": {"stopping_criteria": [lambda ids, _: torch.full((len(ids),), ids.shape[1] >= 9)], "eos_token_id": 1},
    }
    options |= further[kind]
    rows = 1 if kind == "counts" else 2  # that processor looks at the first row for all of them
    given = {"inputs": PADDED[:rows], "attention_mask": mask[:rows]}
    assert torch.equal(ours(model, **given, **options), model.generate(**given, **options))


def test_a_criterion_may_say_it_in_one_word(model: Any) -> None:
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 14, "pad_token_id": 0}
    assert ours(model, IDS, stopping_criteria=[lambda ids, _: ids.shape[1] >= 9], **options).shape[1] == 9


def test_what_a_batch_can_not_tell_is_refused(model: Any) -> None:
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0}
    with pytest.raises(ParameterError, match="must not end in padding"):
        ours(model, IDS, attention_mask=torch.tensor([[1, 1, 1, 0, 0]]), **options)
    criterion = [lambda ids, _: ids.shape[1] > 7]
    with pytest.raises(ParameterError, match="eos_token_id must be given beside function for 2 prompts"):
        ours(model, PADDED, attention_mask=MASK, eos_token_id=None, stopping_criteria=criterion, **options)
    begins = torch.tensor([[0, 0, 5, 6, 7], [0, 5, 6, 7, 9]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]])
    with pytest.raises(ParameterError, match="begin with another one that is padded otherwise"):
        ours(model, begins, attention_mask=mask, no_repeat_ngram_size=2, **options)
    assert ours(model, begins, attention_mask=mask, **options).shape == (2, 11)
    only = {"prefix_allowed_tokens_fn": lambda row, ids: [40, 41] if len(ids) < 6 else [1], "eos_token_id": 1}
    with pytest.raises(ParameterError, match="num_return_sequences must be 2 at most"):
        ours(model, IDS, num_beams=4, num_return_sequences=4, **options, **only)


def test_a_text_that_ends_with_the_context_is_said_to() -> None:
    short = module("Llama", max_position_embeddings=24)
    with pytest.warns(UserWarning, match=r"ended with the context of .*, 24 tokens"):
        assert ours(short, IDS, max_new_tokens=40, do_sample=False, pad_token_id=0).shape == (1, 24)
    with pytest.warns(UserWarning, match="ended with the context"):
        ours(short, IDS, max_new_tokens=40, num_beams=2, pad_token_id=0, eos_token_id=None)


def test_models_are_left_as_they_were(draft: Any) -> None:
    """In training mode they are refused; a copy, a pickle and torch's generator know nothing of a call."""
    used, options = module("Llama", 5), {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    used.train()
    with pytest.raises(ParameterError, match="training mode"):
        ours(used, IDS, **options)
    assert used.training
    used.eval()
    before = torch.get_rng_state()
    wanted = used.generate(IDS, **options)
    assert torch.equal(ours(used, IDS, assistant_model=draft, **options), wanted)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(layer.keys is None for layer in engine_of(used)._cache.layers)  # no memory is kept
    for again in (pickle.loads(pickle.dumps(used)), copy.deepcopy(used), copy.copy(used)):
        assert torch.equal(ours(again, IDS, **options), wanted)


def test_several_threads_may_call_at_once(model: Any, draft: Any) -> None:
    """Each waits for its models; drafts and targets may change places."""
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    prompts = [torch.tensor([[i + 3, i + 4, i + 5]]) for i in range(6)]
    pairs = [(model, draft), (draft, model)]
    wanted = [[one.generate(prompt, **options).tolist() for prompt in prompts] for one, _ in pairs]

    def task(number: int) -> list[list[list[int]]]:
        target, other = pairs[number % 2]
        return [ours(target, prompt, assistant_model=other, **options).tolist() for prompt in prompts]

    with ThreadPoolExecutor(4) as pool:
        for number, found in enumerate(pool.map(task, range(4))):
            assert found == wanted[number % 2]


@pytest.mark.parametrize("named", ["self", "early-exit:layers=1", "suffix"])
def test_drafters_that_need_the_target_are_bound_to_it(model: Any, named: str) -> None:
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    assert torch.equal(ours(model, IDS, draft=named, num_draft_tokens=2, **options), model.generate(IDS, **options))


def test_several_sequences_per_prompt_differ(model: Any) -> None:
    torch.manual_seed(0)
    got = ours(model, IDS, max_new_tokens=12, do_sample=True, num_return_sequences=3, pad_token_id=0)
    assert got.shape == (3, 17)
    assert len({tuple(row) for row in got.tolist()}) == 3


def test_copies_of_padded_prompts_are_penalised_alike(model: Any) -> None:
    """Copies of a prompt have one padding, so it is known which."""
    ids, mask = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 7]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": True, "top_k": 1, "pad_token_id": 0, "attention_mask": mask}
    options |= {"num_return_sequences": 3, "repetition_penalty": 1.7}
    assert torch.equal(ours(model, ids, **options), model.generate(ids, **options))


def test_sampling_is_governed_by_torchs_seed(model: Any, draft: Any) -> None:
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(ours(model, IDS, max_new_tokens=12, do_sample=True, assistant_model=draft, pad_token_id=0))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_a_text_may_be_made_to_depend_on_no_draft(model: Any, draft: Any) -> None:
    outputs = []
    options = {"max_new_tokens": 24, "do_sample": True, "pad_token_id": 0, "drafter_invariant": True}
    drafts: list[dict[str, Any]] = [{"draft": None, "num_draft_tokens": 0}, {"assistant_model": draft}, {}]
    for more in (*drafts, {"assistant_model": draft, "num_draft_tokens": 2}):
        torch.manual_seed(7)
        outputs.append(ours(model, PADDED, attention_mask=MASK, **options, **more))
    assert all(torch.equal(one, outputs[0]) for one in outputs)
    torch.manual_seed(8)
    assert not torch.equal(ours(model, PADDED, attention_mask=MASK, **options), outputs[0])
    with pytest.raises(ParameterError, match="drafter_invariant is about what is sampled"):
        ours(model, IDS, num_beams=2, max_new_tokens=4, drafter_invariant=True)


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


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize(("assistant", "got"), [(3, "3"), ("gpt2", "'gpt2'"), (torch.nn.Linear(2, 2), "Linear")])
def test_an_assistant_that_is_no_model_is_refused(model: Any, assistant: Any, got: str, beams: int) -> None:
    with pytest.raises(ParameterError, match=f"assistant_model must be a transformers model, got {got}: .* give draft="):
        ours(model, IDS, max_new_tokens=4, pad_token_id=0, do_sample=False, num_beams=beams, assistant_model=assistant)


def test_beams_may_be_drafted_by_the_target_itself(model: Any) -> None:
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "num_beams": 3}
    found: list[Any] = []
    assert torch.equal(ours(model, IDS, draft="self", stats=found, **options), model.generate(IDS, **options))
    assert found[0].drafted > 0


def test_rules_that_allow_no_text_are_said_to(model: Any) -> None:
    def forbids(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        del input_ids
        return torch.full_like(scores, -float("inf"))

    with pytest.raises(NumericalError, match="rules allow no text at all"):
        ours(model, IDS, max_new_tokens=4, num_beams=2, pad_token_id=0, do_sample=False, logits_processor=[forbids])


@pytest.mark.parametrize("architecture", ["Lfm2", slow("Mamba"), slow("Qwen3_5")])
def test_models_with_recurrent_layers_write_what_they_do_without(architecture: str) -> None:
    """transformers' own assisted generation refuses them, and any `assistant_model`: a draft is named as such."""
    kept, assistant = module(architecture), module("Lfm2", 1)
    for options in ({"max_new_tokens": 20}, {"max_new_tokens": 12, "num_beams": 3}):
        want = kept.generate(PADDED, attention_mask=MASK, pad_token_id=0, do_sample=False, **options)
        got = ours(kept, PADDED, attention_mask=MASK, pad_token_id=0, do_sample=False, draft=assistant, **options)
        assert torch.equal(got, want)


def test_a_model_with_a_state_of_its_own_is_refused_for_that() -> None:
    small = RwkvConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, attention_hidden_size=16)
    with pytest.raises(ModelError, match="its recurrent state can't be rolled back"):
        ours(RwkvForCausalLM(small).eval(), IDS, max_new_tokens=4)


def test_constraints_by_row_are_honoured_alone_and_refused_in_batches(model: Any) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    options["prefix_allowed_tokens_fn"] = lambda row, ids: [40, 41, 42 + row]
    assert torch.equal(ours(model, IDS, **options), model.generate(IDS, **options))
    with pytest.raises(ParameterError, match="PrefixConstrainedLogitsProcessor must be used with one row, got 2"):
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


class Teens:
    """A matcher: tokens 10 to 19 alone."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def mask(self) -> Tensor:
        return torch.arange(64) // 10 == 1

    def advance(self, token: int) -> bool:
        self.taken.append(token)
        return True

    def rollback(self, count: int) -> None:
        del self.taken[len(self.taken) - count :]


@pytest.mark.parametrize("how", ["plain", "padded", "scores", "beams"])
def test_constraints_are_processors_here_too(how: str) -> None:
    model = module("Llama", vocab_size=64)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ids = torch.tensor([[0, 0, 7, 5, 6], [5, 6, 7, 5, 6]]) if how == "padded" else torch.tensor([[5, 6, 7, 5, 6]])
    options |= {"attention_mask": (ids > 0).long()}
    options |= {"num_beams": 2} if how == "beams" else {"draft": "prompt-lookup", "num_draft_tokens": 2}
    if how == "scores":
        options |= {"output_scores": True, "return_dict_in_generate": True}
    out = ours(model, ids, logits_processor=[Constraint(Teens)], **options)
    if how == "scores":
        assert all(torch.equal(step[0].isfinite(), torch.arange(64) // 10 == 1) for step in out.scores)
        out = out.sequences
    assert out.shape == (len(ids), 11)
    assert ((out[:, 5:] // 10) == 1).all()
