"""The files of heads that other projects trained: names, configs, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.drafters import HeadDrafter
from outrider.errors import ModelError
from outrider.heads.opening import open_head
from outrider.heads.stored import read_head, read_shape
from tests.helpers.published_heads import LLAMA3, TOKENS, YARN, Checkpoint, deep_target, eagle, eagle3, laws_of, medusa
from tests.helpers.tiny_models import VOCABULARY


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_files_and_prefixes(name: str, prefix: str, tmp_path: Path) -> None:
    whole = eagle(VOCABULARY)
    stored = read_head(whole.write(tmp_path, name, prefix))
    assert torch.equal(stored.weights["join.weight"], whole.weights["fc.weight"])


def test_a_map_of_tokens_cuts_medusas_heads(tmp_path: Path) -> None:
    whole = medusa(VOCABULARY)
    cut = Checkpoint({**whole.config, "vocab_size": VOCABULARY}, {**whole.weights, "token_map": torch.tensor(TOKENS[::-1])})
    stored = read_head(cut.write(tmp_path, "medusa_lm_head.pt"))
    assert stored.tokens.tolist() == TOKENS
    assert torch.equal(stored.rows["heads.1"], whole.weights["1.1.weight"][TOKENS])


def test_the_nested_config_of_speculators(tmp_path: Path) -> None:
    flat = eagle3(VOCABULARY, TOKENS, residual_normed=True, norm_before_residual=True)
    inner = {key: value for key, value in flat.config.items() if not key.startswith(("eagle", "draft", "norm"))}
    config = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": inner,
        "draft_vocab_size": len(TOKENS),
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],  # from 1
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "org/verifier"}},
    }
    named = {name.replace("midlayer.", "layers.0."): value for name, value in flat.weights.items()}
    nested = Checkpoint(config, named).write(tmp_path / "nested")
    shape = read_shape(nested)
    assert (shape.target, shape.layers) == ("org/verifier", (1, 2, 3))
    target = deep_target()
    assert torch.allclose(laws_of(target, nested)[1], laws_of(target, flat.write(tmp_path / "flat"))[1])


def test_all_of_medusas_heads_are_read_whatever_the_config_says(tmp_path: Path) -> None:
    """The published ones say two, and have five."""
    checkpoint = medusa(VOCABULARY, blocks=5)
    checkpoint.config["medusa_num_heads"] = 2
    assert read_shape(checkpoint.write(tmp_path, "medusa_lm_head.pt")).blocks == 5


def test_what_is_null_is_not_there(tmp_path: Path) -> None:
    names = ("max_position_embeddings", "num_hidden_layers", "rope_scaling", "head_dim", "draft_vocab_size", "eagle_config")
    nothing: dict[str, Any] = dict.fromkeys(names)
    checkpoint = changed(eagle3(VOCABULARY, TOKENS), **nothing)
    shape = read_shape(checkpoint.write(tmp_path))
    assert (shape.window, shape.head_size, shape.num_tokens) == (2048, 8, len(TOKENS))


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({"sliding_window": 16}, 16),
        ({"sliding_window": 16, "use_sliding_window": False}, 64),
        ({"sliding_window": 16, "layer_types": ["full_attention"]}, 64),
        ({"sliding_window": 4096}, 64),
        ({"rope_parameters": YARN, "max_position_embeddings": 16}, 64),
    ],
)
def test_how_far_a_head_looks_back(config: dict[str, Any], window: int, tmp_path: Path) -> None:
    assert read_shape(eagle(VOCABULARY, **config).write(tmp_path)).window == window


def test_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was fetched once lies in the hub's cache, where it is found without a network."""
    repository = tmp_path / "models--org--eagle-tiny"
    eagle(VOCABULARY).write(repository / "snapshots" / "0123")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    drafter = HeadDrafter("org/eagle-tiny")
    drafter.bind(deep_target())
    assert drafter.name == "head:eagle-tiny"
    assert drafter.model.name == "EAGLE head"
    with pytest.raises(ModelError, match=r"draft head 'org/nothing' is no folder and can't be fetched from the hub"):
        HeadDrafter("org/nothing")


def changed(made: Checkpoint, weights: dict[str, Tensor] | None = None, without: str = "", **config: Any) -> Checkpoint:
    kept = {name: value for name, value in {**made.weights, **(weights or {})}.items() if name != without}
    return Checkpoint({**made.config, **config}, kept)


REFUSED: dict[str, tuple[Callable[[], Checkpoint], str]] = {
    "two layers": (lambda: changed(eagle(VOCABULARY), num_hidden_layers=2), "it has 2 layers, and only heads of one"),
    "activation": (lambda: changed(eagle(VOCABULARY), hidden_act="gelu"), "its activation is gelu"),
    "positions": (
        lambda: changed(eagle(VOCABULARY), rope_scaling={"type": "dynamic", "factor": 2.0}),
        "its rotary positions are dynamic",
    ),
    "no map": (lambda: changed(eagle3(VOCABULARY, TOKENS), without="d2t"), "it drafts 10 of 61 tokens, and has no d2t"),
    "no fc": (lambda: changed(eagle3(VOCABULARY, TOKENS), without="fc.weight"), "it has no fc.weight"),
    "a weight too few": (
        lambda: changed(eagle(VOCABULARY), without="layers.0.mlp.up_proj.weight"),
        r"it has no mlp\.up_proj\.weight",
    ),
    "a weight too many": (
        lambda: changed(eagle3(VOCABULARY, TOKENS), {"midlayer.self_attn.q_norm.weight": torch.ones(8)}),
        r"weights that are not known here, self_attn\.q_norm\.weight",
    ),
    "another number of layers": (
        lambda: changed(eagle3(VOCABULARY, TOKENS), eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2]}),
        "reads the states of 3 layers, and its config names 2",
    ),
    "a token twice": (
        lambda: changed(eagle3(VOCABULARY, [0, 2]), {"d2t": torch.tensor([0, -1])}),
        "its vocabulary is not one of different tokens",
    ),
    "a token that there is not": (
        lambda: changed(eagle3(VOCABULARY, [0, 2]), {"d2t": torch.tensor([0, VOCABULARY])}),
        "its vocabulary is not one of different tokens",
    ),
    "a token of Medusa's twice": (
        lambda: changed(medusa(VOCABULARY), {"token_map": torch.tensor([4, 5, 4])}, vocab_size=VOCABULARY),
        "its vocabulary is not one of different tokens",
    ),
    "no norms before fc": (
        lambda: changed(eagle3(VOCABULARY, TOKENS), norm_before_fc=True),
        "norm_before_fc, and it has no input_norm",
    ),
    "the last state alone": (
        lambda: changed(eagle3(VOCABULARY, TOKENS), eagle_config={"use_aux_hidden_state": False}),
        "reads the last state alone",
    ),
    "another kind of speculators": (
        lambda: changed(eagle3(VOCABULARY, TOKENS), speculators_model_type="peagle"),
        "it is peagle of speculators",
    ),
    "scaled logits": (lambda: changed(eagle3(VOCABULARY, TOKENS), logit_scale=2.0), "its logits are scaled by 2.0"),
    "layers in another order": (
        lambda: changed(eagle3(VOCABULARY, TOKENS), eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 1, 3]}),
        r"names layers \[3, 2, 4\] \(from 1\), and only ascending ones",
    ),
    "no object": (lambda: changed(eagle3(VOCABULARY, TOKENS), eagle_config=[1]), "its config's eagle_config is no object"),
    "positions half described": (
        lambda: changed(eagle(VOCABULARY), rope_scaling={"rope_type": "llama3"}),
        "there is no 'factor'",
    ),
    "positions without what they need": (
        lambda: changed(eagle(VOCABULARY), rope_scaling={"rope_type": "llama3", "factor": 2.0}),
        r"can't be read \(Missing required keys in `rope_parameters`",
    ),
    "positions by a word": (
        lambda: changed(eagle(VOCABULARY), rope_scaling={**LLAMA3, "factor": "two"}),
        r"could not convert string to float: 'two'",
    ),
    "an embedding too small": (
        lambda: changed(eagle3(VOCABULARY, TOKENS), {"embed_tokens.weight": torch.ones(9, 32)}),
        r"its embedding is \[9, 32\], and should be \[61, 32\]",
    ),
    "an output layer too wide": (
        lambda: changed(eagle3(VOCABULARY, TOKENS), {"lm_head.weight": torch.ones(len(TOKENS), 33)}),
        r"its lm_head\.weight is \[10, 33\], and should be \[10, 32\]",
    ),
    "narrower than its target, without rows of its own": (
        lambda: changed(
            eagle3(VOCABULARY, TOKENS),
            {"fc.weight": torch.ones(32, 144), "embed_tokens.weight": torch.ones(VOCABULARY, 32)},
            without="lm_head.weight",
            target_hidden_size=48,
        ),
        "it is 32 wide, its target 48: it needs embed_tokens and lm_head",
    ),
    "fewer layers than are usual": (
        lambda: changed(eagle3(VOCABULARY, TOKENS), without="lm_head.weight", target_hidden_size=48, eagle_config=None),
        "reads the states of 2 layers",
    ),
    "nothing of a head": (
        lambda: Checkpoint(eagle(VOCABULARY).config, {"x": torch.ones(2)}),
        r"it has no layers\.0\.self_attn",
    ),
    "nothing in its config": (lambda: Checkpoint({"a": 1}, eagle(VOCABULARY).weights), "there is no 'hidden_size'"),
    "no output layers of Medusa": (
        lambda: Checkpoint({}, {"0.0.linear.weight": torch.ones(32, 32), "0.0.linear.bias": torch.ones(32)}),
        "it has 1 heads, and output layers of 0",
    ),
    "an unknown weight of Medusa": (
        lambda: changed(medusa(VOCABULARY), {"extra": torch.ones(2)}),
        "unknown weight 'extra'",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_can_not_be_read_is_said_in_a_line(what: str, tmp_path: Path) -> None:
    made, reason = REFUSED[what]
    folder = made().write(tmp_path)
    with pytest.raises(ModelError, match=reason) as refused:
        open_head(deep_target(), folder)
    assert "\n" not in str(refused.value)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(eagle(VOCABULARY).config))
    with pytest.raises(ModelError, match=r"has no weights: none of model\.safetensors, "):
        HeadDrafter(tmp_path)


def test_a_pointer_is_named(tmp_path: Path) -> None:
    folder = eagle(VOCABULARY).write(tmp_path)
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ModelError, match=r"model\.safetensors is a Git LFS pointer: fetch the file itself"):
        HeadDrafter(folder)


def test_weights_in_several_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(eagle(VOCABULARY).config))
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json names several files"):
        HeadDrafter(tmp_path)


def test_a_head_for_another_target(tmp_path: Path) -> None:
    folder = eagle(VOCABULARY + 1).write(tmp_path)
    with pytest.raises(ModelError, match=r"made for states of 32 and 62 tokens, not 32 and 61"):
        HeadDrafter(folder).bind(deep_target())
