"""llama.cpp's C interface as far as the engine uses it: a model, a context, a pass, and what went wrong in words.

Driven through the ctypes declarations of `llama_cpp` (the package llama-cpp-python); its Python classes are not used: they
hold one sequence and copy the logits.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ModelError
from outrider.support.optional import require

BATCH = 512  # tokens a pass at most
OUTPUTS = 64  # of them with logits: llama.cpp reserves memory for as many rows of the vocabulary
_FLASH = 1
# Keys in float16 and values in bfloat16: if both had one type, attention would go through other kernels for a lone token and
# for 64 and more, which add up otherwise; values are then added in float32, too.
_KEYS, _VALUES = 1, 30
_messages: deque[str] = deque(maxlen=8)  # llama.cpp's last complaints
_ERROR_LEVEL = 4
_log_callback: Any = None  # kept: llama.cpp holds a bare pointer to it


def require_library() -> Any:
    """The module `llama_cpp`, told to be quiet."""
    global _log_callback  # noqa: PLW0603 - one log for the process, as in llama.cpp
    require("llama_cpp", "the llama.cpp engine", "use engine transformers")
    import llama_cpp

    if _log_callback is None:

        def keep(level: int, text: bytes, user_data: Any) -> None:
            del user_data
            if level == _ERROR_LEVEL:
                _messages.append(text.decode(errors="replace").strip())

        _log_callback = llama_cpp.llama_log_callback(keep)
        llama_cpp.llama_log_set(_log_callback, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
    return llama_cpp


def _reason() -> str:
    return " ".join(" ".join(_messages).split())[-200:] or "it gave no reason"


def has_tiles() -> bool:
    """Whether the processor has Intel's matrix tiles (AMX). llama.cpp's own kernels for them end the process.

    The compiler drops their tile configuration from the stack, so that the first pass is a segmentation fault
    (ggml-org/llama.cpp issue 20824, pull request 26954; seen with llama-cpp-python 0.3.36 built by gcc 12). Without its
    repacked weights, of which the tiles' are one kind, llama.cpp takes its AVX-512 kernels.
    """
    import torch

    return bool(torch.cpu._is_amx_tile_supported())


class Weights:
    """An opened GGUF file. Freed with the object."""

    def __init__(self, path: Path) -> None:
        self._c = require_library()
        parameters = self._c.llama_model_default_params()
        parameters.n_gpu_layers = 0
        parameters.use_extra_bufts = not has_tiles()
        _messages.clear()
        self.pointer = self._c.llama_model_load_from_file(str(path).encode(), parameters)
        if not self.pointer:
            raise ModelError(f"model {path} can't be opened by llama.cpp ({_reason()}): try engine transformers")
        weakref.finalize(self, self._c.llama_model_free, self.pointer)
        self.vocabulary = self._c.llama_model_get_vocab(self.pointer)
        self.vocab_size = int(self._c.llama_vocab_n_tokens(self.vocabulary))
        self.max_length = int(self._c.llama_model_n_ctx_train(self.pointer))

    @property
    def forgets(self) -> bool:
        """Whether tokens can be taken back: not from a recurrent state."""
        c, pointer = self._c, self.pointer
        return not (c.llama_model_is_recurrent(pointer) or c.llama_model_is_hybrid(pointer))

    @property
    def decoder_only(self) -> bool:
        """Whether it is an ordinary language model."""
        c, pointer = self._c, self.pointer
        return bool(
            c.llama_model_has_decoder(pointer)
            and not c.llama_model_has_encoder(pointer)
            and not c.llama_model_is_diffusion(pointer)
        )

    @property
    def end_tokens(self) -> frozenset[int]:
        """End of text and end of turn."""
        ends = (self._c.llama_vocab_eos(self.vocabulary), self._c.llama_vocab_eot(self.vocabulary))
        return frozenset(int(token) for token in ends if token >= 0)

    def entry(self, key: str) -> str:
        """A value of the file's header as text, "" if it is not there."""
        buffer = ctypes.create_string_buffer(256)
        found = self._c.llama_model_meta_val_str(self.pointer, key.encode(), buffer, len(buffer))
        return buffer.value.decode(errors="replace") if found >= 0 else ""


def _free_context(free: Any, pointer: Any, weights: Weights) -> None:
    """Called when a context is collected; holds the weights until then, since llama.cpp wants them freed after it."""
    del weights
    free(pointer)


class Context:
    """A cache of `cells` tokens of one sequence, and passes that fill it. Freed with the object.

    One for each sequence: in a cache of many, the order in which keys are added up, and the kernels that are chosen,
    depend on the neighbours.
    """

    def __init__(self, weights: Weights, cells: int, threads: int) -> None:
        self._c = c = require_library()
        self._weights = weights
        parameters = c.llama_context_default_params()
        parameters.n_ctx = cells
        parameters.n_batch = parameters.n_ubatch = BATCH
        parameters.n_outputs_max = OUTPUTS
        parameters.n_seq_max = 1
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.flash_attn_type = _FLASH
        parameters.type_k, parameters.type_v = _KEYS, _VALUES
        parameters.swa_full = True  # sliding windows keep all cells, or nothing could be taken back
        parameters.no_perf = True
        _messages.clear()
        self._pointer = c.llama_init_from_model(weights.pointer, parameters)
        if not self._pointer:
            raise ModelError(f"llama.cpp has no memory for a cache of {cells} tokens ({_reason()}): lower max_new_tokens")
        weakref.finalize(self, _free_context, c.llama_free, self._pointer, weights)
        self._memory = c.llama_get_memory(self._pointer)
        self.cells = int(c.llama_n_ctx(self._pointer))

    def cut(self, length: int) -> None:
        """Forget the tokens from position `length` on."""
        if not self._c.llama_memory_seq_rm(self._memory, 0, length, -1):
            raise ModelError("llama.cpp can't take back tokens of this model: use engine transformers")

    @property
    def length(self) -> int:
        """Tokens that the cache holds."""
        return int(self._c.llama_memory_seq_pos_max(self._memory, 0)) + 1

    def decode(self, tokens: Many[int], start: int, keep: Many[bool]) -> NDArray[Any]:
        """One pass over at most `BATCH` tokens, `OUTPUTS` kept. → float32 [kept, V], llama.cpp's own until the next pass"""
        if self.length != start:
            raise ModelError(f"llama.cpp holds {self.length} tokens where {start} were expected: open the sequence again")
        count = len(tokens)
        owner = ctypes.c_int32(0)
        batch = self._c.llama_batch(
            n_tokens=count,
            token=(ctypes.c_int32 * count)(*tokens),
            pos=(ctypes.c_int32 * count)(*range(start, start + count)),
            n_seq_id=(ctypes.c_int32 * count)(*[1] * count),
            seq_id=(ctypes.POINTER(ctypes.c_int32) * count)(*[ctypes.pointer(owner)] * count),
            logits=(ctypes.c_int8 * count)(*keep),
        )
        _messages.clear()
        code = self._c.llama_decode(self._pointer, batch)
        if code != 0:
            raise ModelError(f"llama.cpp failed with code {code} ({_reason()})")
        rows, width = sum(keep), self._weights.vocab_size
        if rows == 0:
            return np.zeros((0, width), np.float32)
        address = ctypes.addressof(self._c.llama_get_logits(self._pointer).contents)
        values: Any = (ctypes.c_float * (rows * width)).from_address(address)
        values.owner = self  # the memory lives as long as somebody looks at it
        logits: NDArray[Any] = np.frombuffer(values, np.float32)
        return logits.reshape(rows, width)

    def take_over(self, source: Context) -> None:
        """Hold what another context holds."""
        size = self._c.llama_state_seq_get_size(source._pointer, 0)
        data = (ctypes.c_uint8 * size)()
        written = self._c.llama_state_seq_get_data(source._pointer, data, size, 0)
        _messages.clear()
        if written != size or self._c.llama_state_seq_set_data(self._pointer, data, size, 0) == 0:
            raise ModelError(f"llama.cpp could not move a sequence into a larger cache ({_reason()}): lower max_new_tokens")
