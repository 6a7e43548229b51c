"""Texts of the target, written many side by side, and the windows that a head is trained and measured on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from target import Sampling, Target

QUESTION = 96  # tokens of a question that the target asks itself
ROWS_SHARE = 0.55  # of the free memory that keys and values of a batch may take (dropping rows copies some of them)
MODES = (Sampling(1.0), Sampling(0.0), Sampling(0.8, 0.95))
SHARES = (3, 3, 2)  # of the answers in each mode
ASKED = 3  # domain of questions that the target asks itself
Array = np.ndarray


@dataclass(frozen=True)
class Text:
    """tokens: prompt and answer. asked: tokens of the prompt. domain: see `prompts.DOMAINS`, or `ASKED`. mode: of MODES."""

    tokens: Array
    asked: int
    domain: int
    mode: int


@dataclass(frozen=True)
class Windows:
    """tokens: int64 [n, L]. drafted: bool [n, L], which of them are of an answer."""

    tokens: Array
    drafted: Array

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Writing:
    """rows: side by side at most. new: tokens of an answer at most. seconds: for all of it."""

    rows: int
    new: int
    seconds: float
    questions: int
    end: int
    seed: int


def write_all(
    target: Target,
    prompts: Sequence[Array],
    domains: Array,
    around: tuple[Array, Array],
    settings: Writing,
    say: Callable[[str], None],
) -> list[Text]:
    """Answers to the prompts and to the target's own questions, in mixed batches; again in other modes if there is time."""
    begun = time.monotonic()
    deadline = begun + settings.seconds
    generator = torch.Generator(target.device).manual_seed(settings.seed)
    random = np.random.default_rng(settings.seed)
    asked = _questions(target, around, settings, generator, begun + settings.seconds / 4)
    say(f"{len(asked)} questions in {time.monotonic() - begun:.1f} s")
    every = [*zip(prompts, domains.tolist(), strict=True), *((one, ASKED) for one in asked)]
    order = random.permutation(len(every))
    turns = np.repeat(np.arange(len(MODES)), SHARES)
    found: list[Text] = []
    for tour in range(len(MODES)):
        modes = turns[(np.arange(len(every)) + tour * max(SHARES)) % len(turns)]
        batches = [
            (mode, rows)
            for mode in range(len(MODES))
            for rows in _batches(target, order[modes == mode], [len(every[i][0]) for i in range(len(every))], settings)
        ]
        random.shuffle(batches)
        for mode, rows in batches:
            if time.monotonic() > deadline:
                return found
            before = time.monotonic()
            try:
                answers = target.write(
                    [every[i][0] for i in rows], settings.new, MODES[mode], settings.end, generator, deadline
                )
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                batches += [(mode, half) for half in np.array_split(rows, 2) if len(rows) > 1]
                say(f"out of memory with {len(rows)} rows, in halves later")
                continue
            pairs = [(every[i], answer) for i, answer in zip(rows, answers, strict=True) if len(answer)]
            found += [Text(np.concatenate([one, answer]), len(one), domain, mode) for (one, domain), answer in pairs]
            seconds, written = time.monotonic() - before, sum(map(len, answers))
            say(
                f"batch of {len(rows)} rows, {MODES[mode]}: {written} tokens in {seconds:.2f} s, "
                f"{written / seconds:.0f} a second; {len(found)} texts after {time.monotonic() - begun:.1f} s"
            )
    return found


def _questions(
    target: Target, around: tuple[Array, Array], settings: Writing, generator: torch.Generator, deadline: float
) -> list[Array]:
    """Prompts whose questions the target asks itself, as `outrider train texts` has it ask; each once."""
    before, after = around
    found: dict[bytes, Array] = {}
    rows = fitting(target, settings.rows, len(before) + QUESTION)
    for _ in range(math.ceil(settings.questions / rows)):
        if time.monotonic() > deadline:
            break
        count = min(rows, settings.questions)
        for one in target.write([before] * count, QUESTION, Sampling(1.0), settings.end, generator, deadline):
            question = one[one != settings.end]
            if len(question) > 2:
                found[question.tobytes()] = np.concatenate([before, question, after])
    return list(found.values())


def fitting(target: Target, rows: int, length: int) -> int:
    """So many rows of that length that their keys and values fit the memory."""
    if target.device.type != "cuda":
        return rows
    free = torch.cuda.mem_get_info(target.device)[0] + torch.cuda.memory_reserved(target.device)
    free -= torch.cuda.memory_allocated(target.device)
    shape = target.shape
    row = 2 * shape.layers * shape.kv_heads * shape.head_size * length * target.dtype.itemsize
    row += 4 * shape.vocab_size * 4  # laws and noise
    return max(1, min(rows, int(ROWS_SHARE * free / row)))


def _batches(target: Target, numbers: Array, lengths: Sequence[int], settings: Writing) -> Iterator[Array]:
    """Prompts of like lengths, side by side."""
    if not len(numbers):
        return
    kept = np.array(lengths)[numbers]
    numbers = numbers[np.argsort(kept, kind="stable")]
    rows = fitting(target, settings.rows, int(kept.max()) + settings.new)
    yield from np.array_split(numbers, math.ceil(len(numbers) / rows))


def beginnings(texts: Sequence[Text], length: int) -> Windows:
    """A window for each text: it stands at the beginning, as in use, and what place is left is filled by the texts after it.

    So nothing is padded, answers' beginnings are there twice, and each has its prompt before it.
    """
    tokens = np.zeros((len(texts), length), dtype=np.int64)
    drafted = np.zeros((len(texts), length), dtype=bool)
    for row in range(len(texts)):
        at, number = 0, row
        while at < length:
            text = texts[number % len(texts)]
            stop = min(length, at + len(text.tokens))
            tokens[row, at:stop] = text.tokens[: stop - at]
            drafted[row, at + text.asked : stop] = True
            at, number = stop, number + 1
    return Windows(tokens, drafted)


def end_to_end(texts: Sequence[Text], length: int, most: int | None = None) -> Windows:
    """Texts laid end to end and cut, as `train.corpus.cut` does. most: tokens."""
    tokens = np.concatenate([text.tokens for text in texts])
    drafted = np.concatenate([np.arange(len(text.tokens)) >= text.asked for text in texts])
    count = min(len(tokens), most or len(tokens)) // length
    return Windows(tokens[: count * length].reshape(count, length), drafted[: count * length].reshape(count, length))


def alone(texts: Sequence[Text], new: int, end: int) -> Windows:
    """Each text by itself, padded; of its answer the first `new` tokens are counted."""
    length = max(text.asked for text in texts) + new
    tokens = np.full((len(texts), length), end, dtype=np.int64)
    drafted = np.zeros((len(texts), length), dtype=bool)
    for row, text in enumerate(texts):
        stop = min(len(text.tokens), text.asked + new)
        tokens[row, :stop] = text.tokens[:stop]
        drafted[row, text.asked : stop] = True
    return Windows(tokens, drafted)


def plain(documents: Sequence[Array], length: int) -> Windows:
    """Text of the corpus, all of which may be drafted."""
    return end_to_end([Text(one.astype(np.int64), 0, 0, 0) for one in documents], length)


def joined(parts: Sequence[Windows]) -> Windows:
    """All of them."""
    return Windows(np.concatenate([part.tokens for part in parts]), np.concatenate([part.drafted for part in parts]))
