"""The laws along a known text (teacher forcing): what target and draft would have said at every position of it.

One pass over the text, in chunks, so that memory stays bounded whatever the vocabulary. A drafter that is no model is asked
for one token at each position, with the text before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many

import torch
from torch import Tensor

from outrider.device_data import pad_rows
from outrider.draft_length import FixedLength
from outrider.drafters import Drafter, ModelDrafter
from outrider.drafters.base import DraftContext
from outrider.models.base import LanguageModel, fit_vocabulary, known_tokens
from outrider.models.table import TableSequence
from outrider.prefill import prefill
from outrider.proposal import DraftRow
from outrider.randomness import RandomStream
from outrider.sampling import Context, SamplingSettings, standardize

CHUNK = 32


def logits_along(model: LanguageModel, tokens: Many[int], start: int) -> Iterator[Tensor]:
    """The logits that predict tokens[start], tokens[start + 1], …, `CHUNK` at a time. start ≥ 1. → [n, V] each

    They may be overwritten when the next chunk is asked for.
    """
    known = known_tokens(list(tokens), model.vocab_size)
    sequence = model.open(reserve=len(known))
    try:
        prefill(model, [sequence], [known[: start - 1]])
        for first in range(start, len(known), CHUNK):
            padded, lengths = pad_rows([known[first - 1 : min(first + CHUNK, len(known)) - 1]], model.device)
            logits = model.score([sequence], padded, lengths, "all")
            assert logits is not None
            yield logits[0]
    finally:
        sequence.close()


def standardized_along(
    chunks: Iterator[Tensor], tokens: Many[int], start: int, prompt_length: int, sampling: SamplingSettings
) -> Iterator[Tensor]:
    """Such logits as the laws that are sampled from. → [n, V] each"""
    for logits in chunks:
        contexts = None
        if sampling.needs_context:
            whole = torch.tensor(list(tokens[: start + len(logits)]), device=logits.device)
            contexts = [Context(whole[: start + i], prompt_length) for i in range(len(logits))]
        yield standardize(logits, sampling, contexts)
        start += len(logits)


def draft_laws_along(
    drafter: Drafter, target: LanguageModel, tokens: Many[int], prompt_length: int, sampling: SamplingSettings
) -> Iterator[Tensor]:
    """The law of the first token that the drafter would propose before each new token; NaN where it proposes none.

    `drafter` must be bound to `target`. → [n, V] each, chunks as in `logits_along`
    """
    if isinstance(drafter, ModelDrafter):
        chunks = (fit_vocabulary(part, target.vocab_size) for part in logits_along(drafter.model, tokens, prompt_length))
        yield from standardized_along(chunks, tokens, prompt_length, prompt_length, drafter.sampling or sampling)
        return
    context = DraftContext(sampling, target, target.vocab_size)
    row = DraftRow(list(tokens[:prompt_length]), prompt_length, RandomStream(0), TableSequence())
    try:
        drafter.begin([row], context)
        for first in range(prompt_length, len(tokens), CHUNK):
            laws = []
            for token in tokens[first : first + CHUNK]:
                laws.append(_proposed(drafter, row, context, token))
            yield torch.stack(laws)
    finally:
        drafter.end(row)


def _proposed(drafter: Drafter, row: DraftRow, context: DraftContext, token: int) -> Tensor:
    """The law of one drafted token after the row, which is then told that the text went on with `token`. → [V]"""
    plan = FixedLength(1).start().plan(drafter.prospects(row), 1, len(row.tokens))
    proposal = drafter.propose([row], [plan], context)
    offered = proposal.lengths[0]
    law = torch.full((context.vocab_size,), torch.nan, device=context.device)
    if offered and proposal.probs is not None:
        law = proposal.probs[0, 0].float()
    elif offered:
        law = torch.zeros_like(law).index_fill_(0, proposal.tokens[0, :1], 1.0)
    kept = bool(offered) and int(proposal.tokens[0, 0]) == token
    row.tokens.append(token)
    drafter.observe([row], [offered], [int(kept)])
    return law
