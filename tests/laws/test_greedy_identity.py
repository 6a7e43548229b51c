"""Temperature 0 on the real default model, float32: the same tokens as plain decoding, or a tie within rounding.

A divergence is never silent: it must be classified by the gap of the two logits, and only ties may pass.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import outrider
from outrider.audit.greedy import first_divergence
from outrider.drafters import ModelDrafter, PromptLookupDrafter
from outrider.models.table import TableModel
from outrider.request.prompts import encode
from tests.helpers.real_models import pruned_draft, smollm2

NEW_TOKENS = 24
SYSTEM = {"role": "system", "content": "Be brief."}  # the template's own would be half of what is read
QUESTIONS = [
    "Write a Python function that returns the n-th Fibonacci number.",
    "Rewrite this with type hints: def add(a, b): return a + b",
    "Explain in three sentences why the sky is blue.",
    "Translate into French: The cat sleeps on the warm roof.",
    "List ten animals that live in the sea, one a line.",
    "What is the capital of Australia?",
    "Write a haiku about autumn.",
    "Count from 1 to 40, separated by commas.",
    "Summarise: The meeting is on Monday at nine. Bring the report. The report must have three parts.",
    "Give me a JSON object with the keys name, age and city for three people.",
    "Write a short story about a robot that learns to paint.",
    "Correct the spelling: Ths sentense has sevral erors in it.",
    "What is 17 times 23? Show the steps.",
    "Write an SQL query that counts the orders of each customer.",
]
TEXTS = [
    "def quicksort(items):\n",
    "The history of the Roman Empire begins",
    "Once upon a time there was a",
    "1, 2, 4, 8, 16, 32,",
    "Ä, ö und ü sind Umlaute. 你好,世界! 🙂 Emoji and accents:",
    "import numpy as np\n\nclass Matrix:\n    def __init__(self, rows, columns):\n",
]


@cache
def prompts() -> list[list[int]]:
    model = smollm2()
    return [encode(model, [SYSTEM, {"role": "user", "content": text}]) for text in QUESTIONS] + [
        encode(model, t) for t in TEXTS
    ]


@cache
def plain() -> list[list[int]]:
    results = outrider.generate(smollm2(), prompts(), draft=None, max_new_tokens=NEW_TOKENS)
    return [result.tokens for result in results]


@pytest.mark.slow
def test_twenty_prompts_give_the_tokens_of_plain_decoding() -> None:
    """In a batch with two kinds of draft, and alone; in one test, since plain decoding takes long."""
    for drafter, length in ((PromptLookupDrafter(), NEW_TOKENS), (ModelDrafter(pruned_draft()), 16)):
        results = outrider.generate(smollm2(), prompts(), draft=drafter, num_draft_tokens=4, max_new_tokens=length, seed=1)
        alone = [tokens[:length] for tokens in plain()]
        assert len(results) == 20
        assert sum(result.stats.accepted for result in results) > 60
        assert sum(result.stats.tested - result.stats.accepted for result in results) > 60  # rejections, too
        divergences = [
            first_divergence(smollm2(), prompt, result.tokens, wanted)
            for prompt, result, wanted in zip(prompts(), results, alone, strict=True)
        ]
        for i, found in enumerate(divergences):
            if found is None:
                assert results[i].tokens == alone[i]
            else:
                print(f"{drafter.name}, prompt {i}: {found}")
                assert found.near_tie, f"{drafter.name}, prompt {i}: {found}"
        # Rounding in float32 is near 1e-4 and ties as close as that are rare: most prompts must agree to the last token.
        assert sum(found is None for found in divergences) >= 18
    for number in (1, 7, 15):
        single = outrider.generate(smollm2(), prompts()[number], max_new_tokens=NEW_TOKENS, num_draft_tokens=5)
        found = first_divergence(smollm2(), prompts()[number], single.tokens, plain()[number])
        assert found is None or found.near_tie, str(found)
        assert single.stats.drafted > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_list_of_prompts_as_it_is_asked_for_by_default(dtype: str) -> None:
    """The shipped head beside copies, several rows: what a first user runs, in the types that `load` gives."""
    model, given = outrider.load(dtype=dtype), prompts()[:6]
    wanted = outrider.generate(model, given, draft=None, max_new_tokens=NEW_TOKENS, temperature=0.0)
    asked: list[dict[str, Any]] = [{}, {"draft": "head", "num_draft_tokens": 3}]
    for drafts in asked:
        results = outrider.generate(model, given, max_new_tokens=NEW_TOKENS, temperature=0.0, **drafts)
        for prompt, result, other in zip(given, results, wanted, strict=True):
            found = first_divergence(model, prompt, result.tokens, other.tokens)
            assert found is None or found.near_tie, str(found)
    assert sum(result.stats.accepted for result in results) > 20


@pytest.mark.slow
def test_acceptance_of_a_real_draft_is_sum_min() -> None:
    """Sampling at temperature 1: accepted / tested at each position against the mean of sum min(target, draft).

    Six standard deviations at four positions: a correct run fails with odds of 1e-8.
    """
    results = outrider.generate(
        smollm2(),
        prompts(),
        draft=pruned_draft(),
        num_draft_tokens=4,
        max_new_tokens=24,
        temperature=1.0,
        seed=3,
        betas=True,
        ignore_eos=True,
    )
    records = [record for result in results for record in result.rounds]
    for position in range(4):
        tested = [r for r in records if r.tested > position]
        betas = [r.betas[position] for r in tested if r.betas is not None]
        accepted = sum(r.accepted > position for r in tested)
        assert len(betas) == len(tested) > 40
        assert abs(accepted - sum(betas)) < 6 * sum(b * (1 - b) for b in betas) ** 0.5


class InBfloat16(TableModel):
    """Gives its logits in fewer bits, the same ones however many tokens are scored at once."""

    def score(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        out = super().score(*args, **kwargs)
        return None if out is None else out.bfloat16()


def test_what_the_numbers_can_not_tell_apart_is_a_tie() -> None:
    """Between 1 and 2 bfloat16 has steps of 2^-7: one of them is no fault, two are."""
    step = 2.0**-7
    logits = torch.tensor([-1.5, -1.5 - step, -1.5 - 2 * step, 0.0], dtype=torch.float64)
    logits[3] = (1 - logits[:3].exp().sum()).log()
    target = InBfloat16(logits.exp())
    one, two = (first_divergence(target, [3, 3], [3, 0], [3, other]) for other in (1, 2))
    assert one is not None
    assert two is not None
    assert (one.gap, one.rounding, one.near_tie) == (step, step, True)
    assert (two.gap, two.near_tie) == (2 * step, False)
    exact = first_divergence(TableModel(logits.exp()), [3, 3], [3, 0], [3, 1])
    assert exact is not None
    assert not exact.near_tie


def test_passes_that_differ_by_as_much_as_logits_spread_are_no_rounding() -> None:
    """An engine whose passes of other widths compute something else is not excused by its own differences."""

    class Shifting(TableModel):
        def score(self, sequences: Any, tokens: Any, lengths: Any, logits: Any = "all") -> Any:
            out = super().score(sequences, tokens, lengths, logits)
            return out if out is None or tokens.shape[1] == 1 else out.roll(1, dims=-1)

    found = first_divergence(Shifting(torch.tensor([0.6, 0.3, 0.09, 0.01])), [3, 3, 3], [3, 0], [3, 1])
    assert found is not None
    assert found.gap <= found.rounding
    assert not found.near_tie
    assert "too much for rounding, since logits spread by" in str(found)
