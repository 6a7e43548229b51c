"""Rows of examples from a file (JSON lines, CSV, Parquet) or, by name, from the Hugging Face hub."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.errors import ParameterError, in_one_line
from outrider.support.optional import optional

Row = Mapping[str, Any]


def read_table(path: Path, lines: bool = False) -> Sequence[Row]:
    """The rows of a local file; its kind by the ending, or JSON lines if `lines`. Parquet needs the extra `datasets`."""
    path = path.expanduser()
    if not path.is_file():
        raise ParameterError(f"data file {path} does not exist")
    ending = ".jsonl" if lines else path.suffix.lower()
    readers = {".jsonl": _json_lines, ".json": _json_lines, ".csv": _csv, ".tsv": _csv, ".parquet": _parquet}
    if ending not in readers:
        raise ParameterError(f"data file must end in {', '.join(readers)}, got {path.name!r}")
    try:
        rows = readers[ending](path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ParameterError(f"data file {path} can't be read: {error}") from None
    if not rows:
        raise ParameterError(f"data file {path} holds no rows")
    return rows


def _json_lines(path: Path) -> list[Row]:
    rows: list[Row] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        try:
            row = json.loads(line) if line.strip() else None
        except ValueError as error:
            raise ParameterError(f"data file {path}, line {number}: no JSON ({error})") from None
        if row is not None and not isinstance(row, dict):
            raise ParameterError(f"data file {path}, line {number}: must be an object like {{'prompt': …}}")
        if row is not None:
            rows.append(row)
    return rows


def _csv(path: Path) -> list[Row]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ","))


def _parquet(path: Path) -> list[Row]:
    parquet, broken = optional("pyarrow.parquet", "a Parquet file"), optional("pyarrow", "a Parquet file").ArrowException
    try:
        rows: list[Row] = parquet.read_table(path).to_pylist()
    except broken as error:
        raise ParameterError(f"data file {path} can't be read: {in_one_line(error)}") from None
    return rows


def load_hub(name: str, configuration: str | None, split: str, count: int) -> Sequence[Row]:
    """The first `count` rows of a data set of the hub, downloaded once and kept by the `datasets` library."""
    datasets = optional("datasets", f"data set {name}", "give --data FILE")
    try:
        found = datasets.load_dataset(name, configuration, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise ParameterError(
            f"data set {name} can't be loaded ({in_one_line(error)}): give a local copy as --data FILE"
        ) from None
    rows: list[Row] = list(found.select(range(min(count, len(found)))))
    return rows


def column(row: Row, names: Sequence[str], option: str) -> Any:
    """The value of the first of these columns that the row has; dots lead into nested ones."""
    for name in names:
        value: Any = row
        for part in (name,) if name in row else name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            return value
    has = ", ".join(map(str, row)) or "none"
    raise ParameterError(f"{option} must name a column: there is no {' or '.join(names)}, the columns are {has}")
