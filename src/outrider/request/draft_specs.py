"""Drafters by name: NAME[:option=value,…], as `--draft` and `draft=` take them.

    prompt-lookup[:max_ngram=8,min_ngram=1]     suffix[:memory=yes,store=FILE,min_match=1]
    ngram:table=FILE[,order=4]                  early-exit[:layers=8]                     random
    head[:path=FOLDER,dtype=auto|float|int8]    auto                                      python:make=MODULE.NAME
    self[:temperature=T,top_k=K,top_p=P,min_p=M]
    MODEL[:temperature=T,top_k=K,top_p=P,min_p=M,vocabulary=intersection|text,dtype=D,engine=E,num_tokens=N,num_draft_tokens=N,draft=SPEC]

`draft=` makes the model's own drafting speculative (Leviathan 5) and takes the rest of the text, so that it nests to any
depth. "A + B" is a choice among several, at each point. A model with another tokenizer than the target's drafts text
(`drafters.other_tokenizer`). A model's sampling options are the draft's own; by default it samples as the target does. A
head's path may be a published one's, or its name on the hub (`heads.published`). dtype, engine and num_tokens are those of
`outrider.load`.
auto is prompt-lookup, and beside it the draft head that comes with the package for the target, if there is one. python is a
drafter of the user's: the module is looked for in the working folder, too, and what it has by that name is called.

Here is what such a text says, read without torch; `from_specs` makes the drafter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from outrider.errors import ModelError, ParameterError
from outrider.heads.config import is_head
from outrider.models.names import check_at_hand, resolve

Options = dict[str, Callable[[str], Any]]
"""Names of options, and what makes a value of the text of each."""
_FIRST_OPTION = re.compile(r":[a-z_]+=")


def _yes_or_no(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError(text)
    return text == "yes"


LAW: Options = {"temperature": float, "top_k": int, "top_p": float, "min_p": float}
AUTO = "auto"
_NOTHING = ("none", "no", "off", "false")
NAMED: dict[str, Options] = {
    "prompt-lookup": {"max_ngram": int, "min_ngram": int},
    "suffix": {"memory": _yes_or_no, "store": str, "min_match": int},
    "ngram": {"table": str, "order": int},
    "early-exit": {"layers": int},
    "head": {"path": str, "dtype": str},
    "random": {},
    "self": LAW,
    "python": {"make": str},
}
"""The drafters that need no model, and their options."""
LOADING: Options = {"dtype": str, "engine": str, "num_tokens": int}
_MODEL_OPTIONS: Options = {
    **LAW,
    "vocabulary": str,
    **LOADING,
    "num_draft_tokens": int,
    "draft": str,
}


def split_choice(spec: str) -> list[str]:
    """The drafters that one text names: "A + B" is a choice among them at each point."""
    return [spec] if Path(spec).expanduser().exists() else [part.strip() for part in spec.split(" + ")]


def is_named(spec: str) -> bool:
    """Whether this means a drafter that needs no model to be loaded."""
    return all(part == AUTO or part.partition(":")[0] in NAMED for part in split_choice(spec))


def meant_by(spec: str) -> str | None:
    """The drafter's name that this may have been meant for."""
    found = get_close_matches(spec.partition(":")[0], [AUTO, *NAMED], 1, 0.75)
    return found[0] if found else None


def check_spec(spec: str) -> None:
    """Raise `ParameterError` for a name or an option that there is not, before anything is loaded."""
    if len(parts := split_choice(spec)) > 1:
        for part in parts:
            check_spec(part)
    elif is_named(spec):
        name, _, text = spec.partition(":")
        named_options(name, text)
    elif (inner := of_model(spec)[1].get("draft")) is not None:
        check_spec(inner)


def check_models(spec: str) -> None:
    """Raise `ModelError` for a model that there is not, before any other is loaded."""
    for part in split_choice(spec):
        if is_named(part):
            continue
        name, options = of_model(part)
        with told_as_draft(name):
            check_at_hand(resolve(name))
        if "draft" in options:
            check_models(options["draft"])


@contextmanager
def told_as_draft(name: str) -> Iterator[None]:
    """Where a model is looked for that might have been meant as a drafter: what goes wrong says so."""
    try:
        yield
    except ModelError as error:
        if "/" in name or Path(name).suffix or Path(name).exists():
            raise
        raise ModelError(f"draft {name!r} is none of {', '.join((AUTO, *NAMED))}, and as a model: {error}") from error


def named_options(name: str, text: str) -> dict[str, Any]:
    """The options in the text after the name of a drafter that needs no model."""
    return _parse(name, text, {} if name == AUTO else NAMED[name])


def of_model(spec: str) -> tuple[str, dict[str, Any]]:
    """A model's name and its options. Raises `ParameterError` for what was meant to be something else."""
    name, text = split_model(spec)
    if name.lower() in _NOTHING and not Path(name).exists():
        raise ParameterError(
            f"draft {name!r} is no drafter: leave it out, and say plain (draft=None) where nothing is to be drafted"
        )
    meant = meant_by(name)
    if meant is not None and not Path(name).expanduser().exists():
        raise ParameterError(
            f"draft {name!r} is no drafter: did you mean {meant}? For a model of that name give its folder or owner/name"
        )
    if Path(name).expanduser().is_dir() and is_head(Path(name).expanduser()):
        raise ParameterError(f"draft {name!r} is a draft head's folder: name it head:path={name}")
    return name, _parse(name, text, _MODEL_OPTIONS)


def split_model(spec: str) -> tuple[str, str]:
    """A model's name and the options after it; a colon inside an existing path belongs to the path."""
    if Path(spec).expanduser().exists():
        return spec, ""
    found = _FIRST_OPTION.search(spec)
    return (spec[: found.start()], spec[found.start() + 1 :]) if found else (spec, "")


def _parse(name: str, text: str, types: dict[str, Callable[[str], Any]]) -> dict[str, Any]:
    """option=value,… → values; `draft=` takes the rest."""
    found: dict[str, Any] = {}
    while text:
        key, equals, rest = text.partition("=")
        if key not in types or not equals:
            known = ", ".join(types) or "none"
            example = f"{name}:make={key}" if name == "python" else "name:option=value"
            raise ParameterError(f"draft {name} has no option {key!r}: its options are {known}, given as {example}")
        if key in found:
            raise ParameterError(f"draft {name} must have each option once, got two of {key}: leave one out")
        value, _, text = (rest, "", "") if key == "draft" else rest.partition(",")
        try:
            found[key] = types[key](value)
        except ValueError:
            raise ParameterError(f"draft {name} got {key}={value!r}, which is no value of this option") from None
    return found
