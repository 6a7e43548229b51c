"""The target's last states along the training text, computed once and kept on disk in shards.

A state is all that is needed of the target: its head's rows make logits of it, and the stored log normaliser makes
probabilities of any part of them. So a training step never runs the target, whatever its size, and memory is bounded by
a batch. A shard is complete or not there: an interrupted run goes on with the next one.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from outrider.errors import ModelError, ParameterError
from outrider.models.transformers_model import TransformersModel
from outrider.support.run_log import as_read_back
from outrider.support.whole_files import replace_whole
from outrider.train.corpus import Window

SHARD = 256  # windows
POSITIONS = 32  # whose laws over the whole vocabulary are in memory at once in float32
Bar = Callable[[Iterable[int], str, str], None]  # steps, what is done, in what it is counted
_BY_WINDOW = ("tokens", "states", "normalisers", "drafted")
TOLERANCE = 0.1  # of the logits' spread: bfloat16 rounds to 0.02


@dataclass(frozen=True)
class Shard:
    """tokens int64 [n, L]; states [n, L, (1 + layers) W] as the target computed them, the last ones first; normalisers
    [n, L]: log of the sum of exp; drafted bool [n, L]: whether the token after each position is no prompt's.

    mass: [V], the target's probabilities added up over all positions: how often it would say each token.
    """

    tokens: Tensor
    states: Tensor
    normalisers: Tensor
    drafted: Tensor
    mass: Tensor


class StateFolder:
    """Shards in a folder. about: what they were made of; a folder made of something else is refused."""

    def __init__(self, folder: Path, about: dict[str, object]) -> None:
        self.folder = folder
        index = folder / "index.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if index.exists():
                if _stored(index) != as_read_back(about):
                    raise ParameterError(f"states in {folder} were made of other data or by another model: delete it")
            else:
                replace_whole(index, json.dumps(about, indent=1))
        except OSError as error:
            raise ParameterError(f"states can't be kept in {folder} ({error.strerror}): name another --cache") from None

    @property
    def paths(self) -> list[Path]:
        """Complete shards."""
        return sorted(self.folder.glob("shard-*.safetensors"))

    def write(self, number: int, shard: Shard) -> None:
        """Add a shard."""
        from safetensors.torch import save_file

        path = self.folder / f"shard-{number:05d}.safetensors"
        part = path.with_suffix(".part")
        parts = {**vars(shard), "tokens": shard.tokens.int()}
        try:
            save_file({name: value.contiguous() for name, value in parts.items()}, part)
            part.rename(path)
        except OSError as error:
            raise ParameterError(f"states can't be kept in {self.folder} ({error.strerror}): make room") from None


def _stored(index: Path) -> object:
    try:
        return json.loads(index.read_text())
    except ValueError:
        raise ParameterError(
            f"states in {index.parent} can't be used ({index.name} is damaged): delete the folder, or name another --cache"
        ) from None


class StateWindows(Dataset[dict[str, Tensor]]):
    """The windows of some shards, read where they lie."""

    def __init__(self, paths: list[Path]) -> None:
        from safetensors import safe_open

        self._files: list[Any] = [safe_open(path, framework="pt") for path in paths]
        self._starts = np.cumsum([0, *(file.get_slice("tokens").get_shape()[0] for file in self._files)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        file, at = self._place(number)
        out = {name: file.get_slice(name)[at] for name in _BY_WINDOW}
        return {**out, "tokens": out["tokens"].long()}

    def tokens(self, number: int) -> Tensor:
        """Of one window, int64 [L], without its states."""
        file, at = self._place(number)
        found: Tensor = file.get_slice("tokens")[at]
        return found.long()

    def spread(self, count: int) -> list[int]:
        """So many windows, evenly over all, by number; all of them if there are no more."""
        count = min(count, len(self))
        return [i * len(self) // count for i in range(count)]

    def _place(self, number: int) -> tuple[Any, int]:
        shard = int(np.searchsorted(self._starts, number, side="right")) - 1
        return self._files[shard], int(number - self._starts[shard])


def keep_states(
    target: TransformersModel,
    windows: Iterator[Window],
    folder: StateFolder,
    layers: Many[int] = (),
    batch_size: int = 4,
) -> Iterator[int]:
    """Compute the states of all windows that the folder does not hold yet, the last ones and those of `layers`; yields the
    windows done so far.
    """
    done = len(folder.paths)
    for _ in islice(windows, done * SHARD):
        pass
    target.keep_states(layers)
    total = done * SHARD
    while block := list(islice(windows, SHARD)):
        parts = []
        for first in range(0, len(block), batch_size):
            some = block[first : first + batch_size]
            tokens = torch.from_numpy(np.stack([window.tokens for window in some])).long()
            if (most := int(tokens.max())) >= target.vocab_size:
                raise ParameterError(
                    f"data must hold tokens in 0 … {target.vocab_size - 1}, {target.name}'s, got {most}: of another model?"
                )
            drafted = torch.from_numpy(np.stack([window.drafted for window in some]))
            parts.append(states_of(target, tokens, layers, drafted))
            yield total + min(first + batch_size, len(block))
        of_windows = {name: torch.cat([getattr(part, name) for part in parts]) for name in _BY_WINDOW}
        folder.write(done, Shard(**of_windows, mass=torch.stack([part.mass for part in parts]).sum(0)))
        done, total = done + 1, total + len(block)


@torch.inference_mode()
def states_of(target: TransformersModel, tokens: Tensor, layers: Many[int] = (), drafted: Tensor | None = None) -> Shard:
    """Teacher-forced states of some windows, through the engine that will draft.

    tokens: int64 [n, L]. drafted: bool [n, L], which of them are no prompt's; all by default.
    """
    sequences = [target.open(tokens.shape[1]) for _ in tokens]
    try:
        logits = target.score(sequences, tokens.to(target.device), [tokens.shape[1]] * len(tokens), "all")
        assert logits is not None
        normalisers, mass = _normalisers(logits.flatten(0, 1))
        normalisers = normalisers.view(tokens.shape)
        states = torch.stack([target.states(sequence, 0, tokens.shape[1], layers) for sequence in sequences])
        check_rows(target, states[0, :8, : target.state_size], logits[0, :8])
        drafted = torch.ones_like(tokens, dtype=torch.bool) if drafted is None else drafted
        followed = torch.cat([drafted[:, 1:], drafted[:, -1:]], dim=1)  # by what, after the last one, is not known
        return Shard(tokens, states.cpu().clone(), normalisers.cpu(), followed, mass.cpu())
    finally:
        for sequence in sequences:
            sequence.close()


def _normalisers(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of the laws at some positions [N, V], few of them at a time, while they are in the cache. → [N], the laws' sum [V]"""
    found, mass = [], torch.zeros(logits.shape[-1], device=logits.device)
    for part in torch.split(logits, POSITIONS):
        exact = part.float()
        found.append(exact.logsumexp(-1))
        mass += (exact - found[-1].unsqueeze(-1)).exp_().sum(0)
    return torch.cat(found), mass


def check_rows(target: TransformersModel, states: Tensor, logits: Tensor) -> None:
    """Raise `ModelError` unless the logits are the output layer's on these states: no caps, no scales in between."""
    if (off := rows_off(target, states, logits)) > TOLERANCE:
        raise ModelError(
            f"{target.name} can't be trained for: its logits are not those of its output layer on its last state (off by "
            f"{off:.2g} of their spread); use a smaller model of its family as the draft"
        )


def rows_off(model: TransformersModel, states: Tensor, logits: Tensor) -> float:
    """How far a model's logits are from its output layer on these states, as a share of their spread."""
    own = model.module.get_output_embeddings()(states).float()
    off = float((own - logits.float()).square().mean().sqrt() / logits.float().std())
    return off if math.isfinite(off) else math.inf


def check_states(target: TransformersModel, folder: StateFolder, layers: Many[int] = ()) -> None:
    """Raise `ParameterError` if the states that a folder holds already are of other weights of the same shape.

    By computing those of its first window again: two targets fine-tuned from one have the same configuration. Each position
    of each layer is compared with itself: a few are of a size that would hide all others.
    """
    if not folder.paths:
        return
    target.keep_states(layers)
    first = StateWindows(folder.paths[:1])[0]
    shape = (len(first["tokens"]), 1 + len(layers), -1)
    kept = first["states"].float().view(shape)
    anew = states_of(target, first["tokens"].unsqueeze(0), layers).states[0].float().view(shape)
    off = float(((anew - kept).norm(dim=-1) / kept.norm(dim=-1)).median(0).values.max())
    if not off <= TOLERANCE:
        raise ParameterError(
            f"states in {folder.folder} were made with other weights of {target.name} (off by {off:.2g} of their size): "
            "delete it, or name another --cache"
        )


def digest(*parts: object) -> str:
    """A short name for what states were made of."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def frequent_tokens(paths: list[Path], count: int, vocab_size: int, always: frozenset[int]) -> Tensor:
    """The `count` tokens to which the target gives most along the training text, those in `always` among them.

    What it gives to others is what no head over these tokens can be accepted for. → int64, ascending
    """
    from safetensors import safe_open

    if not 1 <= count <= vocab_size:
        raise ParameterError(f"vocabulary must be in 1 … {vocab_size}, got {count}")
    counts = torch.zeros(vocab_size)
    for path in paths:
        with safe_open(path, framework="pt") as file:
            counts += file.get_tensor("mass")[:vocab_size]
    for token in always:
        counts[token] = counts.max() + 1
    order: Any = counts.argsort(descending=True, stable=True)
    return torch.as_tensor(order[:count]).sort().values
