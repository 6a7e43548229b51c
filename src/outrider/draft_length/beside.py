"""What alternatives (`proposal.Alternatives`) are worth: how often tokens that a draft held so likely are the recovered one.

Learned from all that it held likely where the rule decided, scored or not: whether one of them came shows in any case.
So a class that was given up comes back once it pays, and nothing need be probed.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

from outrider.draft_length.base import TESTS
from outrider.draft_length.rates import Rate
from outrider.draft_steps.signals import LIKELY_PRIORS, likely_class

MOST_WIDE = 17  # tokens in a pass with alternatives: what cost tables measure
LIKELY_TESTS = 16.0  # decisions that the prior of a class weighs: several are decided in each round
SMOOTH = 8  # rounds over which the number of alternatives is averaged

Valued = tuple[float, int, int]
"""Of a candidate: the tokens that it is expected to bring, the place in the draft, which one it is there."""


class Beside:
    """Of one drafter in one sequence. memory: decisions after which an old one counts 1/e.

    share: of the rejections, those whose recovered token was an alternative; nothing at first.
    """

    def __init__(self, memory: float) -> None:
        self._classes = [Rate(prior, LIKELY_TESTS, memory) for prior in LIKELY_PRIORS]
        self._share = Rate(0.0, TESTS, memory)
        self._count = 0.0

    @property
    def share(self) -> float:
        return self._share.value

    @property
    def width(self) -> int:
        """Tokens that they add to a pass."""
        return round(self._count)

    def values(self, reached: Many[float], others: Many[Many[float]]) -> list[Valued]:
        """The candidates, the best first. reached: the probability that each place is. others: what the draft gave them."""
        found = [
            (likely * self._classes[likely_class(probability)].value, place, m)
            for place, (likely, probabilities) in enumerate(zip(reached, others, strict=False))
            for m, probability in enumerate(probabilities)
        ]
        return sorted(found, key=lambda one: -one[0])

    def learn(self, candidates: Many[tuple[int, bool]]) -> None:
        """The classes of candidates in whose places the rule decided, and whether they were the recovered token."""
        for kind, came in candidates:
            self._classes[kind].update(1, int(came))

    def learn_round(self, count: int, taken: bool, rejected: bool) -> None:
        """A round had so many alternatives."""
        self._share.update(int(rejected), int(taken))
        self._count += (count - self._count) / SMOOTH


def best_number(found: Many[Valued], drafted: int, price: Callable[[int], float]) -> tuple[float, int]:
    """How many of the best to have scored beside so many drafted tokens. → what they bring less the price, the number

    price: of a pass with so many tokens, in tokens.
    """
    best, count, gain = -price(drafted + 1), 0, 0.0
    for n, (value, *_) in enumerate(found[: max(0, MOST_WIDE - drafted - 1)], 1):
        gain += value
        net = gain - price(drafted + 1 + n)
        if net > best:
            best, count = net, n
    return best, count
