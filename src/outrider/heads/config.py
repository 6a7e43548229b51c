"""What a draft head is, on disk: a folder with `config.json`, `model.safetensors` (its own weights and the ids of its
vocabulary) and a card. The target's embedding and the rows of its head are not in it: they are taken from the target.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from outrider.errors import ModelError, ParameterError, in_one_line
from outrider.support.checks import check_count

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CONFIG, WEIGHTS, TOKENS = "config.json", "model.safetensors", "tokens"
Kind = Literal["autoregressive", "blockwise"]
Layout = Literal["EAGLE", "EAGLE-3", "Medusa"]


@dataclass(frozen=True)
class Published:
    """What is different in a head of another project, whose folder is read as it is (`heads.published`).

    target_width: of the target's states, which need not be the head's own. reads: how many of the target's layers an
    EAGLE-3 head reads; which ones is settled when the target is known, if its config does not say. rope: transformers'
    parameters of its rotary positions, theta among them. join_bias: of what joins a token and a state (EAGLE). input_norm:
    before attention (EAGLE), or before the states of several layers become one vector (EAGLE-3); part_norms: each of these
    by itself. out_bias: of attention's output. norm_before_residual: what the layer's output is added to is normed;
    norm_output: what it goes on with is (EAGLE-3). depth: residual blocks of a head (Medusa).
    """

    layout: Layout
    target_width: int
    reads: int = 0
    rope: dict[str, Any] = field(default_factory=dict)
    join_bias: bool = False
    input_norm: bool = False
    part_norms: bool = False
    out_bias: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    depth: int = 1


@dataclass(frozen=True)
class HeadConfig:
    """The shape of a head.

    target: the name of the model that it was made for. width: of the target's hidden state. vocab_size: the target's;
    num_tokens: of the head's own vocabulary. num_heads … qkv_bias: of its one layer (autoregressive). window: positions
    that it attends to at most. blocks: heads, one a position (blockwise). layers: of the target, counted from 1, whose
    states are read beside the last one (autoregressive; in its place by EAGLE-3). published: what a head of another project
    has otherwise.
    """

    kind: Kind
    target: str
    width: int
    vocab_size: int
    num_tokens: int
    intermediate_size: int
    num_heads: int = 1
    num_kv_heads: int = 1
    head_size: int = 64
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    window: int = 512
    blocks: int = 4
    layers: tuple[int, ...] = ()
    published: Published | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))  # JSON has lists
        if self.kind not in ("autoregressive", "blockwise"):
            raise ParameterError(f"kind must be autoregressive or blockwise, got {self.kind!r}")
        for name in ("width", "intermediate_size", "num_heads", "num_kv_heads", "head_size", "window", "blocks"):
            check_count(name, getattr(self, name))
        if not 1 <= self.num_tokens <= self.vocab_size:
            raise ParameterError(f"num_tokens must be in 1 … {self.vocab_size}, got {self.num_tokens}")
        if self.num_heads % self.num_kv_heads or self.head_size % 2:
            raise ParameterError("num_heads must be a multiple of num_kv_heads, and head_size even")
        if self.layers and self.kind != "autoregressive":
            raise ParameterError(f"layers must not be given for {self.kind} heads: they read the last state alone")
        check_order(self.layers)

    @property
    def name(self) -> str:
        """What it is."""
        return f"{self.kind if self.published is None else self.published.layout} head"

    @property
    def target_width(self) -> int:
        """Of one of the target's states."""
        return self.width if self.published is None else self.published.target_width

    @property
    def states_width(self) -> int:
        """Of what its network reads at a position: the target's states side by side, the last one first, or what a head of
        another project makes of them beforehand (`layers.HeadNetwork.condense`).
        """
        return self.width * (1 + len(self.layers)) if self.published is None else self.width


@dataclass(frozen=True)
class StoredHead:
    """What a folder holds. tokens: int64 [num_tokens], the target's ids of the head's own, ascending. weights: of its
    network.

    rows: of its output layer, as far as that is not the target's: `norm` and `head` (EAGLE-3), or `heads.0` on (Medusa).
    embedding: [V, width] or more rows, if it brings one.
    """

    config: HeadConfig
    tokens: Tensor
    weights: dict[str, Tensor]
    rows: dict[str, Tensor] = field(default_factory=dict)
    embedding: Tensor | None = None


def check_order(layers: tuple[int, ...]) -> None:
    """Raise unless these may be the layers whose states a head reads."""
    if any(type(layer) is not int or layer < 1 for layer in layers) or list(layers) != sorted(set(layers)):
        raise ParameterError(f"layers must be different ones from 1 on, ascending, got {list(layers)}")


def save_head(folder: Path, config: HeadConfig, tokens: Tensor, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Write a head. tokens: int64 [num_tokens], the target's ids. weights: of the network alone."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: value.detach().to(dtype).contiguous() for name, value in weights.items()}
    save_file({**kept, TOKENS: tokens.int().contiguous()}, folder / WEIGHTS)
    shape = {name: value for name, value in asdict(config).items() if name != "published"}
    (folder / CONFIG).write_text(json.dumps(shape, indent=1) + "\n")


def is_head(folder: Path) -> bool:
    """Whether a folder says of itself that it is what `save_head` writes."""
    try:
        load_config(folder)
    except (ModelError, ParameterError):
        return False
    return True


def load_config(folder: Path) -> HeadConfig:
    """The shape of a head alone, and whose it is. Raises `ModelError`."""
    with reading(folder):
        stored: dict[str, Any] = json.loads((folder / CONFIG).read_text())
        if "kind" not in stored:
            raise ModelError(f"draft head {folder} can't be used here: its config names no kind, as Outrider's own do")
        unknown = stored.keys() - {one.name for one in fields(HeadConfig) if one.name != "published"}
        if unknown:
            raise ModelError(f"draft head {folder} can't be used: its config has an unknown entry {sorted(unknown)[0]!r}")
        return HeadConfig(**stored)


def load_head(folder: Path) -> tuple[HeadConfig, Tensor, dict[str, Tensor]]:
    """→ the config, the ids of the vocabulary (int64 [num_tokens]), the weights. Raises `ModelError`."""
    from safetensors.torch import load_file

    config = load_config(folder)
    with reading(folder):
        weights: dict[str, Tensor] = load_file(folder / WEIGHTS)
        tokens = weights.pop(TOKENS).long()
    in_order = bool((tokens[1:] > tokens[:-1]).all())
    if len(tokens) != config.num_tokens or not in_order or int(tokens[0]) < 0 or int(tokens[-1]) >= config.vocab_size:
        raise ModelError(f"draft head {folder} can't be used: its vocabulary is not {config.num_tokens} different tokens")
    return config, tokens, weights


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """What can go wrong with the files, in a line."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        reason = in_one_line(error, 200)
        if isinstance(error, KeyError) and error.args:  # a name that is missing, or a sentence of transformers
            said = str(error.args[0])
            reason = in_one_line(ValueError(said), 200) if " " in said else f"there is no {said!r}"
        raise ModelError(
            f"draft head {folder} can't be read ({reason}): name a folder made by outrider train head, or with an EAGLE, "
            "EAGLE-3 or Medusa checkpoint"
        ) from error
