"""What drafters hand out, checked: whoever asks a drafter that others may have written asks through this.

Of one that comes with this package its form is looked at. Of others the values are, too, which reads them back from their
device: a token that there is none of ends in a model's kernel, and a law that is none bends the output.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Many
from dataclasses import replace
from numbers import Integral, Real

import torch
from torch import Tensor

from outrider.draft_length.base import Plan, Prospect
from outrider.drafters.base import DraftContext, Drafter
from outrider.errors import ParameterError
from outrider.proposal import Alternatives, DraftRow, Proposal
from outrider.support.device_data import pad_rows

WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
LAWS = (torch.float64, torch.float32)
ROUNDED = 1e-6  # how far from 1 it may and be tested as it is
OFF = 1e-3  # how far from 1 a law may sum up: more than float32 makes of 150,000 numbers, less than bfloat16 does


def prospects_of(drafter: Drafter, row: DraftRow) -> Many[Prospect]:
    """In which ways it could draft now. Raises `ParameterError` unless these are prospects."""
    if is_ours(drafter):
        return drafter.prospects(row)
    check_name(drafter)
    offered = drafter.prospects(row)
    if not isinstance(offered, list | tuple) or not offered or not all(isinstance(one, Prospect) for one in offered):
        raise ParameterError(f"drafter {drafter.name} must offer a list of one Prospect or more, got {offered!r:.60}")
    for one in offered:
        _check_prospect(f"drafter {drafter.name}", one)
    return offered


def check_name(drafter: Drafter) -> None:
    """Raise `ParameterError` if it has none."""
    if not isinstance(getattr(drafter, "name", None), str):
        raise ParameterError(f"drafter {type(drafter).__name__} must have a name, a text that the records have for it")


def _check_prospect(who: str, one: Prospect) -> None:
    if not isinstance(one.drafter, str):
        raise ParameterError(f"{who} must offer prospects with a name, a text, got {one.drafter!r:.60}")
    if not isinstance(one.longest, int) or one.longest < 0:
        raise ParameterError(f"{who} must offer prospects whose longest is 0 or more, got {one.longest!r}")
    for name in ("step_seconds", "start_seconds", "behind_seconds"):
        value = getattr(one, name)
        if not isinstance(value, Real) or not 0 <= float(value) < float("inf"):
            raise ParameterError(f"{who} must offer prospects whose {name} are 0 or more, got {value!r:.60}")
    for name in ("first", "later"):
        value = getattr(one, name)
        if not isinstance(value, Real) or not 0 <= float(value) <= 1:
            raise ParameterError(f"{who} must offer prospects whose {name} is in [0, 1], got {value!r:.60}")
    tests: object = one.tests
    if not isinstance(tests, Real) or not 0 < float(tests) < float("inf"):
        raise ParameterError(f"{who} must offer prospects whose tests are more than 0, got {tests!r:.60}")
    if not isinstance(one.kind, Hashable):
        raise ParameterError(f"{who} must offer prospects whose kind has a hash, got {one.kind!r:.60}")


def proposal_from(drafter: Drafter, rows: Many[DraftRow], plans: Many[Plan], context: DraftContext) -> Proposal:
    """What it proposes. Raises `ParameterError` unless that is a proposal for these rows and plans.

    That its tokens were drawn from its laws can't be seen: it takes an audit.
    """
    proposal = drafter.propose(rows, plans, context)
    who, limits = f"drafter {drafter.name}", [plan.limit for plan in plans]
    if not isinstance(proposal, Proposal):
        raise ParameterError(f"{who} must propose a Proposal (padded_proposal makes one), got {proposal!r:.60}")
    if is_ours(drafter):
        _check_form(who, proposal, limits, context.vocab_size)
        return proposal
    proposal = _in_our_types(who, proposal)
    _check_form(who, proposal, limits, context.vocab_size)
    return _with_good_values(who, proposal, context.vocab_size)


def is_ours(drafter: Drafter) -> bool:
    """Whether it comes with this package."""
    return type(drafter).__module__.partition(".")[0] == __name__.partition(".")[0]


def _in_our_types(who: str, proposal: Proposal) -> Proposal:
    tokens, probs, lengths = proposal.tokens, proposal.probs, proposal.lengths
    if not _is_dense(tokens) or tokens.dtype not in WHOLE:
        raise ParameterError(f"{who} must propose tokens as an int64 tensor, got {_type(tokens)}")
    if not isinstance(lengths, list | tuple) or not all(map(_is_whole, lengths)):
        raise ParameterError(f"{who} must propose lengths as a list of whole numbers, got {lengths!r:.60}")
    if probs is not None and not (_is_dense(probs) and probs.dtype in LAWS):
        raise ParameterError(f"{who} must propose distributions as a tensor of float32 or float64, got {_type(probs)}")
    made = replace(proposal, tokens=tokens.long(), lengths=[int(length) for length in lengths])
    _check_signals(who, made)
    if not isinstance(made.beside, Alternatives | None):
        raise ParameterError(f"{who} must propose alternatives as Alternatives, got {type(made.beside).__name__}")
    if made.candidates is not None and not _is_list(made.candidates, len(lengths)):
        raise ParameterError(f"{who} must propose candidates as a list for each row, got {made.candidates!r:.60}")
    return made.knowing(proposal.known)


def _check_signals(who: str, proposal: Proposal) -> None:
    signals = proposal.signals
    if signals is None:
        return
    wanted = proposal.lengths
    if not _is_list(signals, len(wanted)) or not all(map(_are_signals, signals, wanted)):
        raise ParameterError(
            f"{who} must propose signals as a whole number for each token of a row, or none, where its rows have "
            f"{wanted!r:.60}, got {signals!r:.60}"
        )


def _are_signals(row: object, length: int) -> bool:
    return isinstance(row, list | tuple) and (not row or len(row) >= length) and all(map(_is_whole, row))


def _is_list(value: object, length: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == length


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_dense(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and value.device.type != "meta"


def _type(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"one of {value.dtype}" if _is_dense(value) else f"one without values of its own ({value.layout}, {value.device})"


def _check_form(who: str, proposal: Proposal, limits: list[int], vocab_size: int) -> None:
    shape, lengths, probs = tuple(proposal.tokens.shape), proposal.lengths, proposal.probs
    if len(shape) != 2 or shape[0] != len(limits) or len(lengths) != len(limits) or max(lengths) > shape[1]:
        raise ParameterError(
            f"{who} must propose tokens [{len(limits)}, K] and a length of K or less for each row, got {list(shape)} and "
            f"lengths {lengths}"
        )
    for length, limit in zip(lengths, limits, strict=True):
        if not 0 <= length <= limit:
            raise ParameterError(f"{who} proposed {length} tokens where {limit} were allowed")
    if probs is not None and tuple(probs.shape) != (*shape, vocab_size):
        raise ParameterError(
            f"{who} must propose distributions [{shape[0]}, {shape[1]}, {vocab_size}], one for each token, "
            f"got {tuple(probs.shape)}"
        )


def _with_good_values(who: str, proposal: Proposal, vocab_size: int) -> Proposal:
    """The same, where nothing but its rows' own tokens is left."""
    held = proposal.tokens.tolist()
    drafts = [row[:length] for row, length in zip(held, proposal.lengths, strict=True)]
    if proposal.known is not None and [list(row) for row in proposal.known] != drafts:
        raise ParameterError(f"{who} must not change the tokens of what padded_proposal made, {proposal.known}, to {drafts}")
    for row, drafted in enumerate(drafts):
        wrong = [token for token in drafted if not 0 <= token < vocab_size]
        if wrong:
            raise ParameterError(f"{who} must propose tokens in 0 … {vocab_size - 1}, got {wrong[0]}")
        if proposal.probs is not None and drafted:
            sums = _check_laws(who, proposal.probs[row, : len(drafted)], proposal.tokens[row, : len(drafted)])
            if bool((sums - 1.0).abs().max() > ROUNDED):
                proposal = _normalised(proposal, row, sums)
    behind = [token for row, length in zip(held, proposal.lengths, strict=True) for token in row[length:]]
    if all(0 <= token < vocab_size for token in behind):
        return proposal
    tokens, _ = pad_rows(drafts, proposal.tokens.device)
    width = proposal.tokens.shape[1] - tokens.shape[1]
    return replace(proposal, tokens=torch.nn.functional.pad(tokens, (0, width))).knowing(drafts)


def _normalised(proposal: Proposal, row: int, sums: Tensor) -> Proposal:
    """The same with a row's laws as they are drawn from, whatever they sum up to."""
    assert proposal.probs is not None
    probs = proposal.probs.clone()
    probs[row, : len(sums)] = (probs[row, : len(sums)].double() / sums.unsqueeze(-1)).to(probs.dtype)
    return replace(proposal, probs=probs).knowing(proposal.known)


def _check_laws(who: str, laws: Tensor, tokens: Tensor) -> Tensor:
    """laws: [K, V], tokens: [K], of one row. → what they sum up to, float64 [K]"""
    sums, least = laws.sum(-1, dtype=torch.float64), laws.amin(-1).double()
    own = laws.gather(-1, tokens.to(laws.device).unsqueeze(-1)).squeeze(-1).double()
    for place, (total, lowest, drawn) in enumerate(torch.stack([sums, least, own], -1).tolist()):
        if not (abs(total - 1.0) <= OFF and lowest >= 0.0):
            raise ParameterError(
                f"{who} must propose distributions that are 0 or more and sum to 1, in float32 or better, "
                f"got a sum of {total:.6g} "
                f"and a least probability of {lowest:.3g} for token {place} of its draft"
            )
        if not drawn > 0.0:
            raise ParameterError(
                f"{who} must draw its tokens from their distributions, got token {place} of its draft with probability 0"
            )
    return sums
