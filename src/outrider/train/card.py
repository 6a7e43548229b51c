"""The card of a trained draft: what it was made of, its alpha by domain, what it costs, and what that predicts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

from outrider.costs import Costs, DraftSeconds

LONGEST = 12


def predicted_speedup(
    alphas: Sequence[float], costs: Costs, drafting: DraftSeconds, longest: int = LONGEST
) -> tuple[int, float]:
    """The best fixed draft length and its speed-up, from alpha by depth (the last one goes on) and measured costs.

    longest: more can't be drafted in a round.

    E[tokens] = 1 + the sum over depths of the product of alphas; with one alpha Leviathan's (1 - a^(g+1)) / (1 - a).
    """
    every = [*alphas, *[alphas[-1]] * longest][:longest]
    gains = list(accumulate(every, mul))
    rates = [1.0]
    for length in range(1, longest + 1):
        seconds = drafting.of(length) + costs.verify(length + 1)
        rates.append((1.0 + sum(gains[:length])) * costs.verify(1) / seconds)
    best = max(range(len(rates)), key=rates.__getitem__)
    return best, rates[best]


def write_card(folder: Path, card: Mapping[str, Any]) -> None:
    """`card.json` and `README.md`."""
    (folder / "card.json").write_text(json.dumps(card, indent=1) + "\n")
    (folder / "README.md").write_text(_page(card))


def _cost(card: Mapping[str, Any]) -> str:
    blocks, step = card.get("blocks"), 1000 * card["step_seconds"]
    return (
        f"{step * blocks:.2f} ms for all {blocks} drafted tokens, however many are used" if blocks else f"{step:.2f} ms each"
    )


def _page(card: Mapping[str, Any]) -> str:
    lines = [f"# A draft for {card['target']}", "", f"{card['what']}. Made by `outrider train`; use it with", ""]
    lines += [f"    outrider generate --draft {card['use']}", "", "## Acceptance on held-out text", ""]
    cut = card.get("match_is_lower_bound", False)
    bound = " (at least)" if cut else ""
    lines += [
        f"| text | positions | alpha, temperature 1, by depth | same choice at temperature 0{bound}, by depth |",
        "|---|---|---|---|",
    ]
    for name, result in card["held_out"].items():
        alpha, match = (", ".join(f"{value:.3f}" for value in result[key]) for key in ("alpha", "match"))
        lines.append(f"| {name} | {result['positions']} | {alpha} | {match} |")
    lines += ["", "Teacher-forced: at depth n the n - 1 tokens before are the text's own. Prompts are not counted."]
    if cut:
        lines.append(
            "The same choice is a lower bound: where a token outside the draft's vocabulary may be the target's best,"
        )
        lines.append("it counts as another.")
    lines += ["", "## Cost", ""]
    if card.get("c") is not None:
        lines.append(
            f"On {card['machine']}: {_cost(card)}, c = {card['c']:.3f} of a pass of the target for one token a drafted one. "
            "Predicted from alpha by depth and those costs, with the best fixed length:"
        )
        lines += ["", "| text | length | speed-up |", "|---|---|---|"]
        lines += [f"| {name} | {one['length']} | {one['speedup']:.2f} |" for name, one in card["predicted"].items()]
    else:
        lines.append("Not measured.")
    lines += ["", "## Data", "", "| source | tokens at most |", "|---|---|"]
    lines += [f"| {name} | {limit or 'all'} |" for name, limit in card["data"].items()]
    lines += [
        "",
        f"{card['windows']} windows of {card['length']} tokens, {card['steps']} steps of {card['batch_size']} windows, ",
    ]
    lines[-1] += f"loss {card['loss']}, seed {card['seed']}"
    lines[-1] += f"; begun from {card['start']}, an earlier run." if card.get("start") else "."
    if card.get("licence"):
        lines += ["", card["licence"]]
    return "\n".join(lines) + "\n"
