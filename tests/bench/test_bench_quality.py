"""The papers' tasks: how answers are scored, and how sure that is."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import outrider
from outrider.bench.examples import Answer, Example
from outrider.bench.quality import (
    Bleu,
    Estimate,
    Mean,
    Perplexity,
    WordErrors,
    difference,
    estimate,
    exact,
    make_metric,
    rouge2,
)
from outrider.errors import ParameterError
from tests.helpers.task_data import answer


def test_scores_are_those_of_the_packages() -> None:
    from sacrebleu.metrics.bleu import BLEU

    assert rouge2().sums(answer("the cat sat on a mat", "the cat sat on the mat")) == [pytest.approx(0.6), 1.0]
    assert exact().sums(answer(" yes\n", "yes")) == [1.0, 1.0]
    bleu, answers = Bleu(), ["Das ist ein kleines Haus.", "Guten Tag, wie geht es Ihnen?"]
    references = ["Das ist ein sehr kleines Haus.", "Guten Morgen, wie geht es Ihnen heute?"]
    sums = [bleu.sums(answer(a, r)) for a, r in zip(answers, references, strict=True)]
    corpus = BLEU().corpus_score(answers, [references]).score
    assert estimate(bleu, sums).value == pytest.approx(corpus)
    low, high = interval(estimate(bleu, sums))
    assert low < corpus < high


def interval(found: Estimate) -> tuple[float, float]:
    assert found.low is not None
    assert found.high is not None
    return found.low, found.high


def width_of(found: Estimate) -> float:
    low, high = interval(found)
    return high - low


def test_word_errors_are_counted_over_the_words_of_the_references() -> None:
    """One of five words another, one left out, one put in; case and punctuation do not count."""
    metric = WordErrors()
    answers = ["the quick red fox jumps", "A dog,  barks Loudly now!"]
    references = ["The quick brown fox jumps.", "A dog barks loudly and now"]
    sums = [metric.sums(answer(a, r)) for a, r in zip(answers, references, strict=True)]
    assert sums == [[1.0, 5.0], [1.0, 6.0]]
    assert estimate(metric, sums).value == pytest.approx(2 / 11)
    assert metric.sums(answer("and a dog barks loudly now", "a dog barks loudly now")) == [1.0, 5.0]


def test_perplexity_is_that_of_the_target(target_folder: Path) -> None:
    model = outrider.load(target_folder, dtype="float64")
    made = outrider.generate(
        model, "fox", draft=None, max_new_tokens=70, temperature=1.0, seed=3, ignore_eos=True, logprobs=True
    )
    prompt = model.tokenizer.encode("fox")
    sums = Perplexity(model).sums(Answer(Example("one", "fox"), prompt, made.tokens, made.text))
    assert made.logprobs is not None
    assert sums == [pytest.approx(-sum(made.logprobs), rel=1e-5), 70.0]
    assert estimate(Perplexity(model), [sums]).value == pytest.approx(math.exp(sums[0] / 70), rel=1e-9)


def test_intervals_are_as_wide_as_theory_says_and_paired_differences_narrower() -> None:
    metric = Mean("m", lambda answer: 0.0)
    generator = np.random.default_rng(1)
    passed = (generator.random(400) < 0.3).astype(float)
    also = np.where(generator.random(400) < 0.05, 1 - passed, passed)  # nearly the same answers
    ours, theirs = ([[x, 1.0] for x in side] for side in (passed, also))
    found = estimate(metric, ours)
    width = 2 * 1.96 * math.sqrt(found.value * (1 - found.value) / 400)
    assert width_of(found) == pytest.approx(width, rel=0.1)
    paired = difference(metric, ours, theirs)
    assert paired.value == pytest.approx(passed.mean() - also.mean())
    assert width_of(paired) < 0.6 * width
    same = difference(metric, ours, ours)
    assert (same.value, same.low, same.high) == (0.0, 0.0, 0.0)
    assert estimate(metric, ours) == found  # seeded


def test_several_answers_to_a_prompt_are_resampled_together() -> None:
    metric = Mean("m", lambda answer: 0.0)
    alone = estimate(metric, [[1.0, 1.0], [0.0, 1.0]] * 20)
    tenfold = estimate(metric, [[10.0, 10.0], [0.0, 10.0]] * 20)
    assert tenfold == alone


def test_an_unknown_metric_is_refused() -> None:
    with pytest.raises(ParameterError, match="metric must be one of"):
        make_metric("f1", None)
    assert make_metric("none", None) is None
