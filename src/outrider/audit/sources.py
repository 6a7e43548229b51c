"""Where audited texts come from: our own decoder, a file of any engine's outputs, a server.

A file holds JSON lines: {"prompt": text or token ids, "tokens": generated ids}, "audio" and a WAV file in place of the
prompt for models that hear. Optional: "rounds", as [tokens, drafted, accepted] each; the sampling settings ("temperature",
"top_p", "top_k", "min_p"), "target" and "draft", which must not differ from what is audited. Texts must be independent
samples, so none may be there twice.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import Tensor

from outrider.audio import Audio, Recordings, named
from outrider.audit.inputs import PROMPTS, read_lines
from outrider.audit.text import Text
from outrider.errors import ParameterError, in_one_line
from outrider.generation import generate
from outrider.models.base import TextModel, has_encoder
from outrider.randomness import derived_seed
from outrider.records import Round
from outrider.request.choices import Draft, Length
from outrider.request.prompts import Asked, Prompt, asked, prepare
from outrider.sampling import SamplingSettings

ROWS = 8
SURELY_DIFFERENT = 24  # tokens: two samples of so many are the same by no chance that matters
TOKENS_PER_TEXT = 128


@dataclass(frozen=True)
class Planned:
    """A text to be written: its number among all texts, from which its prompt and seed follow, and its length."""

    number: int
    prompt: Prompt
    seed: int
    max_new_tokens: int


def longest_text(sampling: SamplingSettings, tokens: int, prompts: Sequence[Prompt] = PROMPTS) -> int:
    """Tokens of a text at most, if `tokens` are wanted: greedily there is one text of each prompt and no more."""
    return max(TOKENS_PER_TEXT, -(-tokens // len(prompts))) if sampling.greedy else TOKENS_PER_TEXT


def plan_group(
    sampling: SamplingSettings, missing: int, longest: int, seed: int, done: int, prompts: Sequence[Prompt] = PROMPTS
) -> list[Planned]:
    """The next `ROWS` texts, while `missing` new tokens are wanted; none if they would be the same as those before.

    done: texts made before, after which the prompts and seeds go on.
    """
    if missing <= 0 or (sampling.greedy and done >= len(prompts)):
        return []
    length = min(longest, -(-missing // ROWS))
    return [Planned(i, prompts[i % len(prompts)], text_seed(seed, i), length) for i in range(done, done + ROWS)]


def own_texts(
    target: TextModel,
    draft: Draft,
    sampling: SamplingSettings,
    tokens: int,
    length: Length = None,
    prompts: Sequence[Prompt] = PROMPTS,
    seed: int = 0,
    done: int = 0,
    alternatives: int | None = None,
    drafter_invariant: bool = False,
) -> Iterator[Text]:
    """Texts by Outrider itself, `ROWS` at a time, until they hold `tokens` new tokens or more. Ends of text are ignored.

    done: texts made before, after which the prompts and seeds go on. alternatives, drafter_invariant: as for `generate`.
    """
    made, longest = 0, longest_text(sampling, tokens, prompts)
    while group := plan_group(sampling, tokens - made, longest, seed, done, prompts):
        read = [asked(target, one.prompt) for one in group]
        results = generate(
            target,
            read,
            draft=draft,
            num_draft_tokens=length,
            alternatives=alternatives,
            drafter_invariant=drafter_invariant,
            max_new_tokens=group[0].max_new_tokens,
            ignore_eos=True,
            seed=[one.seed for one in group],
            **sampling.options(),
        )
        done += ROWS
        for prompt, result in zip(read, results, strict=True):
            made += len(result.tokens)
            yield text_of(target, prompt, result.tokens, tuple(result.rounds))


def text_of(target: TextModel, prompt: Asked, new: Sequence[int], rounds: tuple[Round, ...]) -> Text:
    """The text of a prompt, which is an encoder-decoder's source, and the new tokens."""
    seen = prepare(target, prompt)
    source = seen.source if seen.source is None or isinstance(seen.source, Tensor) else tuple(seen.source)
    heard = prompt if isinstance(prompt, Audio) else None
    return Text((*seen.tokens, *new), len(seen.tokens), rounds, source, heard)


_SETTINGS = ("temperature", "top_p", "top_k", "min_p")
_NOT_AUDITED: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({}, []),
    "typical_p": (1,),
    "no_repeat_ngram_size": (0,),
}
"""What changes a law, by the name that engines have for it, and when it does not."""


def text_seed(seed: int, number: int) -> int:
    """The seed of a text: another one for every (seed, number), so that audits with different seeds share nothing."""
    return derived_seed(seed, number)


def to_json(text: Text, sampling: SamplingSettings, target: str, draft: str | None, drafter_invariant: bool = False) -> str:
    """A text as a line of such a file."""
    line: dict[str, Any] = {"target": target, "draft": draft, **{name: getattr(sampling, name) for name in _SETTINGS}}
    if drafter_invariant:
        line["drafter_invariant"] = True
    if text.heard is not None:
        line |= named(text.heard)
    else:
        read = text.tokens[: text.prompt_length] if text.source is None else text.source
        line["prompt"] = [int(token) for token in read]
    line["tokens"] = list(text.tokens[text.prompt_length :])
    if text.rounds:
        line["rounds"] = [record.counts for record in text.rounds]
    return json.dumps(line)


def read_texts(
    path: Path,
    target: TextModel,
    sampling: SamplingSettings,
    drafts: Sequence[str] = (),
    drafter_invariant: bool | None = None,
) -> list[Text]:
    """The texts of a file, checked line by line, against what they say.

    drafts: under which names who drafts may be there; none: whoever it is. drafter_invariant: whether they are drawn by
    position, as none is that does not say so; None: whether or not.
    """
    lines = read_lines(path)
    wanted: dict[str, Any] = {"target": target.name, **{name: getattr(sampling, name) for name in _SETTINGS}}
    if drafts:
        wanted["draft"] = drafts
    if drafter_invariant is not None:
        wanted["drafter_invariant"] = drafter_invariant
    seen: dict[tuple[Any, ...], int] = {}
    recordings = Recordings(path.parent)
    texts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        text = _parse(line, f"{path}, line {number}", target, wanted, recordings)
        first = seen.setdefault((text.heard or text.source, text.tokens), number)
        if first != number and (len(text.new) >= SURELY_DIFFERENT or sampling.greedy):
            raise ParameterError(f"{path}, line {number}: repeats line {first}, so it is no further sample: remove it")
        texts.append(text)
    if not texts:
        raise ParameterError(f"outputs file {path} holds no texts: one JSON object a line is wanted")
    return texts


def drop_torn_line(path: Path) -> None:
    """Remove a last line that was cut short: its text is made again."""
    whole = path.read_bytes()
    if whole and not whole.endswith(b"\n"):
        os.truncate(path, whole.rfind(b"\n") + 1)


def _parse(line: str, where: str, target: TextModel, wanted: dict[str, Any], recordings: Recordings) -> Text:
    try:
        entry = json.loads(line)
        if not isinstance(entry, dict):
            raise ValueError(f"it is {type(entry).__name__}, no object")
        prompt = recordings.named_by(entry, where) or entry["prompt"]
        new = token_ids(entry["tokens"])
        if not new:
            raise ParameterError(f"{where}: has no tokens, so it tells nothing: remove it")
        read = asked(target, prompt) if isinstance(prompt, str | Audio) else token_ids(prompt)
        rounds = read_rounds(entry.get("rounds") or (), new)
        _refuse_other_laws(entry, where)
        other = next((name for name in wanted if _differs(entry, wanted, name)), None)
    except ParameterError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else in_one_line(error, 80)
        raise ParameterError(
            f'{where}: must be {{"prompt": text or ids, "tokens": ids}}, got {line[:60]!r} ({reason})'
        ) from None
    if other is not None:
        option = other.replace("_", "-")
        audited = wanted[other][0] if other == "draft" else wanted[other]
        remedy = f"leave out --{option}" if audited is True else f"give --{option}"
        raise ParameterError(f"{where}: {other} is {entry.get(other, False)!r}, audited is {audited!r}: {remedy}")
    ids = [] if isinstance(read, Audio) else read
    wrong = [token for token in (*ids, *new) if not 0 <= token < target.vocab_size]
    if wrong or not read:
        what = f"token {wrong[0]}" if wrong else "no tokens in its prompt"
        raise ParameterError(f"{where}: tokens must be in 0 … {target.vocab_size - 1}, got {what}: another tokenizer?")
    context = None if has_encoder(target) else target.max_length
    if context is not None and len(ids) + len(new) > context + 1:
        raise ParameterError(
            f"{where}: has {len(ids) + len(new)} tokens with its prompt, {target.name} has {context} positions: leave it out"
        )
    return text_of(target, read, new, rounds)


def _refuse_other_laws(entry: dict[str, Any], where: str) -> None:
    """Raise for settings that an audit does not know; whatever else a line holds says nothing about its law."""
    for name, off in _NOT_AUDITED.items():
        if entry.get(name) is not None and entry[name] not in off:
            raise ParameterError(
                f"{where}: {name} is {entry[name]!r}, and only temperature, top-k, top-p and min-p are audited: give texts "
                "that were drawn without it"
            )
    for name in sorted(entry.keys() - set(_SETTINGS)):
        meant = get_close_matches(name, _SETTINGS, 1, 0.75)
        if meant:
            raise ParameterError(f"{where}: {name!r} is no setting: did you mean {meant[0]!r}?")


def _differs(entry: dict[str, Any], wanted: dict[str, Any], name: str) -> bool:
    if name == "drafter_invariant":
        return bool(entry.get(name)) is not wanted[name]
    if entry.get(name) is None:
        return False  # not said
    if name == "draft":
        return str(entry[name]) not in wanted[name]
    if name == "target":
        return bool(str(entry[name]) != wanted[name])
    given = float(entry[name])
    if not math.isfinite(given):
        raise ValueError(f"{name} must be a finite number")
    if name == "top_k":
        given = max(given, 0.0)  # -1 is no limit in some engines
    return given != float(wanted[name])


def token_ids(values: Any) -> list[int]:
    """Checked to be a list of whole numbers; `ValueError` otherwise."""
    if not isinstance(values, list) or not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        raise ValueError("token ids must be a list of whole numbers")
    return values


def read_rounds(given: Any, new: list[int]) -> tuple[Round, ...]:
    """Rounds from [tokens, drafted, accepted] each."""
    rounds, at = [], 0
    for kept, drafted, accepted in given:
        token_ids([kept, drafted, accepted])
        further = int(accepted < drafted)  # after a recovered token that was among the alternatives
        if not 0 <= accepted <= drafted or not 1 <= kept <= accepted + 1 + further:
            raise ValueError(f"a round can't be {[kept, drafted, accepted]}")
        rounds.append(Round(tuple(new[at : at + kept]), drafted, accepted, "unknown", taken=kept > accepted + 1))
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
