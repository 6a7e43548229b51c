"""`outrider demo`: the first minute. A real model, the tokens in the colour of their origin, and the speed-up explained."""

from __future__ import annotations

import click

PROMPT = '''Here is a Python function. Repeat it in full, with the variable name `total` changed to `result`.

def average(numbers):
    """Return the mean of a list of numbers."""
    total = 0
    for number in numbers:
        total += number
    if len(numbers) == 0:
        raise ValueError("average of an empty list")
    return total / len(numbers)
'''


@click.command()
@click.option("--max-new-tokens", type=int, default=160, show_default=True)
def demo(max_new_tokens: int) -> None:
    """Watch the default model write, with its draft, and see what the draft was worth."""
    from rich.console import Console

    from outrider.cli.generate import as_prompt, report, show
    from outrider.cli.models import load_target
    from outrider.cli.output import legend
    from outrider.compare import compare

    console = Console()
    model = load_target(None, "auto", "auto")
    console.print(f"[bold]{model.name}[/bold], {model.dtype}, draft: copy from the context. The prompt:\n", highlight=False)
    console.print(PROMPT, style="dim", highlight=False, markup=False)
    console.print(legend())
    console.print()
    comparison = compare(
        model, as_prompt(model, PROMPT, None), "prompt-lookup", {"max_new_tokens": max_new_tokens, "seed": 0}, show
    )
    console.print()
    console.print(report(comparison), highlight=False, markup=False)
    console.print(explain(comparison), highlight=False, markup=False)


def explain(comparison: object) -> str:
    """Why it was that much faster, in one paragraph."""
    from outrider.compare import Comparison

    assert isinstance(comparison, Comparison)
    stats, costs = comparison.speculative.stats, comparison.costs
    drafted = [r.drafted for r in comparison.speculative.rounds]
    longest = max(drafted, default=0)
    ratio = costs.verify(longest + 1) / costs.verify(1)
    return (
        f"\nWhy: drafting is free here, and checking {longest + 1} tokens in one pass takes {ratio:.2f} times as long as "
        f"making one. The draft supplied {stats.accepted} of {stats.tokens} tokens, so that {stats.rounds} passes did the "
        f"work of {stats.tokens}."
    )
