"""Texts at every draft length K (Chen Figure 1, Leviathan Table 4); `sweep_summary` says what they show.

Every prompt is answered at every K, the order rotating from prompt to prompt, after a warm-up of each; K = 0 is plain
decoding. Just before and after each answer the passes that it consists of are timed (`moment`). Answers have a fixed length
(an end of sequence does not end them), as in Chen's "time to generate 128 tokens".
Each round is kept, so that every figure follows from the log.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from outrider.bench.asking import asked_of
from outrider.bench.contest import WARM_UP_TOKENS, in_turn
from outrider.bench.examples import Example, TaskKind
from outrider.bench.moment import mean_moment, time_moment
from outrider.bench.resumed import Resumed
from outrider.bench.settings import Setting
from outrider.drafters import Drafter
from outrider.generation import generate
from outrider.models.base import TextModel
from outrider.records import Round
from outrider.request.prompts import prepare
from outrider.support.run_log import RunLog


@dataclass(frozen=True)
class SweepRun:
    """One answer at one K. rounds: [tokens kept, drafted, accepted, seconds, drafter or None] of each.

    draft_seconds: of each round, the part before the target's pass. moment: what passes cost just then. Both None
    in logs made before they were kept.
    """

    example: str
    digest: str
    setting: str
    length: int
    prompt_tokens: int
    tokens: list[int]
    rounds: list[list[Any]]
    draft_seconds: list[float] | None = None
    moment: dict[str, Any] | None = None

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.example, self.digest, self.setting, self.length

    @property
    def seconds(self) -> float:
        """Of decoding: reading the prompt left out."""
        return sum(float(seconds) for _, _, _, seconds, _ in self.rounds)

    def records(self) -> list[Round]:
        """The rounds as the cost tables want them."""
        found, at = [], 0
        for kept, drafted, accepted, _, drafter in self.rounds:
            found.append(Round(tuple(self.tokens[at : at + kept]), drafted, accepted, drafter))
            at += kept
        return found


def measure(
    target: TextModel,
    draft: Drafter,
    kind: TaskKind,
    examples: Sequence[Example],
    settings: Sequence[Setting],
    lengths: Sequence[int],
    max_new_tokens: int,
    log: RunLog,
) -> Iterator[SweepRun]:
    """Run what the log does not hold yet, append it there, and yield all runs."""
    draft.bind(target)
    runs = Resumed(log, SweepRun)
    for number, example in enumerate(examples):
        for setting in settings:
            for length in in_turn(lengths, number):
                made = partial(_generate, target, draft, kind, example, setting, length)
                key = (example.name, example.digest, setting.name, length)
                yield runs.run(key, partial(made, max_new_tokens), length, partial(made, WARM_UP_TOKENS))


def _generate(
    target: TextModel, draft: Drafter, kind: TaskKind, example: Example, setting: Setting, length: int, tokens: int
) -> SweepRun:
    prompt = asked_of(target, kind, example)
    held = len(prepare(target, prompt).tokens)
    context = held + tokens // 2
    before = time_moment(target, draft, length, context)
    result = generate(
        target,
        prompt,
        draft=draft if length else None,
        num_draft_tokens=length,
        max_new_tokens=tokens,
        ignore_eos=True,
        seed=example.number,
        **setting.sampling.options(),
    )
    after = time_moment(target, draft, length, context)
    return SweepRun(
        example=example.name,
        digest=example.digest,
        setting=setting.name,
        length=length,
        prompt_tokens=result.prompt_tokens,
        tokens=result.tokens,
        rounds=[[*r.counts, sum(r.seconds.values()), r.drafter] for r in result.rounds],
        draft_seconds=[r.seconds.get("draft", 0.0) for r in result.rounds],
        moment=asdict(mean_moment([before, after])),
    )
