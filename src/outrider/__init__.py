"""Outrider: lossless speculative decoding. A cheap draft proposes tokens; the target verifies and keeps its distribution.

>>> import outrider
>>> target = outrider.load("Qwen/Qwen2.5-Coder-1.5B-Instruct")  # hub name, folder or .gguf
>>> result = outrider.generate(target, "def fib(n):", max_new_tokens=64)  # doctest: +SKIP

Names, and the modules that users need (`outrider.structured`, `outrider.drafters`, …), are imported when first used, so that
`import outrider` and `outrider --help` stay quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from outrider.support.garbage import uncollected

if TYPE_CHECKING:
    from outrider import beam as beam
    from outrider import draft_length as draft_length
    from outrider import drafters as drafters
    from outrider import errors as errors
    from outrider import sampling as sampling
    from outrider import structured as structured
    from outrider.audio import Audio, read_wav
    from outrider.batch.answer import Answer
    from outrider.batch.continuous import ContinuousBatch
    from outrider.beam import BeamResult, beam_search
    from outrider.errors import OutriderError
    from outrider.generation import Stream, generate, stream
    from outrider.hf_generate import transformers_generate
    from outrider.models.loading import load
    from outrider.pieces import Piece
    from outrider.results import Result
    from outrider.speculation.run import speculate

__version__ = "0.1.0"
__all__ = [
    "Answer",
    "Audio",
    "BeamResult",
    "ContinuousBatch",
    "OutriderError",
    "Piece",
    "Result",
    "Stream",
    "beam_search",
    "generate",
    "load",
    "read_wav",
    "speculate",
    "stream",
    "transformers_generate",
]

_HOMES = {
    "Answer": "batch.answer",
    "Audio": "audio",
    "BeamResult": "beam",
    "ContinuousBatch": "batch.continuous",
    "OutriderError": "errors",
    "Piece": "pieces",
    "Result": "results",
    "Stream": "generation",
    "beam_search": "beam",
    "generate": "generation",
    "load": "models.loading",
    "read_wav": "audio",
    "speculate": "speculation.run",
    "stream": "generation",
    "transformers_generate": "hf_generate",
}
_MODULES = ("beam", "draft_length", "drafters", "errors", "sampling", "structured")


if not TYPE_CHECKING:  # or a type checker would take any name

    def __getattr__(name: str) -> Any:
        if name not in _MODULES and name not in _HOMES:
            raise AttributeError(f"module 'outrider' has no attribute {name!r}")
        with uncollected():
            module = import_module(f"outrider.{name if name in _MODULES else _HOMES[name]}")
        return module if name in _MODULES else getattr(module, name)


def __dir__() -> list[str]:
    """What there is, loaded yet or not."""
    return sorted({*globals(), *_HOMES, *_MODULES})
