"""alpha of drafts on the target's own texts, as Leviathan et al. measured it (Section 4.2, Table 3).

The target writes texts by plain decoding under a sampling setting. Then each draft proposes one token at *every* position of
them, and beta = sum min(target, draft) there is computed from both laws (Theorem 3.5), both standardised by the setting;
alpha is the mean (Corollary 3.6). No token is drawn to be tested, so this has far less noise than accepted / tested, and
unlike that, it doesn't depend on a draft length. A deterministic draft is a point mass: its beta is the target's probability
of the token. A draft that offers nothing at a position has beta 0 there. Beside alpha stands what it is where tokens are
decided by position (`acceptance.by_position`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from outrider.bench.asking import asked_of
from outrider.bench.examples import Example, TaskKind
from outrider.bench.quality import Estimate, Mean, estimate
from outrider.bench.resumed import Resumed
from outrider.bench.settings import Setting
from outrider.drafters import Drafter
from outrider.forced import pairs_along
from outrider.generation import generate
from outrider.models.base import TextModel
from outrider.request.own_rules import law_along
from outrider.request.prompts import Asked, prepare
from outrider.sampling import SamplingSettings
from outrider.support.run_log import RunLog
from outrider.theory import acceptance_probability, race_acceptance_probability

TEXT = ""  # the entry of a log that holds the target's text instead of a draft's betas


@dataclass(frozen=True)
class Reading:
    """A draft on one text, or the text itself (draft ""). betas: at each position; offered: positions with a proposal.

    raced: what `drafter_invariant` accepts at each (`theory.race_acceptance_probability`); none in logs of older versions.
    """

    example: str
    digest: str
    setting: str
    draft: str
    tokens: list[int]
    betas: list[float]
    offered: int
    raced: list[float] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.example, self.digest, self.setting, self.draft


def texts_of(examples: Sequence[Example], setting: Setting) -> list[Example]:
    """Those to be read: greedily the same prompt gives the same text, which is one text however often it is asked for."""
    if setting.temperature:
        return list(examples)
    first: dict[str, Example] = {}
    for example in examples:
        first.setdefault(example.digest, example)
    return list(first.values())


def measure(
    target: TextModel,
    drafts: Mapping[str, Drafter],
    kind: TaskKind,
    examples: Sequence[Example],
    settings: Sequence[Setting],
    max_new_tokens: int,
    log: RunLog,
) -> Iterator[Reading]:
    """The text of each example and setting, then every draft on it; what the log holds is not done again."""
    readings = Resumed(log, Reading)
    wanted = {setting.name: {one.number for one in texts_of(examples, setting)} for setting in settings}
    for example in examples:
        prompt = asked_of(target, kind, example)
        for setting in settings:
            if example.number not in wanted[setting.name]:
                continue
            text: list[int] = []
            for name in (TEXT, *drafts):
                key = (example.name, example.digest, setting.name, name)
                if (reading := readings.held(key)) is None:
                    if name == TEXT:
                        made = _write(target, prompt, setting, max_new_tokens, example.number)
                        reading = Reading(*key, tokens=made, betas=[], offered=0)
                    else:
                        betas, raced, offered = read(target, drafts[name], setting.sampling, prompt, text)
                        reading = Reading(*key, tokens=[], betas=betas, offered=offered, raced=raced)
                    readings.keep(key, reading)
                text = reading.tokens or text
                yield reading


def _write(target: TextModel, prompt: Asked, setting: Setting, tokens: int, seed: int) -> list[int]:
    return generate(target, prompt, draft=None, max_new_tokens=tokens, seed=seed, **setting.sampling.options()).tokens


def read(
    target: TextModel, drafter: Drafter, sampling: SamplingSettings, prompt: Asked, text: list[int]
) -> tuple[list[float], list[float], int]:
    """The draft along the text. → of each position beta, and the same by position; how many had an offer"""
    drafter.bind(target)
    drafter.measure()
    seen = prepare(target, prompt)
    law = law_along(target, sampling, seen.tokens)
    betas: list[float] = []
    raced: list[float] = []
    for pair in pairs_along(drafter, target, [*seen.tokens, *text], len(seen.tokens), law, seen.source):
        betas += acceptance_probability(*pair).tolist()
        raced += race_acceptance_probability(*pair).tolist()
    offered = sum(not math.isnan(beta) for beta in betas)
    betas, raced = ([0.0 if math.isnan(beta) else beta for beta in some] for some in (betas, raced))
    return betas, raced, offered


@dataclass(frozen=True)
class Row:
    """A draft at a setting.

    alpha: with its 95 % interval over texts. by_position: the same with `drafter_invariant`; None where a log lacks it.
    deviation: of beta between positions; the theory takes beta to be constant. offered: the share of positions with a
    proposal.
    """

    setting: str
    draft: str
    texts: int
    tokens: int
    alpha: Estimate
    deviation: float
    offered: float
    by_position: Estimate | None = None


def summarise(readings: Sequence[Reading]) -> list[Row]:
    """A row per setting and draft, in the order they came."""
    groups: dict[tuple[str, str], list[Reading]] = {}
    for one in readings:
        if one.draft != TEXT:
            groups.setdefault((one.setting, one.draft), []).append(one)
    settings = list(dict.fromkeys(setting for setting, _ in groups))
    return [_row(*key, group) for setting in settings for key, group in groups.items() if key[0] == setting]


def _row(setting: str, draft: str, readings: list[Reading]) -> Row:
    betas = torch.tensor([beta for one in readings for beta in one.betas], dtype=torch.float64)
    raced = all(len(one.raced) == len(one.betas) for one in readings)
    mean = Mean("alpha", lambda _: 0.0)  # only its way of adding up is needed
    return Row(
        setting=setting,
        draft=draft,
        texts=len(readings),
        tokens=len(betas),
        alpha=estimate(mean, [[sum(one.betas), float(len(one.betas))] for one in readings]),
        by_position=estimate(mean, [[sum(one.raced), float(len(one.raced))] for one in readings]) if raced else None,
        deviation=float(betas.std(correction=0)),
        offered=sum(one.offered for one in readings) / len(betas),
    )
