"""A student of another model's neurons: which are left, what is made of them, and what comes out of it."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest
import torch
import transformers

import outrider
from outrider.errors import ModelError, ParameterError, VocabularyMismatchError
from outrider.models.cut_head import cut_head
from outrider.models.encoder_decoder import EncoderDecoderModel
from outrider.models.loading import load_transformers
from outrider.models.transformers_model import TransformersModel
from outrider.train import neurons
from outrider.train.narrow import check_body, make_narrow, no_bar
from tests.helpers.commands import call
from tests.helpers.folders import save_model
from tests.helpers.tiny_models import VOCABULARY, module, tiny
from tests.helpers.train_runs import options, refusal


def windows(count: int, length: int = 32) -> list[torch.Tensor]:
    return list(torch.randint(VOCABULARY, (count, length), generator=torch.Generator().manual_seed(0)))


def body(**config: object) -> TransformersModel:
    return TransformersModel(module("Llama", 3, torch.float32, num_hidden_layers=3, **config), name="body")


def test_the_neurons_left_are_those_that_least_squares_can_spare_least() -> None:
    """Beside every other choice, by the error along the text that it leaves."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(400, 6, generator=generator, dtype=torch.float64)
    values[:, 1] = values[:, 0] + 0.05 * values[:, 1]  # of these two one can stand for both
    values[:, 4] *= 0.01
    weight = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    wanted = values @ weight
    gram, cross = values.T @ values, values.T @ wanted
    kept, made = neurons._least_squares(gram, cross, weight, 4)  # gram is used up

    def error(some: list[int]) -> float:
        best = torch.linalg.lstsq(values[:, some], wanted).solution
        return float((values[:, some] @ best - wanted).square().sum())

    errors = {some: error(list(some)) for some in combinations(range(6), 4)}
    assert tuple(kept.tolist()) == min(errors, key=lambda some: errors[some])
    assert 4 not in kept
    assert len({0, 1} & set(kept.tolist())) == 1
    torch.testing.assert_close(made.T, torch.linalg.lstsq(values[:, kept], wanted).solution, atol=0.05, rtol=0.05)


def test_neurons_that_say_nothing_go_and_nothing_else_changes() -> None:
    whole = body()
    with torch.no_grad():
        for layer in whole.module.model.layers:
            layer.mlp.down_proj.weight[:, ::2] = 0.0
    tokens = torch.randint(VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        before = whole.module(input_ids=tokens).logits
    student = make_narrow(whole, 24, windows(16), no_bar)
    assert student.training
    with torch.no_grad():
        after = student.whole().eval()(input_ids=tokens).logits
        states = student(tokens)
    assert student.whole().config.intermediate_size == 24
    torch.testing.assert_close(after, before, atol=0.02, rtol=0.02)  # a ridge
    torch.testing.assert_close(student.whole().lm_head(states), after)
    trained = {name for name, one in student.named_parameters() if one.requires_grad}
    assert not any("embed_tokens" in name or "lm_head" in name for name in trained)
    assert any("down_proj" in name for name in trained)


def test_what_is_fitted_is_nearer_than_what_is_only_cut() -> None:
    """And later layers make up for what earlier ones lost: each is fitted to the whole model's stream, not to its own."""
    tokens = torch.stack(windows(8))

    def off(student_windows: list[torch.Tensor]) -> float:
        made = make_narrow(body(), 12, student_windows, no_bar).whole().eval()
        with torch.no_grad():
            wanted = body().module.get_decoder()(input_ids=tokens).last_hidden_state
            return float((made.get_decoder()(input_ids=tokens).last_hidden_state - wanted).square().mean())

    assert off(windows(40)) < 0.8 * off([])


def test_a_body_with_scaled_embeddings_and_biases_is_narrowed() -> None:
    whole = body(mlp_bias=True)
    with torch.no_grad():
        for layer in whole.module.model.layers:
            for part in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
                part.bias.normal_(0.0, 0.5, generator=torch.Generator().manual_seed(2))
            layer.mlp.down_proj.weight[:, :24] = 0.0
    tokens = torch.stack(windows(2))
    with torch.no_grad():
        before = whole.module(input_ids=tokens).logits
        after = make_narrow(whole, 24, windows(16), no_bar).whole().eval()(input_ids=tokens).logits
    torch.testing.assert_close(after, before, atol=0.05, rtol=0.05)


def test_bodies_that_can_not_be_narrowed_are_refused_by_name() -> None:
    target = tiny("Llama")
    with pytest.raises(ModelError, match="its layers are not of Llama's kind"):
        check_body(target, tiny("GPT2"), 8)
    other = tiny("GPT2")
    check_body(target, other, None)  # to be trained with all its neurons any model will do
    assert make_narrow(other, None, [], no_bar).whole().config.n_layer == other.module.config.n_layer
    with pytest.raises(ParameterError, match=r"intermediate_size must be in 1 … 48, the neurons of .*, got 49"):
        check_body(target, TransformersModel(module("Llama", 0, torch.float32)), 49)
    with pytest.raises(VocabularyMismatchError):
        check_body(target, TransformersModel(module("Llama", 0, torch.float32, vocab_size=VOCABULARY + 1)), None)
    capped = TransformersModel(module("Gemma2", 0, torch.float32, final_logit_softcapping=0.01))
    with pytest.raises(ModelError, match="its logits are not those of a linear layer on its last state"):
        check_body(target, capped, None)
    normed = TransformersModel(module("Gemma2", 0, torch.float32, final_logit_softcapping=None), name="normed")
    check_body(target, normed, None)
    with pytest.raises(
        ModelError, match=r"normed can't be narrowed: its layers do not just add .* leave intermediate_size out"
    ):
        check_body(target, normed, 8)
    scaled = TransformersModel(module("Granite", 0, torch.float32, residual_multiplier=0.22, logits_scaling=1.0))
    with pytest.raises(ModelError, match="do not just add what their networks say"):
        check_body(target, scaled, 8)
    with pytest.raises(ParameterError, match="can't be the target's own module"):
        check_body(target, target, None)
    with pytest.raises(ModelError, match="it has an encoder"):
        check_body(target, EncoderDecoderModel(module("T5", 0, torch.float32)), None)
    inside = body()
    for layer in inside.module.model.layers:
        layer.mlp.ffn_sub_norm = torch.nn.RMSNorm(48)  # as BitNet has it
    with pytest.raises(ModelError, match="its layers are not of Llama's kind"):
        check_body(target, inside, 8)
    few = TransformersModel(module("Llama", 0, torch.float32), name="few")
    cut_head(few.module, torch.arange(5), "few")
    few.module.config.draft_tokens = list(range(5))
    with pytest.raises(ModelError, match="it is a draft of 5 tokens"):
        check_body(target, TransformersModel(few.module, name="few"), None)


def test_values_that_are_not_finite_and_layers_that_say_nothing() -> None:
    silent = body()
    with torch.no_grad():
        silent.module.model.layers[1].mlp.up_proj.weight.zero_()
    assert all(weight.isfinite().all() for weight in make_narrow(silent, 8, windows(4), no_bar).parameters())
    endless = body()
    with torch.no_grad():
        endless.module.model.layers[1].mlp.up_proj.weight[3] = torch.inf
    with pytest.raises(ModelError, match="values that are not finite along the data"):
        make_narrow(endless, 8, windows(4), no_bar)


def test_windows_go_in_passes_of_one_size() -> None:
    """Of about 2,048 positions; what is over is left out."""
    whole = body()
    for count, length, sizes in ((9, 256, [4, 4]), (1, 32, [1]), (3, 1500, [1, 1, 1]), (24, 256, [8, 8, 8])):
        some = list(torch.zeros(count, length, dtype=torch.int64))
        streams = neurons._Streams.along(whole.module, whole.module.model.layers, some)
        assert [len(one) for one in streams.whole] == sizes


@pytest.mark.usefixtures("cache")
def test_a_narrow_student_is_trained_goes_on_and_drafts(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, small = save_model(tmp_path / "target", 0), save_model(tmp_path / "small", 1, tie_word_embeddings=True)
    out = tmp_path / "student"
    settings = options("student", target, data, "-o", out, "--body", small, "--intermediate-size", 16, "--vocabulary", 25)
    made = call(capsys, *settings)
    assert "small with 16 neurons in each layer, trained, over 25 tokens" in made["what"]
    assert call(capsys, *settings, "--steps", 4, "--resume")["steps"] == 4
    config = json.loads((out / "config.json").read_text())
    assert (config["intermediate_size"], len(config["draft_tokens"])) == (16, 25)
    whole = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    student = outrider.load(out, dtype="float32")
    sequence = student.open()
    found = student.score([sequence], torch.tensor([[5, 9, 2, 7]]), [4], "last")
    assert found is not None
    with torch.inference_mode():
        everything = whole(torch.tensor([[5, 9, 2, 7]])).logits[0, -1]
    torch.testing.assert_close(
        found[0, -1, config["draft_tokens"]], everything[config["draft_tokens"]], atol=1e-4, rtol=1e-4
    )
    plain = outrider.load(target, dtype="float32")
    drafted = outrider.generate(plain, [5, 9, 2], draft=student, num_draft_tokens=2, max_new_tokens=16, ignore_eos=True)
    assert drafted.tokens == outrider.generate(plain, [5, 9, 2], draft=None, max_new_tokens=16, ignore_eos=True).tokens
    assert drafted.stats.drafted > 0


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_without_a_step_the_draft_is_saved_as_it_begins(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, small = save_model(tmp_path / "target", 0), save_model(tmp_path / "small", 1)
    settings = options("student", target, data, "-o", tmp_path / "out", "--body", small, "--intermediate-size", 16)
    made = call(capsys, *settings, "--steps", 0)
    assert (made["steps"], made["finished"]) == (0, True)
    assert made["held_out"]["held_out"]["positions"] > 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["intermediate_size"] == 16
    assert "steps must be" in refusal(capsys, [*settings, "-o", str(tmp_path / "other"), "--steps", "-1"])


@pytest.mark.usefixtures("cache")
@pytest.mark.slow
def test_going_on_takes_the_checkpoints_neurons_and_no_others(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps, and one with one more, end with the same weights; going on does not narrow again."""
    target, small = save_model(tmp_path / "target", 0), save_model(tmp_path / "small", 1)
    asked = ("--body", small, "--intermediate-size", 16)
    straight = options("student", target, data, "-o", tmp_path / "straight", *asked)
    call(capsys, *straight)
    broken = options("student", target, data, "-o", tmp_path / "broken", *asked)
    call(capsys, *broken, "--hours", 1e-9)
    monkeypatch.setattr(neurons._Streams, "choose", lambda *_: pytest.fail("narrowed again"))
    assert call(capsys, *broken, "--resume")["steps"] == 2
    one, other = (
        load_transformers(tmp_path / name, pack=False, dtype="float32").module.state_dict()
        for name in ("straight", "broken")
    )
    assert one.keys() == other.keys()
    for name, weight in one.items():
        torch.testing.assert_close(weight, other[name], atol=1e-6, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_going_on_with_other_weights_is_refused_and_with_the_default_written_out_is_not(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, small = save_model(tmp_path / "target", 0), save_model(tmp_path / "small", 1)
    narrow = options("student", target, data, "-o", tmp_path / "narrow", "--body", small, "--intermediate-size", 16)
    call(capsys, *narrow)
    save_model(tmp_path / "small", 2)
    assert "body: " in refusal(capsys, [*narrow, "--steps", "3", "--resume"])
    deep = save_model(tmp_path / "deep", 0, num_hidden_layers=6)
    shallow = options("student", deep, data, "-o", tmp_path / "shallow")
    call(capsys, *shallow)
    assert call(capsys, *shallow, "--layers", 4, "--steps", 3, "--resume")["steps"] == 3


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_a_body_with_further_rows_drafts_none_of_them(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Padded embeddings: the target has no such tokens, and the student was not trained on their rows."""
    target, small = save_model(tmp_path / "target", 0), save_model(tmp_path / "small", 1, vocab_size=352)
    call(capsys, *options("student", target, data, "-o", tmp_path / "out", "--body", small))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    size = outrider.load(target).vocab_size
    assert config["draft_tokens"] == list(range(size))
    over = options("student", target, data, "-o", tmp_path / "over", "--body", small, "--vocabulary", size + 1)
    assert "vocabulary must be" in refusal(capsys, over)
    tight = save_model(tmp_path / "tight", 1, vocab_size=300)
    refused = options("student", target, data, "-o", tmp_path / "none", "--body", tight)
    assert "300 embeddings for a tokenizer of" in refusal(capsys, refused, code=1)


@pytest.mark.usefixtures("cache")
def test_shapes_that_make_no_sense_are_refused(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, small = save_model(tmp_path / "target", 0), save_model(tmp_path / "small", 1)
    shared = ("-o", tmp_path / "none")
    for more, said in (
        (("--body", small, "--layers", 1), "layers are the target's first ones: leave them out beside body"),
        (("--intermediate-size", 4), "intermediate_size is of the model that body names"),
        (("--body", small, "--intermediate-size", 0), "intermediate_size must be"),
        (("--body", small, "--intermediate-size", 4000), "intermediate_size must be in 1 …"),
        (("--layers", 0), "layers must be in 1 …"),
    ):
        assert said in refusal(capsys, options("student", target, data, *shared, *more))
        assert not (tmp_path / "none").exists()
