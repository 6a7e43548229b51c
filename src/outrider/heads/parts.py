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

from outrider.heads.config import CONFIG, WEIGHTS, load_head
from outrider.heads.layers import load_weights, make_network
from outrider.heads.target_parts import output_rows
from outrider.models.base import HandsOutStates
from outrider.models.packed_linear import pack_linears
from outrider.models.rounded import round_linears

KEPT = 2  # heads a target: what is drafted with in turn, and no more of what a training writes

_kept: WeakKeyDictionary[HandsOutStates, dict[Hashable, HeadParts]] = WeakKeyDictionary()


@dataclass(frozen=True)
class HeadParts:
    """network: frozen, packed or rounded. rows: [.., W] → [.., T]. tokens: int64 [T], the target's ids of its vocabulary.

    They hold no state of a sequence and nothing of the target, so any number of models can share them.
    """

    network: nn.Module
    rows: nn.Module
    tokens: Tensor
    dtype: torch.dtype
    rounded: bool


def parts_of(target: HandsOutStates, folder: Path, dtype: torch.dtype, rounded: bool) -> HeadParts:
    """The parts of the head in a folder, for this target; as they were if neither file has changed since.

    dtype: in which it computes what is not rounded. Raises `ModelError`.
    """
    kept = _kept.setdefault(target, {})
    which = (folder.resolve(), dtype, rounded, *(_version(folder / name) for name in (CONFIG, WEIGHTS)))
    parts = kept.pop(which, None) or _make(target, folder, dtype, rounded)
    kept[which] = parts  # the last one used comes last
    while len(kept) > KEPT:
        del kept[next(iter(kept))]
    return parts


def _make(target: HandsOutStates, folder: Path, dtype: torch.dtype, rounded: bool) -> HeadParts:
    config, tokens, weights = load_head(folder)
    network = make_network(config)
    load_weights(network, config, weights)
    network = network.to(target.device, dtype).eval().requires_grad_(False)
    tokens = tokens.to(target.device)
    rows = nn.Sequential(output_rows(target, tokens, dtype))
    for part in (network, rows):
        (round_linears if rounded else pack_linears)(part)
    return HeadParts(network, rows, tokens, dtype, rounded)


def _version(path: Path) -> tuple[int, int]:
    """Of a file: when it was written, and its size; zeros if it can't be read, which reading it will say."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size
