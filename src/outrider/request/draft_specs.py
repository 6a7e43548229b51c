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
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import outrider
from outrider.draft_length import FixedLength
from outrider.drafters import (
    ChoiceDrafter,
    Drafter,
    EarlyExitDrafter,
    HeadDrafter,
    IntersectionDrafter,
    ModelDrafter,
    NgramDrafter,
    PromptLookupDrafter,
    RandomDrafter,
    SelfDrafter,
    SpeculativeDrafter,
    SuffixDrafter,
    TextDrafter,
)
from outrider.drafters.head import check_compiled as check_head_compiled
from outrider.drafters.head import comes_with_head
from outrider.errors import ModelError, ParameterError, in_one_line
from outrider.heads.config import is_head
from outrider.models.base import LanguageModel, TextModel
from outrider.models.compatibility import same_tokens
from outrider.models.loading import compiles, opens
from outrider.sampling import SamplingSettings

LoadModel = Callable[[str, dict[str, Any]], LanguageModel]
"""Loads a model by its name, with options of `outrider.load`."""
_FIRST_OPTION = re.compile(r":[a-z_]+=")
_LAW: dict[str, Callable[[str], Any]] = {"temperature": float, "top_k": int, "top_p": float, "min_p": float}


@dataclass(frozen=True)
class Named:
    """A drafter that needs no model: what makes it, its options and their types."""

    make: Callable[..., Drafter]
    options: dict[str, Callable[[str], Any]]


def _yes_or_no(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError(text)
    return text == "yes"


def _ngram(table: str | None = None, order: int | None = None) -> NgramDrafter:
    if table is None:
        raise ParameterError("draft ngram needs a table: ngram:table=FILE, made by outrider train-ngram")
    return NgramDrafter(table, order)


def _own(make: str | None = None) -> Drafter:
    module, _, name = (make or "").rpartition(".")
    if not module:
        raise ParameterError("draft python needs a drafter of yours: python:make=MODULE.NAME (docs/writing-a-drafter.md)")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        made = getattr(importlib.import_module(module), name)()
    except Exception as error:  # whatever a user's program may raise
        reason = f"{type(error).__name__}: {in_one_line(error, 160)}"
        raise ParameterError(f"draft python:make={make} can't be made ({reason}): mend it, or name another") from error
    if not isinstance(made, Drafter):
        raise ParameterError(f"draft python:make={make} must be a subclass of outrider.drafters.Drafter, got {made!r}")
    return made


AUTO = "auto"
_NOTHING = ("none", "no", "off", "false")
NAMED = {
    "prompt-lookup": Named(PromptLookupDrafter, {"max_ngram": int, "min_ngram": int}),
    "suffix": Named(SuffixDrafter, {"memory": _yes_or_no, "store": str, "min_match": int}),
    "ngram": Named(_ngram, {"table": str, "order": int}),
    "early-exit": Named(EarlyExitDrafter, {"layers": int}),
    "head": Named(HeadDrafter, {"path": str, "dtype": str}),
    "random": Named(RandomDrafter, {}),
    "self": Named(SelfDrafter, _LAW),
    "python": Named(_own, {"make": str}),
}
_LOADING: dict[str, Callable[[str], Any]] = {"dtype": str, "engine": str, "num_tokens": int}
_MODEL_OPTIONS: dict[str, Callable[[str], Any]] = {
    **_LAW,
    "vocabulary": str,
    **_LOADING,
    "num_draft_tokens": int,
    "draft": str,
}


def loading_options(own: dict[str, Any], dtype: str, engine: str) -> dict[str, Any]:
    """For `outrider.load`: a draft's own options before the target's.

    An own dtype is opened by the engine that suits it; an own engine that can't open the target's dtype chooses one itself.
    """
    if "engine" in own and not opens(own["engine"], dtype):
        dtype = "auto"
    return {"dtype": dtype, "engine": "auto" if "dtype" in own else engine, **own}


def load_draft_model(
    name: str,
    own: dict[str, Any],
    dtype: str,
    device: str,
    engine: str,
    compile: bool = False,  # noqa: A002
    pack: bool = True,
) -> TextModel:
    """A draft's model as its target is loaded, but for options of its own; compiled where such models can be."""
    options = loading_options(own, dtype, engine)
    quick = compile and compiles(options["dtype"], options["engine"])
    return outrider.load(name, device=device, pack=pack, **options, compile=quick)


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
        _parse(name, text, {} if name == AUTO else NAMED[name].options)
    elif (inner := _of_model(spec)[1].get("draft")) is not None:
        check_spec(inner)


def check_compiled(spec: str, target: str) -> None:
    """Raise `ParameterError` for drafts that can't draft for a compiled target of that name, before it is compiled."""
    for part in split_choice(spec):
        name, _, text = part.partition(":")
        if name == "head":
            check_head_compiled(_parse(name, text, NAMED[name].options).get("path"), target)


def make_named(spec: str, target: LanguageModel) -> Drafter:
    """The drafter for `target` that such a name and its options mean."""
    if len(parts := split_choice(spec)) > 1:
        return ChoiceDrafter([make_named(part, target) for part in parts])
    if spec == AUTO:
        return ChoiceDrafter([PromptLookupDrafter(), HeadDrafter()]) if comes_with_head(target) else PromptLookupDrafter()
    name, _, text = spec.partition(":")
    named = NAMED[name]
    return named.make(**_parse(name, text, named.options))


def make_from_spec(spec: str, load: LoadModel, target: LanguageModel) -> Drafter:
    """The drafter for `target` that a name, or a model and its options, mean; several with " + " between are a choice."""
    if len(parts := split_choice(spec)) > 1:
        return ChoiceDrafter([make_from_spec(part, load, target) for part in parts])
    if is_named(spec):
        return make_named(spec, target)
    name, options = _of_model(spec)
    try:
        model = load(name, {key: options.pop(key) for key in _LOADING if key in options})
    except ModelError as error:
        if "/" in name or Path(name).suffix or Path(name).exists():
            raise
        raise ModelError(f"draft {name!r} is none of {', '.join((AUTO, *NAMED))}, and as a model: {error}") from error
    return make_model_drafter(model, target, options, lambda inner, model: make_from_spec(inner, load, model))


def _of_model(spec: str) -> tuple[str, dict[str, Any]]:
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


def make_model_drafter(
    model: LanguageModel,
    target: LanguageModel,
    options: dict[str, Any] | None = None,
    make_inner: Callable[[str, LanguageModel], Drafter] | None = None,
) -> Drafter:
    """A drafter around a model: across vocabularies if need be, and speculative if it has a draft of its own."""
    options = dict(options or {})
    law = {key: options.pop(key) for key in _LAW if key in options}
    sampling = SamplingSettings(**{"temperature": 1.0, **law}) if law else None
    inner, length = options.get("draft"), options.get("num_draft_tokens")
    vocabulary = options.get("vocabulary")
    if vocabulary not in (None, "intersection", "text"):
        raise ParameterError(f"vocabulary must be intersection or text, got {vocabulary!r}")
    foreign = vocabulary is not None or (getattr(target, "tokenizer", None) and not same_tokens(target, model))
    if inner is not None and vocabulary is not None:
        raise ParameterError(
            "vocabulary and draft exclude each other: a draft with a draft of its own needs the target's tokens"
        )
    if inner is not None and make_inner is not None:
        policy = FixedLength(length) if length is not None else None
        return SpeculativeDrafter(model, make_inner(inner, model), policy, sampling)
    if length is not None:
        raise ParameterError("num_draft_tokens belongs to a draft with a draft of its own: give it without the colon")
    if foreign and vocabulary != "intersection":
        if law:
            raise ParameterError(
                f"{next(iter(law))} belongs to a draft that samples, and one with another tokenizer drafts text greedily: "
                "leave it out, or give vocabulary=intersection, too"
            )
        return TextDrafter(model)
    if foreign:
        return IntersectionDrafter(model, sampling)
    return ModelDrafter(model, sampling)


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
