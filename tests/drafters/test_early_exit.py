"""The target's first layers as the draft: what they say, what they leave alone, exact output."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.decode import Request, decode
from outrider.draft_length import FixedLength
from outrider.drafters import ChoiceDrafter, EarlyExitDrafter, RandomDrafter, SelfDrafter, SpeculativeDrafter
from outrider.errors import ModelError, ParameterError
from outrider.forced import draft_laws_along
from outrider.models.base import LanguageModel
from outrider.models.first_layers import first_layers
from outrider.models.transformers_model import TransformersModel
from outrider.randomness import RandomStream
from outrider.sampling import SamplingSettings
from tests.helpers.marks import slow, thinned
from tests.helpers.requests import GREEDY, PROMPTS, WARM, requests
from tests.helpers.tiny_models import module, record_now, tiny
from tests.helpers.toys import table

ARCHITECTURES = ["Llama", "GPT2", "GPTNeoX", "OPT", "Gemma3", "Mistral"]


def deep(architecture: str) -> TransformersModel:
    return TransformersModel(of_depth(architecture, 4), name=f"deep-{architecture}")


def of_depth(architecture: str, layers: int) -> Any:
    overrides: dict[str, Any] = {"n_layer" if architecture == "GPT2" else "num_hidden_layers": layers}
    return module(architecture, 5, **overrides)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_first_layers_are_those_of_a_shorter_model(architecture: str) -> None:
    target = deep(architecture)
    view = first_layers(target, 2)
    sequence = view.open()
    got = view.score([sequence], torch.tensor([[5, 6, 7, 8]]), [4])
    sequence.close()
    shorter = of_depth(architecture, 2)
    shorter.load_state_dict(target.module.state_dict(), strict=False)
    with torch.inference_mode():
        wanted = shorter(input_ids=torch.tensor([[5, 6, 7, 8]])).logits
    assert got is not None
    torch.testing.assert_close(got, wanted, atol=1e-10, rtol=0)
    assert len(list(target.module.parameters())) == len({id(p) for p in target.module.parameters()})


def test_layers_of_one_kind_of_a_model_of_two() -> None:
    """Windows in some layers only, of which the first ones have none, or all of them."""
    target = TransformersModel(module("Gemma2"), name="two-kinds")
    view = first_layers(target, 1)
    view.look_again()
    sequence = view.open()
    found = view.score([sequence], torch.tensor([[5, 6, 7]]), [3])
    sequence.close()
    assert found is not None
    assert found.isfinite().all()


@pytest.mark.parametrize("architecture", thinned(ARCHITECTURES))
def test_output_is_that_of_plain_decoding(architecture: str) -> None:
    target = deep(architecture)
    plain = decode(target, requests(), GREEDY)[0]
    for layers in (1, 3):
        tokens, rounds = decode(target, requests(), GREEDY, EarlyExitDrafter(layers), FixedLength(3))
        assert tokens == plain
        assert sum(r.drafted for row in rounds for r in row) > 20
    assert target._open == []


def test_batches_are_single_rows_when_sampling_too() -> None:
    target = deep("Llama")
    batch, _ = decode(target, requests(), WARM, EarlyExitDrafter(2), FixedLength(3))
    for i, request in enumerate(requests()):
        assert decode(target, [request], WARM, EarlyExitDrafter(2), FixedLength(3))[0][0] == batch[i]


def test_layers_that_change_nothing_are_always_accepted() -> None:
    """If the last layers add nothing, the first ones say what the target says: alpha is 1, so no stale key is read."""
    made = module("Llama", 6, num_hidden_layers=4)
    with torch.no_grad():
        for layer in made.model.layers[2:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    target = TransformersModel(made)
    _, rounds = decode(target, requests(40), SamplingSettings(temperature=1.0), EarlyExitDrafter(2), FixedLength(4))
    records = [r for row in rounds for r in row]
    assert all(r.accepted == r.drafted for r in records)
    assert sum(r.drafted for r in records) > 60


def test_an_early_exit_can_be_accelerated_itself() -> None:
    """A speculative decoder needs a model of its own: the cut model works, with its own sequences in the same cache."""
    target = deep("Llama")
    drafter = SpeculativeDrafter(first_layers(target, 3), EarlyExitDrafter(1), FixedLength(2), step_seconds=0.1)
    assert decode(target, requests(), GREEDY, drafter, FixedLength(4))[0] == decode(target, requests(), GREEDY)[0]


def test_what_can_not_be_cut_is_refused() -> None:
    def start(target: LanguageModel, layers: int) -> None:
        decode(target, [Request(PROMPTS[0], 3, RandomStream(0))], GREEDY, EarlyExitDrafter(layers), FixedLength(1))

    with pytest.raises(ParameterError, match=r"layers must be below the target's 2, got 2"):
        start(tiny("Llama"), 2)
    with pytest.raises(ModelError, match="early-exit can't draft for table-1"):
        start(table(1, 61), 1)
    with pytest.raises(ParameterError, match=r"layers must be a whole number of 1 or more, got 0"):
        EarlyExitDrafter(0)


@pytest.mark.slow
def test_a_view_is_made_once_while_its_target_is_what_it_was(cache: Path) -> None:
    target = TransformersModel(module("Llama", num_hidden_layers=3))
    view = first_layers(target, 2)
    assert first_layers(target, 2) is view
    assert first_layers(target, 1) is not view
    record_now(target)
    assert target.recorded is not None
    quick = first_layers(target, 2)
    assert quick is not view
    assert quick.recorded is not None
    assert first_layers(target, 2) is quick
    layers = target.module.model.layers
    layers[1] = copy.deepcopy(layers[1])
    with torch.no_grad():
        layers[1].mlp.down_proj.weight.mul_(2)
    other = first_layers(target, 2)
    assert other is not quick
    found, old = (one.score([target.open()], torch.tensor([[5, 6]]), [2]) for one in (other, view))
    assert found is not None
    assert old is not None
    assert not torch.equal(found, old)


@pytest.mark.parametrize("depths", [slow((4, 3)), slow((3, 4))])
def test_a_recording_of_the_first_layers_is_not_a_deeper_models(
    depths: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the same two layers, and read the whole cache of their target."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    for layers in depths:
        target = TransformersModel(of_depth("Llama", layers))
        wanted = decode(target, requests(), GREEDY)[0]
        record_now(target)
        view = first_layers(target, 2)
        assert view.recorded is not None
        view.record()
        assert decode(target, requests(), GREEDY, EarlyExitDrafter(2), FixedLength(3))[0] == wanted


def test_several_are_told_apart_by_their_layers() -> None:
    target = deep("Llama")
    drafter = ChoiceDrafter([EarlyExitDrafter(1), EarlyExitDrafter(2), SelfDrafter(), SelfDrafter(temperature=1.5)])
    assert drafter.name == "early-exit:1 + early-exit:2 + self + self:temperature=1.5"
    assert decode(target, requests(), GREEDY, drafter, FixedLength(2))[0] == decode(target, requests(), GREEDY)[0]


def test_it_is_not_read_along_a_text_of_its_own() -> None:
    drafter = ChoiceDrafter([EarlyExitDrafter(1), RandomDrafter()])
    drafter.bind(target := deep("Llama"))
    with pytest.raises(ParameterError, match=r"early-exit:1 drafts in the target's own sequences, .* name it alone"):
        list(draft_laws_along(drafter, target, [1, 2, 3, 4], 2, GREEDY))


def test_a_view_that_is_kept_does_not_keep_its_target() -> None:
    target = TransformersModel(module("Llama", num_hidden_layers=3))
    first_layers(target, 1)
    gone = weakref.ref(target)
    del target
    assert gone() is None
