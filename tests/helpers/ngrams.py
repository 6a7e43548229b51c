"""A small corpus and tables trained on it."""

from __future__ import annotations

import random
from pathlib import Path

import outrider.ngram.training as training
from outrider.ngram import NgramTable, train
from outrider.ngram.table import read_table

SIZE = 12


def corpus(documents: int = 5, length: int = 400, size: int = SIZE) -> list[list[int]]:
    chance = random.Random(7)
    weights = [1 / (i + 1) for i in range(size)]
    texts = []
    for _ in range(documents):
        tokens = [0]
        while len(tokens) < length:
            shift = tokens[-1] * 3 + (tokens[-2] if len(tokens) > 1 else 0)
            tokens.append((chance.choices(range(size), weights)[0] + shift) % size)
        texts.append(tokens)
    return texts


def trained(path: Path, documents: list[list[int]], size: int = SIZE, **settings: int) -> NgramTable:
    """Pieces of text are written-out ids here."""
    pieces = [[" ".join(map(str, doc[i : i + 50])) for i in range(0, len(doc), 50)] for doc in documents]

    def encode(texts: list[str]) -> list[list[int]]:
        return [[int(word) for word in text.split()] for text in texts]

    total = train(pieces, encode, size, f"size {size}", path, training.Settings(**settings))
    assert total == sum(map(len, documents))
    return read_table(path)
