"""Data of a task in files of all kinds, and answers to it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from outrider.bench.examples import Answer, Example

ROWS = [
    {"document": "the quick brown fox jumps", "summary": "a fox jumps"},
    {"document": "def f(x): return x + 1", "summary": "a function, with a comma"},
    {"document": "naïve café", "summary": "coffee"},
]


def answer(text: str, reference: str | None = None, name: str = "one") -> Answer:
    return Answer(Example(name, "p", reference=reference), [1], [2], text)


def write(folder: Path, ending: str) -> Path:
    path = folder / f"data.{ending}"
    if ending == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif ending == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["document", "summary"])
            writer.writeheader()
            writer.writerows(ROWS)
    else:
        import pyarrow
        from pyarrow.parquet import write_table

        write_table(pyarrow.Table.from_pylist(ROWS), path)
    return path
