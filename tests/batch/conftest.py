"""Fixtures of the tests of `ContinuousBatch`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import outrider
from outrider.models.base import TextModel
from tests.helpers.folders import save_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder = save_model(tmp_path_factory.mktemp("target"), 0, max_position_embeddings=8192)  # `ENDLESS` has room
    return outrider.load(folder, dtype="float64")


@pytest.fixture
def batch(target: TextModel) -> Iterator[outrider.ContinuousBatch]:
    made = outrider.ContinuousBatch(target, draft="suffix", num_draft_tokens=2, batch_size=3)
    yield made
    made.close()
