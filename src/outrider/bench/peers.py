"""Against transformers' own `generate`, on its own ground: the same weights, dtype, threads, prompts and token counter."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import dropwhile
from typing import Any

import torch

from outrider.audio import Audio, features
from outrider.bench.contest import Contender, ours
from outrider.bench.settings import Setting
from outrider.models.encoder_decoder import EncoderDecoderModel
from outrider.models.transformers_model import TransformersModel
from outrider.request.prompts import Asked, prepare

PEER_LOOKUP_TOKENS = 10  # what transformers' documentation uses for prompt_lookup_num_tokens
# Ours, and the peers it is compared with: the same drafting on both sides.
PAIRS = {
    "outrider": ("generate",),
    "outrider + draft": ("generate + assistant", "generate"),
    "outrider + lookup": ("generate + lookup", "generate"),
    "outrider + suffix": ("generate + lookup", "generate"),
}


@dataclass(frozen=True)
class Pair:
    """A target and perhaps a draft model."""

    target: TransformersModel
    draft: TransformersModel | None


def contenders(own: Pair, theirs: Pair) -> dict[str, Contender]:
    """All that can be compared. own: for Outrider. theirs: the same models, loaded as transformers loads them."""
    found: dict[str, Contender] = {
        "generate": _peer(theirs.target),
        "outrider": ours(own.target, None),
        "generate + lookup": _peer(theirs.target, prompt_lookup_num_tokens=PEER_LOOKUP_TOKENS),
        "outrider + lookup": ours(own.target, "prompt-lookup"),
        "outrider + suffix": ours(own.target, "suffix"),
    }
    if own.draft is not None and theirs.draft is not None:
        found["generate + assistant"] = _peer(theirs.target, assistant_model=theirs.draft.module)
        found["outrider + draft"] = ours(own.target, own.draft)
    if theirs.target.keeps_states:  # transformers speculates for none of them
        found = {name: run for name, run in found.items() if not name.startswith("generate +")}
    return found


def _peer(target: TransformersModel, **extra: Any) -> Contender:
    def run(prompt: Asked, setting: Setting, tokens: int, seed: int) -> tuple[int, None, None]:
        torch.manual_seed(seed)
        law = {"do_sample": True, "temperature": setting.temperature, "top_p": setting.top_p, "top_k": 0}
        inputs, before = _inputs(target, prompt)
        out = target.module.generate(
            **inputs,
            max_new_tokens=tokens,
            num_beams=1,
            pad_token_id=target.tokenizer.pad_token_id or 0,
            **(law if setting.temperature else {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}),
            **({} if target.has_encoder else {"repetition_penalty": 1.0}),  # an encoder-decoder's own is part of its law
            **extra,
        )
        new = out[0].tolist()[before:]
        if isinstance(prompt, Audio):  # some versions begin with what Whisper's decoder began with
            special = set(target.tokenizer.all_special_ids)
            new = list(dropwhile(lambda token: token in special, new)) or new[:1]
        return len(new), None, None

    return run


def _inputs(target: TransformersModel, prompt: Asked) -> tuple[dict[str, Any], int]:
    """What `generate` reads, and how many tokens its answer begins with."""
    if isinstance(prompt, Audio):  # Whisper's own finds out what its decoder begins with
        assert isinstance(target, EncoderDecoderModel)
        wanted = {"language": prompt.language, "task": prompt.task}
        heard = features(target, prompt).to(target.device, target.module.dtype)[None]
        return {"input_features": heard, **{name: value for name, value in wanted.items() if value is not None}}, 0
    begun = prepare(target, prompt).tokens
    tokens, ids = torch.tensor([begun], device=target.device), torch.tensor([prompt], device=target.device)
    more = {"decoder_input_ids": tokens} if target.has_encoder else {}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more}, len(begun)
