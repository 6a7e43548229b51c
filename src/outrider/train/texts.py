"""Texts by the target itself, to train drafts on what it will really say (sequence-level distillation).

Prompts come from a file, or from the target: given the opening of a user's turn, a chat model goes on with a question (Xu
et al. 2024, "Magpie"), and then answers it. They are written side by side without a draft: a place that is free is taken by
the next one, and only the ends of blocks leave places empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

from outrider.batch.job_batch import JobBatch
from outrider.batch.jobs import Job
from outrider.batch.setup import Ready, Setup
from outrider.errors import ModelError, ParameterError
from outrider.models.base import TextModel, end_tokens
from outrider.randomness import derived_seed
from outrider.request.prompts import as_said, encode, has_template
from outrider.sampling import SamplingSettings
from outrider.support.checks import check_count
from outrider.support.run_log import RunLog

_MARK = "\x00"
LONGEST_QUESTION = 96  # tokens
BLOCK = 8  # texts for each place of the batch that are written at one temperature before the next one's turn
QUESTIONS, ANSWERS = 0, 1
FOR_TRAINING = (0, 1)  # numbers that no other seed is derived by


@dataclass(frozen=True)
class TextSettings:
    """count: texts. temperatures: of the answers, in turn, a batch each. batch_size: texts side by side."""

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
    """Write what `log` does not hold yet, {"number", "tokens", "prompt_tokens", "temperature"} a text, in the order in which
    they end, and yield how many there are.

    prompts: the users' turns, in turn; None has the target ask itself.
    """
    # Another seed than a user gives: a draft that is trained on these texts must not know what that one draws.
    defaults = {"seed": derived_seed(settings.seed, *FOR_TRAINING)}
    setup = Setup(draft=(), num_draft_tokens=0, batch_size=settings.batch_size, chat=False, defaults=defaults)
    ready = setup.use(target)
    done = {int(entry.get("number", i)) for i, entry in enumerate(log.entries)}
    rows, turns = settings.batch_size, len(settings.temperatures)
    block = BLOCK * turns * rows
    for start in range(0, settings.count, block):
        missing = [n for n in range(start, min(start + block, settings.count)) if n not in done]
        for turn, temperature in enumerate(settings.temperatures):
            numbers = [n for n in missing if n // rows % turns == turn]
            asked = dict(zip(numbers, _questions(ready, prompts, numbers, settings), strict=True))
            for number, answer in _go_on(ready, asked, temperature, settings.max_new_tokens, ANSWERS, rows):
                prompt = asked[number]
                entry = {"number": number, "tokens": prompt + answer, "prompt_tokens": len(prompt)}
                log.append({**entry, "temperature": temperature})
                done.add(number)
                yield len(done)


def _questions(ready: Ready, prompts: list[str] | None, numbers: Many[int], settings: TextSettings) -> list[list[int]]:
    """Prompts as token ids, up to where the answer begins."""
    target = ready.target
    if prompts is not None:
        return [encode(target, as_said(target, prompts[number % len(prompts)])) for number in numbers]
    before, after = _around(target)
    begun = dict.fromkeys(numbers, before)
    asked = dict(_go_on(ready, begun, 1.0, LONGEST_QUESTION, QUESTIONS, settings.batch_size))
    ends = end_tokens(target)
    return [before + [token for token in asked[number] if token not in ends] + after for number in numbers]


def check_asks_itself(target: TextModel) -> None:
    """Raise unless it can write questions to answer."""
    if not has_template(target):
        raise ParameterError(f"{target.name} has no chat template to ask itself questions by: give --prompts FILE")


def _around(target: TextModel) -> tuple[list[int], list[int]]:
    """The chat template's tokens before and after what a user says."""
    check_asks_itself(target)
    tokenizer: Any = target.tokenizer
    whole: str = tokenizer.apply_chat_template(as_said(target, _MARK), add_generation_prompt=True, tokenize=False)
    before, _, after = whole.partition(_MARK)
    first, second = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, after))
    return first, second


def _go_on(
    ready: Ready, prompts: Mapping[int, list[int]], temperature: float, longest: int, part: int, batch_size: int
) -> Iterator[tuple[int, list[int]]]:
    """What follows each prompt, by its number, as it ends. part: of the text, so that no two draws share their numbers."""
    options = {"temperature": temperature, "max_new_tokens": longest}
    with JobBatch(ready, batch_size) as batch:
        batch.put(Job(2 * number + part, prompt, options) for number, prompt in prompts.items())
        while batch.load:
            for record in batch.advance():
                if "error" in record:
                    raise ModelError(f"text {record['index'] // 2} could not be written: {record['error']}")
                yield record["index"] // 2, record["tokens"]
