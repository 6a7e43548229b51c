"""A converted model in its folder: graph, weights, tokenizer, and what the engine must know of it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Literal

from outrider.errors import ModelError
from outrider.models.openvino.trace import AttentionLayer

ABOUT = "outrider.json"
Weights = Literal["int8", "int4", "float32"]


@dataclass(frozen=True)
class About:
    """weights: what they were quantized to. group: columns that share a scale, of weights in 4 bits and of activations.
    width: of a state.
    """

    name: str
    vocab_size: int
    max_length: int | None
    end_tokens: tuple[int, ...]
    weights: Weights
    group: int
    width: int
    layers: tuple[AttentionLayer, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> About:
        held = json.loads(text)
        held["layers"] = tuple(AttentionLayer(**layer) for layer in held["layers"])
        return About(**{**held, "end_tokens": tuple(held["end_tokens"])})


class Saved:
    """A folder that `convert` has made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def about(self) -> About:
        try:
            return About.from_json((self.folder / ABOUT).read_text())
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"converted model {self.folder} can't be read: delete the folder, it is made again") from error

    def graph(self) -> Any:
        """The graph, read anew: its weights lie in the file. Raises RuntimeError if it is damaged."""
        import openvino

        return openvino.Core().read_model(self.folder / "model.xml")

    @cached_property
    def tokenizer(self) -> Any:
        """None if the model came without one."""
        from transformers import AutoTokenizer

        if not (self.folder / "tokenizer_config.json").exists():
            return None
        try:
            return AutoTokenizer.from_pretrained(self.folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"tokenizer of the converted model {self.folder} can't be read"
            raise ModelError(f"{reason}: delete the folder, it is made again") from error


_UNPACKING = {"Convert", "Multiply", "Subtract", "Reshape"}  # between a quantized constant and its reader


def read_bytes(graph: Any) -> int:
    """Bytes of constants that a pass of one token reads whole: all but tables of which it only looks up a row."""
    read: dict[str, Any] = {}
    for op in graph.get_ops():
        kind = op.get_type_name()
        if kind not in _UNPACKING:
            whole = op.input_values()[1:] if kind == "Gather" else op.input_values()
            for value in whole:
                _constants(value.get_node(), read)
    return sum(_bytes(node) for node in read.values())


def _constants(node: Any, found: dict[str, Any]) -> None:
    """Add the constants that a node unpacks."""
    if node.get_type_name() == "Constant":
        found[node.get_friendly_name()] = node
    elif node.get_type_name() in _UNPACKING:
        for value in node.input_values():
            _constants(value.get_node(), found)


def _bytes(constant: Any) -> int:
    return prod(int(size) for size in constant.get_output_shape(0)) * int(constant.get_output_element_type(0).bitwidth) // 8
