"""Hidden states of the OpenVINO engine are those of the plain forward pass, and draft heads read them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.decode import decode
from outrider.draft_length import FixedLength
from outrider.drafters import HeadDrafter
from outrider.errors import ParameterError
from outrider.heads.target_parts import output_rows
from outrider.models.openvino.engine import BLOCK, FIRST_BLOCKS, OpenVinoModel
from outrider.models.openvino.saved import Weights
from outrider.models.transformers_model import TransformersModel
from outrider.prefill import prefill
from outrider.sampling import SamplingSettings
from tests.helpers.heads import KINDS, Shape, first_draft, write_head
from tests.helpers.marks import slow, thinned
from tests.helpers.openvino_engine import CLOSE, opened, score
from tests.helpers.ragged import some_tokens
from tests.helpers.requests import GREEDY, WARM, requests


def reference(plain: torch.nn.Module, tokens: list[int], layers: tuple[int, ...] = (1,)) -> Tensor:
    with torch.inference_mode():
        out = plain(input_ids=torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
    return torch.cat([out.hidden_states[layer][0] for layer in (-1, *layers)], dim=-1)


def test_states_are_those_of_the_plain_pass_wherever_their_blocks_lie(cache: Path) -> None:
    """After ragged passes, a roll-back, blocks that are shared and then written, and more blocks than there were."""
    model, plain = opened("Llama", max_position_embeddings=4096)
    common = some_tokens(2 * BLOCK + 5, 0)
    early = model.open()
    prefill(model, [early], [common])  # publishes blocks without states
    model.keep_states((1,))
    first, second = model.open(), model.open()
    for sequence in (first, second):
        prefill(model, [sequence], [common])
    assert first.blocks[:2] == second.blocks[:2] != early.blocks[:2]
    score(model, [second, first], [[4, 5, 6, 7], [8, 9]])
    second.truncate(BLOCK + 3)
    score(model, [second], [[11, 12]])
    for sequence, tokens in ((first, [*common, 8, 9]), (second, [*common[: BLOCK + 3], 11, 12])):
        wanted = reference(plain, tokens)
        for start in (0, BLOCK - 1, len(tokens) - 2):
            got = model.states(sequence, start, len(tokens), (1,))
            torch.testing.assert_close(got, wanted[start:], atol=CLOSE, rtol=0)
        torch.testing.assert_close(model.states(sequence, 3, 5), wanted[3:5, :32], atol=CLOSE, rtol=0)
    many = [model.open() for _ in range(2)]
    texts = [some_tokens(FIRST_BLOCKS * BLOCK // 2 + 40, seed) for seed in (1, 2)]
    prefill(model, many, texts)
    for sequence, tokens in ((first, [*common, 8, 9]), (many[1], texts[1])):
        got = model.states(sequence, 0, len(tokens), (1,))
        torch.testing.assert_close(got, reference(plain, tokens), atol=CLOSE, rtol=0)
    assert model.states(first, 2, 2).shape == (0, 32)


@pytest.mark.parametrize("architecture", ["Llama", *map(slow, ("Gemma3", "GPT2"))])
def test_what_is_lent_is_what_the_model_has(architecture: str, cache: Path) -> None:
    """Embeddings (scaled in Gemma), rows of the head, states; the logits are not changed by keeping them."""
    model, plain = opened(architecture)
    tokens = some_tokens(20, 3)
    before = score(model, [model.open()], [tokens])[0]
    model.keep_states((1,))
    sequence = model.open()
    torch.testing.assert_close(score(model, [sequence], [tokens])[0], before, atol=1e-5, rtol=0)
    wanted = reference(plain, tokens)
    torch.testing.assert_close(model.states(sequence, 0, 20, (1,)), wanted, atol=CLOSE, rtol=0)
    ids = torch.tensor([[3, 17], [60, 5]])
    with torch.inference_mode():
        torch.testing.assert_close(model.embed(ids), plain.get_input_embeddings()(ids), atol=1e-5, rtol=0)
        logits = plain.get_output_embeddings()(wanted[:, :32])
    torch.testing.assert_close(model.logits_of(wanted[:, :32]), logits, atol=1e-4, rtol=0)
    torch.testing.assert_close(output_rows(model, ids[0])(wanted[:, :32]), logits[:, ids[0]], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", thinned(KINDS))
def test_a_head_drafts_the_same_on_both_engines(kind: Shape, cache: Path, tmp_path: Path) -> None:
    model, plain = opened("Llama")
    path = write_head(tmp_path, kind)
    ours, theirs = (first_draft(engine, path, [5, 6, 7, 8, 9], 3)[2] for engine in (model, TransformersModel(plain)))
    torch.testing.assert_close(ours.float(), theirs.float(), atol=CLOSE, rtol=0)


def again(model: OpenVinoModel, settings: SamplingSettings, drafter: HeadDrafter) -> tuple[list[list[int]], object]:
    """The same once more, after other sequences have been in the blocks."""
    decode(model, requests(seed=5), settings, drafter, FixedLength(2))
    return decode(model, requests(), settings, drafter, FixedLength(3))


@pytest.mark.parametrize("weights", ["int8", slow("float32")])
@pytest.mark.parametrize("kind", thinned(KINDS))
def test_output_is_that_of_plain_decoding(kind: Shape, weights: Weights, cache: Path, tmp_path: Path) -> None:
    model, _ = opened("Llama", weights)
    drafter = HeadDrafter(write_head(tmp_path, kind), step_seconds=0.1)
    drafter.bind(model)
    for settings in (GREEDY, WARM):
        ours, rounds = decode(model, requests(), settings, drafter, FixedLength(3))
        assert max(one.drafted for row in rounds for one in row) == 3
        wanted = decode(model, requests(), settings) if settings is GREEDY else again(model, settings, drafter)
        assert ours == wanted[0]


def test_what_can_not_be_kept_is_refused(cache: Path) -> None:
    model, _ = opened("Llama")
    with pytest.raises(ParameterError, match=r"call keep_states\(\) first"):
        model.states(model.open(), 0, 0)
    with pytest.raises(ParameterError, match=r"layers must be in 1 … 1, those of Llama before the last, got 2"):
        model.keep_states((2,))
    model.keep_states()
    with pytest.raises(ParameterError, match=r"states must be of positions in 0 … 0, got 0 … 1"):
        model.states(model.open(), 0, 1)


def test_states_that_can_not_be_kept_leave_the_model_as_it_was(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A converted model whose layers were in no list has the last states alone."""
    model, _ = opened("Llama")
    tokens = some_tokens(9, 4)
    before = score(model, [model.open()], [tokens])[0]
    monkeypatch.setattr("outrider.models.openvino.engine.state_name", lambda layer: "state.0" if layer == 0 else "none")
    with pytest.raises(ParameterError, match="can't be read from Llama: its layers are in no list"):
        model.keep_states((1,))
    torch.testing.assert_close(score(model, [model.open()], [tokens])[0], before, atol=0, rtol=0)
    model.keep_states()
    torch.testing.assert_close(score(model, [model.open()], [tokens])[0], before, atol=1e-5, rtol=0)
