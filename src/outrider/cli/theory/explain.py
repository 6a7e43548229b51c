"""`outrider theory explain`: what to expect at one acceptance rate and one draft."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from outrider.cli.shared_options import json_option

if TYPE_CHECKING:
    from outrider.theory.advice import Advice, Line


@click.command()
@click.option("--alpha", type=float, required=True, help="Acceptance rate, 0 … 1: `acceptance_rate` of a run.")
@click.option("--c", type=float, required=True, help="Time of a draft step / time of a target step: `outrider calibrate`.")
@click.option("--gamma", type=int, help="Draft length, 0 … 64  [default: the best]")
@click.option(
    "--c-hat", type=float, help="The same as c in arithmetic operations: the ratio of the parameters  [default: c]"
)
@json_option
def explain(alpha: float, c: float, gamma: int | None, c_hat: float | None, as_json: bool) -> None:
    """Tokens per round, speed-up, operations, the best draft length and its bounds, in words."""
    from outrider.theory.advice import advise, in_words

    advice = advise(alpha, c, gamma, c_hat)
    if as_json:
        click.echo(json.dumps(advice.to_dict()))
        return
    for sentence in in_words(advice):
        click.echo(sentence)
    click.echo("\n  γ  tokens/round  speed-up  operations  reads of the target")
    for line in _shown(advice):
        mark = "  best" if line.gamma == advice.best_gamma else ""
        click.echo(
            f"{line.gamma:3d}  {line.tokens:12.3f}  {line.walltime_factor:7.3f}×  {line.operations_factor:9.3f}×  "
            f"{line.memory_factor:18.3f}×{mark}"
        )


def _shown(advice: Advice) -> list[Line]:
    """γ = 0 … 10, and the chosen and the best where they are longer."""
    lines = {line.gamma: line for line in (*advice.lines, advice.chosen, advice.best)}
    return [lines[gamma] for gamma in sorted(lines)]
