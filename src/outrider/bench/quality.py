"""How good answers are, with intervals: ROUGE-2, BLEU, word errors, matches, perplexity under the target, tests passed.

A metric turns an answer into a few *sums* (matches, lengths, a count of 1), and sums over many answers into a score. So the
score of any resample of the prompts is a product with a matrix, and prompts with several answers are resampled whole.
Intervals are percentile bootstraps over prompts (Efron 1979), paired for a difference: both sides of a resample have the
same prompts. They cover the choice of prompts and the draws, 95 %, and are too narrow for fewer than about twenty prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.audio import Audio
from outrider.bench.examples import NEED_REFERENCES, Answer
from outrider.bench.humaneval import passes
from outrider.bench.precision import laws
from outrider.errors import ParameterError
from outrider.models.base import TextModel, refuse_encoder
from outrider.support.optional import optional

METRICS = ("pass@1", *NEED_REFERENCES, "perplexity", "none")
RESAMPLES = 2000
FEW_PROMPTS = 20
Sums = NDArray[np.float64]


class Metric(Protocol):
    """sums: of one answer, the same number for each. score: of added sums, [.., S] → [..]."""

    @property
    def name(self) -> str: ...

    def sums(self, answer: Answer) -> list[float]: ...

    def score(self, sums: Sums) -> Sums: ...


@dataclass(frozen=True)
class Mean:
    """The mean of a value that each answer has."""

    name: str
    judge: Callable[[Answer], float]

    def sums(self, answer: Answer) -> list[float]:
        return [self.judge(answer), 1.0]

    def score(self, sums: Sums) -> Sums:
        return np.asarray(sums[..., 0] / sums[..., 1])


class Perplexity:
    """exp of the mean negative log-probability of the answers' tokens under the bare target, temperature 1."""

    name = "perplexity"

    def __init__(self, target: TextModel) -> None:
        refuse_encoder(target, "perplexity")
        self._target = target

    def sums(self, answer: Answer) -> list[float]:
        assert not isinstance(answer.prompt, Audio)
        tokens = answer.prompt + answer.tokens
        following = torch.tensor(tokens[1:])
        parts, at = [], 0
        for law in laws(self._target, tokens):
            parts.append(law.cpu().double().gather(1, following[at : at + len(law)].unsqueeze(1)).squeeze(1))
            at += len(law)
        return [-float(torch.cat(parts)[len(answer.prompt) - 1 :].sum()), float(len(answer.tokens))]

    def score(self, sums: Sums) -> Sums:
        return np.exp(np.asarray(sums[..., 0] / sums[..., 1]))


class Bleu:
    """Corpus BLEU as sacrebleu computes it with its defaults (13a tokenisation, exponential smoothing), 0 … 100."""

    name = "BLEU"

    def __init__(self) -> None:
        self._bleu = optional("sacrebleu.metrics.bleu", "BLEU").BLEU()

    def sums(self, answer: Answer) -> list[float]:
        """Matches and n-grams for n = 1 … 4, lengths of answer and reference."""
        found = self._bleu.corpus_score([answer.text.strip()], [[answer.example.reference]])
        return [float(x) for x in (*found.counts, *found.totals, found.sys_len, found.ref_len)]

    def score(self, sums: Sums) -> Sums:
        rows: list[list[int]] = sums.reshape(-1, sums.shape[-1]).round().astype(int).tolist()
        scores = [self._bleu.compute_bleu(r[:4], r[4:8], r[8], r[9], smooth_method="exp").score for r in rows]
        return np.asarray(scores).reshape(sums.shape[:-1])


class WordErrors:
    """The word error rate: words substituted, left out and put in (Levenshtein), over the words of the references.

    Case and punctuation do not count.
    """

    name = "WER"

    def __init__(self) -> None:
        jiwer = optional("jiwer", "the word error rate")
        steps = [jiwer.ToLowerCase(), jiwer.RemovePunctuation(), jiwer.RemoveMultipleSpaces(), jiwer.Strip()]
        self._words: Any = jiwer.Compose([*steps, jiwer.ReduceToListOfListOfWords()])
        self._compare: Any = jiwer.process_words

    def sums(self, answer: Answer) -> list[float]:
        reference = answer.example.reference
        found = self._compare(reference, answer.text, reference_transform=self._words, hypothesis_transform=self._words)
        wrong = found.substitutions + found.deletions + found.insertions
        return [float(wrong), float(found.hits + found.substitutions + found.deletions)]

    def score(self, sums: Sums) -> Sums:
        return np.asarray(sums[..., 0] / sums[..., 1])


def rouge2() -> Mean:
    """F-measure of bigrams, stemmed, as T5 and Chen et al. report it (rouge-score), 0 … 1."""
    scorer = optional("rouge_score.rouge_scorer", "ROUGE").RougeScorer(["rouge2"], use_stemmer=True)
    return Mean("ROUGE-2", lambda answer: float(scorer.score(answer.example.reference, answer.text)["rouge2"].fmeasure))


def exact() -> Mean:
    """The share of answers that equal their references, blanks at both ends left out."""
    return Mean("exact", lambda answer: float(answer.text.strip() == (answer.example.reference or "").strip()))


def make_metric(name: str, target: TextModel | None, run_code: bool = False) -> Metric | None:
    """The metric of that name; None for "none". run_code: the user allows generated code to be executed."""
    if name == "pass@1":
        return Mean("pass@1", passes(run_code))
    if name not in METRICS:
        raise ParameterError(f"metric must be one of {', '.join(METRICS)}, got {name!r}")
    if name == "perplexity":
        return Perplexity(target) if target is not None else None
    made: dict[str, Callable[[], Metric]] = {"rouge2": rouge2, "bleu": Bleu, "wer": WordErrors, "exact": exact}
    return made[name]() if name in made else None


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval, None where one prompt or none can't tell of any."""

    value: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        interval = "—" if self.low is None or self.high is None else f"{_digits(self.low)} – {_digits(self.high)}"
        return f"{_digits(self.value)} ({interval})"


def _digits(value: float) -> str:
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"


def estimate(metric: Metric, sums: Sequence[Sequence[float]]) -> Estimate:
    """The score of all prompts. sums: [N, S], of each prompt"""
    return _interval(*_resampled(metric, sums), len(sums))


def difference(metric: Metric, ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> Estimate:
    """Our score less theirs over the same prompts. ours, theirs: [N, S], row by row of the same prompt"""
    (value, samples), (other, others) = (_resampled(metric, side) for side in (ours, theirs))
    return _interval(value - other, samples - others, len(ours))


def _resampled(metric: Metric, sums: Sequence[Sequence[float]]) -> tuple[float, Sums]:
    """The score, and that of `RESAMPLES` resamples, which one seed makes the same for both sides of a pair. → score, [B]"""
    table = np.asarray(sums, dtype=np.float64)
    count = len(table)
    weights = np.random.default_rng(0).multinomial(count, [1.0 / count] * count, size=RESAMPLES).astype(np.float64)
    return float(metric.score(table.sum(0))), metric.score(weights @ table)


def _interval(value: float, samples: Sums, count: int) -> Estimate:
    if count < 2 or not math.isfinite(value):
        return Estimate(value, None, None)
    low, high = np.quantile(samples, [0.025, 0.975])
    return Estimate(value, float(low), float(high))
