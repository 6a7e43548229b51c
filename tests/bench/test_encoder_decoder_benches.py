"""Every bench of models takes encoder–decoders: sources of several kinds, recordings where the model hears."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.bench.chains import record_chains
from outrider.bench.peers import Pair, contenders
from outrider.bench.recorded import record
from outrider.bench.settings import Setting
from outrider.bench.tasks import Task
from outrider.bench.texts import kinds_for
from outrider.cli.main import run
from outrider.drafters import ModelDrafter
from outrider.generation import generate
from outrider.models.loading import load, load_transformers
from outrider.request.from_specs import make_named
from outrider.request.prompts import encode
from tests.helpers.encoder_decoder import SOURCE, as_json, tone, write_wav
from tests.helpers.folders import save_encoder_decoder


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of equal depths, or transformers' own `generate` can't use its cache."""
    return save_encoder_decoder(tmp_path_factory.mktemp("t5") / "target", "T5", num_layers=2, num_decoder_layers=2)


@pytest.fixture
def asked(tmp_path: Path) -> dict[str, Path]:
    """Lines for a model that reads, and for one that hears."""
    reads, hears = tmp_path / "read.jsonl", tmp_path / "heard.jsonl"
    reads.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in (SOURCE, "0123456789")))
    for i in range(2):
        write_wav(tmp_path / f"{i}.wav", tone(0.2 + 0.1 * i))
    hears.write_text("".join(json.dumps({"audio": f"{i}.wav"}) + "\n" for i in range(2)))
    return {"T5": reads, "Whisper": hears}


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("architecture", ["T5", "Whisper"])
def test_lenience_is_measured_beside_its_formula(
    architecture: str, request: pytest.FixtureRequest, asked: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Leviathan's Table 5 is about T5. The rules of the generation config are part of the law that is read again."""
    target = request.getfixturevalue(architecture.lower())
    draft = "self:temperature=1.5" if architecture == "Whisper" else str(request.getfixturevalue("small_t5"))
    command = ["--target", str(target), "--draft", draft, "--dtype", "float64", "--task", f"jsonl:{asked[architecture]}"]
    command += ["--lenience", "1", "--lenience", "0.2", "--num-draft-tokens", "3", "--max-new-tokens", "40"]
    found = as_json(capsys, "bench", "lenience", *command)
    greedy, lenient_greedy, exact, lenient = found["rows"]
    assert (greedy["differ"], greedy["verdict"]) == (0, "exact")
    if architecture == "T5":  # a greedy draft leaves nothing to chance
        assert lenient_greedy["alpha"] == pytest.approx(lenient_greedy["expected"])
        assert lenient_greedy["z"] is None
    assert exact["divergence"] == pytest.approx(0.0, abs=1e-9)
    assert 0 < lenient["divergence"] <= math.log(5)
    for row in (lenient_greedy, exact, lenient):
        assert abs(row["z"] or 0.0) < 6
        assert row["verdict"] != "not exact" or row["lossy"]
    assert lenient["expected"] > exact["expected"]


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_drafters_and_lengths_are_measured_on_sources(t5: Path, small_t5: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--target", str(t5), "--dtype", "float32", "--max-new-tokens", "8", "--seeds", "1"]
    drafts = ["--draft", str(small_t5), "--draft", "prompt-lookup"]
    matrix = as_json(capsys, "bench", "drafters", *model, *drafts, "--temperature", "0", "--repetitions", "1")
    texts = {cell["text"] for cell in matrix["cells"]}
    assert texts == {"code", "article", "question", "random words", "Finnish", "repetition"}
    assert {cell["drafter"] for cell in matrix["cells"]} >= {"prompt-lookup", str(small_t5)}
    lengths = as_json(capsys, "bench", "lengths", *model, *drafts, "--temperature", "0", "--temperature", "1")
    assert len(lengths["cells"]) == 2 * 2 * 6
    assert all(cell["tokens_per_round"] >= 1.0 for cell in lengths["cells"])


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_chains_are_what_is_drafted_after_that_source(t5: Path, small_t5: Path) -> None:
    """A target that drafts for itself proposes its own greedy text, but not after another source; nor does another model."""
    target = load(t5, dtype="float64")
    (text,) = record(target, [Task("it", SOURCE)], 16)
    assert text.source is not None
    drafter = ModelDrafter(load(small_t5, dtype="float64"))
    drafter.bind(target)
    drafter.measure()
    chains = record_chains(target, drafter, text).chains
    own = make_named("self", target)
    own.bind(target)
    own.measure()
    same = record_chains(target, own, text).chains
    elsewhere = record_chains(target, own, replace(text, source=[5, 9, 2])).chains
    new = text.tokens[text.prompt_tokens :]
    assert [chain.tokens[0] for chain in same] == new
    assert [chain.tokens[0] for chain in elsewhere] != new
    assert [chain.tokens[0] for chain in chains] != new


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("architecture", ["T5", "Whisper"])
def test_peers_answer_the_same_sources(
    architecture: str, request: pytest.FixtureRequest, asked: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    target = request.getfixturevalue(architecture.lower())
    command = ["--target", str(target), "--dtype", "float32", "--max-new-tokens", "10", "--temperature", "0"]
    if architecture == "T5":
        command += ["--draft", str(request.getfixturevalue("small_t5"))]
    found = as_json(capsys, "bench", "peers", *command, "--texts", f"jsonl:{asked[architecture]}")
    assert found["prompts"] == 2
    names = {row["contender"] for row in found["rows"]}
    assert {"generate", "outrider", "outrider + suffix"} <= names
    assert ("generate + assistant" in names) is (architecture == "T5")


@pytest.mark.usefixtures("cache")
def test_a_peer_decodes_under_the_same_rules(tmp_path: Path) -> None:
    """Beams of the generation config are not for a comparison of greedy texts; its penalty is part of the law."""
    folder = save_encoder_decoder(tmp_path / "bart", "Bart")
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_beams": 4, "repetition_penalty": 1.5}))
    model = load_transformers(folder, dtype="float64", pack=False)
    greedy = Setting(0.0, 1.0)
    asked = encode(model, SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model.module), "_beam_search", lambda *args, **more: pytest.fail("beams"))
        count, _, _ = contenders(Pair(model, None), Pair(model, None))["generate"](asked, greedy, 20, 0)
    assert count == len(generate(model, asked, draft=None, max_new_tokens=20).tokens)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["peers", "--texts", "novels"], "texts must be humaneval, kinds or jsonl:FILE, got 'novels'"),
        (["setups", "--texts", "jsonl:nowhere.jsonl"], "nowhere.jsonl"),
        (["drafters", "--draft", "random"], "hears audio, and these texts are written"),
        (["lengths", "--draft", "random"], "hears audio, and these texts are written"),
    ],
)
def test_what_can_not_be_asked_is_refused(
    words: list[str], told: str, whisper: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", *words, "--target", str(whisper)]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1


def test_texts_of_several_kinds_are_bare_for_an_encoder(t5: Path) -> None:
    texts = kinds_for(load(t5, dtype="float32"))
    assert not any("Summarise" in text.prompt or "Rename" in text.prompt for text in texts)
