"""Recorded passes of one row that are one call from and to plain memory: which are, their bits, what is refused."""

from __future__ import annotations

from array import array
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.heads.autoregressive import AutoregressiveModel
from outrider.heads.opening import open_head
from outrider.kernels.chain_calls import ChainCalls, ChainPlan, numbers, piece_of
from outrider.kernels.models import LIBRARY, Kernels, chain_calls, kernels
from outrider.models.base import LAST
from outrider.models.cache.slot_cache import MIN_CAPACITY
from outrider.models.transformers_model import TransformersModel
from tests.helpers.chains import ONE_CALL, WIDTH, kept_of, norm_plan
from tests.helpers.heads import write_head
from tests.helpers.marks import slow, thinned
from tests.helpers.ragged import score, some_tokens
from tests.helpers.recorded import made, pair, scored
from tests.helpers.tiny_models import record_now

pytestmark = pytest.mark.skipif(kernels() is None, reason="this machine builds no kernels")


@pytest.mark.parametrize("architecture", thinned(ONE_CALL))
def test_a_pass_of_one_row_is_one_call_of_the_same_bits(architecture: str, cache: Path, chains_called: list[int]) -> None:
    ordinary, quick = pair(architecture, "int8")
    row, widths = some_tokens(96, 1), (1, 2, 3, 8, 1, 30)
    wanted = scored(ordinary, row, 20, widths)
    chains_called.clear()
    got = scored(quick, row, 20, widths)
    assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))
    assert chains_called == [20, *(width for width in widths for _ in range(2))]  # the prompt first


@pytest.mark.slow
def test_others_are_not(cache: Path, chains_called: list[int]) -> None:
    for architecture, kind in (("Gemma", "int8"), ("Llama", "float32")):
        _, quick = pair(architecture, kind)
        chains_called.clear()
        scored(quick, some_tokens(30, 1), 20, (1, 2))
        assert chains_called == [-1] * 4


def states_of(model: TransformersModel, layers: tuple[int, ...]) -> list[Tensor]:
    """What is kept of two sequences, scored in turn, one of them moved later, beyond the first growth of the cache."""
    rows = [some_tokens(MIN_CAPACITY + 20, i) for i in (1, 2)]
    first, second = model.open(), model.open()
    for start, stop in ((0, 40), (40, 41), (41, 44), (44, MIN_CAPACITY), (MIN_CAPACITY, MIN_CAPACITY + 3)):
        for sequence, row in ((second, rows[1]), (first, rows[0])):
            score(model, [sequence], [row[start:stop]])
    first.close()
    for width in (3, 1, 2):  # taken back and scored again
        score(model, [second], [rows[1][second.length : second.length + width]])
        second.truncate(second.length - 1)
    found = model.states_by_layer(second, 0, second.length, [layer for layer in layers if layer != LAST])
    out = [each.clone() for each in found]
    second.close()
    return out


def test_states_are_written_where_they_are_kept(cache: Path, chains_called: list[int]) -> None:
    ordinary, quick = (
        made("Llama", "int8", num_hidden_layers=3, max_position_embeddings=4 * MIN_CAPACITY) for _ in range(2)
    )
    for model in (ordinary, quick):
        model.keep_states((1, 2))
    record_now(quick)
    wanted = states_of(ordinary, (LAST, 1, 2))
    chains_called.clear()
    got = states_of(quick, (LAST, 1, 2))
    assert set(chains_called[1:]) >= {1, 2, 3}
    assert -1 not in chains_called[1:]  # the first one makes room for them
    assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))
    assert all(each.abs().sum(-1).all() for each in got)  # every position of every layer


def test_the_first_pass_makes_room_for_states(cache: Path, chains_called: list[int]) -> None:
    """Of one token: as there is nothing before it, no ordinary pass has kept any."""
    ordinary, quick = (made("Llama", "int8") for _ in range(2))
    record_now(quick)
    for model in (ordinary, quick):
        model.keep_states((1,))
    record_now(quick)
    for layer in quick._cache.states.values():
        layer.keys, layer.is_initialized = None, False  # type: ignore[assignment]
    chains_called.clear()
    found = []
    for model in (ordinary, quick):
        sequence = model.open()
        for token in (5, 6):
            score(model, [sequence], [[token]])
        found.append(model.states(sequence, 0, 2, (1,)).clone())
        sequence.close()
    assert chains_called == [1, 1]
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("layers", [slow(()), (1,)])
@pytest.mark.parametrize("kind", ["int8", "float32", slow("bfloat16")])
def test_a_head_reads_states_of_any_target_in_one_call(
    kind: str, layers: tuple[int, ...], cache: Path, tmp_path: Path, chains_called: list[int]
) -> None:
    target = made("Llama", kind)
    record_now(target)
    path = write_head(tmp_path, "layered" if layers else "autoregressive")
    heads = [open_head(target, path, "int8") for _ in range(2)]
    base, row, found = target.open(), some_tokens(30, 3), []
    score(target, [base], [row[:20]])
    for i, head in enumerate(heads):
        assert isinstance(head, AutoregressiveModel)
        head.recorded = None if i else head.recorded
        chains_called.clear()
        sequence, out = head.open_on(base), []
        for tokens in (row[:18], row[18:20], row[20:21], row[21:22], row[22:23]):
            logits = head.score_few([sequence], torch.tensor([tokens]), [len(tokens)], "last")
            assert logits is not None
            assert sequence.last is not None
            out += [logits.clone(), sequence.last.clone()]
        sequence.close()
        assert chains_called[-4:] == ([] if i else [2, 1, 1, 1])  # the first one reads a state that is kept by nobody
        found.append(out)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_keys_that_are_moved_are_read_where_they_are(cache: Path) -> None:
    """What sending them to another process does."""
    ordinary, quick = pair("Llama", "int8")
    row, found = some_tokens(12, 4), []
    for model in (ordinary, quick):
        sequence, out = model.open(), []
        for at in range(0, 12, 2):
            if at == 6:
                ForkingPickler.dumps(model.cache_rows(slice(0, 1)))
            out += score(model, [sequence], [row[at : at + 2]])
        sequence.close()
        found.append(out)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_can_not_be_is_refused_and_strided_tokens_are_read(cache: Path, chains_called: list[int]) -> None:
    """Tokens without memory or of more rows than there are, which it refuses; strided ones are copied."""
    _, quick = pair("Llama", "int8")
    sequence = quick.open()
    for wrong in (torch.zeros(1, 2, dtype=torch.long, device="meta"), torch.zeros(3, 2, dtype=torch.long)):
        with pytest.raises((RuntimeError, NotImplementedError)):
            quick.score([sequence], wrong, [2])
    assert sequence.length == 0
    want = quick.score([sequence], torch.tensor([[5, 7]]), [2])
    sequence.truncate(0)
    chains_called.clear()
    with torch.device("meta"):  # what new tensors lie on, where nothing else is said
        got = quick.score([sequence], torch.tensor([[5, 6, 7]], device="cpu")[:, ::2], [2])
    assert chains_called == [2]
    assert want is not None
    assert got is not None
    assert torch.equal(want, got)


def test_results_do_not_lie_on_the_default_device(cache: Path, chains_called: list[int]) -> None:
    _, quick = pair("Llama", "int8")
    sequence, tokens = quick.open(), torch.tensor([[5, 7]])
    chains_called.clear()
    with torch.device("meta"):
        got = quick.score([sequence], tokens, [2])
    assert chains_called == [2]
    assert got is not None
    assert got.is_cpu


def test_results_are_written_to_where_they_should_be(built: Kernels) -> None:
    kept = kept_of(built)
    plan, x, columns = norm_plan(built, kept), torch.randn(1, 5, WIDTH), array("q", [0] * 5)
    assert (plan.widths, plan.single) == ((WIDTH, WIDTH), (False, True))
    for given in (x, x.bfloat16()):
        all_of_it, last = torch.zeros(7, WIDTH), torch.zeros(3, WIDTH)
        plan.run([(0, 5, 0)], [piece_of(given), numbers(columns)], [], [all_of_it[1].data_ptr(), last[1].data_ptr()])
        want = built.ops.rms_norm(given.float(), torch.ones(WIDTH), 1e-5, 0.0)[0]
        assert torch.equal(all_of_it[1:6], want)
        assert torch.equal(last[1], want[-1])
        assert not all_of_it[[0, 6]].any()
        assert not last[[0, 2]].any()


def test_a_result_that_is_not_wanted_is_left_out(built: Kernels) -> None:
    kept = kept_of(built)
    plan, x, columns = norm_plan(built, kept), torch.randn(1, 5, WIDTH), array("q", [0] * 5)
    out = torch.zeros(5, WIDTH)
    plan.run([(0, 5, 0)], [piece_of(x), numbers(columns)], [], [out.data_ptr(), 0])
    assert torch.equal(out, built.ops.rms_norm(x, torch.ones(WIDTH), 1e-5, 0.0)[0])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("doubles", "float32 or bfloat16"),
        ("another width", "float32 or bfloat16"),
        ("whole numbers", "float32 or bfloat16"),
        ("fewer", "other tensors"),
        ("one result", "other results"),
        ("no tokens", "other results"),
        ("no memory", "without memory"),
        ("no memory for what is read", "no memory for results that its steps read"),
    ],
)
def test_what_does_not_fit_is_refused(built: Kernels, change: str, said: str) -> None:
    kept, columns = kept_of(built), array("q", [0] * 5)
    plan = norm_plan(built, kept)
    x = torch.randn(1, 5, {"another width": WIDTH + 8}.get(change, WIDTH))
    x = x.double() if change == "doubles" else x.long() if change == "whole numbers" else x
    out = torch.zeros(2, 5, WIDTH)
    given = [piece_of(x.to("meta") if change == "no memory" else x), numbers(columns)]
    results = [0 if change == "no memory for what is read" else out[0].data_ptr(), out[1].data_ptr()]
    with pytest.raises(RuntimeError, match=said):
        plan.run(
            [] if change == "no tokens" else [(0, 5, 0)],
            given[:1] if change == "fewer" else given,
            [],
            results[:1] if change == "one result" else results,
        )
    assert not out.any()


def test_bytes_that_are_no_plan_are_refused(built: Kernels) -> None:
    calls = chain_calls[LIBRARY.within(built.level)]
    assert isinstance(calls, ChainCalls)
    for nothing in (torch.zeros(500, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)):
        with pytest.raises(RuntimeError, match="not a plan"):
            ChainPlan(calls, nothing)


def test_cosines_and_masks_are_given_as_tensors_alone(built: Kernels) -> None:
    steps = [1, -2, 0, 1, -1, -1, 4, 4, 1, 1, 2, -1, 0]
    kept = [each[:1] if each.dim() == 4 else each for each in kept_of(built)]
    made = built.ops.chain_plan(kept, steps, [0.0, 0.0, 1.0], [WIDTH, 0, 0], 1, 1)
    plan = ChainPlan(chain_calls[LIBRARY.within(built.level)], made)
    x, out, column = torch.randn(1, 1, WIDTH), torch.zeros(1, 8), array("q", [0])
    with pytest.raises(RuntimeError, match="as tensors alone"):
        plan.run([(0, 1, 3)], [piece_of(x), numbers(column), numbers(column)], [3], [out.data_ptr()])
