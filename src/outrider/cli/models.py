"""Options that name models, shared by the commands, and loading what they name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from outrider.drafters import Drafter
    from outrider.models.base import TextModel

_OPTIONS = (
    click.option("--target", metavar="MODEL", help="Hub name, folder or .gguf file  [default: SmolLM2-135M-Instruct]"),
    click.option(
        "--draft",
        multiple=True,
        default=("prompt-lookup",),
        show_default=True,
        metavar="NAME[:OPTION=VALUE,…]",
        help="Who drafts: prompt-lookup, suffix, ngram:table=FILE, early-exit, random, or a model; given several times, "
        "the best at each point (docs/drafters.md).",
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


def load_target(target: str | None, dtype: str, device: str, pack: bool = True) -> TextModel:
    """The target, or the default model for None."""
    import outrider

    with click_status("Loading the target …"):
        return outrider.load(target, dtype=dtype, device=device, pack=pack)


def load_tokenizer(target: str | None) -> Any:
    """The target's tokenizer alone."""
    from outrider.models.loading import load_tokenizer

    return load_tokenizer(target)


def load_draft(draft: Sequence[str], target: TextModel, dtype: str, device: str, pack: bool = True) -> Drafter:
    """The drafter that one or several --draft mean, models loaded."""
    import outrider
    from outrider.draft_specs import make_from_spec
    from outrider.drafters import ChoiceDrafter

    def load(name: str) -> TextModel:
        with click_status("Loading the draft …"):
            return outrider.load(name, dtype=dtype, device=device, pack=pack)

    made = [make_from_spec(spec, load, target) for spec in draft]
    return made[0] if len(made) == 1 else ChoiceDrafter(made)


def click_status(message: str) -> Any:
    """A spinner on standard error while something takes its time; nothing where that is not a terminal."""
    from rich.console import Console

    return Console(stderr=True).status(message)
