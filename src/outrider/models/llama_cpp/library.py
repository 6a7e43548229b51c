"""llama.cpp's C interface as far as the engine uses it: a model, a context, a pass, and what went wrong in words.

Driven through the ctypes declarations of `llama_cpp` (the package llama-cpp-python); its Python classes are not used: they
hold one sequence and copy the logits.
"""

from __future__ import annotations

import ctypes
import importlib.util
import weakref
from collections import deque
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ModelError

BATCH = 512  # tokens a pass at most
OUTPUTS = 64  # of them with logits: llama.cpp reserves memory for as many rows of the vocabulary
MOST_SEQUENCES = OUTPUTS  # llama.cpp wants an output for each
_FLASH = 1  # the only attention whose bits do not depend on the width of a pass
_messages: deque[str] = deque(maxlen=8)  # llama.cpp's last complaints
_ERROR_LEVEL = 4
_log_callback: Any = None  # kept: llama.cpp holds a bare pointer to it


def require_library() -> Any:
    """The module `llama_cpp`, told to be quiet."""
    global _log_callback  # noqa: PLW0603 - one log for the process, as in llama.cpp
    if importlib.util.find_spec("llama_cpp") is None:
        raise ModelError(
            "the llama.cpp engine is not installed: run `pip install llama-cpp-python` (it compiles for ten minutes), or "
            "use --engine transformers"
        )
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


class Weights:
    """An opened GGUF file. Freed with the object."""

    def __init__(self, path: Path) -> None:
        self._c = require_library()
        parameters = self._c.llama_model_default_params()
        parameters.n_gpu_layers = 0
        _messages.clear()
        self.pointer = self._c.llama_model_load_from_file(str(path).encode(), parameters)
        if not self.pointer:
            raise ModelError(f"model {path} can't be opened by llama.cpp ({_reason()}): try --engine transformers")
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


class Context:
    """A cache of `cells` tokens for each of `sequences` sequences, and passes that fill it. Freed with the object.

    Each sequence has cells of its own: in a cache shared by all, the order in which a token's keys are added up, and so its
    logits, would depend on the neighbours.
    """

    def __init__(self, weights: Weights, cells: int, sequences: int, threads: int) -> None:
        self._c = c = require_library()
        self._weights = weights  # must outlive the context
        parameters = c.llama_context_default_params()
        parameters.n_ctx = cells * sequences
        parameters.n_batch = parameters.n_ubatch = BATCH
        parameters.n_outputs_max = OUTPUTS
        parameters.n_seq_max = sequences
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.kv_unified = False
        parameters.flash_attn_type = _FLASH
        parameters.swa_full = True  # sliding windows keep all cells, or nothing could be taken back
        parameters.no_perf = True
        _messages.clear()
        self._pointer = c.llama_init_from_model(weights.pointer, parameters)
        if not self._pointer:
            raise ModelError(
                f"llama.cpp has no memory for a cache of {sequences} × {cells} tokens ({_reason()}): lower max_new_tokens"
            )
        weakref.finalize(self, c.llama_free, self._pointer)
        self._memory = c.llama_get_memory(self._pointer)
        self.cells, self.sequences = int(c.llama_n_ctx_seq(self._pointer)), sequences

    def cut(self, sequence: int, length: int) -> None:
        """Forget a sequence's tokens from position `length` on."""
        if not self._c.llama_memory_seq_rm(self._memory, sequence, length, -1):
            raise ModelError("llama.cpp can't take back tokens of this model: use --engine transformers")

    def decode(self, tokens: Many[int], positions: Many[int], sequences: Many[int], keep: Many[bool]) -> NDArray[Any]:
        """One pass over at most `BATCH` tokens, `OUTPUTS` kept. → float32 [kept, V], llama.cpp's own until the next pass"""
        count = len(tokens)
        owners = (ctypes.c_int32 * count)(*sequences)
        start, step = ctypes.addressof(owners), ctypes.sizeof(ctypes.c_int32)
        batch = self._c.llama_batch(
            n_tokens=count,
            token=(ctypes.c_int32 * count)(*tokens),
            pos=(ctypes.c_int32 * count)(*positions),
            n_seq_id=(ctypes.c_int32 * count)(*[1] * count),
            seq_id=ctypes.cast(
                (ctypes.c_void_p * count)(*range(start, start + count * step, step)),
                ctypes.POINTER(ctypes.POINTER(ctypes.c_int32)),
            ),
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

    def copy_sequence(self, source: Context, sequence: int) -> None:
        """Take over what another context holds of a sequence."""
        size = self._c.llama_state_seq_get_size(source._pointer, sequence)
        data = (ctypes.c_uint8 * size)()
        written = self._c.llama_state_seq_get_data(source._pointer, data, size, sequence)
        if written != size or self._c.llama_state_seq_set_data(self._pointer, data, size, sequence) == 0:
            raise ModelError("llama.cpp could not move a sequence into a larger cache: lower max_new_tokens")
