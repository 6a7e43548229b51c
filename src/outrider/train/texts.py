"""Texts by the target itself, to train drafts on what it will really say (sequence-level distillation).

Prompts come from a file, or from the target: given the opening of a user's turn, a chat model goes on with a question (Xu
et al. 2024, "Magpie"), and then answers it. Batches are decoded side by side without a draft.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

from outrider.checks import check_count
from outrider.decode import Request, decode
from outrider.errors import ParameterError
from outrider.models.base import TextModel
from outrider.prompts import encode, end_tokens
from outrider.randomness import RandomStream
from outrider.run_log import RunLog
from outrider.sampling import SamplingSettings

_MARK = "\x00"
LONGEST_QUESTION = 96  # tokens


@dataclass(frozen=True)
class TextSettings:
    """count: texts. temperatures: of the answers, in turn. batch_size: texts side by side."""

    count: int
    temperatures: tuple[float, ...] = (1.0, 0.0)
    max_new_tokens: int = 256
    batch_size: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("count", "max_new_tokens", "batch_size"):
            check_count(name, getattr(self, name))
        if not self.temperatures:
            raise ParameterError("temperatures must not be empty: give at least one")
        for temperature in self.temperatures:
            SamplingSettings(temperature=temperature)


def write_texts(target: TextModel, prompts: list[str] | None, settings: TextSettings, log: RunLog) -> Iterator[int]:
    """Write what `log` does not hold yet, {"tokens": …, "prompt_tokens": n, "temperature": t} a text
    and yield how many there are.

    prompts: the users' turns, in turn; None has the target ask itself.
    """
    done = len(log.entries)
    while done < settings.count:
        numbers = range(done, min(done + settings.batch_size, settings.count))
        temperature = settings.temperatures[done // settings.batch_size % len(settings.temperatures)]
        asked = _questions(target, prompts, numbers, settings.seed)
        answers = _go_on(target, asked, temperature, settings.max_new_tokens, [settings.seed, *numbers], 1)
        for prompt, answer in zip(asked, answers, strict=True):
            log.append({"tokens": prompt + answer, "prompt_tokens": len(prompt), "temperature": temperature})
        done += len(numbers)
        yield done


def _questions(target: TextModel, prompts: list[str] | None, numbers: Many[int], seed: int) -> list[list[int]]:
    """Prompts as token ids, up to where the answer begins."""
    if prompts is not None:
        chat = bool(getattr(target.tokenizer, "chat_template", None))
        chosen = [prompts[number % len(prompts)] for number in numbers]
        return [encode(target, [{"role": "user", "content": text}] if chat else text) for text in chosen]
    before, after = _around(target)
    asked = _go_on(target, [before] * len(numbers), 1.0, LONGEST_QUESTION, [seed, *numbers], 0)
    ends = end_tokens(target)
    return [before + [token for token in question if token not in ends] + after for question in asked]


def _around(target: TextModel) -> tuple[list[int], list[int]]:
    """The chat template's tokens before and after what a user says."""
    tokenizer: Any = target.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        raise ParameterError(f"{target.name} has no chat template to ask itself questions by: give --prompts FILE")
    turns = [{"role": "user", "content": _MARK}]
    whole: str = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    before, _, after = whole.partition(_MARK)
    first, second = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, after))
    return first, second


def _go_on(
    target: TextModel, prompts: list[list[int]], temperature: float, longest: int, key: list[int], part: int
) -> list[list[int]]:
    """key: the seed and the numbers of the rows. part: what is written, so that no two draws share their numbers."""
    seed, *numbers = key
    ends = end_tokens(target)
    requests = [
        Request(prompt, longest, RandomStream(seed, 2 * number + part), ends)
        for prompt, number in zip(prompts, numbers, strict=True)
    ]
    return decode(target, requests, SamplingSettings(temperature=temperature))[0]
