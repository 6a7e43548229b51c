"""The same prompt with and without the draft: how much faster, why, and whether the tokens agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from outrider.audit.greedy import Divergence, first_divergence
from outrider.costs import Costs, DraftSeconds, measured_costs
from outrider.draft_length.predicted import plain_seconds, predicted_seconds
from outrider.generation import Generation, Stream
from outrider.models.base import TextModel
from outrider.request.choices import make_drafter
from outrider.request.prompts import Prompt, prepare
from outrider.results import Result

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Comparison:
    """Two runs with one seed.

    costs, draft_seconds: of the target's passes and of a token of each drafter, measured apart from both runs.
    divergence: greedy runs that differ.
    """

    speculative: Result
    plain: Result
    costs: Costs
    draft_seconds: dict[str, DraftSeconds]
    greedy: bool
    divergence: Divergence | None

    @property
    def speedup(self) -> float:
        """Ratio of the tokens per second, reading the prompt left out on both sides."""
        plain = self.plain.stats.tokens_per_second
        return self.speculative.stats.tokens_per_second / plain if plain > 0 else 0.0

    @property
    def predicted_speedup(self) -> float | None:
        """Tokens / (seconds of the rounds that were run, from the cost table) × seconds of a plain token.

        The draft lengths are those that the policy chose, so this checks the costs, not the policy.
        """
        result = self.speculative
        seconds = predicted_seconds(result.rounds, self.costs, self.draft_seconds, result.prompt_tokens)
        return plain_seconds(result.rounds, self.costs, result.prompt_tokens) / seconds if seconds > 0 else None

    @property
    def predicted(self) -> str:
        value = self.predicted_speedup
        return "—" if value is None else f"{value:.2f}×"

    @property
    def identical(self) -> bool:
        return self.speculative.tokens == self.plain.tokens

    @property
    def agreement(self) -> str:
        """What to say about the tokens."""
        if self.identical:
            return "identical"
        if self.speculative.lossy:
            lenient = (
                f"{self.speculative.stats.lenient} of {len(self.speculative.tokens)} tokens are there by lenience alone"
            )
            return f"differ, as lenience {self.speculative.lenience:g} allows: LOSSY, {lenient}"
        if not self.greedy and self.speculative.drafter_invariant:
            both = zip(self.speculative.tokens, self.plain.tokens, strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
            return f"differ after {same} of them, by rounding: this engine's passes do not give the same bits at any width"
        if not self.greedy:
            return (
                "differ, as two samples do: the same distribution, not the same draws (at temperature 0 they are identical)"
            )
        return str(self.divergence or "one is a beginning of the other")

    def to_dict(self) -> dict[str, object]:
        """For machine-readable output."""
        return {
            **self.speculative.to_dict(),
            "plain": self.plain.to_dict(),
            "speedup": self.speedup,
            "predicted_speedup": self.predicted_speedup,
            "identical": self.identical,
            "agreement": self.agreement,
        }


def compare(
    model: TextModel,
    prompt: Prompt,
    draft: Any,
    options: dict[str, Any],
    show: Callable[[Stream], object],
) -> Comparison:
    """Run the prompt with `draft` (shown as it comes), then plain, both after a warm-up, with the same seed."""
    drafter = make_drafter(draft, model)
    short = {**options, "max_new_tokens": min(WARM_UP_TOKENS, options.get("max_new_tokens", WARM_UP_TOKENS))}
    runs: list[Result] = []
    sides: list[dict[str, Any]] = [{"draft": drafter}, {"draft": None, "lenience": 1.0, "alternatives": None}]
    for side in sides:
        for _ in Generation(model, [prompt], **{**short, **side}).run():
            pass
    for side in sides:
        seed = {} if not runs else {"seed": runs[0].seed}
        stream = Stream(Generation(model, [prompt], **{**options, **side, **seed}))
        if not runs:
            show(stream)
        for _ in stream:
            pass
        runs.append(stream.result)
    greedy = options.get("temperature", 0.0) == 0.0
    exact = greedy and not runs[0].lossy
    seen = prepare(model, prompt)
    parted = first_divergence(model, seen.tokens, runs[0].tokens, runs[1].tokens, seen.source) if exact else None
    if drafter is not None:
        drafter.measure()  # what was measured for the runs' own copies of it (`apart`)
    steps = drafter.part_seconds() if drafter is not None else {}
    return Comparison(runs[0], runs[1], measured_costs(model), steps, greedy, parted)
