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
from outrider.heads.published.checkpoint import UNKNOWN, weight_of
from outrider.heads.published.rope import read_rope

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
FURTHER = {"fc": "join", "fc_norm": "part_norms", "input_norm": "join_norm"}
LAYERS_NORMS = {"hidden_norm": "state_norm", "input_layernorm": "token_norm"}  # of EAGLE-3, which our layer has not
LONGEST = 2048  # positions that a head attends to, where its config says nothing
SPECULATORS = ("eagle3", None)  # kinds of heads of `speculators` that are read here

Weights = Mapping[str, Tensor]


def read_eagle(about: Mapping[str, Any], weights: Weights) -> StoredHead:
    """about: its `config.json`. Raises `ValueError`, `TypeError` or `KeyError`."""
    layer, own = _sorted_out(weights)
    inner = _object(about, "transformer_layer_config") or about
    _refuse(about, inner)
    if "query.weight" not in layer:
        some = ", ".join(sorted(weights)[:3])
        raise ValueError(f"it has no layers.0.self_attn.q_proj.weight or midlayer.self_attn.q_proj.weight, but {some}, …")
    width = int(inner["hidden_size"])
    heads = int(inner["num_attention_heads"])
    fused = weight_of(layer, "query.weight", 2).shape[1] == 2 * width
    rope, longest = read_rope(inner, LONGEST)
    window = min(longest, int(_window(inner) or longest))
    reads, target_width = _reads(about, own, width) if fused else (0, width)
    shape = HeadConfig(
        kind="autoregressive",
        target=_verifier(about) or UNKNOWN,
        width=width,
        vocab_size=len(own["t2d"]) if "t2d" in own else int(inner["vocab_size"]),
        num_tokens=len(own["d2t"]) if fused and "d2t" in own else int(inner["vocab_size"]),
        intermediate_size=len(layer["gate.weight"]),
        num_heads=heads,
        num_kv_heads=int(inner.get("num_key_value_heads") or heads),
        head_size=int(inner.get("head_dim") or width // heads),
        rope_theta=float(rope["rope_theta"]),
        norm_eps=float(inner.get("rms_norm_eps") or 1e-6),
        qkv_bias="query.bias" in layer,
        window=window,
        layers=_layers(about) if fused else (),
        published=Published(
            "EAGLE-3" if fused else "EAGLE",
            target_width,
            reads,
            rope,
            join_bias="fc.bias" in own,
            input_norm="input_norm.weight" in own if fused else "input_layernorm.weight" in layer,
            part_norms="fc_norm.0.weight" in own,
            out_bias="out.bias" in layer,
            norm_before_residual=bool(about.get("norm_before_residual")),
            norm_output=bool(about.get("norm_output")),
        ),
    )
    return (_eagle3 if fused else _eagle)(shape, about, layer, own)


def usual_layers(count: int) -> tuple[int, ...]:
    """Those that an EAGLE-3 head reads of a target of so many layers if nothing else is said."""
    return 2, count // 2, count - 3


def _sorted_out(weights: Weights) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Those of the layer by our names, and all others by theirs."""
    layer: dict[str, Tensor] = {}
    own: dict[str, Tensor] = {}
    for name, value in weights.items():
        inside = name.removeprefix("midlayer.").removeprefix("layers.0.")
        theirs, _, last = inside.rpartition(".")
        if last == "inv_freq":
            continue
        if inside == name:
            own[name] = value
        else:
            layer[f"{NAMES.get(theirs, theirs)}.{last}"] = value
    return layer, own


def _ours(name: str) -> str:
    first, _, rest = name.partition(".")
    return f"{FURTHER.get(first, first)}.{rest}"


def theirs(name: str) -> str:
    """What a weight of the network is called in a checkpoint."""
    back = {ours: name for name, ours in (NAMES | FURTHER | LAYERS_NORMS).items()}
    inside, _, last = name.removeprefix("layer.").rpartition(".")
    first, _, rest = inside.partition(".")
    return ".".join(part for part in (back.get(first, first), rest, last) if part)


def _refuse(about: Mapping[str, Any], inner: Mapping[str, Any]) -> None:
    """What changes the network, and no weight tells."""
    kind = about.get("speculators_model_type")
    if kind not in SPECULATORS:
        raise ValueError(f"it is {kind} of speculators, and of these only eagle3 is supported")
    if int(inner.get("num_hidden_layers") or 1) != 1:
        raise ValueError(f"it has {inner['num_hidden_layers']} layers, and only heads of one are supported")
    if (inner.get("hidden_act") or "silu") != "silu":
        raise ValueError(f"its activation is {inner['hidden_act']}, and only silu is supported")
    if float(about.get("logit_scale") or 1.0) != 1.0:
        raise ValueError(f"its logits are scaled by {about['logit_scale']}, which is not supported")
    if (_object(about, "eagle_config") or {}).get("use_aux_hidden_state") is False:
        raise ValueError("it reads the last state alone (use_aux_hidden_state), which is not supported in EAGLE-3")


def _eagle(shape: HeadConfig, about: Mapping[str, Any], layer: Weights, own: Weights) -> StoredHead:
    """The embedding and the output layer of such a head are the target's, frozen: copies of them are left alone."""
    del about
    if "fc.weight" not in own:
        raise ValueError("it has no fc.weight")
    weights = {f"layer.{name.replace('input_layernorm', 'attention_norm')}": value for name, value in layer.items()}
    apart = ("embed_tokens.weight", "lm_head.weight")
    weights |= {_ours(name): value for name, value in own.items() if name not in apart}
    return StoredHead(shape, torch.arange(shape.vocab_size), weights)


def _eagle3(shape: HeadConfig, about: Mapping[str, Any], layer: Weights, own: Weights) -> StoredHead:
    assert shape.published is not None
    if about.get("norm_before_fc") and not (shape.published.input_norm or shape.published.part_norms):
        raise ValueError("its config has norm_before_fc, and it has no input_norm.weight or fc_norm.0.weight")
    weights = {}
    for name, value in layer.items():
        first, _, rest = name.partition(".")
        weights[f"{LAYERS_NORMS[first]}.{rest}" if first in LAYERS_NORMS else f"layer.{name}"] = value
    apart = ("embed_tokens.weight", "lm_head.weight", "norm.weight", "d2t", "t2d")
    weights |= {_ours(name): value for name, value in own.items() if name not in apart}
    norm = weight_of(own, "norm.weight", 1)
    rows: dict[str, Tensor] = {}
    if shape.published.norm_output:
        weights["norm.weight"] = norm
    else:
        rows["norm"] = norm
    tokens = _tokens(own, shape, about)
    if "lm_head.weight" in own:
        rows["head"] = weight_of(own, "lm_head.weight", 2)
        if len(rows["head"]) != len(tokens):
            raise ValueError(f"its lm_head has {len(rows['head'])} rows for {len(tokens)} tokens")
        if not bool((tokens[1:] > tokens[:-1]).all()):
            tokens, order = tokens.sort()
            rows["head"] = rows["head"][order]
    return StoredHead(shape, tokens, weights, rows, own.get("embed_tokens.weight"))


def _reads(about: Mapping[str, Any], own: Weights, width: int) -> tuple[int, int]:
    """The states of how many layers are joined, and how wide each is."""
    if "fc.weight" not in own:
        raise ValueError("it has no fc.weight: EAGLE-3 heads that read the last state alone are not supported")
    joined, ids = weight_of(own, "fc.weight", 2).shape[1], _layers(about)
    said = about.get("target_hidden_size")
    own_tokens = "embed_tokens.weight" in own and "lm_head.weight" in own
    narrow = ids and own_tokens  # a head of another width than its target's has to bring these
    target_width = int(said) if said else joined // len(ids) if narrow else width
    reads, rest = divmod(joined, max(1, target_width))
    if rest:
        raise ValueError(f"its fc.weight reads {joined} numbers, no multiple of {target_width}")
    if ids and len(ids) != reads:
        raise ValueError(f"its fc.weight reads the states of {reads} layers, and its config names {len(ids)}")
    if not ids and reads != 3:
        raise ValueError(f"its fc.weight reads the states of {reads} layers, and its config does not say of which")
    if any(one < 1 for one in ids) or list(ids) != sorted(set(ids)):
        raise ValueError(f"its config names layers {list(ids)} (from 1), and only ascending ones from 1 on are supported")
    return reads, target_width


def _tokens(own: Weights, shape: HeadConfig, about: Mapping[str, Any]) -> Tensor:
    """The target's ids of what it drafts: `d2t` has what is to be added to its own."""
    count = int(about.get("draft_vocab_size") or shape.vocab_size)
    if "d2t" in own:
        shifts = weight_of(own, "d2t", 1).long()
        return torch.arange(len(shifts)) + shifts
    if count != shape.vocab_size:
        raise ValueError(f"it drafts {count} of {shape.vocab_size} tokens, and has no d2t that says which")
    return torch.arange(count)


def _layers(about: Mapping[str, Any]) -> tuple[int, ...]:
    """Whose outputs it reads, counted from 1; none if its config does not say.

    `speculators` and vLLM count like that (0 is the embedding); what SpecForge and SGLang write, within `eagle_config`,
    counts layers from 0.
    """
    ids = about.get("eagle_aux_hidden_state_layer_ids")
    if ids:
        return tuple(int(one) for one in ids)
    nested = (_object(about, "eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") or ()
    return tuple(int(one) + 1 for one in nested)


def _window(inner: Mapping[str, Any]) -> Any:
    """Positions that its layer attends to, if these are fewer than all."""
    kinds = inner.get("layer_types") or ()
    slides = inner.get("use_sliding_window", True) is not False and "full_attention" not in kinds
    return inner.get("sliding_window") if slides else None


def _verifier(about: Mapping[str, Any]) -> str | None:
    """The target that `speculators` names."""
    verifier = _object(_object(about, "speculators_config") or {}, "verifier") or {}
    found = verifier.get("name_or_path")
    return found if isinstance(found, str) else None


def _object(about: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    found = about.get(name)
    if found is not None and not isinstance(found, Mapping):
        raise ValueError(f"its config's {name} is no object")
    return found
