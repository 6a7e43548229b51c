"""Fixtures of the tests of training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.train_runs import LINES


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Few and short documents; the last one is kept apart."""
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps({"text": line * 3}) for line in LINES))
    return path
