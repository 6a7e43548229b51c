"""Options that name models, shared by the commands, and loading what they name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from outrider.choices import Draft
    from outrider.models.transformers_model import TransformersModel

_OPTIONS = (
    click.option("--target", metavar="MODEL", help="Hub name, folder or .gguf file  [default: SmolLM2-135M-Instruct]"),
    click.option(
        "--draft",
        default="prompt-lookup",
        show_default=True,
        metavar="MODEL",
        help="A smaller model with the same tokenizer, or prompt-lookup: copy from the context.",
    ),
    click.option(
        "--dtype",
        default="auto",
        show_default=True,
        help="float32, bfloat16, float16 or float64; auto: the checkpoint's, or what the device is fast in.",
    ),
    click.option("--device", default="auto", show_default=True, help="cpu, cuda, cuda:1, …"),
)


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --target, --draft, --dtype and --device."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def load_target(target: str | None, dtype: str, device: str, pack: bool = True) -> TransformersModel:
    """The target, or the default model for None."""
    import outrider

    with click_status("Loading the target …"):
        return outrider.load(target, dtype=dtype, device=device, pack=pack)


def load_draft(draft: str, dtype: str, device: str, pack: bool = True) -> Draft:
    """The draft model, or the name of a drafter that needs none."""
    import outrider

    if draft == "prompt-lookup":
        return draft
    with click_status("Loading the draft …"):
        return outrider.load(draft, dtype=dtype, device=device, pack=pack)


def click_status(message: str) -> Any:
    """A spinner on standard error while something takes its time; nothing where that is not a terminal."""
    from rich.console import Console

    return Console(stderr=True).status(message)
