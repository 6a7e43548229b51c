"""The contract of a draft-length policy: a drafter's prospects in, a plan out. A limit of 0 is plain decoding.

A policy sees what is certain before a token is drawn and nothing of that token, so it can't bend the law (`verify`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol

from outrider.costs import DraftSeconds
from outrider.settings.drafting import MAX_DRAFT

TESTS = 4.0  # decisions that a prior weighs


@dataclass(frozen=True)
class Prospect:
    """One way to draft now, known before anything is drawn.

    drafter: its name in the records. kind: acceptance is learned for each kind apart (the length of a match, say).
    first, later: acceptance to assume at first, of the first drafted token and of each later one; tests: decisions that
    they weigh. step_seconds: per drafted token; start_seconds: before the first; behind_seconds: before it, too, to read
    what came while it did not draft, once for all later drafts. longest: more can't be drafted. gated: the plan is asked
    before each further token, and told how sure the draft was of the last one. deterministic: it is certain what would be
    proposed, at no cost (`Drafter.preview`), so how it fares is learned whether it is offered or not.
    """

    drafter: str
    kind: int = 0
    first: float = 0.75
    later: float = 0.75
    tests: float = TESTS
    step_seconds: float = 0.0
    start_seconds: float = 0.0
    behind_seconds: float = 0.0
    longest: int = MAX_DRAFT
    gated: bool = False
    deterministic: bool = False


class Plan(Protocol):
    """The policy's answer for one row. prospect: index into the row's prospects. limit: tokens to draft at most."""

    @property
    def prospect(self) -> int: ...

    @property
    def limit(self) -> int: ...

    @property
    def gated(self) -> bool:
        """Whether `go_on` wants to be asked."""

    def go_on(self, signals: Many[int], others: Many[Many[float]] = ()) -> bool:
        """Whether to draft one more, after tokens with these signals (`draft_steps.signals`), one per token.

        others: as in `choose`.
        """

    def choose(self, signals: Many[int], others: Many[Many[float]]) -> list[list[int]]:
        """Which alternatives to have scored beside the drafted tokens. others: what the draft gave to the likeliest other
        tokens in each one's place. → indices, a list for each place
        """


def only_gated(signals: Many[list[int]], plans: Many[Plan]) -> list[list[int]] | None:
    """The signals of rows whose plan asked: a row must not learn what it would not have, had it been alone."""
    if not any(plan.gated for plan in plans):
        return None
    return [row if plan.gated else [] for row, plan in zip(signals, plans, strict=True)]


@dataclass(frozen=True)
class SimplePlan:
    """Draft so many tokens by this prospect, whatever they look like."""

    prospect: int = 0
    limit: int = 0
    gated: bool = False

    def go_on(self, signals: Many[int], others: Many[Many[float]] = ()) -> bool:
        """Up to the limit, always."""
        del others
        return len(signals) < self.limit

    def choose(self, signals: Many[int], others: Many[Many[float]]) -> list[list[int]]:
        """None: a plan that says a number means a chain of them."""
        del signals
        return [[] for _ in others]


@dataclass(frozen=True)
class Trial:
    """What a round showed. tested: tokens on which the rule decided; accepted of them. signals: of each drafted token.

    others: of each candidate for an alternative in whose place the rule decided, its class and whether it was the recovered
    token. alternatives: how many were scored. taken: whether the recovered token was among these.
    """

    prospect: Prospect | None = None
    drafted: int = 0
    tested: int = 0
    accepted: int = 0
    signals: Many[int] = ()
    others: Many[tuple[int, bool]] = ()
    alternatives: int = 0
    taken: bool = False


@dataclass(frozen=True)
class Finding:
    """What became of one token of a deterministic proposal, or would have.

    start: tokens before the proposal. place: 0 for its first token. again: a later token of a proposal that began inside
    another one of the same drafter, so that it was most likely counted there already.
    """

    prospect: Prospect
    start: int
    place: int
    accepted: bool
    again: bool = False


class LengthState(ABC):
    """The policy for one sequence."""

    @abstractmethod
    def plan(self, prospects: Many[Prospect], room: int, context: int) -> Plan:
        """Which way to draft and how many tokens at most, `room` ≥ 0 included. context: tokens before."""

    def update(self, outcome: Trial) -> None:
        """Learn from a round; one without a draft has no prospect."""
        del outcome

    learns: bool = False
    """Whether `learn` is of use."""

    def learn(self, finding: Finding) -> None:
        """Learn from a token of a deterministic proposal, made or not."""
        del finding


class DraftLength(ABC):
    """A policy: makes one state per sequence."""

    def never(self, drafter: str, drafting: DraftSeconds) -> bool:
        """Whether drafts could not be worth while however good they were, and need not be made ready.

        drafter: the name that its prospects have. drafting: what it says that they take.
        """
        del drafter, drafting
        return False

    def shared_by(self, rows: int) -> bool:
        """From now on so many sequences share the passes. Called between rounds. → whether anything follows from it"""
        del rows
        return False

    @abstractmethod
    def start(self) -> LengthState:
        """The state for a new sequence."""

    def together(self, rows: int) -> DraftLength:
        """The same for sequences side by side that may learn from each other: how much is drafted of one then depends on
        the others, its law does not. rows: at once, about.
        """
        del rows
        return self
