"""Drafting as long as it pays: predicted acceptance against measured seconds, for each prospect, in each round.

Before a round: of each prospect the expected tokens and the seconds of a round with k drafted tokens are known from its
learned acceptance rates and the cost tables; the pair (prospect, k) with the most tokens per second is planned. k = 0, plain
decoding, is always among them, so nothing is drafted where nothing pays.

During a draft, if the drafter tells how sure it was of each token: the probability that all of them survive is the
product of the acceptance rates learned for such signals. One more token is drafted while some continuation gains more
tokens than the same seconds would give at the planned rate: the marginal gain against the marginal cost.

Of a copy it is known what it would propose, so it is learned from the tokens that come, whether it is offered or not
(`deterministic`). Other drafts that aren't tried aren't learned, so now and then one is probed with one token, or made one
token longer; all probes together may cost a small share of the time spent, by the cost tables, and one that is tried in vain
again and again is tried ever more seldom (`tries`), since a round with a draft does a little more than the tables know.
What drafts have lost against plain decoding is kept account of, too, and bounded (`account`): where every drafted token
costs a pass, a few wrong first guesses would be a loss.

What rounds take, also where rows of a batch share their passes: `round_seconds`.

Once a draft is made, those alternatives (`proposal.Alternatives`) are scored beside it that are the recovered token often
enough to pay for the wider pass, by rates learned for what the draft gave to them.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

from outrider.costs import ByRows, Costs, DraftSeconds, SharedCosts
from outrider.draft_length.account import Account, PaperRound
from outrider.draft_length.base import DraftLength, Finding, LengthState, Plan, Prospect, SimplePlan, Trial
from outrider.draft_length.beside import best_number
from outrider.draft_length.learned import Learned
from outrider.draft_length.previews import HORIZON
from outrider.draft_length.round_seconds import RoundSeconds, handling

# Where many rows share a pass, its tokens are what it costs, and the best drafts gain next to nothing. Then none are made
# ready, which would take some 50 µs a row and round, and a head's reading of all prompts.
GOOD, FEW, WORTH_TRYING = 0.8, 4, 1.15  # acceptance, tokens at most, tokens a second over plain decoding's


@dataclass(frozen=True)
class AdaptiveLength(DraftLength):
    """The policy.

    costs: measured or assumed. longest: the most it will draft. only: this length, or what there is of it (for a fixed
    length with several prospects). memory: decisions after which an old one counts 1/e. probe_share: of the time, spent on
    probes at most. margin: nothing is drafted for a smaller gain than this, since the tables are not exact and a round with
    a draft does a little more than they know. loss_passes, loss_share: drafts may lose so many passes, each with two
    changes of its width, and this share of the time against plain decoding; no draft is made whose own pass could lose more
    (the changes that it brings about are charged once they have been made). by_rows: what passes cost as rows end that
    share them (`together`).
    """

    costs: Costs
    longest: int = 16
    only: int | None = None
    memory: float = 30.0
    probe_share: float = 0.03
    margin: float = 0.05
    loss_passes: float = 2.0
    loss_share: float = 0.01
    by_rows: ByRows | None = None

    def start(self) -> LengthState:
        return _AdaptiveState(self, self._learned())

    def together(self, rows: int) -> DraftLength:
        return _Together(self, self._learned(rows))

    def _learned(self, rows: int = 1) -> Learned:
        account = Account(self.probe_share, self.loss_passes, self.loss_share)
        return Learned(self.memory * rows**0.5, account, SharedCosts(self.costs), rows)

    def never(self, drafter: str, drafting: DraftSeconds) -> bool:
        return self.hopeless(SharedCosts(self.costs), drafter, drafting)

    def hopeless(self, shared: SharedCosts, drafter: str, drafting: DraftSeconds) -> bool:
        """Of rows that share passes: whether good drafts (`GOOD`) would gain too little for what looking for them takes."""
        costs, drafting = shared.costs, shared.drafting(drafter, drafting)
        if costs.rows == 1 or self.only is not None:
            return False
        plain, beside = costs.verify(1), handling(costs)
        rounds = {k: costs.verify(k + 1) + drafting.of(k) + beside for k in self.lengths(FEW)}
        rates = [(1.0 + expected(GOOD, GOOD, k)) * plain / seconds for k, seconds in rounds.items()]
        return max(rates, default=0.0) < WORTH_TRYING

    def lengths(self, most: int) -> range:
        """The draft lengths it chooses from where there are `most` tokens to be had, besides 0."""
        longest = min(most, self.longest if self.only is None else self.only)
        return range(1 if self.only is None else max(1, longest), longest + 1)


@dataclass(frozen=True)
class _Together(DraftLength):
    """The policy of rows that learn from each other. What it keeps account of are rows' rounds."""

    policy: AdaptiveLength
    learned: Learned

    def never(self, drafter: str, drafting: DraftSeconds) -> bool:
        return self.policy.hopeless(self.learned.costs, drafter, drafting)

    def shared_by(self, rows: int) -> bool:
        if self.policy.by_rows is None:
            return False
        self.learned.share(self.policy.by_rows(rows))
        return True

    def start(self) -> LengthState:
        return _AdaptiveState(self.policy, self.learned)


def expected(first: float, later: float, length: int) -> float:
    """Accepted tokens of `length` ≥ 1 drafted: first · (1 + later + … + later^(length-1)).

    Leviathan's Equation 1 with a first token that is accepted at another rate than those after it; they are equal for a
    model, and far apart for a copy. Without the 1 for the recovered or bonus token.
    """
    return first * (float(length) if later >= 1.0 else (1.0 - later**length) / (1.0 - later))


@dataclass(frozen=True)
class _Best:
    """The best plan of a round: tokens per second, prospect, length."""

    rate: float
    prospect: int
    length: int


@dataclass(frozen=True)
class _GatedPlan:
    """A plan that is asked again after each token.

    rate: tokens per second that the round should reach. least: draft so many in any case, to learn how they fare.
    """

    prospect: int
    limit: int
    rate: float
    state: _AdaptiveState
    about: Prospect
    least: int
    gated: bool = True

    def go_on(self, signals: Many[int], others: Many[Many[float]] = ()) -> bool:
        if len(signals) >= self.limit:
            return False
        return len(signals) < self.least or self.state.pays(self, signals, others)

    def choose(self, signals: Many[int], others: Many[Many[float]]) -> list[list[int]]:
        return self.state.choose(self, signals, others)


class _AdaptiveState(LengthState):
    """Of one row. learned: so far, by it or by others, too."""

    def __init__(self, policy: AdaptiveLength, learned: Learned) -> None:
        self._policy = policy
        self._seconds = RoundSeconds(learned, policy.costs)
        self._of, self._of_signal, self._beside = learned.of, learned.of_signal, learned.beside
        self._tries, self._account, self._offered = learned.tries, learned.account, learned.offered
        self._context = 0
        self._paper: PaperRound | None = None

    def plan(self, prospects: Many[Prospect], room: int, context: int) -> Plan:
        self._context = context
        self._seconds.begin(context, room)
        self._offered.update(1, int(room > 0 and any(prospect.longest for prospect in prospects)))
        best = self._best(prospects, room)
        chosen = self._probe(prospects, best, room)
        if chosen is not None:
            return SimplePlan(chosen, 1)
        if best.length == 0 or self._policy.only is not None:
            return SimplePlan(best.prospect, best.length)
        about = prospects[best.prospect]
        longest = self._affordable(about, min(self._policy.longest, about.longest, room))
        if longest == 0:
            self._plan_on_paper(about, best.length)
            return SimplePlan(best.prospect, 0)
        best, limit = _Best(best.rate, best.prospect, min(best.length, longest)), longest
        further = self._probe_length(about, best.length, limit)
        if not about.gated:
            return SimplePlan(best.prospect, best.length + further)
        return _GatedPlan(best.prospect, limit, best.rate, self, about, least=1 + further)

    def _best(self, prospects: Many[Prospect], room: int) -> _Best:
        best = _Best((1.0 + self._policy.margin) / (self._seconds.plain + self._seconds.beyond(0)), 0, 0)
        if self._policy.only is not None:
            best = _Best(0.0, 0, 0)
        for i, prospect in enumerate(prospects):
            first, later = (rate.value for rate in self._of(prospect))
            beside = self._beside(prospect)
            most = 1.0 + beside.share + (first / (1.0 - later) if later < 1.0 else first * prospect.longest)
            for k in self._policy.lengths(min(prospect.longest, room)):
                seconds = self._seconds.round(k, self._seconds.drafting(prospect, k), beside.width)
                if most <= best.rate * seconds:  # longer drafts take longer, and none can bring that much
                    break
                further = beside.share * (1.0 - first * later ** (k - 1))
                rate = (1.0 + expected(first, later, k) + further) / (seconds + self._seconds.beyond(k, prospect))
                if rate > best.rate:
                    best = _Best(rate, i, k)
        return best

    def _probe(self, prospects: Many[Prospect], best: _Best, room: int) -> int | None:
        """A prospect to be tried with one token instead: the one tried least, if the account allows it."""
        if room == 0 or self._policy.only is not None:
            return None
        chosen = best.prospect if best.length else -1
        others = [
            i
            for i, p in enumerate(prospects)
            if p.longest and not p.deterministic and i != chosen and self._tries.due((p.drafter, p.kind))
        ]
        if not others:
            return None
        i = min(others, key=lambda i: self._tries.count((prospects[i].drafter, prospects[i].kind)))
        extra = self._seconds.probing(prospects[i])
        if best.length:
            extra += self._seconds.plain  # a poorer round instead of a good one: it may gain nothing at all
        return i if self._afford(extra) else None

    def _probe_length(self, about: Prospect, length: int, limit: int) -> int:
        """1 if a token more than planned may be drafted: how later tokens fare shows only where there are some."""
        if length >= limit or about.deterministic:
            return 0
        return int(self._afford(self._seconds.probing_length(about, length)))

    def _affordable(self, about: Prospect, longest: int) -> int:
        """The longest draft whose loss could be borne, should nothing of it be accepted; 0: drafts are suspended.

        One that is asked again after each token stops itself.
        """

        def risk(length: int) -> float:
            return -self._seconds.saved(0, length, self._seconds.drafting(about, length))

        if self._account.suspended(self._seconds.loss_unit, risk(1)):
            return 0
        if about.gated:
            return longest
        allowed = self._account.bearable(self._seconds.loss_unit)
        return max(length for length in range(1, longest + 1) if length == 1 or risk(length) <= allowed)

    def _plan_on_paper(self, about: Prospect, length: int) -> None:
        """What would be done now, if it can be compared with what comes; one such round at a time, as in earnest."""
        over = self._paper is None or self._context > self._paper.start + self._paper.length
        if about.deterministic and over:
            self._paper = PaperRound(about.drafter, self._context, min(length, HORIZON))

    def _afford(self, seconds: float) -> bool:
        """Where a second token is free by the tables, a draft still costs what the margin is there for."""
        return self._account.afford(max(seconds, self._policy.margin * self._seconds.plain))

    def _worthwhile(self, prospect: Prospect) -> float:
        """The acceptance from which on a draft of one token pays."""
        return min(1.0, max(0.0, -self._seconds.saved(0, 1, self._seconds.drafting(prospect, 1)) / self._seconds.plain))

    def pays(self, plan: _GatedPlan, signals: Many[int], others: Many[Many[float]]) -> bool:
        """Whether some continuation gains more tokens than its seconds would give at the planned rate.

        A further token takes a place in the pass that an alternative might have.
        """
        about, drafted = plan.about, len(signals)
        reached = self._reached(about, signals)
        found = self._beside(about).values(reached, others)
        price, seconds = self._price(plan), self._seconds
        now, _ = best_number(found, drafted, price)
        later, rescued, step = self._of(about)[1].value, self._beside(about).share, seconds.step(about)
        most = reached[-1] * (expected(later, later, plan.limit - drafted) + rescued)
        for k in range(drafted + 1, plan.limit + 1):
            extra = seconds.shared((k - drafted) * step) + seconds.beyond(k, about) - seconds.beyond(drafted, about)
            net = best_number(found, k, price)[0] - plan.rate * extra
            gain = expected(later, later, k - drafted) + rescued * (1.0 - later ** (k - drafted))
            if reached[-1] * gain + net > now:
                return True
            if not found and most + net <= now:  # still longer drafts take longer, and none can bring that much
                return False
        return False

    def choose(self, plan: _GatedPlan, signals: Many[int], others: Many[Many[float]]) -> list[list[int]]:
        """The alternatives that bring more tokens than the wider pass's seconds would at the planned rate."""
        about, drafted = plan.about, len(signals)
        found = self._beside(about).values(self._reached(about, signals), others)
        _, count = best_number(found, drafted, self._price(plan))
        drafting = self._seconds.drafting(about, drafted)
        allowed = self._account.bearable(self._seconds.loss_unit)
        while count and -self._seconds.saved(0, drafted, drafting, count) > allowed:
            count -= 1
        chosen: list[list[int]] = [[] for _ in others]
        for _, place, m in found[:count]:
            chosen[place].append(m)
        return chosen

    def _reached(self, about: Prospect, signals: Many[int]) -> list[float]:
        """The probability that the place of each drafted token is reached, and that of the next one."""
        reached = [1.0]
        for signal in signals:
            reached.append(reached[-1] * self._of_signal(about, signal).value)
        return reached

    def _price(self, plan: _GatedPlan) -> Callable[[int], float]:
        """Of a pass with so many tokens beyond plain decoding's, in tokens at the planned rate."""
        plain = self._seconds.plain
        return lambda scored: plan.rate * self._seconds.shared(self._seconds.verify(scored) - plain)

    def update(self, outcome: Trial) -> None:
        prospect = outcome.prospect
        self._tries.end_round()
        kept = self._seconds.follow(outcome.drafted)
        if prospect is None or outcome.drafted == 0:
            self._account.spend(self._seconds.plain + kept, -kept)
            return
        drafting = self._seconds.drafted(prospect, outcome.drafted)
        saved = self._seconds.saved(outcome.accepted + outcome.taken, outcome.drafted, drafting, outcome.alternatives) - kept
        self._account.spend(self._seconds.round(outcome.drafted, drafting, outcome.alternatives) + kept, saved)
        self._tries.tried((prospect.drafter, prospect.kind), outcome.accepted > 0, self._worthwhile(prospect))
        if not prospect.deterministic:
            first, later = self._of(prospect)
            first.update(min(outcome.tested, 1), min(outcome.accepted, 1))
            later.update(max(outcome.tested - 1, 0), max(outcome.accepted - 1, 0))
        for i, signal in enumerate(outcome.signals[: outcome.tested]):
            self._of_signal(prospect, signal).update(1, int(i < outcome.accepted))
        self._beside(prospect).learn(outcome.others)
        if outcome.signals:
            rejected = outcome.accepted < outcome.drafted
            self._beside(prospect).learn_round(outcome.alternatives, outcome.taken, rejected)

    learns = True

    def learn(self, finding: Finding) -> None:
        if not finding.again:
            self._of(finding.prospect)[min(finding.place, 1)].update(1, int(finding.accepted))
        paper = self._paper
        if paper is not None and (paper.drafter, paper.start) == (finding.prospect.drafter, finding.start):
            paper.accepted += int(finding.accepted)
            if not finding.accepted or paper.accepted == paper.length:
                drafting = self._seconds.drafting(finding.prospect, paper.length)
                self._account.save_on_paper(self._seconds.saved(paper.accepted, paper.length, drafting))
                self._paper = None
