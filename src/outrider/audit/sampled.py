"""The audit of generated text: one pass of the target over it says whether it was drawn from the target's law.

Nothing is asked of whoever generated the text but prompt, settings and token ids. Where the draft is known its laws along
the text are computed, too: they order the vocabulary, and say what faults of the acceptance rule would have done here, so
that the audit states what it could have seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat

import numpy as np
import torch
from torch import Tensor

from outrider.audit.planted import BONUS_FAULTS, FAULTS, bonus_law, fault_law
from outrider.audit.support import engine_rounding, rounding_needed, truncated_first
from outrider.audit.temperature import TemperatureFit
from outrider.audit.text import Text
from outrider.audit.transform import keys, likelihood_key, transform
from outrider.audit.truncation import TruncationFit
from outrider.audit.uniformity import Array, Battery, Marks, run_battery
from outrider.drafters import Drafter
from outrider.errors import ParameterError
from outrider.forced import draft_laws_along, logits_along, standardized_along
from outrider.models.base import LanguageModel
from outrider.sampling import SamplingSettings, draw, standardize
from outrider.theory import acceptance_probability

MEASURED = 8  # tokens outside their law at which the engine's rounding is measured
DRAWS = 2  # of each fault at each position
HOTTER, UNDECLARED = 1.1, 0.95
FLAT = 1e5  # a temperature at which a higher one makes no difference


@dataclass(frozen=True)
class Outside:
    """A token to which the law gives no probability.

    gap: of its logit to the best one. needed: by how much logits would have to differ to allow it. truncated_first: whether
    it would be allowed if truncation came before the temperature.
    """

    text: int
    position: int
    token: int
    gap: float
    needed: float
    truncated_first: bool


@dataclass
class Planted:
    """What a fault would have given here, `DRAWS` times.

    numbers: its transform in its own order, by draw. moved: total variation between its law and the target's, summed over
    positions. outside: tokens to which the target gives no probability. positions: where it might be, all of them or those
    of bonus tokens.
    """

    name: str
    of_rule: bool
    numbers: list[list[float]] = field(default_factory=lambda: [[] for _ in range(DRAWS)])
    moved: float = 0.0
    outside: int = 0
    positions: int = 0


class TextAudit:
    """Collects texts of one engine with one setting.

    target: the model whose law the texts should follow. drafter: who drafted, if that is known, bound to `target`.
    rounding: by how much the engine's logits may differ from the target's here; None to measure it on the target.
    seed: of the audit's own random numbers. ends: tokens that should have ended a text, where the engine was to stop there.
    by_position: whether no draft had a say (`acceptance.by_position`): faults of the ratio rule can't be in the texts then.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | None,
        sampling: SamplingSettings,
        rounding: float | None = None,
        seed: int = 0,
        ends: frozenset[int] = frozenset(),
        by_position: bool = False,
    ) -> None:
        self.target, self.drafter, self.sampling = target, None if by_position else drafter, sampling
        self.by_position = by_position
        self.outside: list[Outside] = []
        self.planted: dict[str, Planted] = {}
        self.rounding = rounding or 0.0
        self.temperature = TemperatureFit()
        self.truncation = TruncationFit()
        self.count = 0
        self.texts = 0
        self.run_over = 0  # texts that go on behind an end token, each by the target's law or not
        self._ends = ends
        self._measured = 0 if rounding is None else MEASURED
        self._noise = np.random.default_rng(seed)
        self._numbers: dict[str, list[float]] = {}
        self._marks: list[tuple[int, bool, int, int]] = []  # place, bonus, text, position
        self._betas: list[float] = []

    @property
    def alpha(self) -> float | None:
        """Mean of sum min(target, draft) over the positions at which the draft proposes, if it is known."""
        return float(np.mean(self._betas)) if self._betas else None

    def battery(self) -> Battery:
        """The tests on all texts so far."""
        places, bonus, texts, positions = np.array(self._marks, np.int64).reshape(-1, 4).T
        return run_battery(self.numbers(), Marks(places, bonus.astype(np.bool_), texts, positions))

    def numbers(self) -> dict[str, Array]:
        """The transforms of all tokens inside their law, by order."""
        return {order: np.array(values) for order, values in self._numbers.items()}

    def add(self, text: Text) -> None:
        """Score one text and take its numbers."""
        if not 1 <= text.prompt_length < len(text.tokens):
            raise ParameterError(
                f"prompt_length must be in 1 … {len(text.tokens) - 1}, got {text.prompt_length}: a text needs a prompt "
                "token and a generated one"
            )
        done = 0
        follow = _Rounds(text, self._noise)
        for logits, target, draft in self._laws(text):
            part = slice(done, done + len(target))
            tokens = torch.tensor(text.new[part], device=target.device)
            self._take(text, done, logits, target, draft, *follow.kinds(part, tokens, target, draft))
            done += len(target)
        self.texts += 1
        self.run_over += not self._ends.isdisjoint(text.new[:-1])

    def _laws(self, text: Text) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """(logits, target's laws, draft's laws) along the new tokens, chunk by chunk."""
        start = text.prompt_length
        drafts: Iterator[Tensor | None] = repeat(None)
        if self.drafter is not None and not self.sampling.greedy:
            drafts = draft_laws_along(self.drafter, self.target, text.tokens, start, self.sampling, text.source)
        # Cloned, since the draft may be the same model.
        chunks = (chunk.clone() for chunk in logits_along(self.target, text.tokens, start, text.source))
        for logits, draft in zip(chunks, drafts, strict=False):
            (law,) = standardized_along(iter([logits]), text.tokens, start, text.prompt_length, self.sampling)
            yield logits, law, None if draft is None else draft.to(law.dtype)
            start += len(law)

    def _take(
        self,
        text: Text,
        done: int,
        logits: Tensor,
        target: Tensor,
        draft: Tensor | None,
        tested: Sequence[bool],
        bonus: Sequence[bool],
    ) -> None:
        tokens = torch.tensor(text.new[done : done + len(target)], device=target.device)
        self.count += len(tokens)
        inside = _mass(target, tokens) > 0
        self._fit(text, done, logits, target, tokens)
        self._fit_truncation(target, tokens)
        for i in torch.nonzero(~inside).flatten().tolist():
            self._look(text, done + i, logits[i])
        if self.sampling.greedy:
            return
        if draft is not None:
            proposed = ~draft[:, 0].isnan()
            self._betas += acceptance_probability(target, draft)[proposed].tolist()
        known = text.bonus or [False] * len(text.new)
        marks = [(place, known[i], self.texts, i) for i, place in enumerate(text.places)][done : done + len(target)]
        self._marks += [mark for mark, keep in zip(marks, inside.tolist(), strict=True) if keep]
        for order, key in keys(target, draft).items():
            self._note(self._numbers.setdefault(order, []), target, key, tokens, inside)
        flags, further = (torch.tensor(list(kind), device=target.device) for kind in (tested, bonus))
        for name, of_rule, law in self._fault_laws(logits, target, draft, flags):
            self._plant(name, of_rule, target, law, tokens, inside)
        if draft is not None:
            for name, fault in BONUS_FAULTS.items():
                law, where = bonus_law(fault, target, draft, further)
                self._plant(name, True, target, law, tokens, inside, where)

    def _fit(self, text: Text, done: int, logits: Tensor, target: Tensor, tokens: Tensor) -> None:
        """What temperature the tokens tell of, where the law at another one is known. One of 0 is believed until a token
        is outside its law.
        """
        own, wanted = self.sampling, self.temperature.wanted
        if not wanted or own.top_p < 1.0 or own.min_p or (own.greedy and not self.outside):
            return
        law, tokens = target[:wanted], tokens[:wanted]
        if own.greedy:
            warm, start = replace(own, temperature=1.0), text.prompt_length + done
            (law,) = standardized_along(iter([logits[:wanted]]), text.tokens, start, text.prompt_length, warm)
        possible = _mass(law, tokens) > 0
        self.temperature.add(law[possible], tokens[possible])

    def _fit_truncation(self, target: Tensor, tokens: Tensor) -> None:
        """Which limit nobody declared the tokens tell of, where none is declared."""
        own, wanted = self.sampling, self.truncation.wanted
        if not wanted or own.greedy or own.top_k or own.top_p < 1.0 or own.min_p:
            return
        law, tokens = target[:wanted], tokens[:wanted]
        possible = _mass(law, tokens) > 0
        self.truncation.add(law[possible], tokens[possible])

    def _plant(
        self,
        name: str,
        of_rule: bool,
        target: Tensor,
        law: Tensor,
        tokens: Tensor,
        inside: Tensor,
        where: Tensor | None = None,
    ) -> None:
        """The real tokens, and what a fault would draw, in the order that tells them apart best; `where` alone, if given."""
        planted = self.planted.setdefault(name, Planted(name, of_rule))
        planted.moved += float((law - target).abs().sum() / 2)
        key = likelihood_key(target, law)
        chosen = torch.ones_like(inside) if where is None else where
        planted.positions += int(chosen.sum())
        self._note(self._numbers.setdefault(f"“{name}”", []), target, key, tokens, inside & chosen)
        for numbers in planted.numbers:
            drawn = draw(law, self._uniforms(len(law), target.device))
            possible = _mass(target, drawn) > 0
            planted.outside += int((~possible).sum())
            self._note(numbers, target, key, drawn, possible & chosen)

    def _note(self, numbers: list[float], target: Tensor, key: Tensor, tokens: Tensor, wanted: Tensor) -> None:
        numbers += transform(target, key, tokens, self._uniforms(len(tokens), target.device))[wanted].tolist()

    def _uniforms(self, count: int, device: torch.device) -> Tensor:
        return torch.from_numpy(self._noise.random(count)).to(device)

    def _fault_laws(
        self, logits: Tensor, target: Tensor, draft: Tensor | None, tested: Tensor
    ) -> Iterator[tuple[str, bool, Tensor]]:
        """(name, whether it is one of the acceptance rule, law)"""
        if draft is not None:
            for name, fault in FAULTS.items():
                yield name, True, fault_law(fault, target, draft, tested)
        own = self.sampling
        if own.needs_context:
            return
        if own.temperature < FLAT:
            hotter = replace(own, temperature=HOTTER * own.temperature)
            yield "temperature a tenth higher", False, standardize(logits, hotter)
        if own.top_p == 1.0:
            yield f"undeclared top-p {UNDECLARED}", False, standardize(logits, replace(own, top_p=UNDECLARED))
        if own.temperature != 1.0:
            yield "temperature ignored", False, standardize(logits, replace(own, temperature=1.0))
        if own.top_k or own.top_p < 1.0 or own.min_p:
            yield "truncation ignored", False, standardize(logits, replace(own, top_k=0, top_p=1.0, min_p=0.0))

    def _look(self, text: Text, position: int, logits: Tensor) -> None:
        """Note a token outside its law, and what rounding would have to be to put it inside."""
        at = text.prompt_length + position
        before, token = text.tokens[:at], text.tokens[at]
        # In float64, which does not take unlikely tokens for impossible ones.
        (law,) = standardized_along(
            iter([logits.double().unsqueeze(0)]), text.tokens, at, text.prompt_length, self.sampling.processed_only()
        )
        processed = law[0].log()
        needed = rounding_needed(processed, token, self.sampling)
        if needed > self.rounding and self._measured < MEASURED:
            self._measured += 1
            self.rounding = max(self.rounding, engine_rounding(self.target, before, logits, text.source))
        gap = float(processed.max() - processed[token])
        earlier = not self.sampling.greedy and truncated_first(processed, token, self.sampling)
        self.outside.append(Outside(self.texts, position, token, gap, needed, earlier))


class _Rounds:
    """Which tokens of a text the rule decided about, and which are bonus tokens: known, or as with a draft length of 1,
    which tests the fewest.
    """

    def __init__(self, text: Text, noise: np.random.Generator) -> None:
        self._known = text.tested, text.bonus
        self._noise = noise
        self._bonus = False

    def kinds(self, part: slice, tokens: Tensor, target: Tensor, draft: Tensor | None) -> tuple[list[bool], list[bool]]:
        """(tested, bonus) of the tokens of a part."""
        tested, bonus = self._known
        if tested is not None or draft is None:
            return (tested or [False] * part.stop)[part], (bonus or [False] * part.stop)[part]
        accepted = (_mass(draft, tokens) / _mass(target, tokens)).clamp(max=1.0).nan_to_num(0.0).tolist()
        flags = []
        for chance in accepted:
            flags.append(not self._bonus)
            self._bonus = not self._bonus and float(self._noise.random()) < chance
        return flags, [not flag for flag in flags]


def _mass(law: Tensor, tokens: Tensor) -> Tensor:
    """The probability of each row's token. [n, V], [n] → [n]"""
    return law.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
