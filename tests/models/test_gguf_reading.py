"""What a conversion reads quickly is what gguf reads, and gguf is left as it was."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest

from outrider.models.weights.gguf_reading import quick_reading


@pytest.fixture
def file(tmp_path: Path) -> Path:
    writer = gguf.GGUFWriter(tmp_path / "small.gguf", "llama")
    writer.add_token_list(["a", "bc", "", "Ġdé"])
    writer.add_token_types([1, 1, 3, 1])
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_tensor("output.weight", np.arange(96, dtype=np.float32).reshape(3, 32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "small.gguf"


def test_fields_and_tensors_are_the_same(file: Path) -> None:
    plain = gguf.GGUFReader(file)
    with quick_reading():
        quick = gguf.GGUFReader(file)
        assert gguf.GGUFReader(file) is quick
    assert list(quick.fields) == list(plain.fields)
    for name, field in plain.fields.items():
        assert quick.fields[name].types == field.types
        assert quick.fields[name].contents() == field.contents()
    for mine, theirs in itertools.zip_longest(quick.tensors, plain.tensors):
        assert (mine.name, mine.tensor_type) == (theirs.name, theirs.tensor_type)
        assert np.array_equal(mine.data, theirs.data)


def test_names_are_those_of_gguf() -> None:
    plain = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    with quick_reading():
        quick = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
        assert gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2) is quick
        assert gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 3) is not quick
    assert quick.mapping == plain.mapping


def test_gguf_is_left_as_it_was_after_errors_and_threads(file: Path) -> None:
    before = gguf.GGUFReader, gguf.get_tensor_name_map

    def damaged(_: int) -> None:
        with pytest.raises(ValueError, match="magic"), quick_reading():
            gguf.GGUFReader(Path(__file__))

    def sound(_: int) -> None:
        with quick_reading():
            assert len(gguf.GGUFReader(file).tensors) == 1

    with ThreadPoolExecutor(4) as threads:
        for job in (damaged, sound):
            list(threads.map(job, range(8)))
    assert before == (gguf.GGUFReader, gguf.get_tensor_name_map)
