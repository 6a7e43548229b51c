"""transformers reads GGUF files by the package gguf: here, without what the two do over and over.

Of SmolLM2's file (49,152 tokens) the config, the weights and the tokenizer each cost a reading of all fields, every token
through a memory map's own indexing, which is slow; and the table of names is made anew for every module of the model.
Without that SmolLM2's conversion takes a fifth of its time (EXPERIMENTS.md, "The first conversion").
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any

import numpy as np

_ONE_AT_A_TIME = Lock()  # what stands in another package meanwhile


@contextmanager
def quick_reading() -> Iterator[None]:
    """Within it `gguf` reads each file once, from an ordinary array, and makes each table of names once."""
    import gguf

    with _ONE_AT_A_TIME:
        reader, names = gguf.GGUFReader, gguf.get_tensor_name_map
        gguf.GGUFReader, gguf.get_tensor_name_map = cache(_of_an_ordinary_array(reader)), cache(names)
        try:
            yield
        finally:
            gguf.GGUFReader, gguf.get_tensor_name_map = reader, names


def _of_an_ordinary_array(reader: type[Any]) -> type[Any]:
    class Reader(reader):  # type: ignore[misc]
        @property
        def data(self) -> np.ndarray[Any, Any]:
            """The file's bytes, (size,) uint8, still mapped."""
            return self._bytes

        @data.setter
        def data(self, mapped: np.ndarray[Any, Any]) -> None:
            self._bytes = np.asarray(mapped)

    return Reader
