"""From a drafter's specification (`draft_specs`) to the drafter, models loaded."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
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
from outrider.errors import ParameterError, in_one_line
from outrider.models.base import LanguageModel, TextModel
from outrider.models.choices import compiles
from outrider.models.compatibility import same_tokens
from outrider.models.loading import opens
from outrider.request.draft_specs import AUTO, LAW, LOADING, is_named, named_options, of_model, split_choice, told_as_draft
from outrider.sampling import SamplingSettings

LoadModel = Callable[[str, dict[str, Any]], LanguageModel]
"""Loads a model by its name, with options of `outrider.load`."""


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


MAKERS: dict[str, Callable[..., Drafter]] = {
    "prompt-lookup": PromptLookupDrafter,
    "suffix": SuffixDrafter,
    "ngram": _ngram,
    "early-exit": EarlyExitDrafter,
    "head": HeadDrafter,
    "random": RandomDrafter,
    "self": SelfDrafter,
    "python": _own,
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


def check_compiled(spec: str, target: str) -> None:
    """Raise `ParameterError` for drafts that can't draft for a compiled target of that name, before it is compiled."""
    for part in split_choice(spec):
        name, _, text = part.partition(":")
        if name == "head":
            check_head_compiled(named_options(name, text).get("path"), target)


def make_named(spec: str, target: LanguageModel) -> Drafter:
    """The drafter for `target` that such a name and its options mean."""
    if len(parts := split_choice(spec)) > 1:
        return ChoiceDrafter([make_named(part, target) for part in parts])
    if spec == AUTO:
        return ChoiceDrafter([PromptLookupDrafter(), HeadDrafter()]) if comes_with_head(target) else PromptLookupDrafter()
    name, _, text = spec.partition(":")
    return MAKERS[name](**named_options(name, text))


def make_from_spec(spec: str, load: LoadModel, target: LanguageModel) -> Drafter:
    """The drafter for `target` that a name, or a model and its options, mean; several with " + " between are a choice."""
    if len(parts := split_choice(spec)) > 1:
        return ChoiceDrafter([make_from_spec(part, load, target) for part in parts])
    if is_named(spec):
        return make_named(spec, target)
    name, options = of_model(spec)
    with told_as_draft(name):
        model = load(name, {key: options.pop(key) for key in LOADING if key in options})
    return make_model_drafter(model, target, options, lambda inner, model: make_from_spec(inner, load, model))


def make_model_drafter(
    model: LanguageModel,
    target: LanguageModel,
    options: dict[str, Any] | None = None,
    make_inner: Callable[[str, LanguageModel], Drafter] | None = None,
) -> Drafter:
    """A drafter around a model: across vocabularies if need be, and speculative if it has a draft of its own."""
    options = dict(options or {})
    law = {key: options.pop(key) for key in LAW if key in options}
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
