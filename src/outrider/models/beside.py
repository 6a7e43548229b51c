"""Alternatives in the transformers engine (`base.ScoresAlternatives`): tokens in the places of appended ones, in one pass.

They lie in the columns of the slot cache behind the row's appended tokens, with the positions of their places; the mask
shows them what comes before these, and themselves (`masks`). One that is taken is copied to its place's column, all that is
held of it.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

from torch import Tensor

from outrider.models.cache.slots import SlotSequence, order_by_slot
from outrider.models.engine_checks import check_alternative, check_places, check_score
from outrider.support.device_data import index

if TYPE_CHECKING:
    from outrider.models.transformers_model import TransformersModel


def score_beside(
    model: TransformersModel,
    rows: list[SlotSequence],
    tokens: Tensor,
    lengths: Many[int],
    others: Tensor,
    places: Many[Many[int]],
) -> Tensor:
    """See `ScoresAlternatives`."""
    check_score(model.name, model.max_length, rows, lengths, tokens.shape[1])
    check_places(lengths, others, places)
    order = order_by_slot(rows)
    by_slot = list(range(len(rows))) if order is None else order
    ordered = [rows[i] for i in by_slot]
    wanted = max(count + len(own) for count, own in zip(lengths, places, strict=True))
    width = model._width(wanted, rows[0].length) if len(rows) == 1 else wanted
    recording = model._recording(ordered, width)
    if recording is not None:
        width = model._recorded_width(recording, ordered, width)
    longest = model._reserve(ordered, width)
    at = model._place(ordered, width, longest)
    positions, packed = at.clone(), tokens.new_zeros(len(rows), width)
    for k, i in enumerate(by_slot):
        count, own = lengths[i], places[i]
        packed[k, :count] = tokens[i, :count]
        packed[k, count : count + len(own)] = others[i, : len(own)]
        positions[k, count : count + len(own)] = index([rows[i].length + place for place in own], model.device)
    if recording is not None:
        out = model._forward_recorded(recording, packed, positions, longest, at)
    else:
        out = model._forward(packed, positions, longest, None, at)
    for row, count, own in zip(rows, lengths, places, strict=True):
        row.advance(count)
        row.beside = range(row.length, row.length + len(own))
    out = model.over_vocabulary(out)[:, :wanted]
    return out if order is None else out[index(order, out.device).argsort()]


def take_alternative(model: TransformersModel, row: SlotSequence, position: int, m: int) -> None:
    """See `ScoresAlternatives`."""
    check_alternative(position, m, row.length, len(row.beside))
    model._cache.copy_column(row.slot, row.beside[m], position)
    row.truncate(position + 1)
    row.beside = range(0)
