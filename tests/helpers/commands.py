"""Commands run as a user runs them, in this process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.cli.main import run


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """The JSON object that a command prints; it must end well."""
    code = run([str(argument) for argument in arguments])
    out = capsys.readouterr()
    assert code == 0, out.err
    found: dict[str, Any] = json.loads(out.out)
    return found
