"""From an audit to its verdict: exact, not exact, or could not tell."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from outrider.audit.sampled import Planted, TextAudit
from outrider.audit.uniformity import BINS, DOUBT, REJECT, Array, Check, tokens_to_see

EXACT, NOT_EXACT, UNCLEAR = "exact", "not exact", "could not tell"
EXIT = {EXACT: 0, NOT_EXACT: 1, UNCLEAR: 2}
MATTERS = 0.01  # a fault that changes the law by less is shown, but the verdict does not wait for it
FEWEST_TOKENS = 1000  # for a verdict where the draft is not known
MOST_OUTSIDE = 0.01  # share of tokens outside their law, explained by rounding, above which nothing is said


@dataclass(frozen=True)
class Sight:
    """What the audit would have made of a fault. p: of its battery. needed: tokens that show it nearly always."""

    fault: str
    changed: float
    p: float
    needed: float

    @property
    def seen(self) -> bool:
        return self.p < REJECT


@dataclass(frozen=True)
class Report:
    """The outcome of one audit.

    verdict: with the reason. p: of the battery, None at temperature 0. outside: tokens outside their law that rounding
    explains. impossible: (text, position, token, gap of its logit to the best) of those that it does not. alpha: mean sum
    min(target, draft). histograms: counts of the transform by order.
    """

    setting: str
    tokens: int
    texts: int
    verdict: str
    reason: str
    p: float | None
    checks: tuple[Check, ...]
    sights: tuple[Sight, ...]
    outside: int
    impossible: tuple[tuple[int, int, int, float], ...]
    rounding: float
    alpha: float | None
    histograms: dict[str, list[int]]

    @property
    def exit_code(self) -> int:
        return EXIT[self.verdict]

    @property
    def recommended(self) -> int | None:
        """Tokens that show every fault that matters; None if some can't be shown with this draft."""
        needed = [sight.needed for sight in self.sights if sight.changed >= MATTERS]
        return None if not needed or max(needed) == float("inf") else int(max(needed))

    def to_dict(self) -> dict[str, Any]:
        """For machine-readable output."""
        out = asdict(self)
        out["faults"] = [
            {**asdict(sight), "seen": sight.seen, "needed": None if sight.needed == float("inf") else int(sight.needed)}
            for sight in self.sights
        ]
        del out["sights"]
        return {**out, "recommended_tokens": self.recommended, "false_alarm_rate": REJECT, "doubt_rate": DOUBT}


def judge(audit: TextAudit, setting: str, texts: int) -> Report:
    """The verdict on what an audit has collected."""
    greedy = audit.sampling.greedy
    battery = audit.battery()
    sights = tuple(_sight(planted, audit.count) for planted in audit.planted())
    impossible = tuple((o.text, o.position, o.token, o.gap) for o in audit.outside if not o.explained)
    explained = len(audit.outside) - len(impossible)
    verdict, reason = _verdict(audit, battery.p, battery.worst, sights, len(impossible), explained)
    return Report(
        setting=setting,
        tokens=audit.count,
        texts=texts,
        verdict=verdict,
        reason=reason,
        p=None if greedy else battery.p,
        checks=battery.checks,
        sights=sights,
        outside=explained,
        impossible=impossible,
        rounding=audit.rounding,
        alpha=audit.alpha,
        histograms={order: _histogram(u) for order, u in audit.numbers().items()},
    )


def _sight(planted: Planted, count: int) -> Sight:
    if planted.outside:
        share = planted.outside / max(count, 1)
        return Sight(planted.name, planted.changed, 0.0, float(np.ceil(9.3 / share)))  # none of so many: 1 in 10,000
    return Sight(planted.name, planted.changed, planted.battery.p, tokens_to_see(planted.numbers))


def _verdict(
    audit: TextAudit, p: float, worst: Check | None, sights: tuple[Sight, ...], impossible: int, explained: int
) -> tuple[str, str]:
    if impossible:
        return NOT_EXACT, f"{impossible} of {audit.count} tokens have no probability under the target's law"
    if audit.sampling.greedy:
        return EXACT, f"every token is the target's best one ({explained} within rounding of it)"
    if p < REJECT and worst is not None:
        return NOT_EXACT, f"p = {p:.1e}; {worst.name}: p = {worst.p:.1e}"
    doubt = _doubt(audit.count, p, sights, explained)
    return (UNCLEAR, doubt) if doubt else (EXACT, f"p = {p:.2g}")


def _doubt(count: int, p: float, sights: tuple[Sight, ...], explained: int) -> str | None:
    """Why nothing can be said, None if something can."""
    if explained > MOST_OUTSIDE * count:
        return f"{explained} tokens are outside their law, though within rounding: audit on the engine's own weights"
    if p < DOUBT:
        return f"p = {p:.1e}, which an exact sampler gives once in {1 / max(p, 1e-12):.0f} audits: use other seeds"
    unseen = [sight for sight in sights if sight.changed >= MATTERS and not sight.seen]
    if unseen:
        needed = max(sight.needed for sight in unseen)
        more = "another draft" if needed == float("inf") else f"{needed:.0f} tokens"
        return f"this sample would not have shown {unseen[0].fault!r}: use {more}"
    if count < FEWEST_TOKENS:
        return f"{count} tokens are too few: use {FEWEST_TOKENS} at least"
    return None


def _histogram(u: Array) -> list[int]:
    return [int(count) for count in np.histogram(u, BINS, (0.0, 1.0))[0]]
