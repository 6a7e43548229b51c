"""Training drafts: what is trained is what drafts, held-out text is held out, runs go on where they stopped."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import outrider
from outrider.cli.main import run
from outrider.costs import Costs, DraftSeconds
from outrider.decode import Request, decode
from outrider.drafters import HeadDrafter
from outrider.drafters.base import DraftContext
from outrider.heads.config import load_head
from outrider.heads.layers import make_network
from outrider.heads.opening import open_head
from outrider.models.loading import load_transformers
from outrider.models.transformers_model import TransformersModel
from outrider.proposal import DraftRow
from outrider.randomness import RandomStream, derived_seed, stream_after
from outrider.sampling import SamplingSettings
from outrider.train.card import predicted_speedup
from outrider.train.run import Ends, measure
from outrider.train.states import StateFolder, StateWindows, keep_states, states_of
from outrider.train.texts import ANSWERS, FOR_TRAINING
from outrider.train.trainee import HeadTrainee
from outrider.train.unroll import blocks, chains
from tests.helpers.betas import betas_along
from tests.helpers.commands import call
from tests.helpers.heads import KINDS, Shape, write_head
from tests.helpers.marks import slow
from tests.helpers.tiny_models import VOCABULARY, module, tiny
from tests.helpers.train_windows import window_of

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


@pytest.mark.parametrize("asked", [0, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_the_alpha_of_training_is_that_of_drafting(kind: Shape, asked: int, tmp_path: Path) -> None:
    """On held-out windows, with a cut vocabulary: equal to sum min(target, draft) along the text by the drafter itself.

    Nothing of a prompt is drafted.
    """
    made = module("Llama", 0, torch.float32)
    target = TransformersModel(made)
    ids = torch.tensor([2, 3, *range(5, 40)])
    write_head(tmp_path, kind, tokens=ids.tolist(), window=512)
    config, _, weights = load_head(tmp_path)
    network = make_network(config)
    network.load_state_dict(weights)
    folder = StateFolder(tmp_path / "states", {})
    list(keep_states(target, iter([window_of(TEXT, asked)]), folder, config.layers))
    trainee = HeadTrainee(network, target, ids, "mix", depth=2)
    result = measure(trainee, StateWindows(folder.paths), 1)
    drafter = HeadDrafter(tmp_path, 0.1, "float")
    drafter.bind(target)
    betas = betas_along(drafter, target, TEXT, max(1, asked), SamplingSettings(temperature=1.0))
    trainee.eval()
    # The window's last position predicts a token beyond it, and nothing is drafted for the first.
    laws, second = trainee(**{name: value.unsqueeze(0) for name, value in StateWindows(folder.paths)[0].items()})["counts"][
        :2
    ]
    assert int(second["positions"]) == len(betas)  # nor does a chain begin there
    assert result["alpha"][0] == pytest.approx(float(laws["alpha"]) / (len(betas) + 1), abs=1e-6)
    assert result["positions"] == len(betas) + 1
    assert sum(betas) == pytest.approx(float(laws["alpha"]) - _last_alpha(trainee, folder), abs=2e-4)
    assert 0.05 < result["alpha"][0] < 0.95


def _last_alpha(trainee: HeadTrainee, folder: StateFolder) -> float:
    part = StateWindows(folder.paths)[0]
    whole = trainee(**{k: v.unsqueeze(0) for k, v in part.items()})["counts"][0]["alpha"]
    shorter = trainee(**{k: v[:-1].unsqueeze(0) for k, v in part.items()})["counts"][0]["alpha"]
    return float(whole - shorter)


def test_the_predicted_speed_up_is_leviathans_at_one_alpha() -> None:
    costs = Costs({1: 1.0, 17: 1.0})
    length, speedup = predicted_speedup([0.8], costs, DraftSeconds(0.05))
    rates = [(1 - 0.8 ** (g + 1)) / (0.2 * (g * 0.05 + 1)) for g in range(13)]
    assert speedup == pytest.approx(max(rates))
    assert length == rates.index(max(rates))
    assert predicted_speedup([0.01], costs, DraftSeconds(0.5)) == (0, 1.0)


def test_no_more_is_predicted_than_blocks_can_draft() -> None:
    """One pass pays for all of them: the first token costs it whole, further ones nothing."""
    costs = Costs({1: 1.0, 17: 1.0})
    length, speedup = predicted_speedup([0.8], costs, DraftSeconds(start=0.2), 4)
    assert length == 4
    assert speedup == pytest.approx((1 - 0.8**5) / 0.2 / 1.2)
    assert predicted_speedup([0.9] * 16, costs, DraftSeconds(start=0.2), 16)[0] == 16
    assert predicted_speedup([0.1], costs, DraftSeconds(start=0.2), 4) == (0, 1.0)
    rates = [(1 - 0.8 ** (g + 1)) / 0.2 / (0.3 + g * 0.05 + 1) for g in range(1, 13)]
    length, speedup = predicted_speedup([0.8], costs, DraftSeconds(0.05, 0.3))
    assert length == rates.index(max(rates)) + 1
    assert speedup == pytest.approx(max(rates))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    lines = ["the quick brown fox jumps over the lazy dog 0123456789 ", "def f(x): return x + 1 "] * 60
    path.write_text("\n".join(json.dumps({"text": line * 3}) for line in lines))
    return path


@pytest.mark.parametrize("command", ["head", slow("blocks")])
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


@pytest.mark.slow
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


@pytest.mark.slow
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
    target, sampled = outrider.load(target_folder), next(entry for entry in entries if entry["number"] == 0)
    prompt, said = sampled["tokens"][: sampled["prompt_tokens"]], sampled["tokens"][sampled["prompt_tokens"] :]
    for seed, same in ((0, False), (derived_seed(0, *FOR_TRAINING), True)):  # what a user's seed draws is not trained on
        request = Request(prompt, 8, stream_after(seed, ANSWERS, prompt))
        assert (decode(target, [request], SamplingSettings(temperature=1.0))[0][0][: len(said)] == said) is same
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
    assert not (tmp_path / "x").exists()  # else the same with --prompts would find a log of other settings


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--loss", "mse"], "loss must be kl, tv or mix, got 'mse'"),
        (["--depth", "9"], "depth must be in 1 … 8, got 9"),
        (["--steps", "-1"], "steps must be a whole number of 0 or more, got -1"),
        (["--length", "4"], "length must be in 16 … 8192, got 4"),
        (["--held-out", "code"], "held-out must be NAME=PATH"),
        (["--data", "/nonexistent"], "data /nonexistent does not exist"),
        (["--intermediate-size", "0"], "intermediate_size must be a whole number of 1 or more, got 0"),
        (["--window", "0"], "window must be a whole number of 1 or more, got 0"),
        (["--vocabulary", "99999"], "vocabulary must be 330 or less, the tokens of"),
        (["--data", "notes@-3"], "a number of tokens, got 'notes@-3'"),
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
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": 5}', "line 2, must be"),
        ('{"tokens": ["a"]}', "line 2, must be"),
        slow('{"tokens": [1, -2]}', "line 2, must be"),
        slow('{"tokens": [true]}', "line 2, must be"),
        ("[1]", "line 2, must be"),
        (json.dumps({"tokens": [5] * 60 + [330] * 9}), "data must hold tokens in 0 … 329"),
    ],
)
def test_data_of_other_kinds_is_refused(
    line: str, message: str, target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, held = tmp_path / "odd.jsonl", tmp_path / "held.jsonl"
    path.write_text(f'{{"text": "a"}}\n{line}\n')
    held.write_text(json.dumps({"text": "the quick brown fox " * 40}) + "\n")
    command = ["train", "head", "--target", str(target_folder), "-o", str(tmp_path / "out"), "--data", str(path)]
    assert run([*command, "--held-out", f"p={held}", "--length", "32"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["head", "student", "pair"])
def test_an_output_that_is_a_file_is_refused(command: str, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = [] if command == "pair" else ["--target", "/nonexistent"]  # before anything is loaded
    for out in (str(corpus), str(corpus / "below")):
        assert run(["train", command, *target, "-o", out, "--data", str(corpus)]) == 2
        assert "Traceback" not in (err := capsys.readouterr().err)
        assert out in err


def test_an_interrupt_ends_after_the_step_with_a_checkpoint(
    target_folder: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "head"
    command = ["train", "head", "--target", str(target_folder), "-o", str(out), "--data", str(corpus), "--length", "32"]
    command += ["--batch-size", "4", "--every", "100", "--vocabulary", "200", "--steps", "6"]
    ended = Ends.on_step_end

    def interrupted(self: Ends, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == 3:  # the handler alone: a real one may find another thread of a test's process
            handler: Any = signal.getsignal(signal.SIGINT)
            handler(signal.SIGINT, None)
        ended(self, args, state, control, **more)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever this process was started with
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Ends, "on_step_end", interrupted)
            assert run(command) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    told = capsys.readouterr().err
    assert "stopping after this step, with a checkpoint" in told
    assert "outrider: interrupted; step 3 of 6 is kept: the same command with --resume goes on" in told
    assert not (out / "config.json").exists()
    assert run([*command[:-1], "2", "--resume"]) == 2
    assert "steps must be 3 or more, as many as the checkpoint has, got 2" in capsys.readouterr().err
    assert call(capsys, *command, "--resume", "--json")["steps"] == 6


def test_a_refusal_leaves_what_was_there(
    target_folder: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Data that is too short is seen late, when folders for states have been made; those of the user stay."""
    short = tmp_path / "short.jsonl"
    short.write_text('{"text": "a"}\n{"text": "b"}\n')
    (tmp_path / "mine").mkdir()
    command = ["train", "head", "--target", str(target_folder), "--data", str(short), "--length", "32", "-o"]
    for out in (tmp_path / "mine", tmp_path / "new" / "deep"):
        assert run([*command, str(out)]) == 2
        assert "Traceback" not in capsys.readouterr().err
    assert not list((tmp_path / "mine").iterdir())
    assert not (tmp_path / "new").exists()
