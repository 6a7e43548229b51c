"""What a head is made of beside a target: its network, and the target's output rows for its own vocabulary.

Reading the rows off a target takes a pass over unit vectors (half a second for a vocabulary of 32,000, a second for a large
target), so that whoever generates from many prompts, one call each, would wait for it each time. They are kept while the
target lives.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from outrider.heads.config import StoredHead
from outrider.heads.layers import HeadNetwork, load_weights, make_network
from outrider.heads.published.networks import BlockRows, NormedRows, linear_of, make_published
from outrider.heads.stored import files_of, read_head
from outrider.heads.target_parts import output_rows
from outrider.models.base import HandsOutStates
from outrider.models.packed_linear import pack_linears
from outrider.models.rounded import round_linears

COMPARED = 4096  # rows of embeddings
SAME = 0.02  # what two embeddings differ by if one is the other, rounded to another type or to 8 bits, root mean square
KEPT = 2  # heads a target: what is drafted with in turn, and no more of what a training writes

_kept: WeakKeyDictionary[HandsOutStates, dict[Hashable, HeadParts]] = WeakKeyDictionary()


@dataclass(frozen=True)
class HeadParts:
    """network: frozen, packed or rounded. rows: [.., W] → [.., T] ([.., blocks, W] → [.., blocks, T] of blockwise heads).
    tokens: int64 [T], the target's ids of its vocabulary. embedding: its own, None if it takes the target's.

    They hold no state of a sequence and nothing of the target, so any number of models can share them.
    """

    network: HeadNetwork
    rows: nn.Module
    tokens: Tensor
    dtype: torch.dtype
    rounded: bool
    embedding: nn.Embedding | None = None


def parts_of(target: HandsOutStates, folder: Path, dtype: torch.dtype, rounded: bool) -> HeadParts:
    """The parts of the head in a folder, for this target; as they were if neither file has changed since.

    dtype: in which it computes what is not rounded. Raises `ModelError`.
    """
    kept = _kept.setdefault(target, {})
    which = (folder.resolve(), dtype, rounded, *map(_version, files_of(folder)))
    parts = kept.pop(which, None) or _make(target, folder, dtype, rounded)
    kept[which] = parts  # the last one used comes last
    while len(kept) > KEPT:
        del kept[next(iter(kept))]
    return parts


def _make(target: HandsOutStates, folder: Path, dtype: torch.dtype, rounded: bool) -> HeadParts:
    stored = read_head(folder)
    network: HeadNetwork = (make_network if stored.config.published is None else make_published)(stored.config)
    load_weights(network, stored.config, stored.weights)
    network = network.to(target.device, dtype).eval().requires_grad_(False)
    tokens = stored.tokens.to(target.device)
    rows = nn.Sequential(_rows(target, stored, tokens, dtype))
    for part in (network, rows):
        (round_linears if rounded else pack_linears)(part)
    return HeadParts(network, rows, tokens, dtype, rounded, _embedding(target, stored, dtype))


def _rows(target: HandsOutStates, stored: StoredHead, tokens: Tensor, dtype: torch.dtype) -> nn.Module:
    """The output layer, frozen: the head's own as far as it brings one."""
    own = stored.rows
    if not own:
        return output_rows(target, tokens, dtype)
    if "norm" not in own:
        rows: nn.Module = BlockRows(list(own.values()))
    else:
        head = linear_of(own["head"]) if "head" in own else output_rows(target, tokens, dtype)
        rows = NormedRows(own["norm"], stored.config.norm_eps, head)
    return rows.to(target.device, dtype).requires_grad_(False)


def _embedding(target: HandsOutStates, stored: StoredHead, dtype: torch.dtype) -> nn.Embedding | None:
    """The head's own, unless it is but a copy of the target's, which training left as it was."""
    own = stored.embedding
    if own is None:
        return None
    if own.shape == (target.vocab_size, target.state_size):
        ids = torch.arange(0, target.vocab_size, max(1, target.vocab_size // COMPARED), device=target.device)
        theirs, ours = target.embed(ids).float().cpu(), own[ids.cpu()].float()
        if float((theirs - ours).square().mean()) <= SAME**2 * float(theirs.square().mean()):
            return None
    with torch.inference_mode(False):
        weight = own.to(target.device, dtype)
        return nn.Embedding(weight.shape[0], weight.shape[1], _weight=weight).requires_grad_(False)


def _version(path: Path) -> tuple[int, int]:
    """Of a file: when it was written, and its size; zeros if it can't be read, which reading it will say."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size
