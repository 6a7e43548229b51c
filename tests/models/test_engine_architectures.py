"""The slot cache gives every architecture the logits of its own plain forward pass, however the tokens are fed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from outrider.errors import ContextLengthError, ModelError, ParameterError
from outrider.models.base import scores_alternatives
from outrider.models.cache.slot_cache import MIN_CAPACITY
from outrider.models.kinds import engine_kind
from outrider.models.probe import _tokens
from outrider.models.transformers_model import TransformersModel
from outrider.prefill import prefill
from outrider.support.device_data import pad_rows
from tests.helpers.ragged import ragged_difference, reference, score, some_tokens
from tests.helpers.tiny_models import CONFIGS, VOCABULARY, module, tiny

CLOSE = 1e-9
SINGLE = 1e-4
SINGLE_PRECISION_INSIDE = {"GPTJ"}  # computes its attention in float32 whatever its weights are


@pytest.mark.parametrize("architecture", CONFIGS)
def test_ragged_calls_and_rollbacks_give_the_logits_of_the_plain_pass(architecture: str) -> None:
    model = tiny(architecture)
    close = SINGLE if architecture in SINGLE_PRECISION_INSIDE else CLOSE
    rows = [some_tokens(n, n) for n in (40, 23, 31)]
    wanted = [reference(model, row) for row in rows]
    sequences = [model.open() for _ in rows]
    try:
        assert ragged_difference(model, sequences, rows, wanted) <= close
    finally:
        for sequence in sequences:
            sequence.close()


@pytest.mark.parametrize("architecture", ["Llama", "Gemma3", "GPT2"])
def test_padded_widths_change_nothing(architecture: str) -> None:
    model = TransformersModel(module(architecture))
    model.pad_widths(lambda n, context: {1: 4, 2: 4, 3: 8}.get(n, n))
    row = some_tokens(40, 1)
    wanted = reference(model, row)
    sequence = model.open()
    prefill(model, [sequence], [row[:10]])
    for at, width in ((10, 1), (11, 2), (13, 3), (16, 1), (17, 5)):
        (got,) = score(model, [sequence], [row[at : at + width]])
        assert got.shape == (width, VOCABULARY)
        assert torch.allclose(got, wanted[at : at + width], atol=CLOSE)


@pytest.mark.parametrize("lengths", [(1, 1), (3, 1), (12, 2), (2, 12)])
def test_last_logits_are_each_rows_last(lengths: tuple[int, int]) -> None:
    model = tiny("Llama")
    rows = [some_tokens(n, n) for n in lengths]
    sequences = [model.open() for _ in rows]
    tokens, counts = pad_rows(rows, model.device)
    out = model.score(sequences, tokens, counts, "last")
    assert out is not None
    assert out.shape == (2, 1, VOCABULARY)
    for i, row in enumerate(rows):
        assert torch.allclose(out[i, 0], reference(model, row)[-1], atol=CLOSE)
    for sequence in sequences:
        sequence.close()


def test_the_cache_grows_and_keeps_what_it_holds() -> None:
    model = TransformersModel(module("Llama", max_position_embeddings=4 * MIN_CAPACITY))
    row = some_tokens(2 * MIN_CAPACITY + 9, 3)
    wanted = reference(model, row)
    sequence = model.open()
    prefill(model, [sequence], [row[:-3]])
    (got,) = score(model, [sequence], [row[-3:]])
    assert torch.allclose(got, wanted[-3:], atol=CLOSE)


def test_rows_keep_what_they_hold_when_others_are_opened_and_the_cache_grows() -> None:
    model = TransformersModel(module("Llama", max_position_embeddings=4 * MIN_CAPACITY))
    rows = [some_tokens(length, seed) for seed, length in enumerate((40, MIN_CAPACITY + 20, 9, 30, 11))]
    wanted = [reference(model, row) for row in rows]
    sequences = [model.open(), model.open()]
    prefill(model, sequences, [row[:-3] for row in rows[:2]])  # the second makes the cache longer
    sequences += [model.open() for _ in rows[2:]]  # and these make it higher
    prefill(model, sequences[2:], [row[:-3] for row in rows[2:]])
    for got, want in zip(score(model, sequences, [row[-3:] for row in rows]), wanted, strict=True):
        assert torch.allclose(got, want[-3:], atol=CLOSE)


def test_the_context_limit_is_an_error_not_corruption() -> None:
    model = tiny("GPT2")
    sequence = model.open()
    prefill(model, [sequence], [some_tokens(95, 0)])
    with pytest.raises(ContextLengthError, match="has 96 positions, 97 were asked for"):
        score(model, [sequence], [[3, 4]])
    (got,) = score(model, [sequence], [[3]])
    assert bool(got.isfinite().all())
    sequence.close()


def test_wrong_sequences_and_lengths_are_refused() -> None:
    model, other = tiny("Llama"), tiny("Llama", 1)
    mine, foreign = model.open(), other.open()
    with pytest.raises(ParameterError, match="open sequences of tiny-Llama-0"):
        score(model, [foreign], [[3]])
    with pytest.raises(ParameterError, match=r"lengths must be in 1 … 1, got 2"):
        model.score([mine], torch.tensor([[3]]), [2])
    with pytest.raises(ParameterError, match="can't grow"):
        mine.truncate(1)
    mine.close()
    foreign.close()
    with pytest.raises(ParameterError, match="open sequences"):
        score(model, [mine], [[3]])


SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
REFUSED: dict[str, tuple[Any, str]] = {
    "recurrent": (
        lambda: transformers.RwkvForCausalLM(transformers.RwkvConfig(**SMALL, attention_hidden_size=32)),
        "recurrent state can't be rolled back",
    ),
    "hybrid": (
        lambda: transformers.RecurrentGemmaForCausalLM(
            transformers.RecurrentGemmaConfig(**SMALL, num_attention_heads=4, lru_width=32, intermediate_size=48)
        ),
        "keeps a state of its own that can't be rolled back",
    ),
    "encoder-decoder": (
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=VOCABULARY, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
        ),
        "encoder-decoder",
    ),
    "ALiBi": (
        lambda: transformers.BloomForCausalLM(
            transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)
        ),
        "ALiBi",
    ),
    "linear attention": (
        lambda: transformers.MiniMaxForCausalLM(
            transformers.MiniMaxConfig(
                **{**CONFIGS["Llama"], "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
            )
        ),
        "does not run with kept states .*cache of its own",
    ),
    "window by batch": (
        lambda: transformers.GPTNeoForCausalLM(
            transformers.GPTNeoConfig(
                vocab_size=VOCABULARY, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]
            )
        ),
        "window depends on the other rows",
    ),
    "window of unknown use": (lambda: module("Llama", sliding_window=20), "sliding_window=20"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_can_not_roll_back_are_refused_by_name_and_reason(kind: str) -> None:
    build, reason = REFUSED[kind]
    made = build()
    kind_of_engine = TransformersModel if kind == "encoder-decoder" else engine_kind(made)
    with pytest.raises(ModelError, match=reason) as refusal:
        kind_of_engine(made, name="the-model")
    assert "the-model" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_longrope_ends_where_its_frequencies_switch() -> None:
    """transformers chooses them by the greatest position in the pass, so a neighbour or a draft would change a row."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 24,
    }
    model = TransformersModel(module("Phi3", rope_parameters=rope, original_max_position_embeddings=24))
    assert model.max_length == 24


def test_a_slot_is_clean_for_the_next_sequence() -> None:
    """NaN left in a slot by one generation must not reach the next: 0 × NaN is NaN, masked or not.

    The long neighbour makes the pass read columns of the short sequence's slot that it has not written.
    """
    model = TransformersModel(module("Llama"))
    long, first = model.open(), model.open()
    score(model, [long, first], [[3, 4, 5, 6, 7, 8], [3, 4, 5, 6, 7, 8]])
    for layer in model._cache.layers:
        with torch.inference_mode():
            for tensor in (layer.keys, layer.values):
                assert isinstance(tensor, torch.Tensor)
                tensor[1, :, :6] = torch.nan
    first.close()
    short = model.open()
    got = score(model, [long, short], [[9], [3, 4]])[1]
    long.close()
    short.close()
    alone = model.open()
    torch.testing.assert_close(got[:2], score(model, [alone], [[3, 4]])[0][:2])
    alone.close()


@pytest.mark.parametrize("architecture", ["Llama", "GPT2", "Mamba"])
def test_vocabularies_of_any_size_are_probed(architecture: str) -> None:
    """With tokens that there are, which are not all the same one."""
    for size in (2, 3, 5, 7, 14):
        no_others: dict[str, Any] = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
        model = engine_kind(made := module(architecture, vocab_size=size, **no_others))(made)
        assert len(set(_tokens(model, 8))) == min(size, 8)
        assert scores_alternatives(model) == (architecture != "Mamba")


def test_a_long_text_leaves_no_room_in_every_slot() -> None:
    """Once nobody is there; the texts are the same."""
    model = TransformersModel(module("Llama", max_position_embeddings=20 * MIN_CAPACITY))

    def several() -> list[Tensor]:
        sequences = [model.open(20) for _ in range(3)]
        out = score(model, sequences, [[3, 4, 5], [6], [7, 8]])
        for sequence in sequences:
            sequence.close()
        return out

    before = several()
    assert model._cache.capacity == MIN_CAPACITY
    beside, long = model.open(20), model.open(10 * MIN_CAPACITY)
    score(model, [beside, long], [[9], [1, 2]])
    long.close()
    third = model.open(20)
    assert model._cache.capacity == 10 * MIN_CAPACITY  # somebody is there
    for sequence in (third, beside):
        sequence.close()
    assert all(torch.equal(*both) for both in zip(before, several(), strict=True))
    assert model._cache.capacity == MIN_CAPACITY
    model.open(2 * MIN_CAPACITY).close()
    model.open(20).close()
    assert model._cache.capacity == 2 * MIN_CAPACITY  # not for a little


def test_a_model_that_ignores_positions_is_refused() -> None:
    """A planted fault: the probe at opening must see that cached logits are not those of the plain pass."""

    class Deaf(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    made = module("Llama")
    made.__class__ = Deaf
    with pytest.raises(ModelError, match="other logits through the slot cache"):
        TransformersModel(made, name="deaf")
