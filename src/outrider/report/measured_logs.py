"""Logs of measurements, and what they hold: what the papers' tables and figures are made of (`measured`).

What `bench sweep`, `tasks`, `alpha` and `toyllm` left: their logs, each with its figures beside it (`LOG.result.json`, the
object that --json prints, which may be given alone, too).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import ParameterError
from outrider.support.run_log import read_log, result_path

COMMANDS = {
    "tasks": "outrider bench tasks --task humaneval --execute-generated-code --target MODEL --draft MODEL --log tasks.jsonl",
    "sweep": "outrider bench sweep --target MODEL --draft MODEL --log sweep.jsonl",
    "alpha": "outrider bench alpha --target MODEL --draft MODEL --draft ngram:table=FILE,order=2 --log alpha.jsonl",
    "toyllm": "outrider bench toyllm --log toyllm.jsonl",
}


@dataclass(frozen=True)
class Measurement:
    """One log. found: the command's figures, None if it has not ended. runs: one by one, none for figures without a log."""

    path: Path
    kind: str
    settings: dict[str, Any]
    found: dict[str, Any] | None
    runs: list[dict[str, Any]]

    @property
    def label(self) -> str:
        """What was measured, in a few words."""
        given = self.found or self.settings
        draft = given.get("draft")
        drafts = short(", ".join(draft) if isinstance(draft, list) else str(draft or ""))
        parts = [model(given), f"draft {drafts}" if drafts else "", str(given.get("task") or "")]
        return ", ".join(part for part in parts if part)


def read(paths: Sequence[Path]) -> list[Measurement]:
    """The logs, and figures without a log, in the order given. Raises `ParameterError` for anything else."""
    found = [_read(path) for path in dict.fromkeys(paths)]
    beside = {result_path(one.path) for one in found}
    return [one for one in found if one.path not in beside]  # figures given beside their own log


def _read(path: Path) -> Measurement:
    if not path.is_file():
        raise ParameterError(f"log {path} is not there: give logs of bench sweep, tasks, alpha or toyllm")
    found = _figures(path)
    if found is not None:
        return Measurement(path, _kind(path, found), found, found, [])
    settings, runs = read_log(path)
    kind = _kind(path, settings)
    return Measurement(path, kind, settings, _figures(result_path(path)), runs)


def _figures(path: Path) -> dict[str, Any] | None:
    """The object that a command printed; None if the file is not there, or is something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) and "bench" in value else None


def _kind(path: Path, settings: dict[str, Any]) -> str:
    kind = settings.get("bench")
    if kind not in COMMANDS:
        what = "no bench" if kind is None else f"bench {kind}"
        raise ParameterError(f"log {path} is of {what}: the report is made of {', '.join(COMMANDS)}")
    return str(kind)


def finished(measured: Iterable[Measurement], kind: str) -> list[tuple[Measurement, dict[str, Any]]]:
    """Those of one kind that have figures, with them."""
    return [(one, one.found) for one in measured if one.kind == kind and one.found is not None]


def missing(measured: Sequence[Measurement]) -> dict[str, str]:
    """{what is not measured: the command that measures it}."""
    return {kind: command for kind, command in COMMANDS.items() if not finished(measured, kind)}


def not_measured(measured: Sequence[Measurement], kind: str) -> list[str]:
    """A sentence where there is nothing of this kind."""
    if finished(measured, kind):
        return []
    cut = [str(one.path) for one in measured if one.kind == kind]
    why = f"{', '.join(cut)} has not been ended: run its command again" if cut else "no log of it was given"
    return [f"Not measured here: {why}. It is measured by: {COMMANDS[kind]}"]


def model(found: dict[str, Any]) -> str:
    """The target and its precision."""
    return f"{short(str(found['target']))} {found['dtype']}"


def short(name: str) -> str:
    """Folders by their last part: a column is not a path wide."""
    return re.sub(r"(?<![^\s:=])(?:/[^/,\s]+)+/(?=[^/,\s])", "…/", name)


def quartiles(value: dict[str, float] | None) -> str:
    """A median speed-up and its quartiles."""
    if value is None:
        return "—"
    return f"{value['median']:.2f}× ({value['low']:.2f} – {value['high']:.2f})"


def interval(value: dict[str, float] | None) -> str:
    """An estimate and its interval."""
    if value is None:
        return "—"
    return f"{value['value']:.3f} ({value['low']:.3f} – {value['high']:.3f})"


def number(value: float | None, digits: int = 2) -> str:
    """With so many decimals, a dash for none."""
    return "—" if value is None else f"{value:.{digits}f}"


def agreement(row: dict[str, Any], prompts: int) -> str:
    """How many greedy texts are those of plain decoding, and why the others are not."""
    if row.get("identical") is None:
        return ""
    parted = row["divergences"].values()
    ties = sum(one["gap"] <= one["rounding"] for one in parted)
    others = len(parted) - ties
    words = [f"{row['identical']} of {prompts}"]
    words += [f"{ties} at a tie within rounding"] if ties else []
    words += [f"{others} NOT at a tie"] if others else []
    return "; ".join(words)
