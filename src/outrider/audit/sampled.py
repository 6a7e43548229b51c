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

from outrider.audit.planted import FAULTS, fault_law
from outrider.audit.support import engine_rounding, processed_only, within_rounding
from outrider.audit.transform import keys, transform
from outrider.audit.uniformity import Array, Battery, run_battery
from outrider.drafters import Drafter
from outrider.errors import ParameterError
from outrider.forced import draft_laws_along, logits_along, standardized_along
from outrider.models.base import LanguageModel
from outrider.records import Round
from outrider.sampling import SamplingSettings, draw, standardize
from outrider.theory import acceptance_probability

MEASURED = 8  # tokens outside their law at which the engine's rounding is measured


@dataclass(frozen=True)
class Text:
    """A prompt and what was generated after it. rounds: what each round did, where that is known."""

    tokens: tuple[int, ...]
    prompt_length: int
    rounds: tuple[Round, ...] = ()

    @property
    def places(self) -> list[int]:
        """Each new token's place within its round, -1 where that is not known."""
        if not self.rounds:
            return [-1] * (len(self.tokens) - self.prompt_length)
        return [place for record in self.rounds for place in range(len(record.tokens))]

    @property
    def tested(self) -> list[bool]:
        """Whether the rule decided about each new token; where that is not known, whether it could have."""
        if not self.rounds:
            return [True] * (len(self.tokens) - self.prompt_length)
        return [place < record.drafted for record in self.rounds for place in range(len(record.tokens))]


@dataclass(frozen=True)
class Outside:
    """A token to which the law gives no probability. gap: of its logit to the best one."""

    text: int
    position: int
    token: int
    gap: float
    explained: bool


@dataclass(frozen=True)
class Planted:
    """What a fault would have given here. changed: mean total variation between its law and the target's."""

    name: str
    changed: float
    outside: int
    battery: Battery
    numbers: dict[str, Array]


@dataclass
class _Sample:
    """Numbers of tokens that were drawn, or would have been."""

    numbers: dict[str, list[float]] = field(default_factory=dict)
    changed: float = 0.0
    outside: int = 0

    def arrays(self) -> dict[str, Array]:
        return {order: np.array(values) for order, values in self.numbers.items()}


class TextAudit:
    """Collects texts of one engine with one setting.

    target: the model whose law the texts should follow. drafter: who drafted, if that is known, bound to `target`.
    rounding: by how much the engine's logits may differ from the target's here; None to measure it on the target.
    seed: of the audit's own random numbers.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | None,
        sampling: SamplingSettings,
        rounding: float | None = None,
        seed: int = 0,
    ) -> None:
        self.target, self.drafter, self.sampling = target, drafter, sampling
        self.outside: list[Outside] = []
        self.count = 0
        self._rounding = rounding
        self._measured = 0
        self._noise = np.random.default_rng(seed)
        self._own = _Sample()
        self._faults: dict[str, _Sample] = {}
        self._texts: list[int] = []
        self._places: list[int] = []
        self._betas: list[float] = []
        self._number = -1

    @property
    def alpha(self) -> float | None:
        """Mean of sum min(target, draft) over the positions at which the draft proposes, if it is known."""
        return float(np.mean(self._betas)) if self._betas else None

    @property
    def rounding(self) -> float:
        """What an engine's logits may differ by, as far as it was needed."""
        return self._rounding or 0.0

    def battery(self) -> Battery:
        """The tests on all texts so far."""
        return self._tests(self._own)

    def numbers(self) -> dict[str, Array]:
        """The transforms of all tokens inside their law, by order."""
        return self._own.arrays()

    def planted(self) -> list[Planted]:
        """What each fault would have given."""
        return [
            Planted(name, sample.changed / max(self.count, 1), sample.outside, self._tests(sample), sample.arrays())
            for name, sample in self._faults.items()
        ]

    def _tests(self, sample: _Sample) -> Battery:
        return run_battery(sample.arrays(), np.array(self._texts, np.int64), np.array(self._places, np.int64))

    def add(self, text: Text) -> None:
        """Score one text and take its numbers."""
        if not 1 <= text.prompt_length < len(text.tokens):
            raise ParameterError(
                f"prompt_length must be in 1 … {len(text.tokens) - 1}, got {text.prompt_length}: a text needs a prompt "
                "token and a generated one"
            )
        self._number += 1
        start, places, tested = text.prompt_length, text.places, text.tested
        for logits, target, draft in self._laws(text):
            done = start - text.prompt_length
            part = slice(done, done + len(target))
            self._take(text, start, logits, target, draft, places[part], tested[part])
            start += len(target)

    def _laws(self, text: Text) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """(logits, target's laws, draft's laws) along the new tokens, chunk by chunk."""
        start = text.prompt_length
        drafts: Iterator[Tensor | None] = repeat(None)
        if self.drafter is not None and not self.sampling.greedy:
            drafts = draft_laws_along(self.drafter, self.target, text.tokens, start, self.sampling)
        chunks = (
            chunk.clone() for chunk in logits_along(self.target, text.tokens, start)
        )  # the draft may be the same model
        for logits, draft in zip(chunks, drafts, strict=False):
            (law,) = standardized_along(iter([logits]), text.tokens, start, text.prompt_length, self.sampling)
            yield logits, law, None if draft is None else draft.to(law.dtype)
            start += len(law)

    def _take(
        self,
        text: Text,
        start: int,
        logits: Tensor,
        target: Tensor,
        draft: Tensor | None,
        places: Sequence[int],
        tested: Sequence[bool],
    ) -> None:
        tokens = torch.tensor(text.tokens[start : start + len(target)], device=target.device)
        self.count += len(tokens)
        inside = target.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) > 0
        for i in torch.nonzero(~inside).flatten().tolist():
            self._explain(text, start + i, logits[i])
        if self.sampling.greedy:
            return
        if draft is not None:
            proposed = ~draft[:, 0].isnan()
            self._betas += acceptance_probability(target, draft)[proposed].tolist()
        orders = keys(target, draft)
        self._note(self._own, target, orders, tokens, inside)
        kept = inside.tolist()
        self._texts += [self._number] * sum(kept)
        self._places += [place for place, keep in zip(places, kept, strict=True) if keep]
        flags = torch.tensor(tested, device=target.device)
        for name, law in self._fault_laws(logits, target, draft, flags):
            sample = self._faults.setdefault(name, _Sample())
            sample.changed += float((law - target).abs().sum() / 2)
            drawn = draw(law, self._uniforms(len(law), target.device))
            possible = target.gather(-1, drawn.unsqueeze(-1)).squeeze(-1) > 0
            sample.outside += int((~possible).sum())
            # A token outside the law is seen as such: here the real one keeps its place, so that texts and places fit.
            self._note(sample, target, orders, torch.where(possible, drawn, tokens), inside)

    def _note(self, sample: _Sample, target: Tensor, orders: dict[str, Tensor], tokens: Tensor, inside: Tensor) -> None:
        for order, key in orders.items():
            u = transform(target, key, tokens, self._uniforms(len(tokens), target.device))
            sample.numbers.setdefault(order, []).extend(u[inside].tolist())

    def _uniforms(self, count: int, device: torch.device) -> Tensor:
        return torch.from_numpy(self._noise.random(count)).to(device)

    def _fault_laws(
        self, logits: Tensor, target: Tensor, draft: Tensor | None, tested: Tensor
    ) -> Iterator[tuple[str, Tensor]]:
        if draft is not None:
            for name, fault in FAULTS.items():
                yield name, fault_law(fault, target, draft, tested)
        if self.sampling.needs_context:
            return
        if self.sampling.temperature != 1.0:
            yield "temperature ignored", standardize(logits, replace(self.sampling, temperature=1.0))
        if self.sampling.top_k or self.sampling.top_p < 1.0 or self.sampling.min_p:
            yield "truncation ignored", standardize(logits, replace(self.sampling, top_k=0, top_p=1.0, min_p=0.0))

    def _explain(self, text: Text, position: int, logits: Tensor) -> None:
        """Note a token outside its law, and whether rounding can have put it inside."""
        before, token = text.tokens[:position], text.tokens[position]
        (law,) = standardized_along(
            iter([logits.unsqueeze(0)]), text.tokens, position, text.prompt_length, processed_only(self.sampling)
        )
        processed = law[0].double().log()
        explained = within_rounding(processed, token, self.sampling, self.rounding)
        if not explained and self._measured < MEASURED and self._rounding_open:
            self._measured += 1
            self._rounding = max(self.rounding, engine_rounding(self.target, before))
            explained = within_rounding(processed, token, self.sampling, self.rounding)
        gap = float(processed.max() - processed[token])
        self.outside.append(Outside(self._number, position - text.prompt_length, token, gap, explained))

    @property
    def _rounding_open(self) -> bool:
        return self._rounding is None or self._measured > 0
