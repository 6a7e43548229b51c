"""Encoder–decoders from folders, as users and scripts meet them: generate, audit, tune, bench, recordings, refusals."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import outrider
from outrider.audio import Audio, features, read_wav
from outrider.cli.main import run
from outrider.errors import ModelError, OutriderError, ParameterError
from outrider.models.decoder_rules import decoder_prefix
from outrider.models.encoder_decoder import EncoderDecoderModel
from tests.helpers.encoder_decoder import RATE, SOURCE, as_json, tone, write_wav
from tests.helpers.folders import save_encoder_decoder


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder_decoder(tmp_path_factory.mktemp("t5") / "target", "T5")


def test_generate_reads_the_prompt_as_a_source(t5: Path, small_t5: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--target", str(t5), "--dtype", "float64", "--max-new-tokens", "20"]
    plain = as_json(capsys, "generate", SOURCE, *model, "--plain")
    opened = outrider.load(t5, dtype="float64")
    assert isinstance(opened, EncoderDecoderModel)
    ids = opened.tokenizer(SOURCE, return_tensors="pt").input_ids
    out = opened.module.generate(ids, do_sample=False, num_beams=1, max_new_tokens=20, use_cache=False)[0].tolist()
    assert plain["tokens"] == out[1:]
    assert plain["source_tokens"] == ids.shape[1]
    for draft in (str(small_t5), "prompt-lookup", "suffix", "random", "self", f"{small_t5}:draft=prompt-lookup"):
        got = as_json(capsys, "generate", SOURCE, *model, "--draft", draft, "--num-draft-tokens", "3")
        assert got["tokens"] == plain["tokens"]
        assert got["stats"]["drafted"] > 0 or draft in ("prompt-lookup", "suffix")


def test_copies_come_from_the_source(t5: Path) -> None:
    """What followed the output's last token in the source is proposed, at the first places of an output, too."""
    model = outrider.load(t5, dtype="float64")
    source = list(range(60, 90))
    first = outrider.generate(model, source, draft=None, max_new_tokens=1, logit_bias={70: 100.0}).tokens
    assert first == [70]
    for name in ("prompt-lookup", "suffix"):
        options: dict[str, Any] = {"draft": name, "num_draft_tokens": 3, "drafts": True, "logit_bias": {70: 100.0}}
        rounds = outrider.generate(model, source, max_new_tokens=8, **options).rounds
        assert (71, 72, 73) in [record.drafts for record in rounds]


def test_a_draft_with_another_tokenizer_reads_the_sources_text(t5: Path, foreign_folder: Path) -> None:
    model, other = outrider.load(t5, dtype="float64"), outrider.load(foreign_folder, dtype="float64")
    plain = outrider.generate(model, SOURCE, draft=None, max_new_tokens=12)
    drafted = outrider.generate(model, SOURCE, draft=other, num_draft_tokens=3, max_new_tokens=12)
    assert drafted.tokens == plain.tokens
    assert drafted.stats.drafted > 0


@pytest.mark.slow
def test_ragged_batches_and_seeds(t5: Path, small_t5: Path) -> None:
    """A row of a batch is what it would be alone, sampled too."""
    model, draft = outrider.load(t5, dtype="float64"), outrider.load(small_t5, dtype="float64")
    sources = [SOURCE, "def f(x): return x + 1", "0123456789 0123456789 0123456789"]
    options: dict[str, Any] = {"draft": draft, "num_draft_tokens": 2, "max_new_tokens": 10, "temperature": 1.0}
    together = outrider.generate(model, sources, seed=[5, 6, 7], **options)
    alone = [outrider.generate(model, one, seed=seed, **options) for one, seed in zip(sources, (5, 6, 7), strict=True)]
    assert [row.tokens for row in together] == [row.tokens for row in alone]


@pytest.mark.slow
def test_audit_finds_an_exact_decoder_exact(t5: Path, small_t5: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--target", str(t5), "--dtype", "float32", "--draft", str(small_t5), "--tokens", "1100"]
    assert run(["audit", *options, "--json"]) in (0, 2)  # 2: so few tokens may not tell
    assert json.loads(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.usefixtures("unrecorded")
def test_audit_sees_texts_of_another_source(t5: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The negative control: the same texts, said to answer other sources."""
    kept = tmp_path / "texts.jsonl"
    options = ["--target", str(t5), "--dtype", "float32"]
    run(["audit", *options, "--tokens", "600", "--log", str(kept), "--json"])
    capsys.readouterr()
    assert run(["audit", *options, "--outputs", str(kept), "--json"]) != 1
    capsys.readouterr()
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    for line, other in zip(lines, [*lines[1:], lines[0]], strict=True):
        line["swapped"] = other["prompt"]
    swapped = [{**line, "prompt": line["swapped"]} for line in lines]
    kept.write_text("".join(json.dumps(line) + "\n" for line in swapped))
    assert run(["audit", *options, "--outputs", str(kept), "--json"]) == 1


@pytest.mark.slow
def test_tune_and_bench_work(
    t5: Path, small_t5: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del cache
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(f"{SOURCE}\n0123456789\n")
    drafts = ["--draft", str(small_t5), "--draft", "prompt-lookup"]
    tuned = as_json(capsys, "tune", str(t5), *drafts, "--prompts", str(prompts), "--max-new-tokens", "12")
    assert {one["name"] for one in tuned["candidates"]} == {str(small_t5), "prompt-lookup"}
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in (SOURCE, "0123456789")))
    task = ["--target", str(t5), "--dtype", "float64", "--task", f"jsonl:{data}", "--max-new-tokens", "10"]
    alpha = as_json(capsys, "bench", "alpha", *task, *drafts, "--temperature", "1")
    assert all(0 <= row["alpha"]["value"] <= 1 for row in alpha["rows"])
    swept = as_json(capsys, "bench", "sweep", *task, "--draft", str(small_t5), "--lengths", "0-2", "--temperature", "0")
    assert all(row["identical"] == 2 for row in swept["sweeps"][0]["rows"] if row["identical"] is not None)
    answered = as_json(capsys, "bench", "tasks", *task, "--draft", str(small_t5), "--temperature", "0")
    assert answered["rows"][-1]["identical"] == 2
    setups = ["--setup", "float64", "--setup", "float64 + prompt-lookup", "--prompts", "0-1", "--max-new-tokens", "6"]
    contest = as_json(capsys, "bench", "setups", "--target", str(t5), *setups, "--temperature", "0")
    assert [row["contender"] for row in contest["rows"]] == ["float64", "float64 + prompt-lookup"]


@pytest.mark.slow
def test_recordings_are_heard(whisper: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_wav(tmp_path / "tone.wav", tone())
    model = outrider.load(whisper, dtype="float32")
    assert isinstance(model, EncoderDecoderModel)
    heard = model.feature_extractor(tone().astype(np.float32), sampling_rate=RATE, return_tensors="pt").input_features
    mine = features(model, read_wav(path))
    torch.testing.assert_close(mine, heard[0], atol=0.02, rtol=0)  # 16 bits
    out = model.module.generate(mine.unsqueeze(0), do_sample=False, num_beams=1, max_new_tokens=16)[0].tolist()
    prefix = decoder_prefix(model, mine)
    options = ["--target", str(whisper), "--dtype", "float32", "--max-new-tokens", "16"]
    got = as_json(capsys, "generate", "--audio", str(path), *options, "--num-draft-tokens", "2", "--draft", "random")
    assert got["tokens"] == (out[len(prefix) :] if out[: len(prefix)] == prefix else out)
    other = outrider.generate(
        model, Audio(tone().astype(np.float32)[::-1].copy() * 0.1, RATE), draft=None, max_new_tokens=16
    )
    assert other.tokens != got["tokens"]
    together = outrider.generate(model, [read_wav(path)] * 2, max_new_tokens=16)
    assert [row.tokens for row in together] == [got["tokens"]] * 2


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    """Lines that name recordings, by names relative to their own folder."""
    for i in range(3):
        write_wav(tmp_path / f"{i}.wav", tone(0.2 + 0.1 * i))
    path = tmp_path / "recordings.jsonl"
    path.write_text("".join(json.dumps({"audio": f"{i}.wav", "reference": "the fox"}) + "\n" for i in range(3)))
    return path


@pytest.mark.slow
def test_tune_and_bench_hear_recordings(
    whisper: Path, recordings: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del cache
    draft = save_encoder_decoder(recordings.parent / "draft", "Whisper", 1, decoder_layers=1)
    drafts = ["--draft", str(draft), "--draft", "random"]
    model = ["--target", str(whisper), "--dtype", "float64", "--max-new-tokens", "8"]
    tuned = as_json(capsys, "tune", *model, *drafts, "--prompts", str(recordings))
    assert {one["name"] for one in tuned["candidates"]} == {str(draft), "random"}
    assert set(tuned["equivalents"]) <= {"transformers"}  # neither vLLM nor llama.cpp speculates with these
    task = [*model, "--task", f"jsonl:{recordings}", "--temperature", "0"]
    scored = as_json(capsys, "bench", "tasks", *task, "--draft", str(draft), "--num-draft-tokens", "2", "--metric", "wer")
    plain, drafted = scored["rows"]
    assert drafted["identical"] == 3
    assert drafted["quality"] == plain["quality"] != 0.0
    alpha = as_json(capsys, "bench", "alpha", *task, *drafts)
    assert all(0 <= row["alpha"]["value"] <= 1 for row in alpha["rows"])
    assert sum(row["tokens"] for row in alpha["rows"]) > 0
    swept = as_json(capsys, "bench", "sweep", *task, "--draft", str(draft), "--lengths", "0-1")
    assert all(row["identical"] == 3 for row in swept["sweeps"][0]["rows"] if row["identical"] is not None)


@pytest.mark.slow
def test_audit_hears_recordings(whisper: Path, recordings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Own texts, kept and gone on with; read from the file; and, the negative control, said to be of another temperature."""
    kept = recordings.parent / "texts.jsonl"
    options = ["--target", str(whisper), "--dtype", "float32"]
    own = [*options, "--prompts", str(recordings), "--log", str(kept), "--json"]
    for tokens in (400, 1100):
        assert run(["audit", *own, "--tokens", str(tokens)]) != 1
    assert run(["audit", *options, "--outputs", str(kept), "--json"]) != 1
    capsys.readouterr()
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    assert {line["audio"] for line in lines} == {str(recordings.parent / f"{i}.wav") for i in range(3)}
    for line in lines:
        del line["temperature"]
    kept.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run(["audit", *options, "--outputs", str(kept), "--temperature", "0.7", "--json"]) == 1
    capsys.readouterr()
    kept.write_text(json.dumps({**lines[0], "audio": 3}) + "\n")
    assert run(["audit", *options, "--outputs", str(kept)]) == 2
    assert 'must name a recording as {"audio": FILE' in capsys.readouterr().err


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_wav_files_of_every_width_and_two_channels(width: int, tmp_path: Path) -> None:
    left, right = tone(0.01), 0.25 * tone(0.01)
    pairs = np.stack([left, right], axis=1).reshape(-1)
    got = read_wav(write_wav(tmp_path / "stereo.wav", pairs, width=width, channels=2))
    assert got.rate == RATE
    np.testing.assert_allclose(got.samples, (left + right) / 2, atol=2.0 ** (2 - 8 * width) + 1e-6)


def test_a_recording_that_was_cut_is_refused(tmp_path: Path) -> None:
    path = write_wav(tmp_path / "whole.wav", tone(0.2))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ParameterError, match=r"ends early: it has \d+ of the \d+ bytes that its header names"):
        read_wav(path)
    streamed = bytearray(whole)  # what was written to a pipe names no length
    streamed[4:8] = streamed[40:44] = b"\xff\xff\xff\xff"
    path.write_bytes(streamed)
    assert len(read_wav(path).samples) == round(0.2 * RATE)


MULTILINGUAL = {
    "lang_to_id": {"<|en|>": 11, "<|de|>": 12, "<|fr|>": 13},
    "task_to_id": {"transcribe": 14, "translate": 15},
    "no_timestamps_token_id": 329,  # the last one: transformers takes those after it for timestamps, and goes on from there
    "is_multilingual": True,
    "language": None,
    "task": None,
    "return_timestamps": False,
}


@pytest.mark.parametrize(
    ("language", "task"), [(None, "transcribe"), ("german", None), ("fr", "translate"), ("<|en|>", "transcribe")]
)
def test_whispers_prefix_is_that_of_transformers(whisper: Path, language: str | None, task: str | None) -> None:
    model = outrider.load(whisper, dtype="float32")
    assert isinstance(model, EncoderDecoderModel)
    for name, value in MULTILINGUAL.items():
        setattr(model.module.generation_config, name, value)
    heard = features(model, Audio(tone().astype(np.float32), RATE))
    wanted = model.module.generate(
        heard.unsqueeze(0),
        do_sample=False,
        num_beams=1,
        max_new_tokens=8,
        language=language,
        task=task,
        return_dict_in_generate=True,
    )
    prefix = decoder_prefix(model, heard, language, task)
    assert len(prefix) == 4
    recording = Audio(tone().astype(np.float32), RATE, language, task)
    got = outrider.generate(model, recording, draft=None, max_new_tokens=8)
    sequence = wanted.sequences[0].tolist() if hasattr(wanted, "sequences") else wanted[0].tolist()
    assert (sequence if sequence[: len(prefix)] == prefix else [*prefix, *sequence]) == [*prefix, *got.tokens]


REFUSED: dict[str, tuple[list[str], str]] = {
    "openvino": (["generate", "x", "--target", "T5", "--engine", "openvino"], "OpenVINO engine: it is an encoder-decoder"),
    "llama.cpp": (["generate", "x", "--target", "T5", "--engine", "llama.cpp"], "reads .gguf files"),
    "early-exit": (["generate", "x", "--target", "T5", "--draft", "early-exit"], "early-exit can't draft"),
    "text to Whisper": (["generate", "x", "--target", "WHISPER"], "hears audio and reads no text"),
    "audit of Whisper": (["audit", "--target", "WHISPER"], "hears audio and reads no text"),
    "tune of Whisper": (["tune", "WHISPER"], "hears audio and reads no text"),
    "audio to T5": (["generate", "--audio", "WAV", "--target", "T5"], "reads text, not audio"),
    "another rate": (["generate", "--audio", "SLOW", "--target", "WHISPER"], "8000 Hz.*hears 16000 Hz: resample"),
    "too long": (["generate", "--audio", "LONG", "--target", "WHISPER"], "audio has 1.5 s.*hears 1 s at once"),
    "no WAV": (["generate", "--audio", "TEXT", "--target", "WHISPER"], "is no PCM WAV file"),
    "no file": (["generate", "--audio", "NONE", "--target", "WHISPER"], "can't be read"),
    "language": (["generate", "--audio", "WAV", "--language", "en", "--target", "WHISPER"], "language and task"),
    "audio to a model that reads": (["audit", "--target", "T5", "--prompts", "LINES"], "reads text, not audio"),
    "prompts and outputs": (["audit", "--prompts", "LINES", "--outputs", "LINES"], "--prompts is what to generate from"),
    "a recording for texts": (["train", "texts", "--prompts", "LINES", "-o", "NONE"], "must hold text, it has recordings"),
    "no recording": (["audit", "--prompts", "GONE", "--target", "WHISPER"], "none.wav can't be read"),
    "language of text": (["generate", "x", "--language", "en", "--target", "T5"], "are for --audio"),
    "both": (["generate", "x", "--audio", "WAV", "--target", "WHISPER"], "--audio excludes PROMPT"),
    "draft that hears": (["generate", "x", "--target", "T5", "--draft", "WHISPER"], "read different sources"),
    "draft with an encoder": (["generate", "x", "--target", "LLAMA", "--draft", "T5"], "encoder-decoder"),
    "bench precision": (["bench", "precision", "--target", "T5"], "bench precision is for decoder-only models"),
    "a head": (["train", "head", "--target", "T5", "--data", "TEXT", "-o", "NONE"], "drafts are trained for decoder-only"),
    "a student": (["train", "student", "--target", "T5", "--data", "TEXT", "-o", "NONE"], "trained for decoder-only models"),
    "chat": (["generate", "x", "--chat", "--target", "T5"], "no chat template"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_work_is_refused_by_one_line(
    case: str, t5: Path, whisper: Path, target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, reason = REFUSED[case]
    (tmp_path / "text.wav").write_text("no sound")
    places = {
        "T5": t5,
        "WHISPER": whisper,
        "LLAMA": target_folder,
        "WAV": write_wav(tmp_path / "tone.wav", tone()),
        "SLOW": write_wav(tmp_path / "slow.wav", tone(), rate=8000),
        "LONG": write_wav(tmp_path / "long.wav", tone(1.5)),
        "TEXT": tmp_path / "text.wav",
        "NONE": tmp_path / "none.wav",
        "LINES": tmp_path / "lines.jsonl",
        "GONE": tmp_path / "gone.jsonl",
    }
    places["LINES"].write_text('{"audio": "tone.wav"}\n')
    places["GONE"].write_text('{"audio": "none.wav"}\n')
    assert run([str(places.get(argument, argument)) for argument in arguments]) in (1, 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    import re

    assert re.search(reason, captured.err), captured.err


def test_gguf_files_of_encoder_decoders_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    key, value = b"general.architecture", b"t5"
    entry = struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, len(value)) + value
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry)
    for engine in ("auto", "llama.cpp"):
        with pytest.raises(ModelError, match=r"model.gguf \(t5\) can't be used: it is an encoder-decoder model"):
            outrider.load(path, engine=engine)


def test_sources_are_checked(t5: Path, whisper: Path) -> None:
    model, hears = outrider.load(t5), outrider.load(whisper)
    assert isinstance(model, EncoderDecoderModel)
    assert isinstance(hears, EncoderDecoderModel)
    with pytest.raises(ParameterError, match="give the source"):
        model.open()
    with pytest.raises(ParameterError, match="at least one token"):
        model.open(source=[])
    with pytest.raises(ParameterError, match="source tokens must be in 0"):
        model.open(source=[10**6])
    with pytest.raises(ParameterError, match=r"features \[8, 100\]"):
        hears.open(source=[1, 2])
    with pytest.raises(ParameterError, match="must be token ids"):
        model.open(source=torch.zeros(8, 100))
    assert not model._open
    with pytest.raises(OutriderError, match="samples must be"):
        Audio(np.zeros(0, np.float32), RATE)
