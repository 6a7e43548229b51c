"""Data and options of small runs of `outrider train`."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.cli.main import run

LINES = ["the quick brown fox jumps over the lazy dog 0123456789 ", "def f(x): return x + 1 "] * 20


def options(command: str, target: Path, data: Path, *more: object) -> list[str]:
    shared = ["train", command, "--target", target, "--data", data, "--length", 16, "--batch-size", 2, "--every", 1]
    return [str(argument) for argument in (*shared, "--steps", 2, "--json", *more)]


def refusal(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int = 2) -> str:
    assert run(arguments) == code
    err = capsys.readouterr().err
    assert "Traceback" not in err
    return " ".join(err.split())
