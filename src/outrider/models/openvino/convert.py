"""From a transformers folder to a quantized OpenVINO folder, once; kept in the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openvino
import torch
from rich.console import Console
from rich.progress import track

from outrider.errors import CacheFolderError, ModelError
from outrider.models.limits import context_limit, end_tokens_of
from outrider.models.openvino.engine import OpenVinoModel
from outrider.models.openvino.quantize import group_size, quantize
from outrider.models.openvino.saved import ABOUT, About, Saved, Weights
from outrider.models.openvino.trace import REMEDY, AttentionLayer, trace
from outrider.support.cache_folder import build_once, file_name

# Root mean square allowed, relative to the spread of the logits: rounding gives half of it at most, other logits give 1.4.
_TOLERANCE = {"float32": 0.01, "int8": 0.3, "int4": 0.8}
_TEXT = (
    "The city council voted on Tuesday to close the old harbour bridge to cars from the first of May, and to open a ferry."
)
FORMAT = 4  # raise it when the conversion changes, so that old conversions are made again


def converted(module_of: Callable[[], tuple[Any, Any]], source: str, name: str, weights: Weights) -> Saved:
    """The converted model, made now if the cache has none.

    module_of: loads (module in float32, tokenizer). source: identifies the model's files.
    """
    digest = hashlib.sha256(f"{FORMAT} {source} {weights}".encode()).hexdigest()[:16]

    def build(folder: Path) -> None:
        console = Console(stderr=True)
        with console.status("Loading it …") as status:
            module, tokenizer = module_of()
            status.update("Tracing it …")
            graph, layers = trace(module.eval(), name)
            group = group_size(graph)
        if weights != "float32":
            steps = quantize(graph, 8 if weights == "int8" else 4, group)
            total = next(steps)
            for _ in track(steps, f"Quantizing weights to {weights}", total=total, console=console, transient=True):
                pass
        try:
            openvino.save_model(graph, folder / "model.xml", compress_to_fp16=False)
        except RuntimeError as error:
            raise CacheFolderError(f"converted model can't be written to {folder.parent}: free some space there") from error
        (folder / ABOUT).write_text(_about(module, name, weights, layers, group).to_json())
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        _check(module, tokenizer, folder)

    about = f"Converting {name} for OpenVINO, {weights}"
    return Saved(build_once(f"models/{file_name(name)}-{digest}-openvino-{weights}", build, about))


@torch.inference_mode()
def _check(module: Any, tokenizer: Any, folder: Path) -> None:
    """That the converted model says what the module says, for other tokens than those it was traced with.

    A model that takes decisions in Python (which experts see a token) is frozen by tracing as the example went.
    """
    model = OpenVinoModel(Saved(folder))
    kind = module.config.model_type
    limit = min(model.vocab_size, 5000)
    text = [(1009 * i + 3) % limit for i in range(24)] if tokenizer is None else tokenizer.encode(_TEXT)
    tokens = torch.tensor([text[: min(24, model.max_length or 24)]])
    length = tokens.shape[1]
    wanted = module(input_ids=tokens, use_cache=False).logits[0].double()
    try:
        sequence = model.open()
        model.score([sequence], tokens[:, :5], [5], "none")
        out = model.score([sequence], tokens[:, 5:], [length - 5], "all")
        assert out is not None
        off = float((out[0].double() - wanted[5:]).square().mean().sqrt() / wanted.std().clamp(min=1e-30))
        reason = f"its logits are off by {off:.2g} of their spread"
    except RuntimeError as error:
        off, reason = float("inf"), " ".join(str(error).split())[-160:]
    if not off <= _TOLERANCE[model.dtype_name]:
        raise ModelError(f"{model.name} ({kind}) can't be converted for OpenVINO: {reason}; {REMEDY}")


def _about(module: Any, name: str, weights: Weights, layers: list[AttentionLayer], group: int) -> About:
    config = module.config.get_text_config()
    return About(
        name=name,
        vocab_size=int(config.vocab_size),
        max_length=context_limit(config),
        end_tokens=tuple(sorted(end_tokens_of(module))),
        weights=weights,
        group=group,
        width=int(config.hidden_size),
        layers=tuple(layers),
    )
