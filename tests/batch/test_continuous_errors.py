"""Requests of a `ContinuousBatch` that fail: each alone, and told in a line."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Many
from typing import Any

import pytest
from torch import Tensor

import outrider
from outrider.drafters import (
    DraftContext,
    DraftRow,
    PromptLookupDrafter,
    SuffixDrafter,
)
from outrider.errors import NumericalError, ParameterError
from outrider.models.base import TextModel
from tests.helpers.clients import ENDLESS, PROMPTS, MineError


def test_a_drafter_that_can_not_begin_or_end_fails_its_own_request(target: TextModel) -> None:
    class Faulty(PromptLookupDrafter):
        def begin(self, rows: Many[DraftRow], context: DraftContext) -> None:
            if any(len(row.tokens) > 40 for row in rows):
                raise MineError("begin")
            super().begin(rows, context)

        def end(self, row: DraftRow) -> None:
            if row.tokens[0] == 7:
                raise MineError("end")

    with outrider.ContinuousBatch(target, draft=Faulty(), num_draft_tokens=2, batch_size=4) as batch:
        good = batch.submit("abc", max_new_tokens=120, ignore_eos=True)
        left = batch.submit([7, 8, 9], **ENDLESS)
        next(good)
        next(left)
        deaf = batch.submit("abc " * 50, max_new_tokens=5)
        with pytest.raises(MineError, match="begin"):
            deaf.result(60)
        left.cancel()
        with pytest.raises(MineError, match="end"):
            left.result(60)
        assert len(good.result(60).tokens) == 120


def test_a_function_that_several_requests_share_fails_for_one_of_them(
    target: TextModel, batch: outrider.ContinuousBatch
) -> None:
    seven = target.tokenizer.encode("zebra")[0]

    def fails(tokens: Tensor, logits: Tensor) -> Tensor:
        if seven in tokens.flatten()[:1]:
            raise MineError
        return logits

    good, bad = (batch.submit(prompt, max_new_tokens=9, ignore_eos=True, processors=[fails]) for prompt in ("abc", "zebra"))
    with pytest.raises(MineError):
        bad.result(60)
    assert len(good.result(60).tokens) == 9


@pytest.mark.parametrize("ending", [StopIteration, StopAsyncIteration])
def test_an_error_that_ends_an_iteration_is_told(ending: type[Exception], batch: outrider.ContinuousBatch) -> None:
    def stops(tokens: Tensor, logits: Tensor) -> Tensor:
        raise ending

    answer = batch.submit("abc", processors=[stops])
    with pytest.raises(RuntimeError, match=f"the answer ended by {ending.__name__}"):
        list(answer)


def test_an_error_that_is_raised_again_and_again_does_not_grow(batch: outrider.ContinuousBatch) -> None:
    def fails(tokens: Tensor, logits: Tensor) -> Tensor:
        raise MineError

    answer, lengths = batch.submit("abc", processors=[fails]), []
    for _ in range(3):
        with pytest.raises(MineError) as raised:
            answer.result(60)
        lengths.append(len(raised.traceback))
    assert lengths[0] == lengths[1] == lengths[2]


def test_a_processor_can_not_wait_for_an_answer_of_its_batch(batch: outrider.ContinuousBatch) -> None:
    def waits(tokens: Tensor, logits: Tensor) -> Tensor:
        other.result()
        return logits

    other = batch.submit("abc", **ENDLESS)
    with pytest.raises(ParameterError, match="can't be waited for in the batch's own thread"):
        batch.submit("abc", processors=[waits]).result(60)
    other.cancel()


def test_what_fails_fails_alone(target: TextModel, batch: outrider.ContinuousBatch) -> None:
    def fails(tokens: Tensor, logits: Tensor) -> Tensor:
        raise MineError

    def nothing(tokens: Tensor, logits: Tensor) -> Tensor:
        return logits + -float("inf")

    good = batch.submit("abc", max_new_tokens=12, ignore_eos=True)
    faulty, lawless = (batch.submit("abc", max_new_tokens=8, processors=[one]) for one in (fails, nothing))
    with pytest.raises(MineError):
        faulty.result(60)
    with pytest.raises(MineError):
        list(faulty)
    with pytest.raises(NumericalError, match="no distribution"):
        lawless.result(60)
    assert len(good.result(60).tokens) == 12

    async def wait() -> None:
        with pytest.raises(MineError):
            await faulty
        with pytest.raises(MineError):
            await anext(faulty)

    asyncio.run(wait())


def test_a_function_may_generate_with_the_same_model(target: TextModel, batch: outrider.ContinuousBatch) -> None:
    """Beside other requests, whose laws are made of the pass before."""

    def generates(tokens: Tensor, logits: Tensor) -> Tensor:
        outrider.generate(target, "zebra", draft=None, max_new_tokens=2)
        return logits

    options: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_new_tokens": 8, "ignore_eos": True}
    want = outrider.generate(target, "abc", draft="suffix", num_draft_tokens=2, **options)
    answers = [batch.submit("abc", processors=one, **options) for one in ([generates], [], [generates])]
    assert [answer.result(60).tokens for answer in answers] == [want.tokens] * 3


def test_what_a_pass_raises_ends_all_and_the_batch_goes_on(
    target: TextModel, batch: outrider.ContinuousBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [batch.submit(prompt, **ENDLESS) for prompt in PROMPTS[:2]]
    for answer in answers:
        next(answer)

    def broken(*_: Any, **__: Any) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(type(target), "score", broken)
        for answer in answers:
            with pytest.raises(MemoryError):
                answer.result(60)
    assert len(batch.submit("abc", max_new_tokens=5, ignore_eos=True).result(60).tokens) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": None}, "draft must be left out of a request: give it to ContinuousBatch"),
        ({"num_draft_tokens": 2}, "num_draft_tokens must be left out of a request"),
        ({"cancelled": lambda: False}, r"cancelled must be left out of a request: call cancel\(\)"),
        ({"temperature": -1.0}, "temperature must be"),
        ({"seed": [1, 2]}, "seed must be"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"max_new_tokens": "5"}, "max_new_tokens must be"),
        ({"max_new_tokens": {1: 2}}, "max_new_tokens must be"),
        ({"max_new_tokens": 0}, "max_new_tokens must be"),
        ({"logit_bias": {100000: 1.0}}, "logit_bias names token 100000"),
        ({"alternatives": 2}, "alternatives must be 0 with suffix"),
    ],
)
def test_wrong_options_are_told_at_once(batch: outrider.ContinuousBatch, options: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        batch.submit("abc", **options)
    assert batch.load == 0


def test_wrong_prompts_and_batches(target: TextModel, batch: outrider.ContinuousBatch) -> None:
    for prompt in ([99999], "", 3, "abc " * 9000):
        with pytest.raises(ParameterError):
            batch.submit(prompt)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="prompt must be one prompt for submit, got a list: submit each by itself"):
        batch.submit(["abc", "def"])  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="batch_size must be"):
        outrider.ContinuousBatch(target, batch_size=0)
    with pytest.raises(ParameterError, match="target must be a loaded model"):
        outrider.ContinuousBatch("model")  # type: ignore[arg-type]
    with (
        outrider.ContinuousBatch(target, draft=None) as plain,
        pytest.raises(ParameterError, match="lenience must be 1 without a draft"),
    ):
        plain.submit("abc", lenience=0.5)
    with pytest.raises(ParameterError, match="timeout must be a number of seconds"):
        batch.submit("abc", max_new_tokens=2).result("5")  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="can't keep texts in a batch"):
        outrider.ContinuousBatch(target, draft=SuffixDrafter(memory=True))
