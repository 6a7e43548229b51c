"""What stands above a trace: the figures of the run, what it depended on, and how far the cost table can be believed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.draft_length.predicted import plain_seconds, predicted_seconds
from outrider.results import Result

if TYPE_CHECKING:
    from outrider.costs import Costs
    from outrider.drafters import Drafter
    from outrider.models.base import TextModel

EXTRAS = ("logprobs", "betas", "drafts")
"""The options of `generate` that a trace shows the results of."""

DOUBTFUL = 1.5  # rounds that take this many times as long or as short as predicted: the time lines can't be compared

ENDINGS = {
    "eos": "the end-of-sequence token",
    "stop": "a stop string, which is not part of the text",
    "length": "max_new_tokens",
    "context": "the end of the model's context",
    "cancelled": "being cut short",
}


@dataclass(frozen=True)
class Figure:
    """A number of the header, and what it means."""

    label: str
    value: str
    note: str


def missing(result: Result) -> list[str]:
    """The extras that the records do not hold; log-probabilities of a run without tokens are not missing."""
    drafted = [r for r in result.rounds if r.drafted]
    held = {
        "logprobs": all(r.logprobs is not None for r in result.rounds),
        "betas": all(r.betas is not None for r in drafted),
        "drafts": all(r.drafts is not None for r in drafted),
    }
    return [name for name in EXTRAS if not held[name]]


def figures(result: Result, draft: Drafter | None, costs: Costs | None, plain: Result | None) -> list[Figure]:
    """The numbers of the header."""
    stats = result.stats
    rate = stats.acceptance_rate
    tested = "nothing was drafted" if rate is None else f"{stats.accepted} of {stats.tested} tested drafts accepted"
    figures = [
        Figure("tokens a second", f"{stats.tokens_per_second:.1f}", "reading the prompt left out"),
        Figure(
            "tokens a round", f"{stats.mean_acceptance_length:.2f}", "mean acceptance length, for one pass of the target"
        ),
        Figure("acceptance rate α", "–" if rate is None else f"{rate:.2f}", tested),
        Figure("tokens", f"{stats.tokens:,}", f"in {stats.rounds:,} rounds"),
    ]
    if result.lossy:
        note = (
            f"lenience {result.lenience:g}: these tokens are there by it alone; the text need not follow "
            "the target's distribution"
        )
        figures.append(Figure("LOSSY", f"{stats.lenient:,}", note))
    return figures + _speedups(result, draft, costs, plain)


def _speedups(result: Result, draft: Drafter | None, costs: Costs | None, plain: Result | None) -> list[Figure]:
    """What is known of the gain over plain decoding."""
    found, seconds = [], result.stats.decode_seconds
    if plain is not None and plain.stats.tokens_per_second > 0:
        ratio = result.stats.tokens_per_second / plain.stats.tokens_per_second
        found.append(Figure("speed-up, measured", f"{ratio:.2f}×", "tokens a second over those of plain decoding"))
    if costs is None or not result.rounds:
        return found
    by_table = plain_seconds(result.rounds, costs, result.prompt_tokens)
    if seconds > 0:
        note = "plain decoding by the cost table ÷ this run"
        found.append(Figure("speed-up, this run", f"{by_table / seconds:.2f}×", note))
    ours = _predicted(result, draft, costs)
    if result.stats.drafted and ours is not None:
        off = f"; this run took {seconds / ours:.2f} times as long" if seconds > 0 else ""
        found.append(Figure("speed-up, predicted", f"{by_table / ours:.2f}×", f"both sides by the cost tables{off}"))
    return found


def doubt(result: Result, draft: Drafter | None, costs: Costs | None) -> float | None:
    """How many times the predicted time the rounds took, if that is far from 1; None where they agree."""
    predicted = _predicted(result, draft, costs) if costs is not None else None
    if predicted is None or result.stats.decode_seconds <= 0:
        return None
    ratio = result.stats.decode_seconds / predicted
    return None if 1 / DOUBTFUL < ratio < DOUBTFUL else ratio


def _predicted(result: Result, draft: Drafter | None, costs: Costs) -> float | None:
    """Seconds of the rounds by the cost tables; None without rounds, or where nobody says what a drafted token costs."""
    if draft is not None and any(r.drafted for r in result.rounds):
        draft.measure()  # what was measured for the run's own copy of it (`apart`)
    steps = draft.part_seconds() if draft is not None else {}
    if not result.rounds or any(r.drafter not in steps for r in result.rounds if r.drafted):
        return None
    return predicted_seconds(result.rounds, costs, steps, result.prompt_tokens)


def listed(
    result: Result, target: TextModel, draft: Drafter | None, settings: Mapping[str, object]
) -> list[tuple[str, str]]:
    """Name and value of everything that the run depended on."""
    import outrider
    from outrider.bench.machine import machine

    about = machine()
    device = about["device"] if target.device.type == "cuda" else about["processor"]
    return [
        ("target", f"{target.name}, {target.dtype_name}"),
        ("draft", drafters(result) or (draft.name if draft is not None else "none: plain decoding")),
        *((name.replace("_", " "), _value(value)) for name, value in settings.items()),
        ("seed", str(result.seed)),
        ("prompt", f"{result.prompt_tokens:,} tokens, read in {1000 * result.stats.seconds['prefill']:,.0f} ms"),
        ("ended by", ENDINGS[result.finish_reason]),
        ("machine", f"{device}, threads: {about['threads']}"),
        ("software", f"Outrider {outrider.__version__}, torch {about['torch']}"),
    ]


def drafters(result: Result) -> str:
    """Who drafted, and in how many rounds."""
    names = [record.drafter for record in result.rounds if record.drafter is not None]
    return ", ".join(f"{name} (in {names.count(name):,} rounds)" for name in dict.fromkeys(names))


def _value(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(repr, value))
    return str(value)
