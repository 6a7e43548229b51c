"""What a model would have drafted along a recorded text, drawn once for every position and replayed under any policy.

At temperature 0 a draft is what it is. Above it, draft and text must come from their joint law: a drafted token x and the
token y that the text has at its place, x from the draft's law q, y what the acceptance rule makes of it. Given y, x was y
and accepted with probability min(1, q(y) / p(y)), and else drawn from what q has above the target's law p: the maximal
coupling of Leviathan Theorem 3.5 read backwards. After a token that differs nothing is tested, so the rest of the chain is
drawn as it comes; it tells what the policy would have seen.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.bench.recorded import Recorded
from outrider.costs import DraftSeconds
from outrider.draft_length.base import Plan, Prospect, SimplePlan
from outrider.drafters import Drafter, ModelDrafter, NgramDrafter
from outrider.drafters.base import DraftContext
from outrider.drafters.checked import proposal_from, prospects_of
from outrider.drafters.other_tokenizer import IntersectionDrafter
from outrider.forced import target_laws_along
from outrider.models.base import LanguageModel, open_sequence
from outrider.prefill import prefill
from outrider.proposal import DraftRow, Proposal, padded_proposal
from outrider.randomness import RandomStream
from outrider.request.own_rules import law_along
from outrider.sampling import SamplingSettings
from outrider.sampling.draw import draw
from outrider.support.device_data import pad_rows

LONGEST = 10  # tokens of a chain


def draws_chains(drafter: Drafter, temperature: float) -> bool:
    """Whether it is replayed so: models, and n-grams where they draw from their laws."""
    if isinstance(drafter, NgramDrafter):
        return temperature > 0
    return isinstance(drafter, ModelDrafter | IntersectionDrafter)


@dataclass(frozen=True)
class Chain:
    """What was drafted before one token of the text. prospect: what the drafter told of it. signals: if it is gated."""

    prospect: Prospect
    tokens: list[int]
    signals: list[int]


class RecordedChains(Drafter):
    """Proposes what was drafted when the text was recorded, as tokens that are certain."""

    def __init__(self, name: str, seconds: DraftSeconds, prompt_tokens: int, chains: list[Chain]) -> None:
        self.name = name
        self.chains = chains
        self._seconds = seconds
        self._prompt_tokens = prompt_tokens

    @property
    def seconds(self) -> DraftSeconds:
        return self._seconds

    def _chain(self, row: DraftRow) -> Chain:
        return self.chains[len(row.tokens) - self._prompt_tokens]

    def prospects(self, row: DraftRow) -> list[Prospect]:
        chain = self._chain(row)
        return [replace(chain.prospect, longest=len(chain.tokens))]

    def propose(self, rows: Many[DraftRow], plans: Many[Plan], context: DraftContext) -> Proposal:
        (row,), (plan,) = rows, plans
        chain = self._chain(row)
        length = min(plan.limit, len(chain.tokens))
        if plan.gated:
            length = next((n for n in range(1, length) if not plan.go_on(chain.signals[:n])), length)
        signals = [chain.signals[:length]] if plan.gated else None
        return padded_proposal([chain.tokens[:length]], context.device, (), signals)


def record_chains(target: LanguageModel, drafter: Drafter, text: Recorded) -> RecordedChains:
    """A chain of `LONGEST` tokens at most before every new token of the text. `drafter` is bound to `target`."""
    start, known = text.prompt_tokens, text.tokens
    sampling = law_along(target, SamplingSettings(temperature=text.temperature), known[:start])
    stream = RandomStream(text.seed, row=1)
    if text.temperature > 0:
        stream = _Coupled(text, torch.cat(list(target_laws_along(target, known, start, sampling, text.source))))
    context = DraftContext(sampling, target, target.vocab_size)
    sequence = open_sequence(target, text.source, len(known) + LONGEST)
    row = DraftRow(known[:start], start, stream, sequence, source=text.source)
    chains: list[Chain] = []
    try:
        prefill(target, [sequence], [known[: start - 1]])
        drafter.begin([row], context)
        for at in range(start, len(known)):
            (prospect,) = prospects_of(drafter, row)
            if isinstance(stream, _Coupled):
                stream.begin(at)
            plan = SimplePlan(limit=LONGEST, gated=prospect.gated)
            proposal = proposal_from(drafter, [row], [plan], context)
            signals = proposal.signals[0] if proposal.signals is not None else []
            chains.append(Chain(prospect, proposal.tokens[0, : proposal.lengths[0]].tolist(), signals))
            row.tokens.append(known[at])
            target.score([sequence], *pad_rows([[known[at - 1]]], target.device), "none")
            drafter.observe([row])
    finally:
        drafter.end(row)
        sequence.close()
    return RecordedChains(drafter.name, drafter.seconds, start, chains)


class _Coupled(RandomStream):
    """Numbers by which tokens are drawn as they were, given how the text went on. laws: the target's, [new tokens, V]."""

    aims = True

    def __init__(self, text: Recorded, laws: Tensor) -> None:
        super().__init__(text.seed, row=1)
        self._text = text
        self._laws = laws
        self._at = 0
        self._as_written = True

    def begin(self, at: int) -> None:
        """A draft after `at` tokens of the text."""
        self._at, self._as_written = at, True

    def aim(self, laws: Tensor, row: int, ids: Tensor | None = None) -> float:
        at, self._at = self._at, self._at + 1
        uniform = super().aim(laws, row, ids)
        if not self._as_written or at >= len(self._text.tokens):
            return uniform
        own = self._laws[at - self._text.prompt_tokens].double()
        columns = torch.arange(laws.shape[-1], device=own.device) if ids is None else ids.to(own.device)
        draft = torch.zeros_like(own).index_copy_(0, columns, laws[row].double().to(own.device))
        draft = draft / draft.sum()
        token = self._text.tokens[at]
        if uniform * float(own[token]) >= float(draft[token]):
            above = (draft - own).clamp(min=0.0)
            other = int(draw(above, torch.tensor(self.take(1)[0], dtype=torch.float64, device=own.device)))
            self._as_written = other < 0  # nothing above: the laws differ by rounding only
            token = other if other >= 0 else token
        return float(draft[:token].sum() + 0.5 * draft[token])
