"""EAGLE, EAGLE-2 and EAGLE-3 checkpoints → a head's shape and weights by the names of `published.networks`.

Their own repository's format, which vLLM and SGLang read as well, and that of vLLM's `speculators`, whose config nests the
layer's. An EAGLE-2 checkpoint is an EAGLE one. What tells EAGLE-3 from them is what attention reads: token and state side by
side, not joined into one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.heads.config import HeadConfig, Published, StoredHead

NAMES = {
    "self_attn.q_proj": "query",
    "self_attn.k_proj": "key",
    "self_attn.v_proj": "value",
    "self_attn.o_proj": "out",
    "post_attention_layernorm": "network_norm",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}
LONGEST = 2048  # positions that a head attends to, where its config says nothing
STATIC = ("default", "linear", "llama3", "yarn")  # rotary positions whose frequencies are the same in every pass


def read_eagle(name: str, about: Mapping[str, Any], weights: Mapping[str, Tensor]) -> StoredHead:
    """name: of its target, as far as it is known. about: its `config.json`. Raises `ValueError` or `KeyError`."""
    layer, own = _sorted_out(weights)
    inner = about.get("transformer_layer_config", about)
    width = int(inner["hidden_size"])
    heads = int(inner["num_attention_heads"])
    fused = layer["query.weight"].shape[1] == 2 * width
    if int(inner.get("num_hidden_layers", 1)) != 1:
        raise ValueError(f"it has {inner['num_hidden_layers']} layers, and only heads of one are supported")
    if inner.get("hidden_act", "silu") != "silu":
        raise ValueError(f"its activation is {inner['hidden_act']}, and only silu is supported")
    if "fc.weight" not in own:
        raise ValueError("it has no fc.weight: heads that read the last state alone, unjoined, are not supported")
    tokens = _tokens(own, inner, about)
    shape = HeadConfig(
        kind="autoregressive",
        target=name,
        width=width,
        vocab_size=len(own["t2d"]) if "t2d" in own else int(inner["vocab_size"]),
        num_tokens=len(tokens) if fused else int(inner["vocab_size"]),
        intermediate_size=len(layer["gate.weight"]),
        num_heads=heads,
        num_kv_heads=int(inner.get("num_key_value_heads") or heads),
        head_size=int(inner.get("head_dim") or width // heads),
        rope_theta=float(_rope(inner)["rope_theta"]),
        norm_eps=float(inner.get("rms_norm_eps", 1e-6)),
        qkv_bias="query.bias" in layer,
        window=int(inner.get("max_position_embeddings", LONGEST)),
        layers=_layers(about) if fused else (),
        published=(_eagle3 if fused else _eagle)(about, inner, width, own, layer),
    )
    return (_stored_eagle3 if fused else _stored_eagle)(shape, tokens, layer, own)


def _sorted_out(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Those of the layer by our names, and all others by theirs."""
    layer: dict[str, Tensor] = {}
    own: dict[str, Tensor] = {}
    for name, value in weights.items():
        inside = name.removeprefix("midlayer.").removeprefix("layers.0.")
        theirs, _, last = inside.rpartition(".")
        if inside == name or last == "inv_freq":
            if last != "inv_freq":
                own[name] = value
        else:
            layer[f"{NAMES.get(theirs, theirs)}.{last}"] = value
    return layer, own


def _eagle(
    about: Mapping[str, Any], inner: Mapping[str, Any], width: int, own: Mapping[str, Tensor], layer: Mapping[str, Tensor]
) -> Published:
    del about
    return Published(
        "EAGLE", width, rope=_rope(inner), join_bias="fc.bias" in own, input_norm="input_layernorm.weight" in layer
    )


def _stored_eagle(shape: HeadConfig, tokens: Tensor, layer: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> StoredHead:
    """The embedding and the output layer of such a head are the target's, frozen: copies of them are left alone."""
    del tokens
    weights = {f"layer.{name.replace('input_layernorm', 'attention_norm')}": value for name, value in layer.items()}
    rest = {name for name in own if name not in ("embed_tokens.weight", "lm_head.weight")}
    weights |= {name.replace("fc.", "join."): own[name] for name in rest}
    return StoredHead(shape, torch.arange(shape.vocab_size), weights)


def _eagle3(
    about: Mapping[str, Any], inner: Mapping[str, Any], width: int, own: Mapping[str, Tensor], layer: Mapping[str, Tensor]
) -> Published:
    del layer
    target_width = int(about.get("target_hidden_size") or width)
    reads, rest = divmod(own["fc.weight"].shape[1], target_width)
    if rest:
        raise ValueError(f"its fc.weight reads {own['fc.weight'].shape[1]} numbers, no multiple of {target_width}")
    ids = _layers(about)
    if ids and len(ids) != reads:
        raise ValueError(f"its fc.weight reads the states of {reads} layers, and its config names {len(ids)}")
    if not ids and reads != 3:
        raise ValueError(f"its fc.weight reads the states of {reads} layers, and its config does not say of which")
    return Published(
        "EAGLE-3",
        target_width,
        reads,
        _rope(inner),
        input_norm="input_norm.weight" in own,
        norm_before_residual=bool(about.get("norm_before_residual", False)),
    )


def _stored_eagle3(shape: HeadConfig, tokens: Tensor, layer: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> StoredHead:
    ours = {"hidden_norm.weight": "state_norm.weight", "input_layernorm.weight": "token_norm.weight"}
    weights = {ours.get(name, f"layer.{name}"): value for name, value in layer.items()}
    named = {"fc.weight": "join.weight", "input_norm.weight": "join_norm.weight"}
    apart = ("embed_tokens.weight", "lm_head.weight", "norm.weight", "d2t", "t2d")
    weights |= {named.get(name, name): value for name, value in own.items() if name not in apart}
    rows = {"norm": own["norm.weight"]}
    if "lm_head.weight" in own:
        rows["head"] = own["lm_head.weight"]
        if len(rows["head"]) != len(tokens):
            raise ValueError(f"its lm_head has {len(rows['head'])} rows for {len(tokens)} tokens")
        if not bool((tokens[1:] > tokens[:-1]).all()):
            tokens, order = tokens.sort()
            rows["head"] = rows["head"][order]
    return StoredHead(shape, tokens, weights, rows, own.get("embed_tokens.weight"))


def _tokens(own: Mapping[str, Tensor], inner: Mapping[str, Any], about: Mapping[str, Any]) -> Tensor:
    """The target's ids of what it drafts: `d2t` has what is to be added to its own."""
    every = int(inner["vocab_size"])
    count = int(about.get("draft_vocab_size") or every)
    if "d2t" in own:
        shifts = own["d2t"].long()
        return torch.arange(len(shifts)) + shifts
    if count != every:
        raise ValueError(f"it drafts {count} of {every} tokens, and has no d2t that says which")
    return torch.arange(every)


def _layers(about: Mapping[str, Any]) -> tuple[int, ...]:
    """Whose outputs it reads, counted from 1; none if its config does not say.

    `speculators` and vLLM count like that (0 is the embedding); what SpecForge and SGLang write, within `eagle_config`,
    counts layers from 0.
    """
    ids = about.get("eagle_aux_hidden_state_layer_ids")
    if ids:
        return tuple(int(one) for one in ids)
    nested = (about.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") or ()
    return tuple(int(one) + 1 for one in nested)


def usual_layers(count: int) -> tuple[int, ...]:
    """Those that an EAGLE-3 head reads of a target of so many layers if nothing else is said."""
    return 2, count // 2, count - 3


def _rope(inner: Mapping[str, Any]) -> dict[str, Any]:
    """Of its rotary positions: theta, and how they are scaled, by the names of transformers 5."""
    found = dict(inner.get("rope_parameters") or inner.get("rope_scaling") or {})
    found["rope_type"] = found.pop("type", None) or found.get("rope_type") or "default"
    found.setdefault("rope_theta", inner.get("rope_theta") or 10000.0)
    if found["rope_type"] not in STATIC:
        raise ValueError(f"its rotary positions are {found['rope_type']}, and only {', '.join(STATIC)} are supported")
    if float(found.get("partial_rotary_factor") or inner.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ValueError("it turns a part of each head only, which is not supported")
    return found
