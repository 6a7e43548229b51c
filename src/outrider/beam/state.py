"""One step of beam search as a pure function: which hypotheses run on, which are finished, and when to stop.

The rule is that of transformers 5.23 (`GenerationMixin._beam_search`) for one prompt:

- all continuations of all running hypotheses are ranked by the sum of their log-probabilities;
- those among the first num_beams that end (end-of-sequence, or the greatest length) are finished: they are kept, the best
  num_beams of all steps, by their penalised score;
- the first num_beams that do not end run on; so a hypothesis that ends below rank num_beams is dropped.

Where transformers leaves the order of equal scores to a sort, here the earlier hypothesis comes first, then the smaller
token id. Where fewer continuations than num_beams exist (tiny vocabularies), transformers fills up with copies that score
-1e9; here there are fewer. Plain and speculative search, and the draft's own steps, all go through `advance`.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Literal

from outrider.settings.beams import BeamSettings

Path = tuple[int, ...]
"""The new tokens of a hypothesis: what identifies it."""


@dataclass(frozen=True)
class Continuations:
    """The most likely next tokens of a hypothesis, best first (equal ones by id), and their log-probabilities."""

    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Hypothesis:
    """A running hypothesis. logprob: the sum over its tokens. places: for each of these, which of the running ones it was
    a continuation of, from 0.
    """

    tokens: Path
    logprob: float
    places: tuple[int, ...] = ()


@dataclass(frozen=True)
class Finished:
    """A finished one. score: `Rules.score`. places: as of a running one."""

    tokens: Path
    logprob: float
    score: float
    reason: Literal["eos", "length"]
    places: tuple[int, ...] = ()


@dataclass(frozen=True)
class Rules:
    """What does not change during a search. limit: the greatest number of new tokens. eos: tokens that end a text.

    given: tokens of the prompt that count as new ones in penalties.
    """

    settings: BeamSettings
    limit: int
    eos: Set[int]
    given: int = 0

    def score(self, logprob: float, length: int) -> float:
        """Of a text of so many new tokens."""
        return float(logprob / (length + self.given) ** self.settings.length_penalty)

    def continuations_needed(self, width: int) -> int:
        """How many of a hypothesis's continuations can matter to `width` running ones: as many as may end, and as run on."""
        return (1 + len(self.eos)) * width


@dataclass(frozen=True)
class BeamState:
    """running: best first. finished: best first, at most num_beams. steps: tokens that each running hypothesis has."""

    running: tuple[Hypothesis, ...] = (Hypothesis((), 0.0),)
    finished: tuple[Finished, ...] = ()
    steps: int = 0
    done: bool = False


def advance(state: BeamState, laws: Mapping[Path, Continuations], rules: Rules, width: int | None = None) -> BeamState:
    """The state after one more token. laws: the continuations of every running hypothesis, by its tokens.

    width: how many run on, num_beams by default; a draft may follow more.
    """
    beams, steps = rules.settings.num_beams, state.steps + 1
    ranked = _ranked(state, laws)
    last = steps >= rules.limit
    ended = [i for i, (_, token) in enumerate(ranked) if last or token.tokens[-1] in rules.eos]
    new = [_finish(ranked[i][1], rules) for i in ended if i < beams]
    finished = tuple(sorted((*state.finished, *new), key=lambda one: -one.score)[:beams])
    stays = set(ended)
    running = tuple(one for i, (_, one) in enumerate(ranked) if i not in stays)[: width or beams]
    done = last or not running or _no_better(running[0], finished, steps, rules)
    return BeamState(running, finished, steps, done)


def _ranked(state: BeamState, laws: Mapping[Path, Continuations]) -> list[tuple[tuple[float, int, int], Hypothesis]]:
    """All continuations, best first."""
    found = []
    for place, one in enumerate(state.running):
        law = laws[one.tokens]
        for token, logprob in zip(law.tokens, law.logprobs, strict=True):
            total = one.logprob + logprob
            found.append(((-total, place, token), one))
    found.sort(key=lambda entry: entry[0])
    return [(key, Hypothesis((*one.tokens, key[2]), -key[0], (*one.places, key[1]))) for key, one in found]


def _finish(one: Hypothesis, rules: Rules) -> Finished:
    score = rules.score(one.logprob, len(one.tokens))
    return Finished(one.tokens, one.logprob, score, "eos" if one.tokens[-1] in rules.eos else "length", one.places)


def _no_better(best: Hypothesis, finished: tuple[Finished, ...], steps: int, rules: Rules) -> bool:
    """Whether the search stops with what is finished: see `BeamSettings.early_stopping`."""
    settings = rules.settings
    if len(finished) < settings.num_beams:
        return False
    if settings.early_stopping is True or settings.num_beams == 1:  # transformers decodes greedily with one beam
        return True
    longest = rules.limit if settings.early_stopping == "never" and settings.length_penalty > 0 else steps
    return rules.score(best.logprob, longest) <= finished[-1].score
