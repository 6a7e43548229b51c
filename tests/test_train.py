"""Training drafts: what is trained is what drafts, held-out text is held out, runs go on where they stopped."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import outrider
from outrider.cli.main import run
from outrider.costs import Costs
from outrider.drafters import HeadDrafter
from outrider.drafters.base import DraftContext
from outrider.errors import ModelError, ParameterError
from outrider.forced import betas_along
from outrider.heads.config import HeadConfig, load_head
from outrider.heads.engine import open_head
from outrider.heads.layers import AutoregressiveHead, Mix, make_network
from outrider.models.loading import load_transformers
from outrider.models.transformers_model import TransformersModel
from outrider.proposal import DraftRow
from outrider.randomness import RandomStream
from outrider.sampling import SamplingSettings
from outrider.train.apart import check_apart, check_outside
from outrider.train.card import foretold
from outrider.train.corpus import HELD_OUT_EVERY, Source, marked, parse_source, stamp, windows
from outrider.train.make import Data, HeadSettings, train_head
from outrider.train.run import RunSettings, measure
from outrider.train.start import start_from_target, weight_of
from outrider.train.states import SHARD, StateFolder, StateWindows, check_states, frequent_tokens, keep_states, states_of
from outrider.train.student import make_student
from outrider.train.trainee import HeadTrainee
from outrider.train.unroll import blocks, chains
from tests.commands import call
from tests.conftest import make_tokenizer
from tests.test_heads import KINDS, Shape, write_head
from tests.tiny_models import VOCABULARY, module, tiny

TEXT = [5, 6, 7, 8, 9, 20, 21, 3, 44, 17, 30, 2, 58, 12, 33, 5]


def first_laws(path: Path, target: TransformersModel, known: int, count: int) -> torch.Tensor:
    """The laws of a draft of `count` tokens after the first `known` ones, which draws exactly the text's tokens."""
    drafter = HeadDrafter(path, 0.1)
    drafter.bind(target)
    sequence = target.open()
    target.score([sequence], torch.tensor([TEXT[: known - 1]]), [known - 1], "none")
    row = DraftRow(TEXT[:known], known, RandomStream(0), sequence)
    drafter.begin([row], DraftContext(SamplingSettings(), target, VOCABULARY))
    logits = []
    for i in range(count):
        pending = TEXT[row.state.length : known] if i == 0 else [TEXT[known + i - 1]]
        logits.append(drafter.model.score([row.state], torch.tensor([pending]), [len(pending)], "last"))
    drafter.end(row)
    sequence.close()
    return torch.stack([one[0, 0].clone() for one in logits if one is not None])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_trained_is_what_drafts(kind: Shape, tmp_path: Path) -> None:
    """Chains and blocks over a whole text at once against the engine, round by round, at every depth; window of 7."""
    target, path = tiny("Llama"), write_head(tmp_path, kind, blocks=3)
    model = open_head(target, path)
    tokens = torch.tensor([TEXT])
    embeddings, states = target.module.get_input_embeddings()(tokens), states_of(target, tokens, model.config.layers).states
    network: Any = make_network(model.config).double()
    network.load_state_dict(load_head(path)[2])
    with torch.no_grad():
        depths = (blocks if kind == "blockwise" else chains)(network, embeddings, states, 3)
        laws = torch.stack([target.module.lm_head(depth)[0] for depth in depths])
    for known in (3, 8, 12):
        drafted = first_laws(path, target, known, 3)
        at = [known - 1 + (0 if kind == "blockwise" else s) for s in range(3)]
        torch.testing.assert_close(drafted, torch.stack([laws[s, j] for s, j in enumerate(at)]), atol=1e-9, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_alpha_of_training_is_that_of_drafting(kind: Shape, tmp_path: Path) -> None:
    """On held-out windows, with a cut vocabulary: equal to sum min(target, draft) along the text by the drafter itself."""
    made = module("Llama", 0, torch.float32)
    target = TransformersModel(made)
    ids = torch.tensor([2, 3, *range(5, 40)])
    write_head(tmp_path, kind, tokens=ids.tolist(), window=512)
    config, _, weights = load_head(tmp_path)
    network = make_network(config)
    network.load_state_dict(weights)
    folder = StateFolder(tmp_path / "states", {})
    list(keep_states(target, iter([np.array(TEXT, dtype=np.uint32)]), folder, config.layers))
    trainee = HeadTrainee(network, target, ids, "mix", depth=2)
    result = measure(trainee, StateWindows(folder.paths), 1)
    drafter = HeadDrafter(tmp_path, 0.1)
    drafter.bind(target)
    betas = betas_along(drafter, target, TEXT, 1, SamplingSettings(temperature=1.0))
    # The window's last position predicts a token beyond it, and nothing is drafted for the first.
    laws = trainee(**{name: value.unsqueeze(0) for name, value in StateWindows(folder.paths)[0].items()})["counts"][0]
    assert result["alpha"][0] == pytest.approx(float(laws["alpha"]) / len(TEXT), abs=1e-6)
    assert sum(betas) == pytest.approx(float(laws["alpha"]) - _last_alpha(trainee, folder), abs=2e-4)
    assert 0.05 < result["alpha"][0] < 0.95


def _last_alpha(trainee: HeadTrainee, folder: StateFolder) -> float:
    part = StateWindows(folder.paths)[0]
    whole = trainee(**{k: v.unsqueeze(0) for k, v in part.items()})["counts"][0]["alpha"]
    shorter = trainee(**{k: v[:-1].unsqueeze(0) for k, v in part.items()})["counts"][0]["alpha"]
    return float(whole - shorter)


def test_windows_are_cut_from_other_documents_than_those_held_out(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    lines = [json.dumps({"tokens": [number] * 10}) for number in range(120)]
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join([json.dumps({"settings": {}}), *lines]))
    kept = {int(t) for window in windows([Source(str(path))], tokenizer, 20, False) for t in window}
    apart = {int(t) for window in windows([Source(str(path))], tokenizer, 10, True) for t in window}
    assert apart == {HELD_OUT_EVERY - 1, 2 * HELD_OUT_EVERY - 1}
    assert not kept & apart
    assert len(kept) == 118
    assert len(list(windows([Source(str(path), 100)], tokenizer, 20, None))) == 5
    assert parse_source("a/b@300") == Source("a/b", 300)
    assert parse_source("user@host.txt") == Source("user@host.txt")
    with pytest.raises(ParameterError, match="does not exist"):
        list(windows([Source(str(tmp_path / "none"))], tokenizer, 20, None))


@pytest.mark.parametrize("count", [1, 2, 3, 49, 50, 51, 100, 120])
def test_the_last_of_few_documents_is_kept_apart(count: int) -> None:
    apart = [document[0] for document, is_apart in marked([number] for number in range(count)) if is_apart]
    kept = [document[0] for document, is_apart in marked([number] for number in range(count)) if not is_apart]
    assert sorted(apart + kept) == list(range(count))
    assert apart == ([] if count == 1 else [count - 1] if count < 50 else [49] if count < 100 else [49, 99])


def test_a_limit_does_not_move_the_document_that_is_kept_apart(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"tokens": [number] * 10}) for number in range(4)))
    tokenizer = make_tokenizer()
    kept = {int(t) for window in windows([Source(str(path), 20)], tokenizer, 10, False) for t in window}
    apart = {int(t) for window in windows([Source(str(path), 10)], tokenizer, 10, True) for t in window}
    assert (kept, apart) == ({0, 1}, {3})


def test_text_is_not_taken_twice(tmp_path: Path) -> None:
    """By whatever path it is named: a folder, a link, another spelling; and no text is refused that occurs once."""
    data, other = tmp_path / "data", tmp_path / "other"
    for folder in (data / "deep", other):
        folder.mkdir(parents=True)
    for file in (data / "a.txt", data / "deep" / "b.txt", other / "c.txt"):
        file.write_text(file.name)
    (tmp_path / "link.txt").symlink_to(data / "deep" / "b.txt")
    (tmp_path / "hard.txt").hardlink_to(data / "a.txt")
    check_apart([str(data), str(other)], {})
    check_apart([str(data)], {"other": str(other / "c.txt")})
    check_apart(["dataset:x,split=train"], {"test": "dataset:x,split=test"})
    inside = [data / "deep" / "b.txt", data / "deep", data, tmp_path / "link.txt", tmp_path / "hard.txt", tmp_path]
    for held_out in [*inside, data / ".." / "data" / "a.txt"]:
        with pytest.raises(ParameterError, match=r"held-out code=.* and data .* must not share a text"):
            check_apart([str(data)], {"code": str(held_out)})
    with pytest.raises(ParameterError, match="must not share a text"):
        check_apart([str(data / "deep" / "b.txt")], {"code": str(data)})
    with pytest.raises(ParameterError, match=r"data .* and data .* must not share a text, both have .*b.txt: give it once"):
        check_apart([str(data), str(data / "deep")], {})
    with pytest.raises(ParameterError, match="must not share a text"):
        check_apart(["dataset:x,split=train,column=a"], {"code": "dataset:x,column=a,split=train"})
    with pytest.raises(ParameterError, match="must lie outside the data"):
        check_outside([str(data)], [data / "deep" / "head"])
    check_outside([str(data)], [tmp_path / "head"])


def test_a_stamp_changes_with_the_files_of_a_folder(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("one")
        os.utime(tmp_path / name, ns=(10**18, 10**18))
    stamps = [stamp(str(tmp_path)), stamp(str(tmp_path))]
    assert stamps[0] == stamps[1]
    (tmp_path / "b.txt").write_text("another")
    os.utime(tmp_path / "b.txt", ns=(10**18, 10**18))
    stamps.append(stamp(str(tmp_path)))
    os.utime(tmp_path / "a.txt", ns=(10**18, 2 * 10**18))
    stamps.append(stamp(str(tmp_path)))
    (tmp_path / "b.txt").rename(tmp_path / "c.txt")
    stamps.append(stamp(str(tmp_path)))
    (tmp_path / "c.txt").unlink()
    stamps.append(stamp(str(tmp_path)))
    assert len({repr(one) for one in stamps}) == 5
    assert stamp(str(tmp_path / "a.txt")) == [3, 2 * 10**18]


def test_states_go_on_where_they_stopped(tmp_path: Path) -> None:
    target = TransformersModel(module("Llama", 0, torch.float32))
    every = [np.array([(7 * i + j) % 50 + 3 for j in range(4)], dtype=np.uint32) for i in range(SHARD + 3)]
    whole, cut = StateFolder(tmp_path / "whole", {"a": 1}), StateFolder(tmp_path / "cut", {"a": 1})
    list(keep_states(target, iter(every), whole, batch_size=64))
    for done in keep_states(target, iter(every), cut, batch_size=64):
        if done > SHARD:
            break  # in the second shard: only the first is kept
    assert len(cut.paths) == 1
    list(keep_states(target, iter(every), StateFolder(tmp_path / "cut", {"a": 1}), batch_size=64))
    ours, theirs = StateWindows(cut.paths), StateWindows(whole.paths)
    assert len(ours) == len(theirs) == SHARD + 3
    torch.testing.assert_close(ours[SHARD + 2]["states"], theirs[SHARD + 2]["states"])
    with torch.inference_mode():
        out = target.module(input_ids=ours[SHARD + 1]["tokens"].unsqueeze(0))
    torch.testing.assert_close(ours[SHARD + 1]["normalisers"], out.logits[0].logsumexp(-1), atol=1e-4, rtol=1e-4)
    every_token = torch.stack([ours[i]["tokens"] for i in range(SHARD + 3)])
    with torch.inference_mode():
        wanted = target.module(input_ids=every_token).logits.softmax(-1).sum((0, 1))
    assert frequent_tokens(cut.paths, 10, VOCABULARY, frozenset()).tolist() == sorted(wanted.topk(10).indices.tolist())
    rare = int(wanted.argmin())
    assert rare in frequent_tokens(cut.paths, 10, VOCABULARY, frozenset({rare}))
    with pytest.raises(ParameterError, match="made of other data"):
        StateFolder(tmp_path / "cut", {"a": 2})


def test_states_of_other_weights_are_refused(tmp_path: Path) -> None:
    """Of the same configuration, as two models fine-tuned from one are."""
    ours, theirs = (TransformersModel(module("Llama", seed, torch.float32)) for seed in (0, 1))
    assert ours.fingerprint == theirs.fingerprint
    folder = StateFolder(tmp_path / "states", {})
    check_states(theirs, folder)  # nothing is there yet
    list(keep_states(ours, iter([np.array(TEXT, dtype=np.uint32)] * 5), folder))
    check_states(ours, folder)
    with pytest.raises(ParameterError, match="were made with other weights"):
        check_states(theirs, folder)


def test_states_of_other_weights_are_seen_beside_enormous_ones(tmp_path: Path) -> None:
    """Real models have a position or two whose states are of another size than all others'."""
    ours, theirs = (module("Llama", 0, torch.float32) for _ in range(2))
    with torch.no_grad():
        for made in (ours, theirs):
            made.model.embed_tokens.weight[TEXT[0]] *= 1000.0
        theirs.model.layers[1].mlp.down_proj.weight.neg_()
    folder = StateFolder(tmp_path / "states", {})
    target = TransformersModel(ours)
    list(keep_states(target, iter([np.array(TEXT, dtype=np.uint32)] * 5), folder, (1,)))
    check_states(target, folder, (1,))
    with pytest.raises(ParameterError, match="were made with other weights"):
        check_states(TransformersModel(theirs), folder, (1,))


def test_a_target_with_capped_logits_is_refused(tmp_path: Path) -> None:
    target = TransformersModel(module("Gemma2", 0, torch.float32, final_logit_softcapping=1.0))
    target.keep_states()
    with pytest.raises(ModelError, match="are not those of its output layer on its last state"):
        states_of(target, torch.tensor([TEXT]))


def test_data_and_head_have_the_same_layers(tmp_path: Path) -> None:
    """Else the states of one layer would be read as those of another."""
    data = Data([], StateWindows([]), {}, (1,), {})
    with pytest.raises(ParameterError, match=r"layers must be those that the data has, \[1\], got \[\]"):
        train_head(tiny("Llama"), data, HeadSettings("autoregressive"), RunSettings(1), tmp_path)
    config = HeadConfig("autoregressive", "tiny", 32, VOCABULARY, VOCABULARY, 24, 4, 2, 8, layers=(1,))
    with pytest.raises(ParameterError, match="states must be 32 or 64 wide, got 96"):
        Mix(config)(torch.zeros(1, 32), torch.zeros(1, 96))


def test_a_head_starts_as_the_targets_last_layer() -> None:
    made = module("Llama", 0, torch.float32)
    target = TransformersModel(made)
    network = make_network(HeadConfig("autoregressive", "tiny", 32, VOCABULARY, VOCABULARY, 48, 4, 2, 8))
    assert isinstance(network, AutoregressiveHead)
    assert start_from_target(network, target, torch.tensor([TEXT, TEXT[::-1]]))
    torch.testing.assert_close(network.layer.down.weight, made.model.layers[-1].mlp.down_proj.weight, atol=1e-6, rtol=1e-5)
    assert not torch.equal(network.mix.join.weight, torch.zeros(32, 64))
    assert not start_from_target(network, tiny("GPT2"), torch.tensor([TEXT]))
    weight = torch.randn(5, 7)
    layer = torch.nn.Linear(7, 5)
    layer.weight.data.copy_(weight)
    torch.testing.assert_close(weight_of(layer, 7).detach(), weight, atol=1e-6, rtol=1e-5)


def test_a_narrower_head_starts_with_the_neurons_that_matter() -> None:
    made = module("Llama", 0, torch.float32)
    last = made.model.layers[-1].mlp
    with torch.no_grad():
        last.down_proj.weight[:, ::2] *= 1e-3  # says nothing, however large its neurons are
        last.up_proj.weight[::2] *= 10.0
    network = make_network(HeadConfig("autoregressive", "tiny", 32, VOCABULARY, VOCABULARY, 24, 4, 2, 8))
    assert isinstance(network, AutoregressiveHead)
    assert start_from_target(network, TransformersModel(made), torch.tensor([TEXT, TEXT[::-1]]))
    for own, theirs in ((network.layer.gate, last.gate_proj), (network.layer.up, last.up_proj)):
        torch.testing.assert_close(own.weight, theirs.weight[1::2], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(network.layer.down.weight, last.down_proj.weight[:, 1::2], atol=1e-6, rtol=1e-5)
    wider = make_network(HeadConfig("autoregressive", "tiny", 32, VOCABULARY, VOCABULARY, 64, 4, 2, 8))
    assert isinstance(wider, AutoregressiveHead)
    assert not start_from_target(wider, TransformersModel(made), torch.tensor([TEXT]))


def test_a_students_layers_are_the_targets() -> None:
    target = TransformersModel(module("Llama", 0, torch.float32, num_hidden_layers=6))
    student = make_student(target, 2)
    theirs = target.module.model.layers
    for own, number in zip(student.model.layers, (2, 5), strict=True):
        torch.testing.assert_close(own.mlp.up_proj.weight, theirs[number].mlp.up_proj.weight)
    assert not student.get_input_embeddings().weight.requires_grad
    with pytest.raises(ParameterError, match=r"layers must be in 1 … 5, got 6"):
        make_student(target, 6)


def test_the_speed_up_foretold_is_leviathans_at_one_alpha() -> None:
    costs = Costs({1: 1.0, 17: 1.0})
    length, speedup = foretold([0.8], costs, 0.05)
    rates = [(1 - 0.8 ** (g + 1)) / (0.2 * (g * 0.05 + 1)) for g in range(13)]
    assert speedup == pytest.approx(max(rates))
    assert length == rates.index(max(rates))
    assert foretold([0.01], costs, 0.5) == (0, 1.0)


def test_no_more_is_foretold_than_blocks_can_draft() -> None:
    """One pass pays for all of them: the first token costs it whole, further ones nothing."""
    costs = Costs({1: 1.0, 17: 1.0})
    length, speedup = foretold([0.8], costs, 0.0, 0.2, 4)
    assert length == 4
    assert speedup == pytest.approx((1 - 0.8**5) / 0.2 / 1.2)
    assert foretold([0.9] * 16, costs, 0.0, 0.2, 16)[0] == 16
    assert foretold([0.1], costs, 0.0, 0.2, 4) == (0, 1.0)
    rates = [(1 - 0.8 ** (g + 1)) / 0.2 / (0.3 + g * 0.05 + 1) for g in range(1, 13)]
    length, speedup = foretold([0.8], costs, 0.05, 0.3)
    assert length == rates.index(max(rates)) + 1
    assert speedup == pytest.approx(max(rates))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    lines = ["the quick brown fox jumps over the lazy dog 0123456789 ", "def f(x): return x + 1 "] * 60
    path.write_text("\n".join(json.dumps({"text": line * 3}) for line in lines))
    return path


@pytest.mark.parametrize("command", ["head", "blocks"])
@pytest.mark.usefixtures("cache")
def test_a_head_is_trained_resumed_and_used(
    command: str, target_folder: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "head"
    shared = ["train", command, "--target", target_folder, "-o", out, "--data", corpus, "--length", 32, "--batch-size", 4]
    shared += ["--every", 20, "--vocabulary", 200, "--learning-rate", 0.003, "--steps", 40, "--json"]
    short = call(capsys, *shared, "--hours", 1e-9)
    assert (short["steps"], short["finished"]) == (1, False)
    assert run([str(argument) for argument in shared]) == 2
    assert "go on with --resume" in capsys.readouterr().err
    whole = call(capsys, *shared, "--resume")
    assert (whole["steps"], whole["finished"]) == (40, True)
    before, after = (result["held_out"]["held_out"]["alpha"][0] for result in (short, whole))
    assert after > before + 0.02
    assert (out / "model.safetensors").stat().st_size < 200_000
    assert "Acceptance on held-out text" in (out / "README.md").read_text()
    target = outrider.load(target_folder, dtype="float32")
    options: dict[str, Any] = {"max_new_tokens": 30, "temperature": 0.0, "ignore_eos": True}
    plain = outrider.generate(target, "the quick", draft=None, **options)
    drafted = outrider.generate(target, "the quick", draft=f"head:path={out}", num_draft_tokens=3, **options)
    assert drafted.tokens == plain.tokens
    assert drafted.stats.drafted > 20


@pytest.mark.usefixtures("cache")
def test_a_student_is_trained_and_used(
    target_folder: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "student"
    shared = ["train", "student", "--target", target_folder, "-o", out, "--data", corpus, "--length", 32, "--layers", 1]
    made = call(capsys, *shared, "--steps", 30, "--batch-size", 4, "--every", 30, "--learning-rate", 0.003, "--json")
    target, student = (load_transformers(folder, dtype="float32") for folder in (target_folder, out))
    drafted = outrider.generate(target, "def f(x)", draft=student, num_draft_tokens=3, max_new_tokens=20, ignore_eos=True)
    assert drafted.tokens == outrider.generate(target, "def f(x)", draft=None, max_new_tokens=20, ignore_eos=True).tokens
    assert made["held_out"]["held_out"]["alpha"][0] > 0.1


@pytest.mark.usefixtures("cache")
def test_the_target_writes_texts_and_goes_on(
    target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text('{"prompt": "the quick"}\n{"prompt": "def f"}\n')
    shared = ["train", "texts", "--target", target_folder, "--prompts", prompts, "--max-new-tokens", 8, "--batch-size", 2]
    first = call(capsys, *shared, "-o", tmp_path / "whole.jsonl", "--count", 4, "--json")
    assert first["texts"] == 4
    call(capsys, *shared, "-o", tmp_path / "parts.jsonl", "--count", 2, "--json")
    call(capsys, *shared, "-o", tmp_path / "parts.jsonl", "--count", 4, "--json")
    whole, parts = ((tmp_path / name).read_text().splitlines() for name in ("whole.jsonl", "parts.jsonl"))
    assert parts == whole
    entries = [json.loads(line) for line in whole[1:]]
    assert sorted((entry["number"], entry["temperature"]) for entry in entries) == [(0, 1.0), (1, 1.0), (2, 0.0), (3, 0.0)]
    (tmp_path / "torn.jsonl").write_text("\n".join([whole[0], whole[2], whole[3][:20]]))
    call(capsys, *shared, "-o", tmp_path / "torn.jsonl", "--count", 4, "--json")
    torn = (tmp_path / "torn.jsonl").read_text().splitlines()
    assert sorted(torn) == sorted(whole)
    moved = prompts.rename(tmp_path / "moved.jsonl")
    shared[shared.index(prompts)] = moved
    assert call(capsys, *shared, "-o", tmp_path / "torn.jsonl", "--count", 4, "--json")["texts"] == 4
    moved.write_text('{"prompt": "the slow"}\n')
    assert run([*map(str, shared), "-o", str(tmp_path / "torn.jsonl"), "--count", "4"]) == 2
    assert "was made with other settings (prompts:" in capsys.readouterr().err
    assert run(["train", "texts", "--target", str(target_folder), "-o", str(tmp_path / "x")]) == 2
    assert "has no chat template to ask itself questions by: give --prompts FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--loss", "mse"], "loss must be kl, tv or mix, got 'mse'"),
        (["--depth", "9"], "depth must be in 1 … 8, got 9"),
        (["--steps", "0"], "steps must be a whole number of 1 or more, got 0"),
        (["--length", "4"], "length must be in 16 … 8192, got 4"),
        (["--held-out", "code"], "held-out must be NAME=PATH"),
        (["--data", "/nonexistent"], "data /nonexistent does not exist"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, target_folder: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = ["train", "head", "--target", str(target_folder), "-o", str(tmp_path / "out"), "--data", str(corpus)]
    assert run([*shared, *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err
