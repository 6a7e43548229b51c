"""The options of `generate` and `stream`, checked once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

from outrider.errors import ParameterError
from outrider.settings.drafting import check_count_of_alternatives, check_lenience, check_without_drafts
from outrider.settings.extras import Extras
from outrider.settings.sampling import KeepsState, LogitsProcessor, SamplingSettings, constrains
from outrider.settings.seed import check_seed
from outrider.support.checks import check_count, check_switch, unknown_option
from outrider.support.text import check_stop

if TYPE_CHECKING:
    from outrider.request.choices import Draft, Length


MOST_TOP_LOGPROBS = 100


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate`; described there."""

    draft: Draft
    num_draft_tokens: Length
    max_new_tokens: int
    stop: str | Sequence[str]
    ignore_eos: bool
    seed: int | Sequence[int] | None
    logprobs: bool
    top_logprobs: int
    betas: bool
    drafts: bool
    cancelled: Callable[[], bool]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    processors: Sequence[LogitsProcessor]
    lenience: float
    alternatives: int | None
    drafter_invariant: bool


@dataclass(frozen=True)
class Options:
    """The options besides the draft, checked. See `generate`."""

    sampling: SamplingSettings
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    ignore_eos: bool = False
    extras: Extras = field(default_factory=Extras)
    cancelled: Callable[[], bool] = lambda: False
    lenience: float = 1.0
    alternatives: int | None = None
    drafter_invariant: bool = False


def parse_options(count: int, given: GenerateOptions) -> Options:
    """Check the options for a batch of `count` prompts."""
    options: dict[str, Any] = {key: value for key, value in given.items() if key not in ("draft", "num_draft_tokens")}
    _refuse_lists(options)
    seed: int | Sequence[int] | None = options.pop("seed", None)
    stop = _several("stop", options.pop("stop", None), "a string or several")
    processors = _several("processors", options.pop("processors", None), "functions of (tokens, logits) or constraints")
    if not all(callable(one) or isinstance(one, KeepsState) for one in processors):
        raise ParameterError("processors must be functions of (tokens, logits) or constraints: one of them is neither")
    if options.get("cancelled") is None:
        options.pop("cancelled", None)
    elif not callable(options["cancelled"]):
        raise ParameterError(f"cancelled must be a function that says whether to stop, got {options['cancelled']!r}")
    extras = _extras(options)
    options["ignore_eos"] = check_switch("ignore_eos", options.pop("ignore_eos", False))
    if options["ignore_eos"] and any(map(constrains, processors)):
        raise ParameterError("ignore_eos must be false with a constraint, which says where a text ends: leave it out")
    lenience = check_lenience(options.pop("lenience", 1.0))
    alternatives = options.pop("alternatives", None)
    if alternatives is not None:
        check_count_of_alternatives(alternatives)
    if given.get("draft", "") is None or _never_drafts(given.get("num_draft_tokens")):
        check_without_drafts(lenience, alternatives)
    invariant = check_switch("drafter_invariant", options.pop("drafter_invariant", False))
    if invariant and lenience < 1.0:
        raise ParameterError(f"lenience must be 1 with drafter_invariant, got {lenience:g}: drafts have no say in it")
    if invariant and alternatives and options.get("temperature"):
        raise ParameterError(f"alternatives must be 0 with drafter_invariant, got {alternatives}: rounding could show")
    rest = {key: options.pop(key) for key in ("max_new_tokens", "ignore_eos", "cancelled") if key in options}
    known = SamplingSettings.__dataclass_fields__
    unknown = [key for key in options if key not in known]
    if unknown:
        raise unknown_option(unknown[0], GenerateOptions.__annotations__, "generate")
    several = isinstance(seed, Iterable)
    seeds = tuple(check_seed(s) for s in seed) if isinstance(seed, Iterable) else (check_seed(seed),)
    if several and len(seeds) != count:
        raise ParameterError(f"seed must be one number or one for each of the {count} prompts, got {len(seeds)}")
    check_stop(stop)
    return Options(
        sampling=SamplingSettings(processors=processors, **options),
        stop=stop,
        seeds=seeds,
        extras=extras,
        lenience=lenience,
        alternatives=alternatives,
        drafter_invariant=invariant,
        **rest,
    )


def _extras(options: dict[str, Any]) -> Extras:
    """What is to be reported, taken out of the options."""
    logprobs, betas, drafts = (check_switch(name, options.pop(name, False)) for name in ("logprobs", "betas", "drafts"))
    top = options.pop("top_logprobs", 0)
    check_count("top_logprobs", top, 0, MOST_TOP_LOGPROBS)
    return Extras(logprobs or top > 0, betas, drafts, top_logprobs=int(top))


_ONE_FOR_ALL = (
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "ignore_eos",
    "logprobs",
    "top_logprobs",
    "lenience",
    "alternatives",
)


def _refuse_lists(options: dict[str, Any]) -> None:
    """Raise for one value for each prompt, as `seed` takes it."""
    stop = options.get("stop")
    nested = isinstance(stop, list | tuple) and any(isinstance(one, list | tuple) for one in stop)
    for name in (*_ONE_FOR_ALL, *(["stop"] if nested else [])):
        if isinstance(options.get(name), list | tuple):
            raise ParameterError(
                f"{name} must be one for all prompts, got a list: submit each to a ContinuousBatch, whose requests may "
                "differ, or use outrider batch"
            )


def _several(name: str, given: Any, what: str) -> tuple[Any, ...]:
    """None is none of them, and a string is one."""
    if given is None or isinstance(given, str):
        return () if given is None else (given,)
    if not isinstance(given, Iterable):
        raise ParameterError(f"{name} must be {what}, got {given!r}")
    return tuple(given)


def _never_drafts(length: Any) -> bool:
    if not isinstance(length, int | str | None):
        from outrider.draft_length.fixed import FixedLength  # which whoever made it has imported

        length = length.length if isinstance(length, FixedLength) else None
    return not isinstance(length, bool) and isinstance(length, int) and length == 0
