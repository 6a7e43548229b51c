"""Tiny randomly initialised models of many architectures, in float64, made from their configs; nothing is downloaded."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers

from outrider.models.encoder_decoder import EncoderDecoderModel
from outrider.models.recurrent.model import RecurrentModel
from outrider.models.transformers_model import TransformersModel

VOCABULARY = 61
_SHARED: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA: dict[str, Any] = {
    **_SHARED,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
}
_WINDOW = {"sliding_window": 7}
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama": _LLAMA,
    "Qwen2": _LLAMA,
    "Qwen3": {**_LLAMA, "head_dim": 8},
    "Mistral": {**_LLAMA, **_WINDOW},
    "Gemma": {**_LLAMA, "head_dim": 8},
    "Gemma2": {**_LLAMA, **_WINDOW, "head_dim": 8, "query_pre_attn_scalar": 8},
    "Gemma3": {**_LLAMA, **_WINDOW, "head_dim": 8, "num_hidden_layers": 3, "query_pre_attn_scalar": 8},
    "Phi": _LLAMA,
    "Phi3": _LLAMA,
    "StableLm": _LLAMA,
    "Starcoder2": _LLAMA,
    "Olmo2": _LLAMA,
    "Cohere": _LLAMA,
    "Granite": _LLAMA,
    # The grouped kernel of the experts knows no float64.
    "Mixtral": {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"},
    "GPT2": {**_SHARED, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96},
    "GPTNeoX": {**_LLAMA, "num_key_value_heads": 4},
    "OPT": {
        **_SHARED,
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 96,
    },
    "GPTJ": {**_SHARED, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96, "rotary_dim": 4},
}
_RECURRENT: dict[str, Any] = {**_LLAMA, "num_hidden_layers": 3}
_HEADS_OF_8 = {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
_DELTA = {**_RECURRENT, **_HEADS_OF_8, "head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2}
_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "experts_implementation": "eager"}
_MAMBA2 = {
    **_RECURRENT,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
}
_LINEAR_THEN_FULL = ["linear_attention", "linear_attention", "full_attention"]
RECURRENT: dict[str, dict[str, Any]] = {
    "Qwen3_5": {**_DELTA, "layer_types": _LINEAR_THEN_FULL},
    "Qwen3Next": {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 16, "layer_types": _LINEAR_THEN_FULL},
    "OlmoHybrid": {**_DELTA, "linear_num_key_heads": 4, "layer_types": _LINEAR_THEN_FULL},
    "Lfm2": {**_RECURRENT, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3},
    "Mamba": {**_SHARED, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "Mamba2": {
        **_SHARED,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 4,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 2,
        "chunk_size": 16,
    },
    "Bamba": {**_MAMBA2, "attn_layer_indices": [1]},
    "GraniteMoeHybrid": {
        **_MAMBA2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "shared_intermediate_size": 32,
        "experts_implementation": "eager",
    },
    "FalconH1": {**_MAMBA2, "mamba_d_ssm": 64},
    "Jamba": {
        **_RECURRENT,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "BailingHybrid": {
        **_RECURRENT,
        **_EXPERTS,
        "n_group": 1,
        "topk_group": 1,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "layer_types": _LINEAR_THEN_FULL,
    },
}
_BART: dict[str, Any] = {
    **_SHARED,
    "decoder_start_token_id": 1,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 96,
}
_T5: dict[str, Any] = {
    **_SHARED,
    "decoder_start_token_id": 0,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
}
WHISPER: dict[str, Any] = {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 96}
ENCODER_DECODERS: dict[str, dict[str, Any]] = {
    "T5": {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "MT5": {**_T5, "feed_forward_proj": "relu"},
    "UMT5": _T5,
    "Bart": _BART,
    "MBart": _BART,
    "Marian": {**_BART, "decoder_vocab_size": VOCABULARY},
    "Pegasus": _BART,
    "Whisper": {**_BART, **WHISPER},
}
CONFIGS_OF_ALL = {**CONFIGS, **RECURRENT, **ENCODER_DECODERS}
_CLASSES = {
    **{name: (f"{name}Config", f"{name}ForConditionalGeneration") for name in ENCODER_DECODERS},
    "Marian": ("MarianConfig", "MarianMTModel"),
    "Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "Gemma4": ("Gemma4TextConfig", "Gemma4ForCausalLM"),
    "OPT": ("OPTConfig", "OPTForCausalLM"),
    "Qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
}


def module(architecture: str, seed: int = 0, dtype: torch.dtype = torch.float64, **overrides: Any) -> Any:
    """A tiny model with weights large enough for its choices to differ from place to place."""
    config_name, model_name = _CLASSES.get(architecture, (f"{architecture}Config", f"{architecture}ForCausalLM"))
    if architecture == "GPT2":
        model_name = "GPT2LMHeadModel"
    config = getattr(transformers, config_name)(**{**CONFIGS_OF_ALL.get(architecture, _LLAMA), **overrides})
    torch.manual_seed(seed)
    made = getattr(transformers, model_name)(config).to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.25)
    return made


@cache
def tiny_encoder_decoder(architecture: str, seed: int = 0) -> EncoderDecoderModel:
    """An encoder–decoder behind its engine."""
    return EncoderDecoderModel(module(architecture, seed), name=f"tiny-{architecture}-{seed}")


@cache
def tiny_recurrent(architecture: str, seed: int = 0) -> RecurrentModel:
    """One with recurrent layers behind its engine."""
    return RecurrentModel(module(architecture, seed), name=f"tiny-{architecture}-{seed}")


@cache
def tiny(architecture: str, seed: int = 0) -> TransformersModel:
    """The same behind the engine."""
    return TransformersModel(module(architecture, seed), name=f"tiny-{architecture}-{seed}")


def record_now(model: TransformersModel) -> None:
    """`record`, which puts off what takes time, and that at once."""
    model.record()
    assert model.recorded is None or model.recorded.fits()
