"""What was found, as a file that `outrider generate --config` takes, and in the words of other engines."""

from __future__ import annotations

import json
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.errors import ParameterError, why_unread
from outrider.request.draft_specs import is_named, split_choice, split_model

_KINDS: dict[str, type | tuple[type, ...]] = {
    "target": str,
    "draft": (str, list),
    "num_draft_tokens": (int, str),
    "dtype": str,
    "engine": str,
    "device": str,
    "plain": bool,
    "compile": bool,
}


@dataclass(frozen=True)
class Configuration:
    """The models and the draft. draft: None for plain decoding. num_draft_tokens: a number, or "auto"."""

    target: str | None
    draft: str | None
    num_draft_tokens: int | str
    dtype: str = "auto"
    engine: str = "auto"
    device: str = "auto"
    compile: bool = False

    def to_toml(self) -> str:
        """The text of the file. A JSON string, number or boolean is one of TOML, too."""
        entries: dict[str, Any] = {key: value for key, value in asdict(self).items() if value is not None}
        if self.draft is None:
            entries["plain"] = True
            del entries["num_draft_tokens"]
        if not self.compile:
            del entries["compile"]
        lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in entries.items()]
        return "\n".join(["# Written by outrider tune; for outrider generate --config.", *lines, ""])

    def equivalents(self, fixed: int) -> dict[str, str]:
        """The same in transformers, vLLM and llama.cpp, where they have this kind of draft.

        fixed: the best length that does not adapt, for those, if this one does; 0: none.
        """
        engines = ("transformers", "vLLM", "llama.cpp")
        if self.draft is None:
            return dict.fromkeys(engines, "no draft: plain decoding is quickest here")
        count = self.num_draft_tokens if isinstance(self.num_draft_tokens, int) else fixed
        if not count:
            return dict.fromkeys(engines, "no draft: it pays with lengths that adapt, with no fixed one")
        if len(split_choice(self.draft)) > 1:
            return {}
        kind = self.draft.partition(":")[0]
        if kind in ("prompt-lookup", "suffix"):
            method = {"method": "ngram", "num_speculative_tokens": count, "prompt_lookup_max": 8, "prompt_lookup_min": 1}
            return {
                "transformers": f"model.generate(…, prompt_lookup_num_tokens={count})",
                "vLLM": f"--speculative-config '{json.dumps(method)}'",
                "llama.cpp": f"llama-server … --spec-type ngram-simple --draft-max {count}",
            }
        if is_named(self.draft):
            return {}
        name, _ = split_model(self.draft)  # its options are ours
        model = {"model": name, "num_speculative_tokens": count}
        return {
            "transformers": f"draft.generation_config.num_assistant_tokens = {count}; draft.generation_config."
            'num_assistant_tokens_schedule = "constant"; model.generate(…, assistant_model=draft)',
            "vLLM": f"--speculative-config '{json.dumps(model)}'",
            "llama.cpp": f"llama-server … -md {name} --draft-max {count} --draft-min 0",
        }


def read_configuration(path: Path) -> dict[str, Any]:
    """The options in such a file, by the names that the command line has for them."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ParameterError(
            f"config {path} can't be read ({why_unread(error)}): make one with outrider tune --output"
        ) from None
    for key, value in found.items():
        if key not in _KINDS:
            raise ParameterError(f"config {path}: {key!r} is not one of {', '.join(_KINDS)}: remove it")
        if not isinstance(value, _KINDS[key]) or (isinstance(value, bool) and _KINDS[key] is not bool):
            raise ParameterError(f"config {path}: {key} can't be {value!r}")
    if isinstance(found.get("draft"), str):
        found["draft"] = (found["draft"],)
    if "num_draft_tokens" in found:
        found["num_draft_tokens"] = str(found["num_draft_tokens"])
    return found
