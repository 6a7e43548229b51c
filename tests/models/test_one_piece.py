"""Weights moved into one piece of memory: the same numbers, the same parameters, one storage."""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch
from torch import nn

from outrider.kernels.models import kernels
from outrider.models.transformers_model import TransformersModel
from outrider.models.weights import one_piece
from outrider.models.weights.one_piece import put_in_one_piece
from outrider.models.weights.packed_linear import OpaqueLinear, can_pack, pack_linears
from outrider.models.weights.quantized import quantize_to_int8
from tests.helpers.tiny_models import module, record_now


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_piece, "LEAST", 1)


def storages(made: nn.Module) -> set[int]:
    packed = [part._packed for part in made.modules() if isinstance(part, OpaqueLinear)]
    held = [*made.parameters(), *made.buffers(), *packed]
    return {tensor.untyped_storage().data_ptr() for tensor in held if not tensor.is_mkldnn and tensor.numel()}


@pytest.mark.skipif(kernels() is None, reason="this machine builds no kernels")
def test_a_quantized_models_weights_lie_in_one_piece_and_say_the_same() -> None:
    made: Any = module("Llama", dtype=torch.float32)
    quantize_to_int8(made)
    ids = torch.arange(3, 20)[None]
    with torch.inference_mode():
        want = made(ids, use_cache=False).logits
        before = dict(made.named_parameters())
        assert put_in_one_piece(made)
        assert torch.equal(made(ids, use_cache=False).logits, want)
    assert len(storages(made)) == 1
    assert all(found is before[name] for name, found in made.named_parameters())
    model = TransformersModel(made, name="tiny")
    record_now(model)
    assert model.recorded is not None  # the same bits as ordinary passes


def test_what_shares_memory_or_has_another_layout_stays_where_it_is() -> None:
    whole = torch.randn(8, 8)
    part: Any = nn.Module()
    part.own = nn.Parameter(torch.randn(5, 3))
    part.view = nn.Parameter(whole[:4])
    part.turned = nn.Parameter(torch.randn(4, 6).t())
    part.sparse = nn.Parameter(torch.eye(4).to_sparse(), requires_grad=False)
    part.empty = nn.Parameter(torch.empty(0))
    part.register_buffer("numbers", torch.arange(7))
    part.tied = part.own
    part.first = nn.Parameter(torch.randn(3, 3))
    part.same = nn.Parameter(part.first.data)  # another parameter in the same memory
    values = {name: value.detach().clone() for name, value in [*part.named_parameters(), *part.named_buffers()]}
    where = {name: getattr(part, name).data_ptr() for name in ("view", "turned")}
    assert put_in_one_piece(part)
    assert part.tied is part.own
    assert part.same.data_ptr() == part.first.data_ptr()
    assert part.own.untyped_storage().data_ptr() == part.numbers.untyped_storage().data_ptr()
    assert {name: getattr(part, name).data_ptr() for name in where} == where
    for name, value in values.items():
        assert torch.equal(getattr(part, name).to_dense(), value.to_dense()), name
    whole.zero_()
    assert not part.view.any()  # it still shares that


@pytest.mark.skipif(not can_pack(torch.float32, torch.device("cpu")), reason="needs oneDNN's layouts")
def test_layouts_of_another_library_stay_where_they_are() -> None:
    made: Any = module("Llama", dtype=torch.float32)
    pack_linears(made)
    packed = [part._packed for part in made.modules() if isinstance(part, OpaqueLinear)]
    assert put_in_one_piece(made)
    assert [part._packed for part in made.modules() if isinstance(part, OpaqueLinear)] == packed
    assert len(storages(made)) == 1


def test_large_and_tiny_models_stay_in_pieces_and_so_does_what_finds_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    made = nn.Linear(30, 40)
    where = made.weight.data_ptr()
    for name, value in (("MOST", 100), ("LEAST", 10**6)):
        with monkeypatch.context() as changed:
            changed.setattr(one_piece, name, value)
            assert not put_in_one_piece(made)

    def refuse(*args: object, **options: object) -> mmap.mmap:
        raise OSError("no memory")

    with monkeypatch.context() as changed:
        changed.setattr(mmap, "mmap", refuse)
        assert not put_in_one_piece(made)
    assert made.weight.data_ptr() == where
    with monkeypatch.context() as changed:  # a system without such maps
        changed.delattr(mmap, "MAP_PRIVATE")
        assert put_in_one_piece(made)


def test_memory_is_given_back_with_the_last_weight() -> None:
    made = nn.Linear(1 << 10, 1 << 12)
    assert put_in_one_piece(made)
    before = resident()
    del made
    assert before is None or resident() < before - (8 << 20)


def resident() -> Any:
    """Bytes, None on systems that do not tell."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except OSError:
        return None
