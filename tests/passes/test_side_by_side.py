"""Passes of several rows in one call: as long as their tokens are, in any order, of the same bits."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Many
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.decode import Request, decode
from outrider.draft_length import FixedLength
from outrider.drafters import PromptLookupDrafter
from outrider.heads.autoregressive import AutoregressiveModel
from outrider.heads.opening import open_head
from outrider.kernels.chain_calls import numbers, piece_of
from outrider.kernels.models import Kernels, kernels
from outrider.models.base import Sequence, WhichLogits
from outrider.models.cache.slots import opening_several
from outrider.models.flat import begins, in_parts, in_rows, last_of
from outrider.models.passes.recording import Recording
from outrider.models.table import TableModel
from outrider.models.transformers_model import TransformersModel
from outrider.prefill import prefill
from outrider.randomness import RandomStream
from outrider.round import Extras
from outrider.sampling import SamplingSettings
from tests.helpers.chains import ONE_CALL, WIDTH, kept_of, norm_plan
from tests.helpers.heads import write_head
from tests.helpers.marks import thinned
from tests.helpers.ragged import score, some_tokens
from tests.helpers.recorded import made, pair
from tests.helpers.tiny_models import record_now

needs_kernels = pytest.mark.skipif(kernels() is None, reason="this machine builds no kernels")


def ragged(model: TransformersModel, layer: int | None = None) -> list[Tensor]:
    """Logits of rows of other lengths and widths, in any order, some of them gone, and states that are kept."""
    rows = [model.open() for _ in range(5)]
    texts = [some_tokens(60, i) for i in range(5)]
    prefill(model, rows, [text[: 7 + 9 * i] for i, text in enumerate(texts)])
    found: list[Tensor] = []

    def go_on(which: list[int], counts: list[int]) -> None:
        parts = [texts[i][rows[i].length : rows[i].length + count] for i, count in zip(which, counts, strict=True)]
        found.extend(score(model, [rows[i] for i in which], parts))

    go_on([0, 1, 2, 3, 4], [1, 4, 1, 2, 1])
    go_on([4, 0, 2], [1, 3, 1])  # apart from each other, and in another order
    rows[1].close()  # the last one moves there
    go_on([3, 4, 2, 0], [2, 1, 1, 5])
    rows[4].truncate(rows[4].length - 1)
    go_on([4, 2], [3, 1])
    tokens = torch.tensor([texts[i][rows[i].length : rows[i].length + 2] for i in (3, 0)])
    last = model.score([rows[3], rows[0]], tokens, [2, 1], "last")
    assert last is not None
    assert last.shape[:2] == (2, 1)
    found += [last[0, 0], last[1, 0]]
    if layer is not None:
        found += [model.states(rows[i], 0, rows[i].length, (layer,)).clone() for i in (0, 2, 3, 4)]
    for i in (0, 2, 3, 4):
        rows[i].close()
    return found


@needs_kernels
@pytest.mark.parametrize("architecture", thinned(ONE_CALL))
def test_rows_of_any_width_and_order_are_one_call_of_the_same_bits(
    architecture: str, cache: Path, chains_called: list[int]
) -> None:
    ordinary, quick = pair(architecture, "int8")
    wanted = ragged(ordinary)
    chains_called.clear()
    got = ragged(quick)
    assert chains_called[-5:] == [9, 5, 9, 4, 3]  # as many as their tokens: no row is as wide as the widest
    assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))


@needs_kernels
def test_states_of_several_rows_are_kept_where_they_belong(cache: Path, chains_called: list[int]) -> None:
    ordinary, quick = (made("Llama", "int8", num_hidden_layers=3) for _ in range(2))
    for model in (ordinary, quick):
        model.keep_states((2,))
    record_now(quick)
    wanted = ragged(ordinary, 2)
    got = ragged(quick, 2)
    assert -1 not in chains_called
    assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))


@needs_kernels
@pytest.mark.parametrize("how", ["states", "autocast", "as ever"])
def test_prompts_are_read_in_any_order(how: str, cache: Path) -> None:
    """Also where that is an ordinary pass, or the first one that keeps states: rows lie where their slots are."""
    model, found = made("Llama", "int8", max_position_embeddings=400), []
    if how == "states":
        model.keep_states(())
    record_now(model)
    texts = [some_tokens(100, i) for i in range(4)]
    for order in ([0, 1, 2, 3], [0, 2, 1, 3]):
        rows = [model.open() for _ in range(4)]
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            prefill(model, [rows[i] for i in order], [texts[i][:80] for i in order])
        found.append(score(model, rows, [text[80:81] for text in texts]))
        for row in rows:
            row.close()
        for layer in model._cache.states.values():
            layer.keys, layer.is_initialized = None, False  # type: ignore[assignment]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_model_looks_once_whether_it_is_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("Llama")
    looked: list[TransformersModel] = []

    def look(self: TransformersModel) -> None:
        looked.append(self)

    monkeypatch.setattr(TransformersModel, "_look_again", look)
    with opening_several():
        rows = [model.open() for _ in range(5)]
    assert looked == [model]
    rows += [model.open() for _ in range(2)]
    assert looked == [model] * 3


@needs_kernels
@pytest.mark.parametrize("layers", [(), (1,)])
def test_heads_read_several_rows_in_one_call(
    layers: tuple[int, ...], cache: Path, tmp_path: Path, chains_called: list[int]
) -> None:
    """Also where some read their target's states and others go on with their own."""
    target = made("Llama", "int8")
    record_now(target)
    path = write_head(tmp_path, "layered" if layers else "autoregressive")
    heads, found = [open_head(target, path, "int8") for _ in range(2)], []
    texts = [some_tokens(40, i) for i in range(3)]
    bases = [target.open() for _ in texts]
    prefill(target, bases, [text[:20] for text in texts])
    for i, head in enumerate(heads):
        assert isinstance(head, AutoregressiveModel)
        head.recorded = None if i else head.recorded
        chains_called.clear()
        rows, out = [head.open_on(base) for base in bases], []
        prefill(head, rows, [text[: 10 + 2 * k] for k, text in enumerate(texts)])
        for which, counts in (([0, 1, 2], [4, 1, 3]), ([2, 0], [4, 1]), ([1, 2, 0], [2, 1, 1]), ([0, 2], [1, 1])):
            parts = [texts[k][rows[k].length : rows[k].length + count] for k, count in zip(which, counts, strict=True)]
            tokens = torch.zeros(len(which), max(counts), dtype=torch.long)
            for place, part in enumerate(parts):
                tokens[place, : len(part)] = torch.tensor(part)
            logits = head.score_few([rows[k] for k in which], tokens, counts, "last")
            assert logits is not None
            out += [logits.clone(), *(row.last.clone() for row in rows if row.last is not None)]
        assert (i == 1) == (not chains_called)
        for row in rows:
            row.close()
        found.append(out)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@needs_kernels
def test_the_last_token_is_that_of_each_sequence(built: Kernels) -> None:
    kept = kept_of(built)
    plan, x, columns = norm_plan(built, kept), torch.randn(1, 6, WIDTH), array("q", [0] * 6)
    every, last = torch.zeros(6, WIDTH), torch.zeros(3, WIDTH)
    spans = [(0, 2, 0), (4, 1, 0), (1, 3, 0)]
    plan.run(spans, [piece_of(x), numbers(columns)], [], [every.data_ptr(), last.data_ptr()])
    assert torch.equal(every, built.ops.rms_norm(x, torch.ones(WIDTH), 1e-5, 0.0)[0])
    assert torch.equal(last, every[[1, 2, 5]])
    with pytest.raises(RuntimeError, match="a sequence has tokens"):
        plan.run([(0, 6, 0), (1, 0, 0)], [piece_of(x), numbers(columns)], [], [every.data_ptr(), last.data_ptr()])


@needs_kernels
def test_a_row_that_is_not_kept_or_reads_too_much_is_refused(cache: Path) -> None:
    _, quick = pair("Llama", "int8")
    rows = [quick.open() for _ in range(2)]
    score(quick, rows, [[5, 6], [7]])
    recording = quick._recording(rows, 1)
    assert isinstance(recording, Recording)
    bound, columns, capacity = recording._bound(slice(0, 2), 3)
    where, tokens = array("q", [2, 1]), torch.tensor([[8, 9]])
    about = (piece_of(tokens), numbers(where), numbers(where))
    wrong: list[list[tuple[int, int, int]]] = [
        [(0, 1, 3), (quick._cache.num_slots, 1, 2)],
        [(0, 1, 3), (-1, 1, 2)],
        [(0, 1, quick._cache.capacity + 1), (1, 1, 2)],
        [(0, 1, 3), (1, 1, -1)],
    ]
    for spans in wrong:
        with pytest.raises(RuntimeError, match="kept in other sizes"):
            recording._graph.call(bound, columns, capacity, spans, about)


class Careless(TableModel):
    """Leaves behind a row's own logits what is no number, as engines may."""

    def score(
        self, sequences: Many[Sequence], tokens: Tensor, lengths: Many[int], logits: WhichLogits = "all"
    ) -> Tensor | None:
        out = super().score(sequences, tokens, lengths, logits)
        if out is not None and logits == "all":
            out = out.clone()
            for row, count in zip(out, lengths, strict=True):
                row[count:] = torch.nan
        return out


@pytest.mark.parametrize(
    "settings",
    [
        SamplingSettings(temperature=0.0),
        SamplingSettings(temperature=0.0, repetition_penalty=1.3),
        SamplingSettings(),
        SamplingSettings(top_p=0.8),
        SamplingSettings(presence_penalty=0.4),
    ],
)
@pytest.mark.parametrize("extras", [{}, {"logprobs": True, "betas": True}])
@pytest.mark.parametrize(("dtype", "lenience"), [(torch.float64, 1.0), (torch.float32, 1.0), (torch.float32, 0.5)])
def test_what_lies_behind_a_rows_own_logits_does_not_matter(
    settings: SamplingSettings, extras: dict[str, bool], dtype: torch.dtype, lenience: float
) -> None:
    """Rows of other draft lengths side by side."""
    table = torch.randn(5, 5, generator=torch.Generator().manual_seed(2)).softmax(-1).to(dtype)
    found = []
    for kind in (TableModel, Careless):
        requests = [Request([i % 5, 1, 2, 1, 2, i % 3], 12, RandomStream(4, i)) for i in range(6)]
        found.append(
            decode(
                kind(table),
                requests,
                settings,
                PromptLookupDrafter(),
                FixedLength(3),
                Extras(**extras),
                lenience,
            )
        )
    (plain, rounds), (careless, others) = found
    assert plain == careless
    assert len({record.drafted for row in rounds for record in row}) > 1
    for row, other in zip(rounds, others, strict=True):
        assert [(each.logprobs, each.betas) for each in row] == [(each.logprobs, each.betas) for each in other]


def test_rows_end_to_end() -> None:
    assert begins([2, 1, 3]) == [0, 2, 3, 6]
    assert list(in_parts([5, 1, 4], 4)) == [[(0, 0, 4)], [(0, 4, 1), (1, 0, 1), (2, 0, 2)], [(2, 2, 2)]]
    assert list(in_parts([4, 4], 4)) == [[(0, 0, 4)], [(1, 0, 4)]]
    flat = torch.arange(7.0).unsqueeze(-1)
    rows = in_rows(flat, [1, 1, 3, 2])
    assert rows.shape == (4, 3, 1)
    assert [row[:n, 0].tolist() for row, n in zip(rows, [1, 1, 3, 2], strict=True)] == [[0], [1], [2, 3, 4], [5, 6]]
    assert in_rows(flat[:6], [2, 2, 2])[..., 0].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert last_of(flat, [1, 1, 3, 2])[..., 0].tolist() == [[0], [1], [4], [6]]
