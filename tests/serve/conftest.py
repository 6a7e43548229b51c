"""Fixtures of the tests of the server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import outrider
from outrider.models.base import TextModel
from tests.helpers.folders import save_model
from tests.helpers.serving import TEMPLATE, Served, serving


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder = save_model(tmp_path_factory.mktemp("served"), 0, max_position_embeddings=8192)
    made = outrider.load(folder, dtype="float64")
    made.tokenizer.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def served(target: TextModel) -> Iterator[Served]:
    with serving(target) as made:
        yield made
