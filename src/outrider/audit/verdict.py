"""From an audit to its verdict: exact, not exact, or could not tell."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from outrider.audit.sampled import DRAWS, Outside, Planted, TextAudit
from outrider.audit.temperature import Likeliest
from outrider.audit.temperature import told as told_temperature
from outrider.audit.transform import ORDERS
from outrider.audit.truncation import Undeclared
from outrider.audit.truncation import told as told_truncation
from outrider.audit.uniformity import BINS, DOUBT, REJECT, Array, Battery, Check, ks_p, tokens_to_see

EXACT, NOT_EXACT, UNCLEAR = "exact", "not exact", "could not tell"
EXIT = {EXACT: 0, NOT_EXACT: 1, UNCLEAR: 2}
MATTERS = 0.05  # a fault that changes the law by less is named if it could hide, but the verdict does not wait for it
NOTHING = 1e-4  # a change that is no fault here: the noise of arithmetic
PLAUSIBLE = 1.0  # by how much the logits of another build of an engine may differ
MOSTLY = 0.8  # share of such tokens that another order of the settings explains
FEWEST_TOKENS = 1000  # for a verdict above temperature 0
MOST_TIED = 0.1  # share of tokens at temperature 0 that are not the best one but within rounding of it
MOST_OUTSIDE = 0.01  # share of tokens outside their law, explained by rounding, above which nothing is said


@dataclass(frozen=True)
class Sight:
    """What the audit would have made of a fault.

    changed: mean total variation between its law and the target's. p: of the whole audit, had the tokens been drawn from it.
    needed: tokens that show it nearly always. seen: whether this sample would have, with a margin.
    """

    fault: str
    changed: float
    p: float
    needed: float
    seen: bool


@dataclass(frozen=True)
class Report:
    """The outcome of one audit.

    verdict: with the reason. p: of the battery, None at temperature 0. tests: those that it takes together, of further
    audits, too, if they share one verdict. outside: tokens outside their law that rounding explains. impossible: (text,
    position, token, gap of its logit to the best) of those that it does not. run_over: texts that go on behind an end
    token. alpha: mean sum min(target, draft). likeliest: the temperature that the tokens fit best, where that can be told.
    undeclared: a limit that no token passed, of texts that are not exact. histograms: counts of the transform by order.
    """

    setting: str
    tokens: int
    texts: int
    verdict: str
    reason: str
    p: float | None
    checks: tuple[Check, ...]
    tests: int
    sights: tuple[Sight, ...]
    outside: int
    impossible: tuple[tuple[int, int, int, float], ...]
    rounding: float
    run_over: int
    alpha: float | None
    likeliest: Likeliest | None
    undeclared: Undeclared | None
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
            {**asdict(sight), "needed": None if sight.needed == float("inf") else int(sight.needed)} for sight in self.sights
        ]
        del out["sights"]
        return {**out, "recommended_tokens": self.recommended, "false_alarm_rate": REJECT, "doubt_rate": DOUBT}


def judge(audit: TextAudit, setting: str, fault_known: bool = False, audits: int = 1) -> Report:
    """The verdict on what an audit has collected. fault_known: so that no likely one is named. audits: of several settings
    that are taken together, so that all of them have the false-alarm rate of one.
    """
    battery = replace(audit.battery(), audits=audits)
    sights = tuple(_sight(planted, audit.count, battery.tests) for planted in audit.planted.values())
    impossible = [one for one in audit.outside if one.needed > audit.rounding]
    explained = len(audit.outside) - len(impossible)
    verdict, reason = _verdict(audit, battery, sights, impossible, explained)
    declared = audit.sampling.temperature
    likeliest = audit.temperature.likeliest(declared or 1.0)
    undeclared = audit.truncation.undeclared() if verdict == NOT_EXACT else None
    if verdict == NOT_EXACT and not fault_known:
        warmer = told_temperature(likeliest, declared)
        cut = undeclared is not None and (
            likeliest is None or undeclared.gain > audit.temperature.gain(declared or 1.0, likeliest.temperature)
        )
        reason += told_truncation(undeclared) if cut else warmer  # a truncated law looks like a cooler one, and the reverse
    return Report(
        setting=setting,
        tokens=audit.count,
        texts=audit.texts,
        verdict=verdict,
        reason=reason,
        p=None if audit.sampling.greedy else battery.p,
        checks=battery.checks,
        tests=battery.tests,
        sights=sights,
        outside=explained,
        impossible=tuple((one.text, one.position, one.token, one.gap) for one in impossible),
        rounding=audit.rounding,
        run_over=audit.run_over,
        alpha=audit.alpha,
        likeliest=likeliest,
        undeclared=undeclared,
        histograms={order: _histogram(u) for order, u in audit.numbers().items() if order in ORDERS},
    )


def _sight(planted: Planted, count: int, tests: int) -> Sight:
    changed = planted.moved / max(count, 1)
    share = planted.outside / max(DRAWS * count, 1)
    by_order = min(1.0, tests * ks_p(np.array(planted.numbers[0]))) if tests else 1.0  # no test shows nothing
    needed = tokens_to_see(np.array([u for numbers in planted.numbers for u in numbers]))
    needed *= count / max(planted.positions, 1)  # a fault of bonus tokens is at a few of all
    if planted.outside >= 10:  # several of so many are seen, even if rounding excuses some
        needed, by_order = min(needed, float(np.ceil(20 / share))), 0.0
    return Sight(planted.name, changed, by_order, needed, by_order < REJECT / 100 or needed <= count)


def _verdict(
    audit: TextAudit, battery: Battery, sights: tuple[Sight, ...], impossible: list[Outside], explained: int
) -> tuple[str, str]:
    if impossible:
        reason = f"{len(impossible)} of {audit.count} tokens have no probability under the target's distribution"
        needed = max(one.needed for one in impossible)
        if needed < PLAUSIBLE:
            reason += f"; --rounding {needed:.2g} would explain them, if the engine's logits differ from these by as much"
        earlier = sum(one.truncated_first for one in impossible)
        if earlier > MOSTLY * len(impossible):
            reason += f"; {earlier} have if truncation comes before the temperature, as in llama.cpp: another distribution"
        return NOT_EXACT, reason
    if audit.sampling.greedy:
        reason = f"every token is the target's best one, {explained} of {audit.count} within rounding of it"
        return (UNCLEAR, f"{reason}: too many") if explained > MOST_TIED * audit.count else (EXACT, reason)
    if battery.p < REJECT and battery.worst is not None:
        return NOT_EXACT, f"p = {battery.p:.1e}; {battery.worst.name}: p = {battery.worst.p:.1e}"
    doubt = _doubt(audit, battery.p, sights, explained)
    if doubt:
        return UNCLEAR, doubt
    limits = "" if audit.drafter is not None else "; without knowing the draft, faults of its rule are not planted"
    limits = "; no draft had a say, and faults of its rule are not planted" if audit.by_position else limits
    hidden = [sight for sight in sights if not sight.seen and sight.changed > NOTHING]
    if hidden:
        limits += "; could hide: " + ", ".join(
            f"{one.fault} ({100 * one.changed:.1f} % of the distribution)" for one in hidden
        )
    return EXACT, f"p = {battery.p:.2g}{limits}"


def _doubt(audit: TextAudit, p: float, sights: tuple[Sight, ...], explained: int) -> str | None:
    """Why nothing can be said, None if something can."""
    count = audit.count
    if count < FEWEST_TOKENS:
        return f"{count} tokens are too few: use {FEWEST_TOKENS} at least"
    if explained > MOST_OUTSIDE * count:
        return (
            f"{explained} tokens are outside their distribution, though within rounding: audit on the engine's own weights"
        )
    if p < DOUBT:
        return f"p = {p:.1e}, which an exact sampler gives once in {1 / max(p, 1e-12):.0f} audits: use another seed"
    of_rule = [sight for sight in sights if audit.planted[sight.fault].of_rule]
    if audit.drafter is not None and all(sight.changed < MATTERS for sight in of_rule):
        return (
            "no fault of the rule would change this text's distribution, the draft is rejected too rarely: use another draft"
        )
    unseen = [sight for sight in sights if sight.changed >= MATTERS and not sight.seen]
    if unseen:
        hardest = max(unseen, key=lambda sight: sight.needed)
        endless = hardest.needed == float("inf")
        more = "many more tokens, or another draft" if endless else f"{hardest.needed:.0f} tokens"
        return f"this sample need not have shown {hardest.fault!r}: use {more}"
    return None


def _histogram(u: Array) -> list[int]:
    return [int(count) for count in np.histogram(u, BINS, (0.0, 1.0))[0]]
