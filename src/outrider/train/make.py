"""From data and a target to a draft in a folder: the steps that all kinds of drafts share.

output/states-…        the target's states, shard by shard
output/checkpoints     Trainer's
output                 the draft itself, its card
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from outrider.errors import ModelError, ParameterError
from outrider.heads.config import HeadConfig, Kind, check_order, load_head, save_head
from outrider.heads.layers import AutoregressiveHead, BlockwiseHeads, load_weights, make_network
from outrider.heads.opening import check_fits
from outrider.models.base import end_tokens, has_encoder, refuse_draft_only
from outrider.models.transformers_model import TransformersModel
from outrider.support.checks import check_count
from outrider.train.apart import check_apart, check_outside
from outrider.train.checkpoints import CHECKPOINTS
from outrider.train.corpus import HELD_OUT_EVERY, Source, stamp, windows
from outrider.train.losses import Loss
from outrider.train.run import Report, RunSettings, Windows, processes, train
from outrider.train.start import head_config, start_from_target
from outrider.train.states import Bar, StateFolder, StateWindows, check_states, digest, frequent_tokens, keep_states
from outrider.train.trainee import HeadTrainee

VOCABULARY = 8192
HELD_OUT_TOKENS = 6144
SAMPLE = 16  # windows that a head's start is fitted on
Network = AutoregressiveHead | BlockwiseHeads


@dataclass(frozen=True)
class DataSettings:
    """length: of a window. held_out: domain → a file or folder that is never trained on; without any, documents of the
    data are kept apart. cache: where states are kept. layers: of the target, whose states are kept beside the last ones.
    """

    sources: tuple[Source, ...]
    held_out: Mapping[str, str]
    cache: Path
    length: int = 256
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.sources:
            raise ParameterError("data must not be empty: give text files, folders, .jsonl files or dataset:NAME")
        if not 16 <= self.length <= 8192:
            raise ParameterError(f"length must be in 16 … 8192, got {self.length}")


@dataclass(frozen=True)
class Data:
    """What is trained on, and the held-out text by domain. paths: the shards. layers: whose states they have beside the last
    ones. about: what they were made of, in short.
    """

    paths: list[Path]
    train: StateWindows
    held_out: dict[str, Windows]
    layers: tuple[int, ...]
    about: dict[str, object]


def check_target(target: TransformersModel) -> None:
    """Raise if no draft can be trained for it, before it has read anything."""
    refuse_draft_only(target)
    if has_encoder(target):
        raise ModelError(
            f"{target.name} is an encoder-decoder, and drafts are trained for decoder-only models: draft for it with a "
            "smaller encoder-decoder of its family, copies or n-grams (docs/encoder-decoder.md)"
        )


def prepare(target: TransformersModel, settings: DataSettings, bar: Bar) -> Data:
    """The target's states of all windows; what is there already is not computed again."""
    if target.max_length is not None and settings.length > target.max_length:
        raise ParameterError(f"length must be at most the {target.max_length} positions of {target.name}")
    check_target(target)
    target.check_layers(settings.layers)
    names = [source.name for source in settings.sources]
    check_apart(names, settings.held_out)
    check_outside([*names, *settings.held_out.values()], [settings.cache])
    held_out = _held_out(target, settings, bar) if settings.held_out else _kept_apart(target, settings, bar)
    apart = None if settings.held_out else False
    paths = [path for source in settings.sources for path in _states(target, source, apart, settings, bar)]
    if not paths:
        raise ParameterError(f"data must hold at least one window of {settings.length} tokens: give more text")
    about: dict[str, object] = {
        "target": f"{target.name} {target.dtype_name} {digest(target.fingerprint)}",
        "length": settings.length,
        "data": [source.name if source.limit is None else f"{source.name}@{source.limit}" for source in settings.sources],
        "held out": "given" if settings.held_out else "of the data",
        "version of the data": digest([_about(target, source, apart, settings) for source in settings.sources]),
    }
    return Data(paths, StateWindows(paths), held_out, settings.layers, about)


def _held_out(target: TransformersModel, settings: DataSettings, bar: Bar) -> dict[str, Windows]:
    """By domain, what was given."""
    held_out: dict[str, Windows] = {}
    for name, place in settings.held_out.items():
        found = _states(target, Source(place, HELD_OUT_TOKENS), None, settings, bar)
        if not found:
            raise ParameterError(f"held-out text {name} must hold at least one window of {settings.length} tokens")
        held_out[name] = StateWindows(found)
    return held_out


def _kept_apart(target: TransformersModel, settings: DataSettings, bar: Bar) -> dict[str, Windows]:
    """Documents of the data that are not trained on."""
    most = max(settings.length, HELD_OUT_TOKENS // len(settings.sources))
    kept = [path for source in settings.sources for path in _states(target, Source(source.name, most), True, settings, bar)]
    if not kept:
        raise ParameterError(
            f"the documents kept apart (every {HELD_OUT_EVERY}th; of fewer the last of two or more) hold less than a window "
            f"of {settings.length} tokens: give --held-out NAME=PATH, more data, or a smaller --length"
        )
    return {"held_out": StateWindows(kept)}


def _states(
    target: TransformersModel, source: Source, held_out: bool | None, settings: DataSettings, bar: Bar
) -> list[Path]:
    """The shards of one source, in a folder of its own, so that other runs with the same source find them."""
    about = _about(target, source, held_out, settings)
    folder = StateFolder(settings.cache / f"states-{digest(about)}", about)
    check_states(target, folder, settings.layers)
    done = folder.folder / "done"
    if not done.exists():
        cut = windows([source], target.tokenizer, settings.length, held_out)
        try:
            bar(keep_states(target, cut, folder, settings.layers), f"States of {source.name}", "windows")
        finally:
            if not folder.paths:  # not a window: nothing to keep for other runs
                shutil.rmtree(folder.folder, ignore_errors=True)
        if folder.paths:
            done.touch()
    return folder.paths


def _about(target: TransformersModel, source: Source, held_out: bool | None, settings: DataSettings) -> dict[str, object]:
    """What the states of one source depend on."""
    about: dict[str, object] = {
        "target": target.fingerprint,
        "length": settings.length,
        "held_out": held_out,
        "kept": "states, normalisers, drafted, mass",
        **({"layers": settings.layers} if settings.layers else {}),
        "source": source.name,
        "limit": source.limit,
        "stamp": stamp(source.name),
    }
    return about if held_out is None else {**about, "apart": "every 50th document, or the last"}


@dataclass(frozen=True)
class HeadSettings:
    """vocabulary: tokens that the head drafts, None for 8192 or those of `start`. depth: of the chains trained on.
    intermediate_size: None for the target's. layers: of the target, whose states are read beside the last ones; the data
    must have them.

    start: a head to go on from, with its shape instead of this one. Its vocabulary may be another: what a head predicts are
    states, and their logits over any tokens are the target's.
    """

    kind: Kind
    vocabulary: int | None = None
    depth: int = 3
    blocks: int = 4
    intermediate_size: int | None = None
    window: int = 512
    layers: tuple[int, ...] = ()
    loss: Loss = "mix"
    start: Path | None = None

    def __post_init__(self) -> None:
        for name in ("vocabulary", "intermediate_size", "blocks", "window"):
            value = getattr(self, name)
            if value is not None:
                check_count(name, value)
        if not 1 <= self.depth <= 8:
            raise ParameterError(f"depth must be in 1 … 8, got {self.depth}")
        check_order(self.layers)


def train_head(
    target: TransformersModel, data: Data, head: HeadSettings, run: RunSettings, output: Path
) -> tuple[HeadConfig, Report]:
    """Train a head and write it to `output`."""
    if data.layers != head.layers:
        raise ParameterError(f"layers must be those that the data has, {list(data.layers)}, got {list(head.layers)}")
    torch.manual_seed(run.seed)
    begun = _begin(target, data, head) if head.start is None else _begin_from(target, data, head, head.start)
    config, tokens, network = begun
    trainee = HeadTrainee(network, target, tokens, head.loss, head.depth)
    shape = {**asdict(head), "start": None if head.start is None else str(head.start)}
    report = train(trainee, data.train, data.held_out, output / CHECKPOINTS, run, {**data.about, **shape})
    if processes().is_main_process:
        save_head(output, config, tokens, network.state_dict(), kept_dtype(target))
    return config, report


def _begin(target: TransformersModel, data: Data, head: HeadSettings) -> tuple[HeadConfig, Tensor, Network]:
    """A new head."""
    tokens = drafted_tokens(target, data, VOCABULARY if head.vocabulary is None else head.vocabulary)
    config = head_config(target, head.kind, len(tokens), head.intermediate_size, head.blocks, head.window, head.layers)
    network = make_network(config)
    if isinstance(network, AutoregressiveHead):
        sample = [data.train[i * len(data.train) // SAMPLE]["tokens"] for i in range(SAMPLE)]
        start_from_target(network, target, torch.stack(sample))
    return config, tokens, network


def drafted_tokens(target: TransformersModel, data: Data, most: int, size: int | None = None) -> Tensor:
    """The tokens that the target would say most often along the data, and those that end texts or have a special meaning.

    size: of the draft's own vocabulary, if it is smaller than the target's.
    """
    size = target.vocab_size if size is None else size
    count = min(most, size)
    special = end_tokens(target) | set(getattr(target.tokenizer, "all_special_ids", None) or ())
    always = frozenset(token for token in special if 0 <= token < size) if count > 256 else frozenset()
    return frequent_tokens(data.paths, count, size, always)


def _begin_from(
    target: TransformersModel, data: Data, head: HeadSettings, start: Path
) -> tuple[HeadConfig, Tensor, Network]:
    config, tokens, weights = load_head(start)
    check_fits(target, config)
    if config.layers != head.layers:
        raise ParameterError(f"layers must be those that {start} reads, {list(config.layers)}, got {list(head.layers)}")
    network = make_network(config)
    load_weights(network, config, {name: value.float() for name, value in weights.items()})
    if head.vocabulary is not None:
        tokens = drafted_tokens(target, data, head.vocabulary)
        config = replace(config, num_tokens=len(tokens))
    return config, tokens, network


def kept_dtype(target: TransformersModel) -> torch.dtype:
    """That a draft's weights are saved in."""
    return target.dtype if target.dtype in (torch.float32, torch.float64) and not target.quantized else torch.bfloat16
