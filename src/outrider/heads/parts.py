"""What a head is made of beside a target: its network, and the target's output rows for its own vocabulary.

Reading the rows off a target takes a pass over unit vectors (half a second for a vocabulary of 32,000, a second for a large
target), so that whoever generates from many prompts, one call each, would wait for it each time. They are kept while the
target lives.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from outrider.heads.config import StoredHead
from outrider.heads.layers import HeadNetwork, load_weights, make_network
from outrider.heads.published.networks import BlockRows, NormedRows, make_published
from outrider.heads.rotary import use_kernels
from outrider.heads.stored import files_of, read_head
from outrider.heads.target_parts import output_rows
from outrider.kernels.models import kernels
from outrider.models.base import HandsOutStates
from outrider.models.weights.one_piece import put_in_one_piece
from outrider.models.weights.packed_linear import pack_linears
from outrider.models.weights.quantized import quantize_linears

if TYPE_CHECKING:
    from outrider.heads.recorded import RecordedHead

COMPARED = 4096  # rows of embeddings
SAME = 0.02  # what two embeddings differ by if one is the other, rounded to another type or to 8 bits, root mean square
KEPT = 2  # heads a target: what is drafted with in turn, and no more of what a training writes

_kept: WeakKeyDictionary[HandsOutStates, dict[Hashable, HeadParts]] = WeakKeyDictionary()


@dataclass(frozen=True)
class HeadParts:
    """network: frozen, packed or quantized. rows: [.., W] → [.., T] ([.., blocks, W] → [.., blocks, T] of blockwise heads).
    tokens: int64 [T], the target's ids of its vocabulary. embedding: its own, None if it takes the target's.

    They hold no state of a sequence and nothing of the target but its token table, so any number of models can share them.
    recorded: its passes, by the kinds of the states that they read: making them anew takes milliseconds in each generation.
    """

    network: HeadNetwork
    rows: nn.Module
    tokens: Tensor
    dtype: torch.dtype
    quantized: bool
    embedding: nn.Embedding | None = None
    recorded: dict[Hashable, RecordedHead] = field(default_factory=dict)


def parts_of(target: HandsOutStates, folder: Path, dtype: torch.dtype, quantized: bool) -> HeadParts:
    """The parts of the head in a folder, for this target; as they were if neither file has changed since.

    dtype: in which it computes what is not quantized. Raises `ModelError`.
    """
    kept = _kept.setdefault(target, {})
    which = (folder.resolve(), dtype, quantized, *map(_version, files_of(folder)))
    parts = kept.pop(which, None) or _make(target, folder, dtype, quantized)
    kept[which] = parts  # the last one used comes last
    while len(kept) > KEPT:
        del kept[next(iter(kept))]
    return parts


def _make(target: HandsOutStates, folder: Path, dtype: torch.dtype, quantized: bool) -> HeadParts:
    stored = read_head(folder)
    lay_out = quantize_linears if quantized else pack_linears
    network = _network(stored).to(target.device, dtype).eval().requires_grad_(False)
    tokens = stored.tokens.to(target.device)
    rows = nn.Sequential(_rows(target, stored, tokens, dtype, lay_out))
    for part in (network, rows):
        lay_out(part)
    ours = kernels() if quantized else None
    if ours is not None:
        use_kernels(network, ours)
        put_in_one_piece(network, rows)
    return HeadParts(network, rows, tokens, dtype, quantized, _embedding(target, stored))


def _network(stored: StoredHead) -> HeadNetwork:
    if stored.config.published is not None:
        published = make_published(stored.config)
        published.load_state_dict(stored.weights, assign=True)
        return published
    network = make_network(stored.config)
    load_weights(network, stored.config, stored.weights)
    return network


def _rows(
    target: HandsOutStates, stored: StoredHead, tokens: Tensor, dtype: torch.dtype, lay_out: Callable[[nn.Module], object]
) -> nn.Module:
    """The output layer, frozen: the head's own as far as it brings one. lay_out: what makes linear layers ready."""
    own = stored.rows

    def linear(name: str) -> nn.Module:
        """One after the other, since each is large in the type that it is quantized from."""
        weight = own[name].to(target.device, dtype)
        layer = nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta"))
        layer[0].weight = nn.Parameter(weight, requires_grad=False)
        lay_out(layer)
        return layer[0]

    if "heads.0" in own:
        return BlockRows([linear(name) for name in own])
    head = linear("head") if "head" in own else output_rows(target, tokens, dtype)
    if "norm" not in own:
        return head
    norm = own["norm"].to(target.device, dtype)
    return NormedRows(norm, stored.config.norm_eps, head).requires_grad_(False)


def _embedding(target: HandsOutStates, stored: StoredHead) -> nn.Embedding | None:
    """The head's own, unless it is but a copy of the target's, which training left as it was."""
    own = stored.embedding
    if own is None:
        return None
    if own.shape[1] == target.state_size:
        ids = torch.arange(0, target.vocab_size, max(1, target.vocab_size // COMPARED), device=target.device)
        theirs, ours = target.embed(ids).float().cpu(), own[ids.cpu()].float()
        if float((theirs - ours).square().mean()) <= SAME**2 * float(theirs.square().mean()):
            return None
    with torch.inference_mode(False):
        weight = own.to(target.device)
        return nn.Embedding(weight.shape[0], weight.shape[1], _weight=weight).requires_grad_(False)


def _version(path: Path) -> tuple[int, int]:
    """Of a file: when it was written, and its size; zeros if it can't be read, which reading it will say."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size
