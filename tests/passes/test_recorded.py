"""Recorded passes: the bits of ordinary ones at any width and position, read again by the next start, left out otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.costs.measure import measure_settled
from outrider.decode import Request, decode
from outrider.draft_length import FixedLength
from outrider.drafters import HeadDrafter, PromptLookupDrafter
from outrider.kernels.models import kernels
from outrider.models.attention.shared_keys import WIDEST
from outrider.models.cache.slot_cache import MIN_CAPACITY
from outrider.models.encoder_decoder import EncoderDecoderModel
from outrider.models.first_layers import first_layers
from outrider.models.passes import recording
from outrider.models.passes.planned import PlannedGraph
from outrider.models.passes.recording import Recording
from outrider.models.transformers_model import TransformersModel
from outrider.models.weights.packed_linear import pack_linears
from outrider.models.weights.quantized import quantize_to_int8
from outrider.prefill import prefill
from outrider.randomness import RandomStream
from tests.helpers.heads import write_head
from tests.helpers.marks import slow
from tests.helpers.ragged import score, some_tokens
from tests.helpers.recorded import KINDS, made, pair, scored
from tests.helpers.requests import GREEDY, WARM
from tests.helpers.tiny_models import CONFIGS, module, record_now

LONG = 4 * MIN_CAPACITY
OFTEN = ("GPT2", "Gemma2", "Llama", "Qwen2")


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        *((name, "float32") for name in OFTEN),
        *(slow(name, "float32") for name in sorted(CONFIGS.keys() - {"Mixtral", *OFTEN})),
        *(slow("Llama", kind) for kind in KINDS[1:]),
        *(slow("Gemma3", kind) for kind in KINDS[1:]),
    ],
)
def test_the_bits_are_those_of_ordinary_passes(architecture: str, kind: str, cache: Path) -> None:
    ordinary, quick = pair(architecture, kind)
    row = some_tokens(96, 1)
    widths = (1, 2, 3, 4, 5, 8, 1, 13, 1, 30)
    for wanted, got in zip(scored(ordinary, row, 20, widths), scored(quick, row, 20, widths), strict=True):
        assert torch.equal(wanted, got)


@pytest.mark.parametrize("kind", [*KINDS[:1], *map(slow, KINDS[1:])])
def test_the_bits_are_the_same_after_the_cache_has_grown(kind: str, cache: Path) -> None:
    ordinary, quick = pair("Llama", kind, max_position_embeddings=LONG)
    row = some_tokens(2 * MIN_CAPACITY + 99, 2)
    for start in (MIN_CAPACITY - 6, 2 * MIN_CAPACITY - 3):
        widths = (1, 4, WIDEST, 3)
        for wanted, got in zip(scored(ordinary, row, start, widths), scored(quick, row, start, widths), strict=True):
            assert torch.equal(wanted, got)


def test_passes_with_all_their_logits_are_recorded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, quick = pair("Llama")
    seen: list[tuple[int, ...]] = []
    plain = Recording.run

    def counting(self: Recording, slots: slice, longest: int, *about: Tensor) -> Any:
        seen.append(tuple(about[0].shape))
        return plain(self, slots, longest, *about)

    monkeypatch.setattr(Recording, "run", counting)
    one, other = quick.open(), quick.open()
    score(quick, [one, other], [[5], [6]])  # the first pass of several rows is compared with ordinary ones
    seen.clear()
    score(quick, [one], [[5]])
    score(quick, [other], [[5, 6, 7]])
    score(quick, [one, other], [[5], [6]])
    score(quick, [one], [[5] * WIDEST])
    third = quick.open()
    score(quick, [one, third], [[5], [6]])  # rows apart are not
    assert quick.score([other], torch.tensor([[5, 6]]), [2], "none") is None  # nor is what is only read
    out = quick.score([other], torch.tensor([[5, 6, 7, 0]]), [3], "last")
    assert out is not None
    assert out.shape[1] == 1
    assert seen == [(1, 1), (1, 3), (2, 1), (1, WIDEST), (1, 4)]


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("Gemma3", "float32"),
        *(slow(name, "float32") for name in ("GPT2", "Phi3")),
        *(slow("Llama", kind) for kind in KINDS[1:]),
    ],
)
def test_rows_side_by_side_have_the_bits_of_ordinary_passes(architecture: str, kind: str, cache: Path) -> None:
    """Ragged calls, roll-backs, a subset, a closed row."""
    found = []
    for model in pair(architecture, kind):
        model.keep_states()
        rows = [some_tokens(n, n) for n in (40, 23, 31)]
        sequences = [model.open() for _ in rows]
        prefill(model, sequences, [rows[0][:20], rows[1][:5], rows[2][:11]])
        out = []
        for start, widths in ((0, (1, 3, 2)), (3, (5, 1, 8)), (9, (1, 1, 1))):
            for sequence, done in zip(sequences, (20, 5, 11), strict=True):
                sequence.truncate(min(sequence.length, done + start))
            parts = [
                row[sequence.length : sequence.length + width]
                for row, sequence, width in zip(rows, sequences, widths, strict=True)
            ]
            out += score(model, sequences, parts)
        out += score(model, sequences[1:], [[4, 5], [6]])
        sequences[0].close()
        out += score(model, sequences[1:], [[7], [8, 9, 10]])
        found.append([*out, *(model.states(sequence, 0, sequence.length) for sequence in sequences[1:])])
    assert quick_for_several(model)
    assert all(torch.equal(wanted, got) for wanted, got in zip(*found, strict=True))


def quick_for_several(model: TransformersModel) -> bool:
    return model.recorded is not None and model.recorded.of(2, 2) is not None


def test_rows_keep_apart_and_a_closed_slot_is_taken_over(cache: Path) -> None:
    found = []
    for model in pair("Qwen2"):
        rows = [some_tokens(40, 2), some_tokens(30, 3)]
        sequences = [model.open() for _ in rows]
        prefill(model, sequences, [rows[0][:20], rows[1][:9]])
        out = []
        for width in (1, 4, 2):
            for i in (1, 0):
                start = sequences[i].length
                out += score(model, [sequences[i]], [rows[i][start : start + width]])
        sequences[0].close()  # the other one takes its slot
        start = sequences[1].length
        out += score(model, [sequences[1]], [rows[1][start : start + 3]])
        found.append(out)
    assert all(torch.equal(wanted, got) for wanted, got in zip(*found, strict=True))


@pytest.mark.parametrize("layers", [slow(()), (1, 2)])
def test_states_for_heads_are_kept(layers: tuple[int, ...], cache: Path) -> None:
    ordinary, quick = pair("Llama", num_hidden_layers=3)
    row = some_tokens(40, 6)
    found = []
    for model in (ordinary, quick):
        model.keep_states(layers)
        scored(model, row, 10, (1, 4))  # a slot that was in use
        sequence = model.open()
        for width in (10, 1, 4, 2):
            score(model, [sequence], [row[sequence.length : sequence.length + width]])
        found.append(model.states(sequence, 0, 17, layers))
    assert quick.recorded is not None
    assert len(quick.recorded.layers) == 1 + len(layers)
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_texts_are_the_same(kind: str, cache: Path) -> None:
    ordinary, quick = pair("Llama", kind)
    for number in range(2):
        request = Request(some_tokens(12, number) * 2, 60, RandomStream(0, number))
        wanted, _ = decode(ordinary, [request], GREEDY, PromptLookupDrafter(), FixedLength(3))
        got, _ = decode(quick, [request], GREEDY, PromptLookupDrafter(), FixedLength(3))
        assert got == wanted


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("T5", "float32"),
        *(slow(name, "float32") for name in ("Bart", "Pegasus", "Whisper")),
        *(slow(name, "int8") for name in ("T5", "Whisper") if KINDS[2:]),
    ],
)
@pytest.mark.slow
def test_decoders_with_sources_of_different_length(architecture: str, kind: str, cache: Path) -> None:
    found = []
    for quick in (False, True):
        made_now = module(architecture, dtype=torch.float32)
        (quantize_to_int8 if kind == "int8" else pack_linears)(made_now)
        model = EncoderDecoderModel(made_now, name=architecture)
        if quick:
            record_now(model)
            assert quick_for_several(model)
        sources: list[Any] = [model.stand_in() if model.hears else some_tokens(length, 1) for length in (9, 20, 4)]
        sequences = [model.open(source=source) for source in sources]
        row, out = some_tokens(60, 2), []
        for widths in ((3, 1, 2), (1, 1, 1), (8, 2, 5)):
            parts = [row[s.length : s.length + n] for s, n in zip(sequences, widths, strict=True)]
            out += score(model, sequences, parts)
        sequences[1].truncate(3)
        out += score(model, sequences[1:2], [row[10:14]])
        sequences[0].close()
        out += score(model, sequences[1:2], [row[20:21]])
        out += score(model, sequences[1:], [row[30:33], row[4:5]])
        found.append(out)
    assert all(torch.equal(wanted, got) for wanted, got in zip(*found, strict=True))


def test_the_first_layers_are_recorded_for_themselves(cache: Path) -> None:
    ordinary, quick = pair("Llama")
    row = some_tokens(30, 4)
    views = [first_layers(model, 1) for model in (ordinary, quick)]
    assert [view.recorded is not None for view in views] == [False, True]
    assert quick.recorded is not views[1].recorded
    found = [scored(view, row, 9, (1, 3)) for view in views]
    assert all(torch.equal(wanted, got) for wanted, got in zip(*found, strict=True))
    assert torch.equal(*(scored(model, row, 9, (2,))[0] for model in (ordinary, quick)))


@pytest.mark.parametrize("kind", ["autoregressive", "layered"])
def test_recorded_heads_draft_what_ordinary_ones_do(kind: Any, cache: Path, tmp_path: Path) -> None:
    """From what was recorded now and from what was kept: the same texts drawn, and the same rounds."""
    folder, found = write_head(tmp_path / "head", kind), []
    for recorded_head in (False, True, True):
        target, drafter = made("Llama"), HeadDrafter(folder, step_seconds=0.1)
        drafter.bind(target)
        head: Any = drafter.model
        assert head.recorded is not None
        head.recorded = head.recorded if recorded_head else None
        asked = [Request(some_tokens(9, number), 40, RandomStream(1, number)) for number in range(2)]
        found.append([decode(target, [one], WARM, drafter, FixedLength(3)) for one in asked])
    texts = [[tokens for tokens, _ in one] for one in found]
    counts = [[[(r.drafted, r.accepted) for r in rounds[0]] for _, rounds in one] for one in found]
    assert texts[1] == texts[2] == texts[0]
    assert counts[1] == counts[2] == counts[0]
    assert any(accepted for rounds in counts[0] for _, accepted in rounds)


@pytest.mark.skipif(kernels() is None, reason="this machine builds no kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, None])
@pytest.mark.parametrize("kind", ["autoregressive", "layered"])
def test_a_quantized_heads_pass_is_one_chain_from_tokens_and_kept_states(
    kind: Any, dtype: torch.dtype | None, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside targets in float32, bfloat16 and 8 bits."""
    texts: list[str] = []

    def planned(text: str) -> PlannedGraph:
        texts.append(text)
        return PlannedGraph(text)

    monkeypatch.setattr(recording, "PlannedGraph", planned)
    target = made("Llama", "int8") if dtype is None else made("Llama", str(dtype).removeprefix("torch."))
    drafter = HeadDrafter(write_head(tmp_path / "head", kind), step_seconds=0.1, dtype="int8")
    drafter.bind(target)
    head: Any = drafter.model
    assert head.module.table is target.module.get_input_embeddings()
    assert set(head.recorded._recordings) == {head.states_kind, head.own_kind}
    for text in texts:
        assert text.count("::chain(") == 1
        assert not [name for name in ("::embedding", "::rows_int8", "::cat", "::cos", "::arange") if name in text]
    asked: list[Sequence[Tensor]] = []
    passes = head.recorded

    def passes_of(states: Sequence[Tensor]) -> Any:
        asked.append(states)
        return passes.of(states)

    head.recorded = SimpleNamespace(fits=lambda: True, of=passes_of)
    decode(target, [Request(some_tokens(9, 1), 20, RandomStream(1, 1))], WARM, drafter, FixedLength(3))
    used = len(asked)
    measure_settled(head, rows=1, attempts=1)
    assert len(asked) > used + 4 > 10  # what passes cost is measured by these, too
    assert all(passes.of(states) is not None for states in asked)


def test_a_head_follows_when_its_target_gets_another_table(cache: Path, tmp_path: Path) -> None:
    target = made("Llama")
    drafter = HeadDrafter(write_head(tmp_path / "head", "layered"), step_seconds=0.1)
    drafter.bind(target)
    head: Any = drafter.model
    before = head.recorded
    first = target.module.get_input_embeddings()
    other = torch.nn.Embedding(*first.weight.shape)
    target.module.set_input_embeddings(other)
    with torch.inference_mode():
        sequence = head.open()
        logits = head.score([sequence], torch.tensor([[3, 4]]), [2], "last")
        assert head.module.table is other
        assert head.recorded not in (None, before)
        wanted, _ = head.module(torch.tensor([[3, 4]]), [torch.zeros(1, 2, 64)], torch.tensor([[0, 1]]), no_past)
    torch.testing.assert_close(head.over_vocabulary(wanted), logits)


def no_past(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of new tokens alone."""
    out: Tensor = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
    return out
