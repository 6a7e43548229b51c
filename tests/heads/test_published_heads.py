"""Heads that other projects trained: their checkpoints give what their code gives, and drafts of theirs are as exact."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.decode import Request, decode
from outrider.draft_length import FixedLength
from outrider.drafters import HeadDrafter
from outrider.errors import ModelError
from outrider.heads.opening import open_head
from outrider.models.transformers_model import TransformersModel
from outrider.randomness import RandomStream
from tests.helpers.heads import exact_joint, sample
from tests.helpers.marks import slow, thinned
from tests.helpers.published_heads import (
    CHECKPOINTS,
    DRAFTED,
    LLAMA3,
    TEXT,
    TOKENS,
    YARN,
    Chain,
    Checkpoint,
    deep_target,
    eagle,
    eagle3,
    laws_of,
    medusa,
)
from tests.helpers.samples import ALARM, SAMPLES, V, p_value_of
from tests.helpers.tiny_models import VOCABULARY, module
from tests.helpers.toys import SETTINGS

CLOSE = 1e-5  # of the largest logit: the references turn positions and take norms in float32


def states_of(target: TransformersModel, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """The last states [1, N, 32], and those after the first three layers side by side."""
    with torch.inference_mode():
        out = target.module.model(input_ids=torch.tensor([tokens]), output_hidden_states=True)
    return out.last_hidden_state, torch.cat(out.hidden_states[1:4], dim=-1)


def off(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


def wanted(target: TransformersModel, checkpoint: Checkpoint) -> Tensor:
    """The same by the reference."""
    last, three = states_of(target, TEXT[:-1])
    layered = "norm" in checkpoint.parts
    chain = Chain(checkpoint, target.module.get_input_embeddings())

    def logits(states: Tensor) -> Tensor:
        if layered:
            out: Tensor = checkpoint.parts["lm_head"](checkpoint.parts["norm"](states))
            return out
        return target.module.get_output_embeddings()(states)  # type: ignore[no-any-return]

    later = checkpoint.config.get("norm_output", False)  # a head of the later kind goes on with what is normed

    def logits_and_next(predicted: Tensor) -> tuple[Tensor, Tensor]:
        if later:
            normed = checkpoint.parts["norm"](predicted)
            return checkpoint.parts["lm_head"](normed[0]), normed
        return logits(predicted[0]), predicted

    with torch.inference_mode():
        law, predicted = logits_and_next(chain.forward(torch.tensor([TEXT[1:]]), three if layered else last))
        out = [law]
        for token in DRAFTED:
            law, predicted = logits_and_next(chain.forward(torch.tensor([[token]]), predicted[:, -1:]))
            out.append(law)
    return torch.cat(out)


MADE: dict[str, Callable[[], Checkpoint]] = {
    "EAGLE": lambda: eagle(VOCABULARY),
    "EAGLE without a bias": lambda: eagle(VOCABULARY, bias=False),
    "EAGLE, Llama 3's positions": lambda: eagle(VOCABULARY, rope=LLAMA3, rope_parameters=LLAMA3),
    "EAGLE, YaRN's positions": lambda: eagle(VOCABULARY, rope=YARN, rope_parameters=YARN),
    "EAGLE-3": lambda: eagle3(VOCABULARY, TOKENS),
    "EAGLE-3, all tokens": lambda: eagle3(VOCABULARY),
    "EAGLE-3, biases": lambda: eagle3(VOCABULARY, TOKENS, bias=True),
    "EAGLE-3, states normed": lambda: eagle3(VOCABULARY, TOKENS, norms="input_norm", norm_before_fc=True),
    "EAGLE-3, each state normed": lambda: eagle3(VOCABULARY, TOKENS, norms="fc_norm", norm_before_fc=True),
    "EAGLE-3, output normed": lambda: eagle3(VOCABULARY, TOKENS, norm_output=True),
    "EAGLE-3, residual normed": lambda: eagle3(VOCABULARY, TOKENS, residual_normed=True, norm_before_residual=True),
}


@pytest.mark.parametrize("what", thinned(MADE))
def test_a_chain_of_drafts_is_what_their_code_computes(what: str, tmp_path: Path) -> None:
    target, checkpoint = deep_target(), MADE[what]()
    head, laws = laws_of(target, checkpoint.write(tmp_path))
    assert head.name == f"{what.split(maxsplit=1)[0].rstrip(',')} head"
    if head.draft_tokens is not None:
        assert head.draft_tokens.tolist() == TOKENS
        assert bool(laws[:, [t for t in range(VOCABULARY) if t not in TOKENS]].isneginf().all())
        laws = laws[:, TOKENS]
    assert off(laws, wanted(target, checkpoint)) < CLOSE


@pytest.mark.parametrize("depth", [1, 2])
def test_medusas_heads_read_the_last_state(depth: int, tmp_path: Path) -> None:
    target, checkpoint = deep_target(), medusa(VOCABULARY, depth=depth)
    head = open_head(target, checkpoint.write(tmp_path, "medusa_lm_head.pt"))
    base = target.open()
    target.score([base], torch.tensor([TEXT[:-1]]), [len(TEXT) - 1], "none")
    row = head.open_on(base)
    got = [head.score([row], torch.tensor([TEXT]), [len(TEXT)], "last")]
    got += [head.score([row], torch.tensor([[token]]), [1], "last") for token in DRAFTED[:2]]
    (state, _) = states_of(target, TEXT[:-1])
    for mine, block in zip(got, checkpoint.layer, strict=True):
        x = state[0, -1]
        for i in range(depth):
            x = x + torch.nn.functional.silu(block[i]["linear"](x))
        assert mine is not None
        assert off(mine[0, 0], block[depth](x)) < CLOSE
    along = head.score([head.open_on(base)], torch.tensor([TEXT]), [len(TEXT)])
    assert along is not None
    assert got[0] is not None
    assert torch.allclose(along[0, -1], got[0][0, 0])


def test_vllms_medusa_is_the_same_one(tmp_path: Path) -> None:
    target, theirs = deep_target(), medusa(VOCABULARY)
    named = {}
    for key, value in theirs.weights.items():
        block, layer, *rest = key.split(".")
        named[f"lm_heads.{block}.weight" if layer == "1" else f"blocks.{block}.layers.0.{rest[-1]}"] = value
    config = {"architectures": ["MedusaModel"], "num_heads": 3, "num_hidden_layers": 1, "vocab_size": VOCABULARY}
    folders = [theirs.write(tmp_path / "a", "medusa_lm_head.pt"), Checkpoint(config, named).write(tmp_path / "b")]
    rows = [open_head(target, folder) for folder in folders]
    one, other = (head.score([head.open()], torch.tensor([TEXT]), [len(TEXT)]) for head in rows)
    assert one is not None
    assert other is not None
    assert torch.allclose(one, other)


def test_layers_that_are_not_named_are_the_usual_ones(tmp_path: Path) -> None:
    checkpoint = eagle3(VOCABULARY, TOKENS)
    del checkpoint.config["eagle_config"]
    folder = checkpoint.write(tmp_path)
    deeper = TransformersModel(module("Llama", 8, num_hidden_layers=9), name="deeper")
    assert open_head(deeper, folder).config.layers == (2, 4, 6)
    with pytest.raises(ModelError, match=r"reads the states of layers 2, 3, 3"):
        open_head(deep_target(), folder)


def test_an_embedding_of_its_own_is_used_and_a_copy_is_not(tmp_path: Path) -> None:
    target = deep_target()
    theirs = target.module.get_input_embeddings().weight
    copy, other = eagle3(VOCABULARY, TOKENS), eagle3(VOCABULARY, TOKENS)
    copy.weights["embed_tokens.weight"] = theirs.detach().bfloat16()
    other.weights["embed_tokens.weight"] = theirs.detach() + 1
    plain = laws_of(target, eagle3(VOCABULARY, TOKENS).write(tmp_path / "plain"))[1]
    assert torch.allclose(laws_of(target, copy.write(tmp_path / "copy"))[1], plain)
    assert not torch.allclose(laws_of(target, other.write(tmp_path / "other"))[1], plain)


def test_tokens_in_any_order(tmp_path: Path) -> None:
    target = deep_target()
    turned = eagle3(VOCABULARY, TOKENS)
    turned.weights["d2t"] = torch.tensor(TOKENS[::-1]) - torch.arange(len(TOKENS))
    turned.weights["lm_head.weight"] = turned.weights["lm_head.weight"].flip(0)
    straight = laws_of(target, eagle3(VOCABULARY, TOKENS).write(tmp_path / "straight"))[1]
    assert torch.allclose(laws_of(target, turned.write(tmp_path / "turned"))[1], straight)


def test_a_head_narrower_than_its_target(tmp_path: Path) -> None:
    """With tokens and rows of its own it drafts all the same."""
    wide = TransformersModel(module("Llama", 8, hidden_size=48, num_hidden_layers=6), name="wide")
    narrow = eagle3(VOCABULARY, TOKENS)
    torch.manual_seed(1)
    narrow.weights |= {
        "fc.weight": torch.randn(32, 144, dtype=torch.float64) / 6,
        "embed_tokens.weight": torch.randn(VOCABULARY + 3, 32, dtype=torch.float64),
    }
    drafter = HeadDrafter(narrow.write(tmp_path), step_seconds=0.1)
    asked = [Request(TEXT, 16, RandomStream(0))]
    spoken, (rounds,) = decode(wide, asked, SETTINGS["greedy"], drafter, FixedLength(2))
    assert spoken == decode(wide, asked, SETTINGS["greedy"])[0]
    assert sum(record.drafted for record in rounds) > 8


def test_medusas_heads_may_share_the_targets_output_layer(tmp_path: Path) -> None:
    target, theirs = deep_target(), medusa(VOCABULARY)
    named = {
        f"blocks.{key[0]}.layers.0.{key.split('.')[-1]}": value for key, value in theirs.weights.items() if "linear" in key
    }
    config = {"num_heads": 3, "num_hidden_layers": 1, "vocab_size": VOCABULARY, "original_lm_head": True}
    weights = {**named, "lm_heads.0.weight": target.module.lm_head.weight.detach()}
    head = open_head(target, Checkpoint(config, weights).write(tmp_path))
    base = target.open()
    target.score([base], torch.tensor([TEXT[:-1]]), [len(TEXT) - 1], "none")
    got = head.score([head.open_on(base)], torch.tensor([TEXT]), [len(TEXT)], "last")
    state = states_of(target, TEXT[:-1])[0][0, -1]
    x = state + torch.nn.functional.silu(theirs.layer[0][0]["linear"](state))
    assert got is not None
    assert off(got[0, 0], target.module.lm_head(x).detach()) < CLOSE


@cache
def three_tokens() -> TransformersModel:
    return TransformersModel(module("Llama", 4, vocab_size=V, num_hidden_layers=6), name="three")


@pytest.mark.parametrize("setting", [slow("greedy"), "temperature 1", slow("all")])
@pytest.mark.parametrize("what", thinned(CHECKPOINTS))
def test_the_law_is_the_targets(what: str, setting: str, tmp_path: Path) -> None:
    target, (made, name) = three_tokens(), CHECKPOINTS[what]
    drafter = HeadDrafter(made(V).write(tmp_path, name), step_seconds=0.1)
    written, rounds = sample(target, drafter, SETTINGS[setting], FixedLength(3))
    assert p_value_of(written, exact_joint(target, SETTINGS[setting])) > ALARM
    assert sum(record.drafted for record in rounds) > SAMPLES // 3


@pytest.mark.parametrize("what", CHECKPOINTS)
def test_batches_and_round_after_round(what: str, tmp_path: Path) -> None:
    """Ragged rows of several rounds write what plain decoding writes."""
    target, (made, name) = deep_target(), CHECKPOINTS[what]
    drafter = HeadDrafter(made(VOCABULARY).write(tmp_path, name), step_seconds=0.1)
    asked = [Request(prompt, 24, RandomStream(0, i)) for i, prompt in enumerate([[1], [5, 9, 33], TEXT, TEXT * 2])]
    greedy = SETTINGS["greedy"]
    plain, _ = decode(target, asked, greedy)
    spoken, rounds = decode(target, asked, greedy, drafter, FixedLength(2))
    assert spoken == plain
    assert sum(record.drafted for row in rounds for record in row) > 24
