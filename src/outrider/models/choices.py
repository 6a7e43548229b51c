"""Engines and number formats that `load` can be asked for, and which go together; told without torch."""

from __future__ import annotations

from outrider.errors import ParameterError

ENGINES = ("auto", "transformers", "openvino", "llama.cpp")
FLOATS = ("float64", "float32", "bfloat16", "float16")
QUANTIZED = {"int8": 8, "int4": 4}  # bits of a weight


def check_choices(dtype: str, engine: str, compiled: bool = False) -> None:
    """Raise `ParameterError` for an engine or a dtype that there is not, and for what can't be compiled.

    Dtypes that an engine of its own weights has not are left to it.
    """
    if engine not in ENGINES:
        raise ParameterError(f"engine must be {', '.join(ENGINES[:-1])} or {ENGINES[-1]}, got {engine!r}")
    if compiled and not compiles(dtype, engine):
        raise ParameterError(
            f"compile is for the transformers engine with float weights, got engine {engine!r} and dtype {dtype!r}: leave "
            "compile out, or use dtype bfloat16 or float32"
        )
    if engine in ("auto", "transformers") and dtype not in QUANTIZED:
        check_dtype(dtype)


def check_dtype(dtype: str) -> None:
    """Raise `ParameterError` unless weights can be floating-point numbers of that format, or of whichever ("auto")."""
    if dtype not in ("auto", *FLOATS):
        raise ParameterError(f"dtype must be one of auto, {', '.join(FLOATS)}, int8, int4, got {dtype!r}")


def compiles(dtype: str, engine: str) -> bool:
    """Whether models that are loaded so can be compiled. Drafts that can not stay as they are beside a target that can."""
    return dtype not in QUANTIZED and engine in ("auto", "transformers")
