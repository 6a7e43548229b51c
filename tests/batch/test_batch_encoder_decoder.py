"""Batches of sources: each line's text is what it would be alone, under a checkpoint's own rules; recordings, too."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider.audio import read_wav
from outrider.cli.main import run
from tests.helpers.commands import call
from tests.helpers.encoder_decoder import tone, write_wav
from tests.helpers.folders import save_encoder_decoder
from tests.helpers.marks import thinned

OPTIONS: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9}
RULES: dict[str, dict[str, Any]] = {
    "T5": {"min_length": 4, "bad_words_ids": [[7], [9, 11]]},
    "Bart": {"forced_bos_token_id": 5, "forced_eos_token_id": 2, "begin_suppress_tokens": [10, 20]},
}


def written(folder: Path, lines: list[dict[str, Any]]) -> Path:
    path = folder / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def ruled(folder: Path, architecture: str) -> Path:
    """A checkpoint whose generation config forbids and forces tokens."""
    save_encoder_decoder(folder, architecture)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **RULES[architecture]}))
    return folder


def results(path: Path) -> list[dict[str, Any]]:
    return sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda one: one["index"])


@pytest.mark.parametrize(("architecture", "draft"), thinned(RULES, ["prompt-lookup", "model"], every=3))
def test_each_line_is_answered_as_if_it_were_alone(
    architecture: str, draft: str, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Places are taken by the next source at once; ends are forced where each line has them."""
    folder = ruled(tmp_path / "target", architecture)
    named = draft if draft != "model" else str(save_encoder_decoder(tmp_path / "draft", architecture, 1))
    prompts = ["the quick brown fox", "0123", "def f(x): return x + 1", "the lazy dog jumps", "brown"]
    lines: list[dict[str, Any]] = [
        {"prompt": prompt, "seed": i, "max_new_tokens": 4 + 5 * (i % 3)} for i, prompt in enumerate(prompts)
    ]
    output = tmp_path / "out.jsonl"
    command = ["batch", written(tmp_path, lines), "-o", output, "--target", folder, "--dtype", "float64", "--batch-size", 2]
    command += ["--temperature", 1, "--top-p", 0.9, "--draft", named, "--num-draft-tokens", 2, "--json"]
    assert call(capsys, *command)["complete"]
    target = outrider.load(folder, dtype="float64")
    drafting: Any = draft if draft != "model" else outrider.load(named, dtype="float64")
    ended = 0
    for line, found in zip(lines, results(output), strict=True):
        alone = outrider.generate(
            target,
            line["prompt"],
            draft=drafting,
            num_draft_tokens=2,
            seed=line["seed"],
            max_new_tokens=line["max_new_tokens"],
            **OPTIONS,
        )
        assert found["tokens"] == alone.tokens
        assert found["text"] == alone.text
        assert found["source_tokens"] == alone.source_tokens
        ended += found["finish_reason"] == "eos"
    assert ended == len(lines) if architecture == "Bart" else ended < len(lines)


@pytest.mark.usefixtures("unrecorded")
def test_recordings_are_heard(tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_encoder_decoder(tmp_path / "whisper", "Whisper")
    sounds = [write_wav(tmp_path / f"{i}.wav", tone(0.3 + 0.2 * i)) for i in range(3)]
    lines = [{"audio": sound.name, "id": i} for i, sound in enumerate(sounds)]
    output = tmp_path / "out.jsonl"
    command = ["batch", written(tmp_path, lines), "-o", output, "--target", folder, "--dtype", "float64", "--batch-size", 2]
    assert call(capsys, *command, "--temperature", 0, "--max-new-tokens", 6, "--draft", "suffix", "--json")["complete"]
    target = outrider.load(folder, dtype="float64")
    for sound, found in zip(sounds, results(output), strict=True):
        assert found["tokens"] == outrider.generate(target, read_wav(sound), max_new_tokens=6).tokens
        assert "source_tokens" not in found


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ({"audio": "none.wav"}, "line 1: audio .*none.wav can't be read"),
        ({"audio": None}, "must name a WAV file"),
        ({"audio": "tone.wav", "prompt": "x"}, "must have exactly one of prompt, messages, audio"),
        ({"prompt": "x", "language": "en"}, "language is for audio"),
        ({"audio": "tone.wav", "task": 3}, "must name a recording as"),
        ({"audio": "wide.wav"}, "wide.wav has 40 bits a sample, 8, 16, 24 or 32 are read"),
        ({"audio": "a\0b.wav"}, "can't be read .*null byte"),
        ({"audio": "\ud800.wav"}, "can't be read"),
        ({"audio": "~nobody-here/x.wav"}, "nobody-here/x.wav can't be read"),
    ],
)
def test_wrong_lines_are_refused_before_a_model_is_loaded(
    line: dict[str, Any], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    raw = bytearray(write_wav(tmp_path / "tone.wav", tone()).read_bytes())
    struct.pack_into("<HH", raw, 32, 5, 40)  # bytes a frame, bits a sample
    (tmp_path / "wide.wav").write_bytes(raw)
    assert run(["batch", str(written(tmp_path, [line])), "-o", str(tmp_path / "out"), "--target", "nowhere"]) in (1, 2)
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(told, error), error


def test_a_run_does_not_go_on_with_other_recordings(tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_encoder_decoder(tmp_path / "whisper", "Whisper")
    path = written(tmp_path, [{"audio": write_wav(tmp_path / f"{i}.wav", tone(0.3)).name} for i in range(3)])
    output = tmp_path / "out.jsonl"
    command = ["batch", str(path), "-o", str(output), "--target", str(folder), "--max-new-tokens", "4", "--batch-size", "1"]
    assert run(command) == 0
    whole, tokens = output.read_text(), [one["tokens"] for one in results(output)]
    output.write_text(whole.splitlines(keepends=True)[0])
    assert run(command) == 0  # goes on
    assert [one["tokens"] for one in results(output)] == tokens
    output.write_text(whole.splitlines(keepends=True)[0])
    write_wav(tmp_path / "2.wav", tone(0.5))
    capsys.readouterr()
    assert run(command) in (1, 2)
    error = capsys.readouterr().err
    assert "input_sha256" in error
    assert output.read_text() == whole.splitlines(keepends=True)[0]


@pytest.mark.usefixtures("unrecorded")
@pytest.mark.parametrize("what", ["alternatives", "config"])
def test_what_no_line_could_be_served_with_is_said_once(
    what: str, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_encoder_decoder(tmp_path / "target", "T5")
    command = ["batch", str(written(tmp_path, [{"prompt": "the fox"}] * 3)), "-o", str(tmp_path / "out.jsonl")]
    command += ["--target", str(folder), "--max-new-tokens", "4", "--num-draft-tokens", "2"]
    if what == "alternatives":
        command += ["--draft", str(folder), "--alternatives", "2"]
    else:
        config = folder / "generation_config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "encoder_no_repeat_ngram_size": 2}))
    assert run(command) in (1, 2)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert ("alternatives" if what == "alternatives" else "encoder_no_repeat_ngram_size") in error
    output = tmp_path / "out.jsonl"
    assert not output.exists() or not output.read_text()


@pytest.mark.usefixtures("unrecorded")
@pytest.mark.parametrize("short", ["target", "draft"])
def test_a_source_that_is_too_long_is_that_lines_error(
    short: str, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For the target, or for the draft, which has an encoder of its own; the others' lines go on."""
    sizes = {name: {"max_position_embeddings": 24 if name == short else 256} for name in ("target", "draft")}
    models = [str(save_encoder_decoder(tmp_path / name, "Marian", i, **sizes[name])) for i, name in enumerate(sizes)]
    path, output = written(tmp_path, [{"prompt": "fox " * 30}, {"prompt": "the fox"}]), tmp_path / "out.jsonl"
    command = ["batch", str(path), "-o", str(output), "--target", models[0], "--draft", models[1], "--max-new-tokens", "5"]
    command += ["--num-draft-tokens", "2"]
    assert run(command) == 1
    first, second = results(output)
    assert "positions: shorten it" in first["error"]
    assert "text" in second


@pytest.mark.usefixtures("unrecorded")
def test_a_recording_for_a_model_that_reads_is_that_lines_error(
    tmp_path: Path, target_folder: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_wav(tmp_path / "tone.wav", tone())
    path, output = written(tmp_path, [{"audio": "tone.wav"}, {"prompt": "the fox"}]), tmp_path / "out.jsonl"
    assert run(["batch", str(path), "-o", str(output), "--target", str(target_folder), "--max-new-tokens", "3"]) == 1
    first, second = results(output)
    assert "reads text, not audio" in first["error"]
    assert second["text"]
