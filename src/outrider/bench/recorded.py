"""Texts of the target, written once, on which policies are replayed (`lengths`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outrider.bench.tasks import Task
from outrider.generation import generate
from outrider.models.base import Source, TextModel
from outrider.request.prompts import encode, prepare


@dataclass(frozen=True)
class Recorded:
    """A text of the target. tokens: prompt and output. source: what its encoder read, if it has one."""

    name: str
    tokens: list[int]
    prompt_tokens: int
    temperature: float = 0.0
    seed: int = 0
    source: Source | None = None


def record(
    target: TextModel, tasks: Sequence[Task], max_new_tokens: int, temperatures: Sequence[float] = (0.0,), seeds: int = 1
) -> Iterator[Recorded]:
    """The target's own continuations, one after the other; `seeds` of each task where they are drawn."""
    for temperature in temperatures:
        for seed in range(number_of_texts(temperature, seeds)):
            for task in tasks:
                prompt = encode(target, task.prompt)
                begun = prepare(target, prompt)
                result = generate(
                    target,
                    prompt,
                    draft=None,
                    max_new_tokens=max_new_tokens,
                    ignore_eos=True,
                    temperature=temperature,
                    seed=seed,
                )
                tokens = [*begun.tokens, *result.tokens]
                yield Recorded(task.name, tokens, len(begun.tokens), temperature, seed, begun.source)


def number_of_texts(temperature: float, seeds: int) -> int:
    """Greedy texts don't depend on the seed."""
    return seeds if temperature > 0 else 1


def cells_of(texts: Sequence[Recorded]) -> list[list[Recorded]]:
    """The texts of each cell: those that differ by their seed only."""
    found: dict[tuple[str, float], list[Recorded]] = {}
    for text in texts:
        found.setdefault((text.name, text.temperature), []).append(text)
    return list(found.values())
