"""The laws along a known text (teacher forcing): what target and draft would have said at every position of it.

One pass over the text, in chunks, so that memory stays bounded whatever the vocabulary. A drafter that is no model is asked
for one token at each position, with the text before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager

import torch
from torch import Tensor

from outrider.draft_length import FixedLength
from outrider.drafters import Drafter, ModelDrafter
from outrider.drafters.base import DraftContext
from outrider.drafters.checked import proposal_from, prospects_of
from outrider.errors import ParameterError
from outrider.models.base import LanguageModel, Source, fit_vocabulary, has_encoder, known_tokens, open_sequence
from outrider.models.table import TableSequence
from outrider.prefill import prefill
from outrider.proposal import DraftRow, Proposal
from outrider.randomness import RandomStream
from outrider.sampling import Context, SamplingSettings, standardize
from outrider.support.device_data import pad_rows

LEAST, MOST = 32, 512  # positions in a chunk
NUMBERS = 1 << 20  # in a chunk, if these are more than `LEAST` positions


def positions_in_chunk(vocab_size: int) -> int:
    """How many laws over so many tokens are held at once."""
    return min(max(LEAST, NUMBERS // vocab_size), MOST)


def logits_along(
    model: LanguageModel, tokens: Many[int], start: int, source: Source | None = None, chunk: int | None = None
) -> Iterator[Tensor]:
    """The logits that predict tokens[start], tokens[start + 1], …, `chunk` positions at a time. start ≥ 1. → [n, V] each

    source: what the encoder of an encoder-decoder reads. chunk: None for as many as `positions_in_chunk` has for this model.
    They may be overwritten when the next chunk is asked for.
    """
    wide = chunk or positions_in_chunk(model.vocab_size)
    known = known_tokens(list(tokens), model.vocab_size)
    sequence = open_sequence(model, source, len(known))
    try:
        prefill(model, [sequence], [known[: start - 1]])
        for first in range(start, len(known), wide):
            padded, lengths = pad_rows([known[first - 1 : min(first + wide, len(known)) - 1]], model.device)
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


def target_laws_along(
    target: LanguageModel, tokens: Many[int], prompt_length: int, sampling: SamplingSettings, source: Source | None = None
) -> Iterator[Tensor]:
    """The target's law of each new token. → [n, V] each, chunks as in `logits_along`"""
    logits = logits_along(target, tokens, prompt_length, source)
    chunks = (chunk.clone() for chunk in logits)  # a draft may be the same model
    return standardized_along(chunks, tokens, prompt_length, prompt_length, sampling)


def pairs_along(
    drafter: Drafter,
    target: LanguageModel,
    tokens: Many[int],
    prompt_length: int,
    sampling: SamplingSettings,
    source: Source | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """The target's laws and the drafter's (`draft_laws_along`) at each new token. → float64 [n, V] both, chunk by chunk"""
    own = target_laws_along(target, tokens, prompt_length, sampling, source)
    drafts = draft_laws_along(drafter, target, tokens, prompt_length, sampling, source)
    for law, draft in zip(own, drafts, strict=True):
        yield law.double(), draft.double()


def draft_laws_along(
    drafter: Drafter,
    target: LanguageModel,
    tokens: Many[int],
    prompt_length: int,
    sampling: SamplingSettings,
    source: Source | None = None,
) -> Iterator[Tensor]:
    """The law of the first token that the drafter would propose before each new token; NaN where it proposes none.

    `drafter` must be bound to `target`. → [n, V] each, chunks as in the target's `logits_along`
    """
    wide = positions_in_chunk(target.vocab_size)
    if isinstance(drafter, ModelDrafter):
        model = drafter.reader()
        row = DraftRow(list(tokens), prompt_length, RandomStream(0), TableSequence(), source=source)
        reading = row.tokens if has_encoder(drafter.model) else row.reading
        before = len(reading) - len(tokens)  # a source that the draft reads as text
        limit = (model.max_length or len(reading)) - before
        known = (
            tokens[: limit + 1] if limit >= prompt_length else []
        )  # the law after the last token that its context holds is its last
        read = [*reading[:before], *known]
        logits = logits_along(model, read, before + prompt_length, source, wide) if known else ()
        chunks = (fit_vocabulary(part, target.vocab_size) for part in logits)
        yield from _filled(
            standardized_along(chunks, tokens, prompt_length, prompt_length, drafter.sampling or sampling),
            len(tokens) - prompt_length,
            wide,
            target,
        )
        return
    with _walk(drafter, target, tokens, prompt_length, sampling, source) as (row, context):
        for first in range(prompt_length, len(tokens), wide):
            laws = []
            for token in tokens[first : first + wide]:
                laws.append(_law(_propose(drafter, row, context, 1), context))
                _go_on(drafter, row, token)
            yield torch.stack(laws)


def point_drafts_along(
    drafter: Drafter,
    target: LanguageModel,
    tokens: Many[int],
    prompt_length: int,
    sampling: SamplingSettings,
    longest: int,
    source: Source | None = None,
) -> list[list[int]] | None:
    """What a deterministic drafter would propose before each new token; None if it draws from laws."""
    drafts: list[list[int]] = []
    with _walk(drafter, target, tokens, prompt_length, sampling, source) as (row, context):
        for token in tokens[prompt_length:]:
            proposal = _propose(drafter, row, context, longest)
            if proposal.probs is not None:
                return None
            drafts.append([int(drafted) for drafted in proposal.tokens[0, : proposal.lengths[0]]])
            _go_on(drafter, row, token)
    return drafts


def _filled(laws: Iterator[Tensor], count: int, wide: int, target: LanguageModel) -> Iterator[Tensor]:
    """Laws of `count` positions in chunks; NaN from where there are none on."""
    for done in range(0, count, wide):
        wanted = min(wide, count - done)
        law = next(laws, torch.zeros(0, target.vocab_size, device=target.device))
        yield torch.nn.functional.pad(law, (0, 0, 0, wanted - len(law)), value=torch.nan)


def check_forgets(drafter: Drafter) -> None:
    """Raise if the drafter may know the very text that it is to be measured on."""
    if drafter.remembers:
        raise ParameterError(
            f"draft {drafter.name} remembers earlier texts, the one under test among them: leave out memory and store"
        )


@contextmanager
def _walk(
    drafter: Drafter,
    target: LanguageModel,
    tokens: Many[int],
    prompt_length: int,
    sampling: SamplingSettings,
    source: Source | None = None,
) -> Iterator[tuple[DraftRow, DraftContext]]:
    """A row that holds the prompt, for a drafter that is asked token by token."""
    check_forgets(drafter)
    context = DraftContext(sampling, target, target.vocab_size)
    row = DraftRow(list(tokens[:prompt_length]), prompt_length, RandomStream(0), TableSequence(), source=source)
    try:
        drafter.begin([row], context)
        yield row, context
    finally:
        drafter.end(row)


def _propose(drafter: Drafter, row: DraftRow, context: DraftContext, longest: int) -> Proposal:
    plan = FixedLength(longest).start().plan(prospects_of(drafter, row), longest, len(row.tokens))
    return proposal_from(drafter, [row], [plan], context)


def _law(proposal: Proposal, context: DraftContext) -> Tensor:
    """The law of the proposal's first token, NaN if there is none. → [V]"""
    law = torch.full((context.vocab_size,), torch.nan, device=context.device)
    if not proposal.lengths[0]:
        return law
    if proposal.probs is not None:
        return proposal.probs[0, 0].float()
    return torch.zeros_like(law).index_fill_(0, proposal.tokens[0, :1], 1.0)


def _go_on(drafter: Drafter, row: DraftRow, token: int) -> None:
    """The text goes on with `token`, as after a round whose draft was rejected."""
    row.tokens.append(token)
    drafter.observe([row])
