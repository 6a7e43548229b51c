"""Speculative beam search on SmolLM2: the texts of plain beam search and of transformers, in every width."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch

from outrider.beam import BeamResult, beam_search
from outrider.beam.compare import Agreement
from outrider.beam.task import BeamTask
from outrider.request.prompts import encode
from outrider.settings.beams import EarlyStopping
from tests.helpers.real_models import pruned_draft, smollm2

STOPPING: tuple[EarlyStopping, ...] = (False, True, "never")
QUESTION = "Explain in one sentence why the sky is blue."


@cache
def prompt() -> tuple[int, ...]:
    return tuple(encode(smollm2(), [{"role": "user", "content": QUESTION}]))


def searched(width: int, penalty: float, stopping: EarlyStopping, tokens: int, drafted: bool) -> BeamResult:
    draft = {"draft": pruned_draft(), "num_draft_tokens": 2} if drafted else {}
    return beam_search(
        smollm2(),
        list(prompt()),
        num_beams=width,
        num_return_sequences=width,
        length_penalty=penalty,
        early_stopping=stopping,
        max_new_tokens=tokens,
        **draft,  # type: ignore[arg-type]
    )


@pytest.mark.slow
def test_smollm2_gives_the_same_texts_with_a_draft_and_in_transformers() -> None:
    target = smollm2()
    plain, fast = (searched(3, 1.0, False, 12, drafted) for drafted in (False, True))
    found = Agreement(fast, plain, BeamTask(list(prompt())), target)
    assert found.identical or found.gap <= found.rounding, found.text
    assert fast.stats.passes < plain.stats.passes
    ids = torch.tensor([prompt()])
    with torch.inference_mode():
        out = target.module.generate(
            ids, attention_mask=torch.ones_like(ids), num_beams=3, max_new_tokens=12, do_sample=False
        )
    assert plain.tokens == out[0, ids.shape[1] :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("width", range(1, 9))
def test_every_width_penalty_and_stopping_gives_the_same_texts(width: int) -> None:
    """All hypotheses that are returned, in their order; where two change places it is within the engine's rounding."""
    for penalty, stopping in product((0.5, 1.5), STOPPING):
        plain, fast = (searched(width, penalty, stopping, 10, drafted) for drafted in (False, True))
        found = Agreement(fast, plain, BeamTask(list(prompt())), smollm2())
        assert found.identical or found.gap <= found.rounding, (width, penalty, stopping, found.text)
