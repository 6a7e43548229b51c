"""The lines of a file of prompts: checked all at once before a model is loaded, read one by one afterwards.

A line is a JSON object with `prompt` (text or token ids), `messages` (for the chat template) or `audio` (a WAV file, beside
the lines' own, for a model that hears; with `language` and `task` if need be), and, if it wants other settings than the
command's, any of `OPTIONS`. `id` and `metadata` are handed on to the line's result. A prompt's index is
its line's number among those that are not empty, from 0: with the seed it is all that its randomness depends on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from outrider.audio import Audio, Recordings
from outrider.errors import ParameterError
from outrider.request.from_json import check_kinds, read_biases, read_prompt, read_regex, read_schema
from outrider.request.options import Options, parse_options
from outrider.structured import Structure
from outrider.support.checks import check_count
from outrider.support.text import check_characters

_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
LAW = ("temperature", "top_k", "top_p", "min_p", *_PENALTIES, "logit_bias")
STRUCTURE = ("json_schema", "regex")
OPTIONS = ("max_new_tokens", "stop", "ignore_eos", "seed", "logprobs", "top_logprobs", *LAW, *STRUCTURE)
_PROMPTS = ("prompt", "messages", "audio")
_KEYS = (*_PROMPTS, "language", "task", "id", "metadata", *OPTIONS)


@dataclass(frozen=True)
class Job:
    """One prompt. options: what the line says otherwise than the command. passed: `id` and `metadata`, if it has them."""

    index: int
    prompt: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    passed: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Prompts:
    """A checked file. digest: of its bytes and of the recordings that it names, by which a run that goes on knows them."""

    path: Path
    count: int
    digest: str

    def jobs(self) -> Iterator[Job]:
        """The prompts, read as they are asked for; `ParameterError` if they are no longer those that were checked."""
        digest, index = hashlib.sha256(), -1
        for number, index, line in _lines(self.path):
            digest.update(line)
            if index >= self.count:
                break
            job = _job(self.path, number, index, line)
            _add_recording(digest, job)
            yield job
        if index + 1 != self.count or digest.hexdigest() != self.digest:
            raise ParameterError(
                f"{self.path}, or a recording that it names, has changed since it was checked: restore it and go on, or "
                "begin anew with another --output"
            )


def check_prompts(path: Path, defaults: Mapping[str, Any]) -> Prompts:
    """Read the file once, keep nothing, and raise one `ParameterError` with the number of the first line that is wrong.

    defaults: the command's own options, which the lines' are laid over.
    """
    count, digest = 0, hashlib.sha256()
    options_of(Job(0, ""), defaults)  # or the first line would be blamed
    for number, index, line in _lines(path):
        digest.update(line)
        job = _job(path, number, index, line)
        _add_recording(digest, job)
        try:
            ignored = options_of(job, defaults).ignore_eos
            _check_structure(structure_of(job, defaults), ignored)
        except ParameterError as error:
            raise ParameterError(f"{path}, line {number}: {error}") from None
        count = index + 1
    if not count:
        raise ParameterError(f'{path} holds no prompts: give a JSON object such as {{"prompt": "…"}} on each line')
    return Prompts(path, count, digest.hexdigest())


def _add_recording(digest: hashlib._Hash, job: Job) -> None:
    if isinstance(job.prompt, Audio):
        digest.update(job.prompt.digest)


def options_of(job: Job, defaults: Mapping[str, Any]) -> Options:
    """The job's options: its own over the command's."""
    both = {key: value for key, value in {**defaults, **job.options}.items() if key not in STRUCTURE}
    options = parse_options(1, both)  # type: ignore[arg-type]
    check_count("max_new_tokens", options.max_new_tokens)
    return options


def structure_of(job: Job, defaults: Mapping[str, Any]) -> Structure | None:
    """What the job's text must follow: its own schema and pattern, if it names either, instead of the command's."""
    source = job.options if any(key in job.options for key in STRUCTURE) else defaults
    found = [source.get(key) for key in STRUCTURE]
    return None if found == [None, None] else Structure(*found)


@lru_cache(maxsize=256)
def _check_structure(structure: Structure | None, ignore_eos: bool) -> None:
    """Checked once where many lines name the same."""
    if structure is not None:
        structure.check(ignore_eos)


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """The lines that are not empty. → (number from 1, index from 0, the line)"""
    index = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, index, line
                    index += 1
    except OSError as error:
        how = (
            "write standard input to a file first" if str(path) == "-" else "check the path"
        )  # a resumed run reads it again
        raise ParameterError(f"prompts {path} can't be read ({error.strerror}): {how}") from None


def _job(path: Path, number: int, index: int, line: bytes) -> Job:
    where = f"{path}, line {number}"
    try:
        found = json.loads(line.decode("utf-8"), object_pairs_hook=_object)
    except UnicodeDecodeError:
        raise ParameterError(f"{where} is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ParameterError(f"{where} is not JSON ({error.msg}, column {error.colno}): one object a line") from None
    except _TwiceError as error:
        raise ParameterError(f"{where}: {error.args[0]!r} is given twice: leave one out") from None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ParameterError(f'{where} must be a JSON object such as {{"prompt": "…"}}')
    unknown = [key for key in found if key not in _KEYS]
    if unknown:
        raise ParameterError(f"{where}: {unknown[0]!r} must be one of {', '.join(_KEYS)}: put other data into metadata")
    if sum(key in found for key in _PROMPTS) != 1:
        raise ParameterError(f"{where} must have exactly one of {', '.join(_PROMPTS)}")
    wrong = [key for key in ("language", "task") if key in found and "audio" not in found]
    if wrong:
        raise ParameterError(f"{where}: {wrong[0]} is for audio: leave it out")
    try:
        options = _options({key: found[key] for key in OPTIONS if key in found})
        prompt = _prompt(path, where, found)
    except ParameterError as error:
        raise error if str(error).startswith(where) else ParameterError(f"{where}: {error}") from None
    return Job(index, prompt, options, _passed(where, found))


def _options(options: dict[str, Any]) -> dict[str, Any]:
    """What a line says; a schema or pattern of null is none, and neither is the command's then."""
    check_kinds(options)
    for key, read in (("json_schema", read_schema), ("regex", read_regex), ("logit_bias", read_biases)):
        if key in options:
            options[key] = read(options[key])
    return options


def _passed(where: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """What is handed on to the result, as it is."""
    passed = {key: found[key] for key in ("id", "metadata") if key in found}
    try:
        json.dumps(passed, allow_nan=False)
    except ValueError:
        raise ParameterError(
            f"{where}: id and metadata must be JSON, which has no NaN and no Infinity: leave it out"
        ) from None
    return passed


class _TwiceError(Exception):
    """A key that an object has twice, of which JSON's reader would keep the last."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _TwiceError(next(key for key in keys if keys.count(key) > 1))
    return found


def _prompt(path: Path, where: str, found: Mapping[str, Any]) -> Any:
    if "prompt" in found:
        return read_prompt(found["prompt"])
    if "messages" in found:
        return _messages(found["messages"])
    heard = Recordings(path.parent).named_by(found, where)
    if heard is None:
        raise ParameterError("audio must name a WAV file, got null")
    return heard


def _messages(messages: Any) -> Any:
    def good(one: Any) -> bool:
        return isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)

    if not (isinstance(messages, list) and messages and all(good(one) for one in messages)):
        raise ParameterError("messages must be a list of objects with role and content")
    for one in messages:
        check_characters("message", one["content"])
    return messages
