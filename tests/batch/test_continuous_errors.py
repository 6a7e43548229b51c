"""Requests of a `ContinuousBatch` that fail: each alone, and told in a line."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Many
from typing import Any
from weakref import WeakSet

import pytest
import torch
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
from outrider.models.table import TableModel
from outrider.sampling.stateful import StatefulProcessor
from tests.helpers.clients import ENDLESS, PROMPTS, MineError
from tests.helpers.folders import make_tokenizer
from tests.helpers.tiny_models import module


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


@pytest.mark.parametrize("with_state", [False, True])
def test_a_processor_that_several_requests_share_fails_for_one_of_them(
    with_state: bool, target: TextModel, batch: outrider.ContinuousBatch
) -> None:
    seven = target.tokenizer.encode("zebra")[0]

    def fails(tokens: Tensor, logits: Tensor) -> Tensor:
        if seven in tokens.flatten()[:1]:
            raise MineError
        return logits

    options: dict[str, Any] = {"max_new_tokens": 9, "ignore_eos": True}
    options["processors"] = [StatefulProcessor(lambda: fails) if with_state else fails]
    good, bad = (batch.submit(prompt, **options) for prompt in ("abc", "zebra"))
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


def test_what_a_request_leaves_in_its_slot_harms_nobody() -> None:
    """A text of NaN ends, and the last row moves into its slot: what lies behind it there is read with weight 0, and 0 × NaN
    is NaN.
    """
    made = module("Llama", vocab_size=len(make_tokenizer()), max_position_embeddings=256)
    target = outrider.load(made, tokenizer=make_tokenizer(), pack=False)
    options: dict[str, Any] = {"max_new_tokens": 30, "ignore_eos": True}
    long, short = [5, 6, 8] * 10, [9, 10, 11, 12] * 5
    with torch.no_grad():
        made.model.embed_tokens.weight[7] = torch.nan
    want = [outrider.generate(target, prompt, draft=None, **options).tokens for prompt in (long, short)]
    with outrider.ContinuousBatch(target, draft=None, batch_size=3) as batch:
        lost, *others = (batch.submit(prompt, **options) for prompt in ([7] * 40, long, short))
        with pytest.raises(NumericalError):
            lost.result(60)
        assert [other.result(60).tokens for other in others] == want


class Faulty(TableModel):
    """A table that fails for what is too long to be opened, and in passes with a token 9. MemoryErrors are no Outrider's."""

    dtype_name = "float64"
    end_tokens: frozenset[int] = frozenset()

    def __init__(self) -> None:
        vocabulary = len(make_tokenizer())
        laws = torch.rand(vocabulary, vocabulary, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        super().__init__(laws / laws.sum(-1, keepdim=True), name="faulty")
        self.tokenizer = make_tokenizer()
        self.passes = 0
        self.made = WeakSet[Made]()

    def open(self, reserve: int = 0) -> Any:
        if reserve > 10**6:
            raise MemoryError("open")
        return super().open(reserve)

    def score(self, sequences: Any, tokens: Tensor, lengths: Any, logits: Any = "all") -> Any:
        assert not self.made  # a pass that has failed holds no memory while another one is made
        self.passes += 1
        activations = Made()
        self.made.add(activations)
        if logits == "none" and (tokens == 9).any():
            raise MemoryError("pass")
        return super().score(sequences, tokens, lengths, logits)


class Made:
    """What a pass makes, and lets go at its end."""


class Begins(PromptLookupDrafter):
    def begin(self, rows: Many[DraftRow], context: DraftContext) -> None:
        if any(row.tokens[0] == 8 for row in rows):
            raise MineError("begin")
        super().begin(rows, context)

    def end(self, row: DraftRow) -> None:
        if row.tokens[0] == 7:
            raise MineError("end")


def test_of_prompts_that_are_read_together_those_fail_that_can_not_be_read() -> None:
    target = Faulty()
    few: dict[str, Any] = {"max_new_tokens": 5}
    with outrider.ContinuousBatch(target, draft=Begins(), num_draft_tokens=2, batch_size=9) as batch:
        going = batch.submit([3, 4, 5], max_new_tokens=2000)
        next(going)
        with batch._worker._changed:  # so that all join before one round
            good = [batch.submit([3 + i, 4, 5], **few) for i in range(3)]
            bad = [batch.submit(prompt, **few) for prompt in ([3, 9, 5], [8, 3, 5], [7, 8, 3])]
            bad.append(batch.submit([6, 4, 5], max_new_tokens=10**7))
            good.append(batch.submit([6, 4, 5], temperature=1.0, **few))
        for answer, said in zip(bad, ("pass", "begin", "end", "open"), strict=True):
            with pytest.raises((MemoryError, MineError), match=said):
                answer.result(60)
        assert [len(answer.result(60).tokens) for answer in good] == [5] * 4
        assert len(going.result(60).tokens) == 2000


def test_short_prompts_do_not_wait_for_a_long_one_nor_it_for_them() -> None:
    target = Faulty()
    with outrider.ContinuousBatch(target, draft=None, batch_size=4) as batch:
        going = batch.submit([3, 4, 5], max_new_tokens=3000)
        next(going)
        with batch._worker._changed:
            long = batch.submit([3, 4] * 3000, max_new_tokens=1)  # 94 parts
            short = batch.submit([3, 4, 5] * 5, max_new_tokens=1)
        before = target.passes
        short.result(60)
        assert target.passes - before < 60
        assert not long.done
        further = [batch.submit([3, 4, 5] * 20, max_new_tokens=1) for _ in range(40)]
        long.result(60)
        for answer in (*further, going):
            answer.result(60)
