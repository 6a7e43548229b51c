"""The same bits in a pass of any width, in bfloat16: layers, attention, recorded passes, texts with drafts and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import outrider
from outrider.decode import Request, decode
from outrider.draft_length import FixedLength
from outrider.drafters import ModelDrafter
from outrider.models.attention import in_blocks, in_float64
from outrider.models.attention.in_blocks import BLOCKS, few, fours
from outrider.models.attention.shared_keys import use_shared_keys
from outrider.models.dtypes import native_dtype
from outrider.models.transformers_model import TransformersModel
from outrider.models.weights import same_bits
from outrider.models.weights.packed_linear import PackedLinear, can_pack, pack_linears
from outrider.models.weights.same_bits import FILL, use_same_bits
from outrider.prefill import prefill
from outrider.randomness import RandomStream
from outrider.records import Round
from outrider.sampling import SamplingSettings
from tests.helpers.kernels import HEADS
from tests.helpers.ragged import score, some_tokens
from tests.helpers.tiny_models import module, record_now

SIZE = 900  # tokens: a head that has something to choose from


def packed(seed: int = 0, **overrides: Any) -> Any:
    made = module("Llama", seed, dtype=torch.bfloat16, **{**HEADS, "vocab_size": SIZE, **overrides})
    pack_linears(made)
    return made


def _applies() -> bool:
    return can_pack(torch.bfloat16, torch.device("cpu")) and use_same_bits(packed())


pytestmark = pytest.mark.skipif(not _applies(), reason="kernels here add up in another order for other widths")


@pytest.fixture(scope="module")
def model() -> TransformersModel:
    made = packed()
    assert use_same_bits(made)
    return TransformersModel(made)


def passes(model: TransformersModel, last: int, width: int, count: int = 36) -> Tensor:
    """The logits of so many tokens, scored so many at a time."""
    tokens, sequence = some_tokens(last, 1, SIZE), model.open()
    prefill(model, [sequence], [tokens[: last - count]])
    parts = [score(model, [sequence], [tokens[i : min(i + width, last)]])[0] for i in range(last - count, last, width)]
    sequence.close()
    return torch.cat(parts)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("last", [40, 80, 210, 330, 540, 700])
def test_any_width_gives_the_same_bits(model: TransformersModel, last: int, recorded: bool, cache: object) -> None:
    model.recorded = None
    if recorded:
        record_now(model)
        assert model.recorded is not None
    assert model.same_bits
    alone = passes(model, last, 1)
    for width in (2, 3, 4, 5, 7, 12, 17, 36):
        assert torch.equal(passes(model, last, width), alone), width
    model.recorded = None


def test_without_it_widths_differ() -> None:
    """Or nothing is tried above."""
    made = packed()
    use_shared_keys(made)
    ordinary = TransformersModel(made)
    assert not ordinary.same_bits
    alone = passes(ordinary, 330, 1)
    assert not all(torch.equal(passes(ordinary, 330, width), alone) for width in (2, 3, 5, 7, 12, 17, 36))


@pytest.mark.parametrize("recorded", [False, True])
def test_two_rows_side_by_side_are_each_alone(model: TransformersModel, recorded: bool, cache: object) -> None:
    model.recorded = None
    if recorded:
        record_now(model)
        assert model.recorded is not None
    texts = [some_tokens(length, seed, SIZE) for seed, length in enumerate((60, 150))]
    alone = []
    for text in texts:
        sequence = model.open()
        prefill(model, [sequence], [text[:-6]])
        alone.append(torch.cat([score(model, [sequence], [text[i : i + 1]])[0] for i in range(len(text) - 6, len(text))]))
        sequence.close()
    sequences = [model.open() for _ in texts]
    for sequence, text in zip(sequences, texts, strict=True):
        prefill(model, [sequence], [text[:-6]])
    found: list[list[Tensor]] = [[], []]
    for first, width in ((-6, 1), (-5, 2), (-3, 3)):
        stop = first + width
        parts = score(model, sequences, [text[first : stop or None] for text in texts])
        for row, part in zip(found, parts, strict=True):
            row.append(part)
    assert all(torch.equal(torch.cat(row), one) for row, one in zip(found, alone, strict=True))
    for sequence in sequences:
        sequence.close()
    model.recorded = None


@pytest.fixture(scope="module")
def nearly(model: TransformersModel) -> TransformersModel:
    """A draft that is mostly right: the target with noise in its weights."""
    made = module("Llama", 0, dtype=torch.float32, **{**HEADS, "vocab_size": SIZE})
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in made.parameters():
            weight.add_(0.15 * weight.std() * torch.randn(weight.shape, generator=draw))
    return TransformersModel(made)


def greedy(
    target: TransformersModel, draft: TransformersModel | None, alternatives: int | None
) -> tuple[list[list[int]], list[Round]]:
    requests = [Request(some_tokens(30 + i, i, SIZE), 100, RandomStream(1, i)) for i in range(6)]
    found, rounds = [], []
    for request in requests:  # one by one: side by side a pass is another one
        drafter = None if draft is None else ModelDrafter(draft, step_seconds=0.1)
        tokens, made = decode(target, [request], SamplingSettings(), drafter, FixedLength(3), alternatives=alternatives)
        found += tokens
        rounds += made[0]
    return found, rounds


@pytest.mark.parametrize("alternatives", [0, 3])
def test_greedy_texts_are_plain_decodings(model: TransformersModel, nearly: TransformersModel, alternatives: int) -> None:
    plain, _ = greedy(model, None, None)
    drafted, rounds = greedy(model, nearly, alternatives)
    assert drafted == plain
    assert sum(made.accepted for made in rounds) > 20
    if alternatives:
        assert sum(made.taken for made in rounds) > 5


@pytest.mark.skipif(native_dtype(torch.device("cpu")) is not torch.bfloat16, reason="slow: no products of bfloat16")
def test_the_default_model_writes_plain_decodings_text_with_its_head_and_copies() -> None:
    target = outrider.load(dtype="bfloat16")
    assert isinstance(target, TransformersModel)
    if not target.same_bits:
        pytest.skip("not with this model's shapes")
    for text in ("Write a Python class Vector with add and sub.", "Why is the sky blue? Explain it twice."):
        prompt = [{"role": "user", "content": text}]
        plain = outrider.generate(target, prompt, draft=None, max_new_tokens=96)
        for alternatives in (None, 4):
            drafted = outrider.generate(target, prompt, max_new_tokens=96, alternatives=alternatives)
            assert drafted.tokens == plain.tokens
            always = outrider.generate(target, prompt, max_new_tokens=96, alternatives=alternatives, num_draft_tokens=3)
            assert always.tokens == plain.tokens
            assert always.stats.rounds < 0.8 * plain.stats.rounds  # how often an adaptive length drafts, costs decide


def test_what_is_held_of_an_alternative_is_scored_anew(
    model: TransformersModel, nearly: TransformersModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys spoilt where an alternative is taken are not seen by the target."""
    own = TransformersModel.take_alternative
    taken = []

    def spoil(self: TransformersModel, sequence: Any, position: int, m: int) -> None:
        own(self, sequence, position, m)
        with torch.inference_mode():
            for layer in self._cache.layers:
                layer.keys[sequence.slot, :, position] = 3.0
        taken.append(position)

    assert model.scores_alternatives  # tried before, not with this
    monkeypatch.setattr(TransformersModel, "take_alternative", spoil)
    plain, _ = greedy(model, None, None)
    drafted, _ = greedy(model, nearly, 3)
    assert len(taken) > 5
    assert drafted == plain


def test_rows_are_filled_up_so_that_four_are_multiplied_at_least() -> None:
    for rows in range(1, 200):
        for fill in (few, fours):
            assert rows < fill(rows) <= rows + 4
            assert fill(rows) % 32 not in (1, 2, 3)
        assert few(rows) == rows + (4 if rows % 32 < 3 else 1)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], None]]:
    """Products of so many rows to so many get other last bits."""

    def plant(first: int, last: int) -> None:
        own = PackedLinear.product

        def otherwise(self: PackedLinear, x: Tensor) -> Tensor:
            out, rows = own(self, x), x.numel() // self.in_features
            return out * (1 + 2**-7) if first <= rows <= last else out

        monkeypatch.setattr(PackedLinear, "product", otherwise)

    same_bits._alike.cache_clear()
    yield plant
    same_bits._alike.cache_clear()


@pytest.mark.parametrize(("rows", "used"), [((1, FILL - 1), True), ((12, 12), False), ((40, 64), False)])
def test_it_is_used_where_products_are_alike(rows: tuple[int, int], used: bool, planted: Callable[[int, int], None]) -> None:
    made = packed()
    planted(*rows)
    assert use_same_bits(made) is used
    assert (made.config._attn_implementation == BLOCKS) is used
    assert all((layer.fill == FILL) is used for layer in made.modules() if isinstance(layer, PackedLinear))


def test_another_order_of_a_sum_is_seen_by_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last half of the columns first, for some widths: one bit in thousands with ordinary numbers."""
    own = PackedLinear.product

    def reordered(self: PackedLinear, x: Tensor) -> Tensor:
        if x.numel() // self.in_features != 7:
            return own(self, x)
        half = self.in_features // 2
        first, last = x.clone(), x.clone()
        first[..., half:] = 0
        last[..., :half] = 0
        return (own(self, first).float() + own(self, last).float()).to(x.dtype)

    monkeypatch.setattr(PackedLinear, "product", reordered)
    same_bits._alike.cache_clear()
    assert not use_same_bits(packed())
    same_bits._alike.cache_clear()


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("Llama", {"dtype": torch.float32}),
        ("Llama", {"num_key_value_heads": 1}),
        ("Mixtral", {}),  # as many tokens as are sent to an expert, whatever the width
        ("Gemma2", {}),
    ],
)
def test_what_it_is_not_for_is_left_alone(architecture: str, overrides: dict[str, Any]) -> None:
    made = module(architecture, 0, **{"dtype": torch.bfloat16, **HEADS, **overrides})
    before = made.config._attn_implementation
    pack_linears(made)
    assert not use_same_bits(made)
    assert made.config._attn_implementation == before != BLOCKS
    assert all(layer.fill == 1 for layer in made.modules() if isinstance(layer, PackedLinear))


def test_layers_that_are_not_laid_out_are_not_trusted() -> None:
    assert not use_same_bits(module("Llama", 0, dtype=torch.bfloat16, **HEADS))


def test_the_attention_it_falls_back_on_is_not_that_of_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it does not apply: without float64's copies of all keys."""
    monkeypatch.setattr(in_float64, "attend", None)
    query, key = torch.randn(1, 4, 3, 16).bfloat16(), torch.randn(1, 2, 9, 16).bfloat16()
    mask = torch.ones(1, 1, 3, 9, dtype=torch.bool).tril(6)
    layer = type("Layer", (), {"num_key_value_groups": 2, "training": False, "is_causal": True})()
    out, _ = in_blocks.attend(layer, query, key, key[..., :8], mask, scaling=0.25)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query, key.repeat_interleave(2, 1), key[..., :8].repeat_interleave(2, 1), attn_mask=mask, scale=0.25
    )
    assert out.shape == (1, 3, 4, 8)
    assert torch.allclose(out.transpose(1, 2).float(), wanted.float(), atol=0.02)
