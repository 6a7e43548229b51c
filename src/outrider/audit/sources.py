"""Where audited texts come from: our own decoder, a file of any engine's outputs, a server.

A file holds JSON lines: {"prompt": text or token ids, "tokens": generated ids, "rounds": optional numbers of tokens of each
round}. Sampling settings may be given in a line ("temperature", "top_p", "top_k", "min_p"); they must not differ from those
that are audited.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from outrider.audit.sampled import Text
from outrider.choices import Draft, Length
from outrider.errors import ParameterError
from outrider.generation import generate
from outrider.models.base import TextModel
from outrider.records import Round
from outrider.sampling import SamplingSettings

ROWS = 8
TOKENS_PER_TEXT = 128
PROMPTS = (
    "def quicksort(items):\n",
    "The history of the bicycle begins in",
    "Dear Dr. Novak,\n\nThank you for your letter about",
    "1, 2, 4, 8, 16,",
    "Q: Why is the sky blue?\nA:",
    "import json\n\n\nclass Settings:\n",
    "Once upon a time, in a village by the sea,",
    "| name | age | city |\n|---|---|---|\n| Ann |",
    "La recette de la ratatouille :\n",
    "SELECT name, COUNT(*) FROM orders",
    "To be, or not to be, that is the question:",
    "Abstract. We show that every finite group of",
    "<html>\n<head>\n<title>",
    "MINUTES OF THE MEETING\n\nPresent:",
    "What I learned from ten years of gardening is",
    "Error: expected ';' before '}' token\n",
)
"""Beginnings of different kinds of text, none of which fixes how it goes on."""


def own_texts(
    target: TextModel,
    draft: Draft,
    sampling: SamplingSettings,
    tokens: int,
    length: Length = None,
    prompts: Sequence[str] = PROMPTS,
    seed: int = 0,
    done: int = 0,
) -> Iterator[Text]:
    """Texts by Outrider itself, `ROWS` at a time, until they hold `tokens` new tokens or more. Ends of text are ignored.

    done: texts made before, after which the prompts and seeds go on.
    """
    made = 0
    while made < tokens:
        chosen = [prompts[(done + i) % len(prompts)] for i in range(ROWS)]
        ids = [[int(token) for token in target.tokenizer.encode(prompt)] for prompt in chosen]
        results = generate(
            target,
            ids,
            draft=draft,
            num_draft_tokens=length,
            max_new_tokens=min(TOKENS_PER_TEXT, -(-(tokens - made) // ROWS)),
            ignore_eos=True,
            seed=[seed + done + i for i in range(ROWS)],
            **sampling.options(),
        )
        done += ROWS
        for prompt, result in zip(ids, results, strict=True):
            made += len(result.tokens)
            yield Text((*prompt, *result.tokens), len(prompt), tuple(result.rounds))


_SETTINGS = ("temperature", "top_p", "top_k", "min_p")


def to_json(text: Text, sampling: SamplingSettings) -> str:
    """A text as a line of such a file."""
    line: dict[str, Any] = {name: getattr(sampling, name) for name in _SETTINGS}
    line["prompt"] = list(text.tokens[: text.prompt_length])
    line["tokens"] = list(text.tokens[text.prompt_length :])
    if text.rounds:
        line["rounds"] = [[len(record.tokens), record.drafted, record.accepted] for record in text.rounds]
    return json.dumps(line)


def read_texts(path: Path, target: TextModel, sampling: SamplingSettings) -> list[Text]:
    """The texts of a file, checked line by line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"outputs file {path} can't be read ({error}): name a file of JSON lines") from None
    texts = [_parse(line, f"{path}, line {n}", target, sampling) for n, line in enumerate(lines, 1) if line.strip()]
    if not texts:
        raise ParameterError(f"outputs file {path} holds no texts: one JSON object a line is wanted")
    return texts


def _parse(line: str, where: str, target: TextModel, sampling: SamplingSettings) -> Text:
    try:
        entry = json.loads(line)
        prompt, new = entry["prompt"], _ids(entry["tokens"])
        ids = target.tokenizer.encode(prompt) if isinstance(prompt, str) else _ids(prompt)
        rounds = _rounds(entry.get("rounds", ()), new)
    except (ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ParameterError(
            f'{where}: must be {{"prompt": text or ids, "tokens": ids}}, got {line[:60]!r} ({reason})'
        ) from None
    for name in _SETTINGS:
        if name in entry and float(entry[name]) != float(getattr(sampling, name)):
            raise ParameterError(
                f"{where}: {name} is {entry[name]}, audited is {getattr(sampling, name)}: give --{name.replace('_', '-')}"
            )
    tokens = (*[int(token) for token in ids], *new)
    wrong = [token for token in tokens if not 0 <= token < target.vocab_size]
    if wrong or not new or not len(ids):
        what = f"token {wrong[0]}" if wrong else "no tokens"
        raise ParameterError(f"{where}: tokens must be in 0 … {target.vocab_size - 1}, got {what}: another tokenizer?")
    return Text(tokens, len(ids), rounds)


def _ids(values: Any) -> list[int]:
    if not isinstance(values, list) or not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        raise ValueError("token ids must be a list of whole numbers")
    return values


def _rounds(given: Any, new: list[int]) -> tuple[Round, ...]:
    """Rounds from [tokens, drafted, accepted] each."""
    rounds, at = [], 0
    for kept, drafted, accepted in given:
        rounds.append(Round(tuple(new[at : at + kept]), drafted, accepted, "unknown"))
        at += kept
    if rounds and at != len(new):
        raise ValueError(f"rounds hold {at} tokens, there are {len(new)}")
    return tuple(rounds)


def name_of(sampling: SamplingSettings) -> str:
    """Settings in words."""
    if sampling.greedy:
        return "temperature 0"
    limits = {"top-k": sampling.top_k, "top-p": sampling.top_p if sampling.top_p < 1 else 0, "min-p": sampling.min_p}
    return ", ".join(
        [f"temperature {sampling.temperature:g}", *(f"{name} {value:g}" for name, value in limits.items() if value)]
    )
