"""What lenience buys and what it costs (Leviathan A.5, Table 5), on the user's prompts: LOSSY for every l below 1.

Plain decoding and every l answer the same prompts, in an order that rotates from prompt to prompt; ends of text are ignored.
Afterwards target and draft read each lenient text once more, which gives the law of every token as it was generated
(`lenience.lenient_law` where the rule decided, the target's elsewhere): from these laws come the acceptance that A.5's
formula expects, the drift (KL and total variation) and, greedily, how often and by how much a token is not the best.

A draft that is no model proposes afresh at each position of that reading, not in the runs that it proposed while generating.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import torch
from torch import Tensor

from outrider.acceptance.lenience import lenient_betas, lenient_law
from outrider.audit.sampled import TextAudit
from outrider.audit.text import Text
from outrider.audit.verdict import judge
from outrider.bench.asking import asked_of
from outrider.bench.contest import WARM_UP_TOKENS, in_turn
from outrider.bench.examples import Example, TaskKind
from outrider.bench.resumed import Resumed
from outrider.bench.settings import Setting
from outrider.bench.statistics import Spread, paired_ratios
from outrider.drafters import Drafter
from outrider.forced import draft_laws_along, target_laws_along
from outrider.generation import generate
from outrider.models.base import Source, TextModel
from outrider.records import Round
from outrider.request.own_rules import law_along
from outrider.request.prompts import Asked, prepare
from outrider.sampling import SamplingSettings
from outrider.support.run_log import RunLog
from outrider.theory.printed import tables

PLAIN = 0.0  # in the place of a lenience: plain decoding


@dataclass(frozen=True)
class LenientRun:
    """One prompt answered with one lenience. rounds: [tokens, drafted, accepted, lenient] each. seconds: of decoding.

    prompt: what the sequence began with: an encoder-decoder's source is not among it.
    """

    example: str
    digest: str
    setting: str
    lenience: float
    prompt: list[int]
    tokens: list[int]
    rounds: list[list[int]]
    seconds: float

    @property
    def key(self) -> tuple[str, str, str, float]:
        return self.example, self.digest, self.setting, self.lenience

    def text(self, source: Source | None) -> Text:
        """As an audit wants it. source: what an encoder read."""
        at, rounds = count(), []
        for kept, drafted, accepted, _ in self.rounds:
            rounds.append(Round(tuple(self.tokens[next(at)] for _ in range(kept)), drafted, accepted, "draft"))
        read = source if source is None or isinstance(source, Tensor) else tuple(source)
        return Text((*self.prompt, *self.tokens), len(self.prompt), tuple(rounds), read)


def measure(
    target: TextModel,
    draft: Drafter,
    kind: TaskKind,
    examples: Sequence[Example],
    settings: Sequence[Setting],
    leniences: Sequence[float],
    length: int | None,
    max_new_tokens: int,
    log: RunLog,
) -> Iterator[LenientRun]:
    """Run what the log does not hold yet, append it there, and yield all runs. length: tokens drafted, None for adaptive."""
    runs = Resumed(log, LenientRun)
    for number, example in enumerate(examples):
        prompt = asked_of(target, kind, example)
        for setting in settings:
            for lenience in in_turn([PLAIN, *leniences], number):
                made = partial(_generate, target, draft, prompt, example, setting, lenience, length)
                key = (example.name, example.digest, setting.name, lenience)
                yield runs.run(key, partial(made, max_new_tokens), lenience, partial(made, WARM_UP_TOKENS))


def _generate(
    target: TextModel,
    draft: Drafter,
    prompt: Asked,
    example: Example,
    setting: Setting,
    lenience: float,
    length: int | None,
    tokens: int,
) -> LenientRun:
    result = generate(
        target,
        prompt,
        draft=None if lenience == PLAIN else draft,
        lenience=lenience or 1.0,
        num_draft_tokens=length,
        max_new_tokens=tokens,
        ignore_eos=True,
        seed=example.number,
        **setting.sampling.options(),
    )
    rounds = [[*r.counts, r.origins.count("lenient")] for r in result.rounds]
    key = (example.name, example.digest, setting.name, lenience)
    return LenientRun(*key, prepare(target, prompt).tokens, result.tokens, rounds, result.stats.decode_seconds)


@dataclass(frozen=True)
class Drift:
    """Sums over the tokens of one text.

    tested: positions where the rule decided. expected, variance: of the number accepted, from the laws. divergence, moved:
    KL (nats) and total variation of the token's law from the target's. best_gap: log-probability of the best token minus
    that of the one generated.
    """

    tokens: int
    tested: int
    expected: float
    variance: float
    divergence: float
    moved: float
    best_gap: float


def read(target: TextModel, draft: Drafter, sampling: SamplingSettings, text: Text, lenience: float) -> Drift:
    """Target and draft along a text, and what its lenience did to the laws. sampling: as of `law_along`."""
    own = sampling.processed_only() if sampling.greedy else sampling
    laws = target_laws_along(target, text.tokens, text.prompt_length, own, text.source)
    drafts = draft_laws_along(draft, target, text.tokens, text.prompt_length, sampling, text.source)
    done, sums = 0, torch.zeros(6, dtype=torch.float64)
    for law, offered in zip(laws, drafts, strict=True):
        part = slice(done, done + len(law))
        flags = torch.tensor((text.tested or [])[part], device=law.device) & ~offered[:, 0].isnan()
        p, q = law.double(), offered.double().to(law.device)
        sums += _sums(p, q, flags, torch.tensor(text.new[part], device=law.device), lenience, sampling.greedy)
        done += len(law)
    tested, expected, variance, divergence, moved, gap = sums.tolist()
    return Drift(len(text.new), int(tested), expected, variance, divergence, moved, gap)


def _sums(p: Tensor, q: Tensor, tested: Tensor, tokens: Tensor, lenience: float, greedy: bool) -> Tensor:
    gap = (p.amax(-1) / p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)).log().sum()
    p, q = p[tested], q[tested]
    betas = lenient_betas(p, q, lenience, p if greedy else None).clamp(max=1.0)
    divergence = moved = torch.zeros((), dtype=torch.float64)
    if not greedy:
        law = lenient_law(p, q, lenience)
        divergence = torch.where(law > 0, law * (law / p).log(), 0.0).sum()
        moved = (law - p).abs().sum() / 2
    terms = (tested.sum().double(), betas.sum(), (betas * (1 - betas)).sum(), divergence, moved, gap)
    return torch.stack([term.double().cpu() for term in terms])


@dataclass(frozen=True)
class Row:
    """One lenience at one setting; lossy below 1.

    alpha: accepted / tested. expected: Σ min(p / l, q) at the tested positions, averaged; z: how far the two are apart, in
    standard deviations (None where the rule leaves nothing to chance). speedup: over plain decoding, prompt by prompt.
    divergence, moved: per token, None at temperature 0. differ: tokens that are there by lenience alone; not_best: at
    temperature 0 these are the tokens that are not the target's best, best_gap by how many nats on average. verdict, reason:
    the audit's on the texts. paper_alpha, paper_speedup: Leviathan's, with T5-XXL and T5-small.
    """

    setting: str
    lenience: float
    lossy: bool
    texts: int
    tokens: int
    alpha: float | None
    expected: float | None
    z: float | None
    tokens_per_round: float
    speedup: Spread
    divergence: float | None
    moved: float | None
    differ: float
    best_gap: float
    verdict: str
    reason: str
    paper_alpha: str | None
    paper_speedup: str | None


def summarise(
    target: TextModel,
    draft: Drafter,
    kind: TaskKind,
    examples: Sequence[Example],
    settings: Sequence[Setting],
    runs: Sequence[LenientRun],
) -> Iterator[Row]:
    """A row per setting and lenience; reads every text again, twice with the audit."""
    draft.bind(target)
    sources = {(one.name, one.digest): prepare(target, asked_of(target, kind, one)).source for one in examples}
    for setting in settings:
        groups: dict[float, dict[tuple[str, str], LenientRun]] = {}
        for run in runs:
            if run.setting == setting.name:
                groups.setdefault(run.lenience, {})[run.example, run.digest] = run
        plain = groups.pop(PLAIN)
        for lenience, group in sorted(groups.items(), reverse=True):
            texts = [run.text(sources[key]) for key, run in group.items()]
            yield _row(target, draft, setting, lenience, texts, list(group.values()), [plain[key] for key in group])


def _row(
    target: TextModel,
    draft: Drafter,
    setting: Setting,
    lenience: float,
    texts: list[Text],
    runs: list[LenientRun],
    plain: list[LenientRun],
) -> Row:
    sampling = law_along(target, setting.sampling, runs[0].prompt)
    drifts = [read(target, draft, sampling, text, lenience) for text in texts]
    tokens, tested = sum(one.tokens for one in drifts), sum(one.tested for one in drifts)
    expected, variance = sum(one.expected for one in drifts), sum(one.variance for one in drifts)
    rounds = [record for text in texts for record in text.rounds]
    accepted, decided = sum(record.used for record in rounds), sum(record.tested for record in rounds)
    sampled = setting.temperature > 0
    verdict, reason = _audited(target, draft, sampling, setting.name, texts, lenience < 1.0)
    paper = _printed(setting, lenience)
    return Row(
        setting=setting.name,
        lenience=lenience,
        lossy=lenience < 1.0,
        texts=len(runs),
        tokens=tokens,
        alpha=accepted / decided if decided else None,
        expected=expected / tested if tested else None,
        z=(accepted - expected * decided / tested) / math.sqrt(variance) if tested and variance > 1e-9 else None,
        tokens_per_round=tokens / len(rounds),
        speedup=paired_ratios([len(r.tokens) / r.seconds for r in runs], [len(r.tokens) / r.seconds for r in plain]),
        divergence=max(0.0, sum(one.divergence for one in drifts) / tokens) if sampled else None,  # but for rounding
        moved=sum(one.moved for one in drifts) / tokens if sampled else None,
        differ=sum(lenient for run in runs for *_, lenient in run.rounds) / tokens,
        best_gap=sum(one.best_gap for one in drifts) / tokens,
        verdict=verdict,
        reason=reason,
        paper_alpha=paper[0],
        paper_speedup=paper[1],
    )


def _audited(
    target: TextModel, draft: Drafter, sampling: SamplingSettings, name: str, texts: list[Text], lossy: bool
) -> tuple[str, str]:
    """The audit's verdict on the texts, and its reason."""
    audit = TextAudit(target, draft, sampling)
    for text in texts:
        audit.add(text)
    report = judge(audit, name, fault_known=lossy)
    return report.verdict, report.reason


def _printed(setting: Setting, lenience: float) -> tuple[str | None, str | None]:
    """Alpha and speed-up as Leviathan prints them for this lenience, at temperature 1 or 0."""
    (table,) = tables(["leviathan-lenience"])
    for row in table.rows:
        if float(row.given["temperature"]) == setting.temperature and float(row.given["l"]) == lenience:
            return row.given["α"], row.theirs
    return None, None
