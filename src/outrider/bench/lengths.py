"""Draft-length policies on recorded texts: what each would have cost by the cost tables, free of all noise.

The text is generated once; then a replay stands in for the target, and every policy meets the same text with the same
drafter, in a fraction of the time. At temperature 0 that is what would have happened. Above it, a proposal that is a point
mass is accepted if the text goes on with it: with the target's probability of it, as the acceptance rule does, so rounds of
copies follow their law. What models draft is drawn once for every position of the text (`chains`). The best fixed length is
chosen in hindsight, and the oracle (Leviathan 3.5) knows how much of each draft will be accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.bench.chains import draws_chains, record_chains
from outrider.bench.recorded import Recorded
from outrider.bench.statistics import captured_share
from outrider.costs import Costs
from outrider.decode import Decoder, Request
from outrider.draft_length import AdaptiveLength, DraftLength, FixedLength
from outrider.draft_length.predicted import oracle_seconds, plain_seconds, predicted_seconds
from outrider.drafters import Drafter, HeadDrafter
from outrider.drafters.copying import CopyDrafter
from outrider.errors import ParameterError
from outrider.forced import check_forgets
from outrider.models.base import Sequence as ModelSequence
from outrider.models.base import Source, TextModel, WhichLogits, has_encoder
from outrider.models.table import TableSequence
from outrider.randomness import RandomStream
from outrider.records import Round
from outrider.sampling import SamplingSettings

FIXED = (1, 2, 3, 4, 6, 8)
LONGEST = 16


@dataclass(frozen=True)
class Cell:
    """A text, a temperature, a drafter. Speed-ups over plain decoding by the table: adaptive, each fixed length, oracle.

    seeds: of how many texts, drawn after the same prompt, whose seconds are summed up: a length that is the best of one
    drawn text in hindsight owes that to chance.
    """

    text: str
    temperature: float
    seeds: int
    drafter: str
    adaptive: float
    fixed: dict[int, float]
    oracle: float
    tokens_per_round: float

    @property
    def best_fixed(self) -> int:
        """The best length in hindsight, 0 among them."""
        best = max(self.fixed, key=lambda length: self.fixed[length])
        return best if self.fixed[best] > 1.0 else 0

    @property
    def against_best_fixed(self) -> float:
        """Adaptive over the best fixed length."""
        return self.adaptive / max(1.0, *self.fixed.values())

    @property
    def captured(self) -> float | None:
        """The share of the oracle's gain in time that the adaptive policy had; None where there is next to none."""
        return captured_share(self.adaptive, self.oracle)


class Replay:
    """A `TextModel` that says what was recorded: all mass on the next token of the text.

    One of an encoder-decoder's text has an encoder, too, for drafters to look for; it reads nothing.
    """

    name = "the recorded text"
    max_length = None
    device = torch.device("cpu")
    dtype_name = "recorded"
    end_tokens: frozenset[int] = frozenset()

    def __init__(self, target: TextModel, tokens: list[int]) -> None:
        self.tokenizer: Any = target.tokenizer
        self.vocab_size = target.vocab_size
        self.has_encoder = has_encoder(target)
        self.source_kind = target.source_kind if has_encoder(target) else ""
        self._tokens = tokens

    def open(self, reserve: int = 0, source: Source | None = None) -> TableSequence:
        del reserve, source
        return TableSequence()

    def check_source(self, source: Source) -> None:
        """It was read when the text was recorded."""

    def score(
        self, sequences: Sequence[ModelSequence], tokens: Tensor, lengths: Sequence[int], logits: WhichLogits = "all"
    ) -> Tensor | None:
        (sequence,), (row,), (count,) = sequences, tokens.tolist(), lengths
        assert isinstance(sequence, TableSequence)
        sequence.tokens += row[:count]
        if logits == "none":
            return None
        start = sequence.length - count
        out = torch.full((1, count, self.vocab_size), -torch.inf)
        for i in range(count):
            out[0, i, self._tokens[min(start + i + 1, len(self._tokens) - 1)]] = 0.0
        return out if logits == "all" else out[:, -1:]


def check_replayed(target: TextModel, drafter: Drafter, temperatures: Sequence[float]) -> None:
    """Raise unless the drafter's rounds along a recorded text follow their law; binds it to the target.

    It must not remember texts. One whose chains aren't recorded is asked anew in each replay: it must do without the
    target's states, which a replay has not (`bind` refuses it), and where texts are drawn, all of its parts must propose
    point masses without the target's help, which knows what comes: copies.
    """
    check_forgets(drafter)
    for temperature in temperatures:
        if draws_chains(drafter, temperature):
            continue
        parts = drafter.parts()
        if any(isinstance(part, HeadDrafter) or (temperature > 0 and not isinstance(part, CopyDrafter)) for part in parts):
            raise ParameterError(
                "draft must be one model, head or n-gram table, or copies, to be replayed at temperature "
                f"{temperature:g}, got {drafter.name}: name its parts one by one, or use `outrider bench drafters`, which "
                "generates anew"
            )
        drafter.bind(Replay(target, [0]))
    drafter.bind(target)


def replay(target: TextModel, texts: Sequence[Recorded], drafter: Drafter, costs: Costs) -> Cell:
    """The texts of one cell with one drafter, bound to `target`, under every policy."""
    recorded = draws_chains(drafter, texts[0].temperature)
    drafters = [record_chains(target, drafter, text) if recorded else drafter for text in texts]

    def run(policy: DraftLength) -> list[list[Round]]:
        pairs = zip(texts, drafters, strict=True)
        return [_rounds(target, text, along, policy) for text, along in pairs]

    def seconds(runs: list[list[Round]]) -> float:
        pairs = zip(runs, texts, strict=True)
        return sum(predicted_seconds(rounds, costs, steps, text.prompt_tokens) for rounds, text in pairs)

    adaptive = run(AdaptiveLength(costs))
    steps = drafter.part_seconds()
    longest = list(zip(run(FixedLength(LONGEST)), texts, strict=True))
    plain = sum(plain_seconds(rounds, costs, text.prompt_tokens) for rounds, text in longest)
    oracle = sum(oracle_seconds(rounds, costs, drafter.seconds, text.prompt_tokens) for rounds, text in longest)
    tokens = sum(len(text.tokens) - text.prompt_tokens for text in texts)
    return Cell(
        text=texts[0].name,
        temperature=texts[0].temperature,
        seeds=len(texts),
        drafter=drafter.name,
        adaptive=plain / seconds(adaptive),
        fixed={length: plain / seconds(run(FixedLength(length))) for length in FIXED},
        oracle=plain / oracle,
        tokens_per_round=tokens / sum(map(len, adaptive)),
    )


def _rounds(target: TextModel, text: Recorded, drafter: Drafter, policy: DraftLength) -> list[Round]:
    model = Replay(target, text.tokens)
    prompt, new = text.tokens[: text.prompt_tokens], len(text.tokens) - text.prompt_tokens
    request = Request(prompt, new, RandomStream(0), source=text.source)
    decoder = Decoder(model, [request], SamplingSettings(temperature=text.temperature), drafter, policy)
    return [made for batch in decoder.rounds() for _, made in batch]
