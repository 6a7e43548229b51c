"""The engines around transformers' models, and the drafter that a call means."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

from torch import nn

from outrider.beam.draft import draft_model
from outrider.drafters import Drafter, ModelDrafter
from outrider.errors import ParameterError
from outrider.models.as_opened import AsOpened, refuse_training
from outrider.models.base import LanguageModel
from outrider.models.compatibility import share_source
from outrider.models.kinds import engine_kind
from outrider.models.transformers_model import TransformersModel
from outrider.request.choices import bound_drafter, make_drafter
from outrider.support.alone import Alone, OneAtATime

T = TypeVar("T")
_KEPT_AS = "_outrider_engine"
OPENING = OneAtATime()
"""Held while engines are opened."""


class SameTokensDrafter(ModelDrafter):
    """No tokenizers here: like `generate`, take the caller's word that both models share one, whatever the padding."""

    def bind(self, target: Any) -> None:
        share_source(target, self.model)


def engine_of(model: Any) -> TransformersModel:
    """The engine around a model, kept on the model, since opening it costs a few forward passes."""
    if model.config.model_type == "whisper" and not model.config.is_encoder_decoder:
        raise ParameterError(
            f"{type(model).__name__} can't draft alone: load it as WhisperForConditionalGeneration; an encoder that is the "
            "target's is run once for both"
        )
    name = type(model).__name__
    refuse_training(model, name)
    kept, as_opened = model.__dict__.get(_KEPT_AS), AsOpened.of(model, name)
    if kept is None or kept.engine is None or kept.as_opened != as_opened or kept.engine.module is not model:
        kept = model.__dict__[_KEPT_AS] = _Kept(as_opened, engine_kind(model)(model))
    return kept.engine  # type: ignore[no-any-return]


class _Kept:
    """An engine on its model. Copies of the model, and what is written of it, do without: theirs are opened anew."""

    def __init__(self, as_opened: Any = None, engine: TransformersModel | None = None) -> None:
        self.as_opened, self.engine = as_opened, engine

    def __reduce__(self) -> Any:
        return _Kept, ()


def held_alone(target: TransformersModel, drafter: Drafter | None, draft: LanguageModel | None, work: Callable[[], T]) -> T:
    """Do a call's work with its engines from its beginning to its end, when the caches are freed."""
    used = [target, *(() if draft is None else (draft,)), *(drafter.engines() if drafter is not None else ())]
    own = [one for one in used if isinstance(one, TransformersModel) and _KEPT_AS in one.module.__dict__]

    def freed() -> T:
        with ExitStack() as stack:
            for one in own:
                stack.callback(one.give_back)
            return work()

    return Alone(used).hold(freed)


def drafter_of(assistant_model: Any, draft: Any, target: TransformersModel) -> Drafter | None:
    """Who drafts: the assistant, or what `draft` names, by default whatever is best without a further model."""
    _check_assistant(assistant_model, draft)
    if assistant_model is not None:
        return SameTokensDrafter(engine_of(assistant_model))
    return make_drafter(_wrapped("auto" if draft is None else draft), target)


def beam_draft(assistant_model: Any, draft: Any, target: TransformersModel) -> LanguageModel | None:
    """The model that drafts hypotheses; None for plain beam search."""
    _check_assistant(assistant_model, draft)
    asked = assistant_model if assistant_model is not None else draft
    if isinstance(asked, list | tuple) and len(asked) == 1:
        asked = asked[0]
    if asked is None or isinstance(asked, nn.Module):
        return None if asked is None else engine_of(asked)
    drafter = bound_drafter(asked, target)
    return None if drafter is None else draft_model(drafter)


def _check_assistant(assistant_model: Any, draft: Any) -> None:
    """Raise `ParameterError` for what is no model of transformers, and beside another draft."""
    if assistant_model is None:
        return
    if draft is not None:
        raise ParameterError("draft and assistant_model must not both be given: leave one out")
    if not isinstance(assistant_model, nn.Module) or not hasattr(getattr(assistant_model, "config", None), "model_type"):
        got = repr(assistant_model) if isinstance(assistant_model, str | int | float) else type(assistant_model).__name__
        raise ParameterError(
            f"assistant_model must be a transformers model, got {got}: load it with from_pretrained, or give draft=, which "
            "takes all that outrider.generate takes"
        )


def _wrapped(draft: Any) -> Any:
    """A draft as `outrider.generate` takes it: models of transformers by themselves or in a list are wrapped."""
    if isinstance(draft, list | tuple):
        return [_wrapped(one) for one in draft]
    return SameTokensDrafter(engine_of(draft)) if isinstance(draft, nn.Module) else draft
