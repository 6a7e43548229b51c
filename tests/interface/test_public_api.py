"""The Python interface as its users write it."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
from pathlib import Path
from threading import Event, Thread
from typing import Any, assert_type

import numpy as np
import pytest
import torch
import transformers

import outrider
from outrider.costs import Costs, kept
from outrider.draft_length import FixedLength, OptimalLength
from outrider.drafters import IntersectionDrafter
from outrider.errors import ModelError, ParameterError
from outrider.models.loading import load_transformers
from outrider.models.transformers_model import TransformersModel
from outrider.models.weights.packed_linear import OpaqueLinear
from outrider.request.prompts import prepare
from outrider.results import Result

PROMPT = "the quick brown fox jumps over the quick brown"


@pytest.fixture(scope="module")
def target(target_folder: Path) -> TransformersModel:
    return load_transformers(target_folder, dtype="float64")


@pytest.fixture(scope="module")
def draft(draft_folder: Path) -> TransformersModel:
    return load_transformers(draft_folder, dtype="float64")


def test_every_public_name_is_there() -> None:
    for name in outrider.__all__:
        assert getattr(outrider, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        outrider.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_modules_have_types() -> None:
    assert_type(outrider.draft_length.OptimalLength(0.5), OptimalLength)


@pytest.mark.slow
def test_modules_that_users_need_are_there_and_imported_when_first_used() -> None:
    """In a fresh process: here the tests have imported them all."""
    program = (
        "import sys, outrider\n"
        "assert not {'torch', 'outrider.structured', 'outrider.drafters'} & set(sys.modules)\n"
        "for name in ('structured.json_schema', 'drafters.ModelDrafter', 'draft_length.OptimalLength',\n"
        "             'errors.ModelError', 'sampling.SamplingSettings', 'beam.BeamDecoder'):\n"
        "    module, member = name.split('.')\n"
        "    assert callable(getattr(getattr(outrider, module), member)), name\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr


def test_draft_and_lookup_give_the_plain_text(target: TransformersModel, draft: TransformersModel) -> None:
    plain = outrider.generate(target, PROMPT, draft=None, max_new_tokens=40)
    assert plain.stats.acceptance_rate is None
    assert "Round(" not in repr(plain)  # pages
    for kind in (draft, "prompt-lookup"):
        for length in (None, 3):
            result = outrider.generate(target, PROMPT, draft=kind, num_draft_tokens=length, max_new_tokens=40)
            assert (result.text, result.tokens, result.finish_reason) == (plain.text, plain.tokens, plain.finish_reason)
    assert result.stats.drafted > 0
    assert result.stats.tokens == len(result.tokens)


def test_text_ids_and_batches_are_prompts(target: TransformersModel) -> None:
    ids = target.tokenizer.encode(PROMPT)
    by_text = outrider.generate(target, PROMPT, max_new_tokens=12)
    by_ids = outrider.generate(target, list(ids), max_new_tokens=12)
    batch = outrider.generate(target, [PROMPT, "def f(x):"], max_new_tokens=12)
    assert by_ids.tokens == by_text.tokens == batch[0].tokens
    assert len(batch) == 2


def test_a_packed_weight_can_not_be_written_to(target_folder: Path) -> None:
    packed = load_transformers(target_folder, dtype="float32")
    layers = [layer for layer in packed.module.modules() if isinstance(layer, OpaqueLinear)]
    assert layers
    with torch.no_grad(), pytest.raises(RuntimeError, match="nference"):
        layers[0].weight.mul_(0)


def test_a_packed_model_of_another_type_is_refused_before_heads_are_bound(target_folder: Path) -> None:
    packed = load_transformers(target_folder, dtype="bfloat16")
    packed.module.float()
    with pytest.raises(ParameterError, match=r"opened with dtype torch.bfloat16 and has torch.float32 by now"):
        packed.logits_of(torch.zeros(1, packed.state_size))


def test_what_can_only_draft_is_refused_before_anything_is_measured(
    target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = outrider.load(target_folder, num_tokens=20)
    monkeypatch.setattr("outrider.generation.bound_drafter", lambda *_: pytest.fail("bound"))
    with pytest.raises(ParameterError, match="is a draft of 20 tokens and can't be a target"):
        outrider.generate(cut, PROMPT)


@pytest.mark.parametrize("what", [{"lenience": 0.5}, {"alternatives": 2}])
@pytest.mark.parametrize("none", [0, FixedLength(0)])
def test_what_is_about_drafted_tokens_is_refused_where_none_are(
    what: dict[str, Any], none: Any, target: TransformersModel, draft: TransformersModel
) -> None:
    with pytest.raises(ParameterError, match=r"must be . without a draft"):
        outrider.generate(target, PROMPT, draft=draft, num_draft_tokens=none, **what)


def test_messages_need_a_chat_template(target: TransformersModel) -> None:
    with pytest.raises(ParameterError, match="no chat template"):
        outrider.generate(target, [{"role": "user", "content": "hi"}])
    target.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    try:
        result = outrider.generate(target, [{"role": "user", "content": PROMPT}], max_new_tokens=8)
    finally:
        target.tokenizer.chat_template = None
    assert result.tokens == outrider.generate(target, PROMPT, max_new_tokens=8).tokens


def test_messages_have_text_whatever_a_template_makes_of_others(target: TransformersModel) -> None:
    """In parts, too, as some clients send it: a template may write such a list down as it is."""
    target.tokenizer.chat_template = "{% for one in messages %}{{ one['content'] }}{% endfor %}"
    parts: Any = [{"type": "text", "text": "hi"}, {"type": "text", "text": "you"}]
    image: Any = [*parts, {"type": "image", "url": "x.png"}]
    wrong: list[tuple[Any, str]] = [
        ({"role": "user", "content": image}, "got list"),
        ({"role": "user", "content": []}, "got list"),
        ({"role": "user", "content": 3}, "got int"),
        ({"role": "user"}, "got {'role'"),
    ]
    try:
        for message, got in wrong:
            with pytest.raises(ParameterError, match=r"messages must be \{\"role\": …, \"content\": text, .*\}, " + got):
                outrider.generate(target, [message], max_new_tokens=1)
        said: Any = [{"role": "user", "content": parts}, {"role": "assistant", "tool_calls": [], "content": None}]
        assert prepare(target, said[:1]).tokens == prepare(target, "hi\nyou").tokens
        assert outrider.generate(target, said, max_new_tokens=1).tokens
    finally:
        target.tokenizer.chat_template = None


def test_no_prompts_have_no_results(target: TransformersModel) -> None:
    none: Any = []
    assert outrider.generate(target, none, draft=None) == none


@pytest.mark.parametrize("name", ["max_new_tokens", "temperature", "top_k", "logprobs", "stop"])
def test_what_is_one_for_all_prompts_is_told(name: str, target: TransformersModel) -> None:
    given: Any = {name: [["a"], ["b"]] if name == "stop" else [1, 1]}
    with pytest.raises(ParameterError, match=f"{name} must be one for all prompts, got a list: submit each to a"):
        outrider.generate(target, ["a", "b"], **given)


def test_messages_that_a_template_refuses_are_one_line(target: TransformersModel) -> None:
    target.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    try:
        with pytest.raises(ParameterError, match=r"don't fit the chat template of .*: roles must alternate"):
            outrider.generate(target, [{"role": "user", "content": "a"}], max_new_tokens=1)
    finally:
        target.tokenizer.chat_template = None


def test_seeds_are_reproducible_and_reported(target: TransformersModel, draft: TransformersModel) -> None:
    def sampled(seed: int | None) -> Result:
        return outrider.generate(target, PROMPT, draft=draft, temperature=1.0, top_p=0.9, max_new_tokens=24, seed=seed)

    first = sampled(5)
    assert first.seed == 5
    assert sampled(5).tokens == first.tokens
    unseeded = sampled(None)
    assert sampled(unseeded.seed).tokens == unseeded.tokens


@pytest.mark.slow
def test_a_text_may_be_made_to_depend_on_no_draft(target: TransformersModel, draft: TransformersModel) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "max_new_tokens": 40, "seed": 5, "drafter_invariant": True}
    plain = outrider.generate(target, PROMPT, draft=None, **options)
    drafts: list[Any] = ["auto", draft, "suffix", [draft, "prompt-lookup"], "early-exit"]
    for drafted in drafts:
        for length in (None, 1, 4):
            found = outrider.generate(target, PROMPT, draft=drafted, num_draft_tokens=length, **options)
            assert found.tokens == plain.tokens
            assert found.drafter_invariant
    together = outrider.generate(target, [PROMPT, "other", PROMPT], draft=draft, **{**options, "seed": [5, 1, 5]})
    assert [together[i].tokens == plain.tokens for i in range(3)] == [True, False, True]
    assert plain.to_dict()["drafter_invariant"] is True
    assert "drafter_invariant" not in outrider.generate(target, PROMPT, max_new_tokens=2).to_dict()


def test_coarse_rounding_is_told_where_it_will_be_seen(
    target: TransformersModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 2, "seed": 5}
    outrider.generate(target, PROMPT, drafter_invariant=True, **options)
    assert "in spite of drafter_invariant" not in caplog.text
    monkeypatch.setattr(TransformersModel, "same_bits", False)
    monkeypatch.setattr(TransformersModel, "dtype_name", "bfloat16")
    outrider.generate(target, PROMPT, **options)
    outrider.generate(target, PROMPT, drafter_invariant=True, draft=None, **options)
    outrider.generate(target, PROMPT, drafter_invariant=True, **{**options, "temperature": 0.0})
    assert "in spite of drafter_invariant" not in caplog.text
    for _ in range(2):
        outrider.generate(target, PROMPT, drafter_invariant=True, **options)
    assert caplog.text.count("in bfloat16 round otherwise in other widths: in spite of drafter_invariant") == 1


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"lenience": 0.5}, "lenience must be 1 with drafter_invariant, got 0.5"),
        ({"alternatives": 2}, "alternatives must be 0 with drafter_invariant, got 2"),
        ({"drafter_invariant": "yes"}, "drafter_invariant must be true or false, got 'yes'"),
    ],
)
def test_what_makes_no_sense_with_it_is_refused(wrong: Any, told: str, target: TransformersModel) -> None:
    with pytest.raises(ParameterError, match=told):
        outrider.generate(target, PROMPT, temperature=1.0, **{"drafter_invariant": True, **wrong})


def test_a_reported_seed_repeats_its_text_though_the_passes_refute_the_table(
    target: TransformersModel, draft: TransformersModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a machine that gets busy: lengths adapted to a table measured anew would give another text."""
    costs = Costs({1: 1e-6, 65: 1e-6})
    monkeypatch.setattr(kept, "_measured", {kept._key(model): costs for model in (target, draft)})
    monkeypatch.setattr(kept, "_refuted", set())  # an earlier test's passes may have refuted the target's own table
    monkeypatch.setattr(kept, "WORTH_REVIEWING", 0.0)

    def sampled(seed: int | None) -> Result:
        options: Any = {"temperature": 1.0, "max_new_tokens": 40, "ignore_eos": True}  # so that there are enough rounds
        result: Result = outrider.generate(target, PROMPT, draft=draft, seed=seed, **options)
        return result

    unseeded = sampled(None)
    assert "the next run measures it again" in caplog.text
    assert sampled(unseeded.seed).tokens == unseeded.tokens
    assert kept._measured[kept._key(target)] == costs


@pytest.mark.parametrize("how", [{"num_draft_tokens": 3}, {"drafter_invariant": True}])
def test_a_list_of_seeds_makes_rows_stand_alone(target: TransformersModel, how: dict[str, Any]) -> None:
    how |= {"temperature": 1.0, "max_new_tokens": 16}
    rows = outrider.generate(target, [PROMPT, "def f(x):"], seed=[7, 8], **how)
    alone = [outrider.generate(target, PROMPT, seed=7, **how), outrider.generate(target, "def f(x):", seed=8, **how)]
    assert [(row.tokens, row.seed) for row in rows] == [(row.tokens, row.seed) for row in alone]


def test_stream_gives_the_text_in_pieces_with_origins(target: TransformersModel, draft: TransformersModel) -> None:
    stream = outrider.stream(target, PROMPT, draft=draft, num_draft_tokens=3, max_new_tokens=30)
    pieces = list(stream)
    assert "".join(pieces) == stream.result.text
    assert {piece.origin for piece in pieces} <= {"accepted", "recovered", "bonus", "target"}
    assert stream.result.tokens == outrider.generate(target, PROMPT, draft=None, max_new_tokens=30).tokens


def test_a_stream_can_be_left_at_any_time(target: TransformersModel) -> None:
    stream = outrider.stream(target, PROMPT, max_new_tokens=60, ignore_eos=True)
    next(stream)
    stream.close()
    assert stream.result.finish_reason == "cancelled"
    assert 0 < len(stream.result.tokens) < 60
    assert not target._open


def test_a_stream_that_is_left_ends_with_its_last_reference(target: TransformersModel) -> None:
    gc.disable()
    try:
        for _ in outrider.stream(target, PROMPT, max_new_tokens=60, ignore_eos=True):
            break
        assert not target._open
        with outrider.stream(target, PROMPT, max_new_tokens=60, ignore_eos=True) as stream:
            next(stream)
        assert stream.result.finish_reason == "cancelled"
        assert not target._open
    finally:
        gc.enable()


def test_a_live_model_is_taken_as_it_is(target_folder: Path) -> None:
    module = transformers.AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(target_folder)
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    live = outrider.load(module, tokenizer=tokenizer)
    wanted = outrider.generate(outrider.load(target_folder, dtype="float32"), PROMPT, max_new_tokens=12)
    assert outrider.generate(live, PROMPT, max_new_tokens=12).tokens == wanted.tokens
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())
    without = outrider.load(module)
    with pytest.raises(ParameterError, match=r"give it, outrider.load\(model, tokenizer=…\)"):
        outrider.generate(without, PROMPT)
    for draft in (None, module):
        with pytest.raises(ParameterError, match=r"outrider.load\(model, tokenizer=…\)"):
            outrider.generate(live if draft else module, PROMPT, draft=draft)
    with pytest.raises(ParameterError, match="tokenizer must be the model's, or its processor, got str"):
        outrider.load(module, tokenizer="a name")
    with pytest.raises(ParameterError, match="a transformers model, got Linear"):
        outrider.load(torch.nn.Linear(2, 2))
    for option in ({"dtype": "int8"}, {"engine": "openvino"}, {"num_tokens": 0}, {"device": "cpu"}):
        with pytest.raises(ParameterError, match="can't be set for a model that is loaded already"):
            outrider.load(module, **option)
    with pytest.raises(ParameterError, match="got int"):
        outrider.load(5)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="tokenizer is for a model that is loaded already"):
        outrider.load(target_folder, tokenizer=tokenizer)
    with pytest.raises(ModelError, match="does not exist"):
        outrider.load("x" * 400)


def test_rules_of_a_generation_config_that_are_not_applied_are_told_once(
    target_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = transformers.AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(target_folder)
    outrider.generate(outrider.load(module, tokenizer=tokenizer), PROMPT, max_new_tokens=2)
    assert "generation config" not in caplog.text
    module.generation_config.repetition_penalty = 1.3
    live = outrider.load(module, tokenizer=tokenizer)
    for _ in range(2):
        outrider.generate(live, PROMPT, max_new_tokens=2)
    assert caplog.text.count("has rules that are not applied (repetition_penalty 1.3)") == 1
    ids = torch.tensor([tokenizer.encode(PROMPT)])
    wanted = module.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
    assert outrider.generate(live, PROMPT, max_new_tokens=12, repetition_penalty=1.3).tokens == wanted


def test_a_stream_can_be_closed_by_another_thread(target: TransformersModel) -> None:
    inside, closed = Event(), Event()

    def waits(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        del tokens
        inside.set()
        assert closed.wait(60)
        return scores

    stream = outrider.stream(target, PROMPT, draft=None, max_new_tokens=60, ignore_eos=True, processors=[waits])
    pieces: list[outrider.Piece] = []
    reader = Thread(target=lambda: pieces.extend(stream))
    reader.start()
    assert inside.wait(60)
    stream.close()
    closed.set()
    reader.join(60)
    assert not reader.is_alive()
    assert stream.result.finish_reason == "cancelled"
    assert len(stream.result.tokens) == 1
    assert not target._open


def test_a_piece_can_be_copied_and_sent(target: TransformersModel) -> None:
    (piece, *_) = outrider.stream(target, PROMPT, max_new_tokens=8, logprobs=True, top_logprobs=2)
    for twin in (copy.copy(piece), copy.deepcopy(piece), pickle.loads(pickle.dumps(piece))):
        assert (twin, type(twin), vars(twin)) == (piece, type(piece), vars(piece))


@pytest.mark.parametrize("stop", [(), ("th",)])
def test_pieces_tell_of_their_tokens(target: TransformersModel, stop: tuple[str, ...]) -> None:
    """With text held back, too, that may be the beginning of a stop string."""
    options: dict[str, Any] = {"draft": "suffix", "temperature": 1.0, "seed": 5, "max_new_tokens": 40, "stop": stop}
    stream = outrider.stream(target, PROMPT, logprobs=True, top_logprobs=2, ignore_eos=True, **options)
    pieces = list(stream)
    result = stream.result
    assert result.logprobs is not None
    assert result.top_logprobs is not None
    tokens = [token for piece in pieces for token in piece.tokens]
    assert tokens == result.tokens[: len(tokens)]
    assert len(tokens) >= len(result.tokens) - 8  # the last ones have no text, or none of it is kept
    assert [told for piece in pieces for told in piece.logprobs or ()] == result.logprobs[: len(tokens)]
    assert [told for piece in pieces for told in piece.top_logprobs or ()] == result.top_logprobs[: len(tokens)]
    assert any(len(piece.tokens) != 1 for piece in pieces)
    (bare, *_) = outrider.stream(target, PROMPT, max_new_tokens=8)
    assert (bare.logprobs, bare.top_logprobs) == (None, None)


def test_what_processors_take_is_not_held_against_the_cost_table(
    target: TransformersModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    reviewed: list[object] = []
    monkeypatch.setattr("outrider.generation.review_costs", lambda *given: reviewed.append(given))
    outrider.generate(target, PROMPT, max_new_tokens=8, processors=[lambda tokens, scores: scores])
    assert not reviewed
    outrider.generate(target, PROMPT, max_new_tokens=8)
    assert len(reviewed) == 1


def test_stop_strings_end_the_text(target: TransformersModel) -> None:
    whole = outrider.generate(target, PROMPT, max_new_tokens=40, ignore_eos=True).text
    stop = whole[10:13]
    result = outrider.generate(target, PROMPT, max_new_tokens=40, ignore_eos=True, stop=["never to be seen", stop])
    assert result.finish_reason == "stop"
    assert result.text == whole[: whole.index(stop)]


def test_cancelled_before_the_first_round_still_gives_a_result(target: TransformersModel) -> None:
    result = outrider.generate(target, PROMPT, cancelled=lambda: True)
    assert (result.finish_reason, result.tokens, result.stats.rounds) == ("cancelled", [], 0)


def test_logprobs_are_reported_on_request(target: TransformersModel) -> None:
    result = outrider.generate(target, PROMPT, max_new_tokens=12, logprobs=True, temperature=0.7, seed=1)
    ids = [*target.tokenizer.encode(PROMPT), *result.tokens]
    with torch.inference_mode():
        logits = target.module(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    at = len(ids) - len(result.tokens)
    wanted = [float(logits[i - 1].log_softmax(-1)[ids[i]]) for i in range(at, len(ids))]
    assert result.logprobs == pytest.approx(wanted, abs=1e-9)
    assert outrider.generate(target, PROMPT, max_new_tokens=2).logprobs is None


def test_numpys_numbers_are_numbers(target: TransformersModel) -> None:
    settings: dict[str, Any] = {"temperature": np.float32(0.5), "top_k": np.int64(9), "top_p": np.float64(0.9)}
    counts: dict[str, Any] = {"seed": np.int64(3), "max_new_tokens": np.int64(5)}
    of_numpy = outrider.generate(target, "def", **settings, **counts)
    ours = outrider.generate(target, "def", seed=3, max_new_tokens=5, temperature=0.5, top_k=9, top_p=0.9)
    assert of_numpy.tokens == ours.tokens
    assert of_numpy.seed == 3
    refused: list[dict[str, Any]] = [{"seed": 1.5}, {"temperature": 10**400}, {"logit_bias": None}, {"logit_bias": [3]}]
    for wrong in refused:
        with pytest.raises(ParameterError, match=f"{next(iter(wrong))} must"):
            outrider.generate(target, "def", max_new_tokens=2, **wrong)


def test_completion_shows_what_there_is() -> None:
    assert {"load", "generate", "stream", "theory"} <= set(dir(outrider))


def test_unknown_options_and_drafts_are_refused(target: TransformersModel) -> None:
    with pytest.raises(ParameterError, match=r"'temprature' is not an option of generate: did you mean temperature"):
        outrider.generate(target, PROMPT, temprature=1.0)  # type: ignore[call-overload]
    with pytest.raises(ParameterError, match=r"'num_beam' is not an option of beam_search: did you mean num_beams"):
        outrider.beam_search(target, PROMPT, num_beams=2, num_beam=2)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match=r"'torch_dtype' is not an option of load: did you mean dtype"):
        outrider.load("nowhere/model", torch_dtype="bfloat16")  # type: ignore[arg-type]
    with pytest.raises(
        ParameterError, match=r"'xyz' is not an option of load: its options are compile, device, dtype, .*: see"
    ):
        outrider.load("nowhere/model", xyz=1)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="draft must be"):
        outrider.generate(target, PROMPT, draft="some/model")
    with pytest.raises(ParameterError, match="num_draft_tokens"):
        outrider.generate(target, PROMPT, num_draft_tokens=65)
    asked: Any
    for asked in (-7, 65, "banana"):  # where nothing drafts, too
        with pytest.raises(ParameterError, match="num_draft_tokens"):
            outrider.generate(target, PROMPT, draft=None, num_draft_tokens=asked)
    with pytest.raises(ParameterError, match="one for each of the 1 prompts"):
        outrider.generate(target, PROMPT, seed=[1, 2])
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"ignore_eos": "no"}, "ignore_eos must be true or false, got 'no'"),
        ({"logprobs": "no"}, "logprobs must be true or false, got 'no'"),
        ({"logit_bias": {3: "x"}}, r"logit_bias\[3\] must be a number or -inf, got 'x'"),
        ({"logit_bias": {3: None}}, r"logit_bias\[3\] must be a number or -inf, got None"),
        ({"logit_bias": {3: float("inf")}}, r"logit_bias\[3\] must be a number or -inf, got inf"),
        ({"processors": [lambda tokens, scores: None]}, r"must return scores \[1, \d+\], .* gave NoneType"),
        ({"temperature": 1e7}, "temperature must be in 0 … 1e6"),
        ({"frequency_penalty": 2e7}, "frequency_penalty must be in -1e6 … 1e6"),
    ]
    for options, said in wrong:
        with pytest.raises(ParameterError, match=said):
            outrider.generate(target, PROMPT, **options)


def test_a_draft_with_another_tokenizer_changes_nothing(target: TransformersModel, foreign_folder: Path) -> None:
    foreign = outrider.load(foreign_folder)
    plain = outrider.generate(target, PROMPT, draft=None, max_new_tokens=20)
    for draft in (foreign, IntersectionDrafter(foreign)):
        result = outrider.generate(target, PROMPT, draft=draft, num_draft_tokens=3, max_new_tokens=20)
        assert result.tokens == plain.tokens
        assert result.stats.drafted > 0


def test_what_is_cited_is_this_version() -> None:
    citation = (Path(__file__).parents[2] / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {outrider.__version__}\n" in citation
