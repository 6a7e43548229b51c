"""`outrider demo`: the first minute. A real model, the tokens in the colour of their origin, and the speed-up explained."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from outrider.cli.models import ModelChoice, threads_option

if TYPE_CHECKING:
    from outrider.compare import Comparison

TEXT = (
    "The quick brown fox jumps ovr the lazy dog. The dog did not mind, because it was a very warm aftenoon and the fox was "
    "an old friend. Later they both went down to the river to drink some water and to watch the boats go by."
)
PROMPTS = {
    "Writing something new": "Write a Python class Vector with methods add, sub, mul and div that each return a new Vector "
    "with x, y and z.",
    "Editing a text": f"Correct the spelling and repeat the whole text:\n\n{TEXT}",
}


@click.command()
@click.option("--max-new-tokens", type=int, default=160, show_default=True, help="Of each text at most; 1 or more.")
@threads_option
def demo(max_new_tokens: int) -> None:
    """Watch the default model write, with its draft, and see what the draft was worth."""
    from rich.console import Console

    from outrider.cli.generate import report, show
    from outrider.cli.output import legend
    from outrider.compare import compare
    from outrider.drafters.head import comes_with_head
    from outrider.request.prompts import as_said

    console = Console(highlight=False)
    model = ModelChoice().load_target()
    whence = "drafts are copied from the context" + (" or come from its draft head" if comes_with_head(model) else "")
    console.print(f"[bold]{model.name}[/bold], {model.dtype_name}; {whence}.", soft_wrap=True)
    console.print(legend(), soft_wrap=True)
    options = {"max_new_tokens": max_new_tokens, "seed": 0}
    for title, prompt in PROMPTS.items():
        console.print(f"\n[bold]{title}.[/bold] [dim]{prompt}[/dim]\n", soft_wrap=True)
        comparison = compare(model, as_said(model, prompt), "auto", options, show)
        console.print(f"\n{report(comparison)}\n{explain(comparison)}", markup=False, soft_wrap=True)


def explain(comparison: Comparison) -> str:
    """Why it was that much faster."""
    stats, costs = comparison.speculative.stats, comparison.costs
    widest = max((r.scored for r in comparison.speculative.rounds), default=1)
    ratio = costs.verify(widest) / costs.verify(1)
    foreseen = f" ({stats.taken} more foreseen as alternatives)" if stats.taken else ""
    return (
        f"why:         drafts cost little beside a pass and gave {stats.accepted} of {stats.tokens} tokens{foreseen}, so "
        f"{stats.rounds} passes of the model did the work of {stats.tokens};\n"
        f"             a pass over {widest} tokens takes {ratio:.2f} times as long as one over a single token"
    )
