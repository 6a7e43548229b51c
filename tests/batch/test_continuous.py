"""Requests of many clients through one model: texts, threads, asyncio, ends and errors."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import outrider
from outrider.batch.continuous import _Worker
from outrider.errors import ParameterError
from outrider.models.base import TextModel
from outrider.structured import regex
from outrider.support.text import TextTracker
from tests.helpers.clients import ENDLESS, PROMPTS, Gate, MineError
from tests.helpers.threads import side_by_side

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "top_p": 0.9, "seed": 3},
    {"temperature": 1.0, "seed": 4, "logprobs": True},
    {"repetition_penalty": 1.3, "max_new_tokens": 5},
    {"temperature": 1.0, "seed": 5, "stop": ["e", "qu"]},
    {"temperature": 0.5, "top_k": 3, "seed": 3, "drafter_invariant": True},
)


@pytest.fixture(scope="module")
def draft(draft_folder: Path) -> TextModel:
    return outrider.load(draft_folder, dtype="float64")


def asked(i: int) -> dict[str, Any]:
    return {"max_new_tokens": 16, **OPTIONS[i]}


def wanted(target: TextModel, draft: Any) -> list[outrider.Result]:
    return [
        outrider.generate(target, prompt, draft=draft, num_draft_tokens=2, **asked(i)) for i, prompt in enumerate(PROMPTS)
    ]


def same(found: outrider.Result, want: outrider.Result) -> bool:
    return (
        (found.text, found.tokens, found.finish_reason, found.seed, found.prompt_tokens, found.drafter_invariant)
        == (want.text, want.tokens, want.finish_reason, want.seed, want.prompt_tokens, want.drafter_invariant)
        and [one.counts for one in found.rounds] == [one.counts for one in want.rounds]
        and (found.logprobs is None) == (want.logprobs is None)
    )


@pytest.mark.parametrize("with_draft", [False, True])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_each_request_has_the_text_that_it_has_alone(
    target: TextModel, draft: TextModel, with_draft: bool, size: int
) -> None:
    drafts = draft if with_draft else None
    want = wanted(target, drafts)
    seeded = [{"seed": one.seed, **asked(i)} for i, one in enumerate(want)]
    with outrider.ContinuousBatch(target, draft=drafts, num_draft_tokens=2, batch_size=size) as batch:
        answers = [batch.submit(prompt, **seeded[i]) for i, prompt in enumerate(PROMPTS)]
    assert all(answer.done for answer in answers)
    assert batch.load == 0
    for answer, one in zip(answers, want, strict=True):
        assert same(answer.result(), one)
        assert "".join(answer) == one.text  # afterwards, too


def test_pieces_come_as_they_are_made(target: TextModel, batch: outrider.ContinuousBatch) -> None:
    stream = outrider.stream(target, PROMPTS[0], draft="suffix", num_draft_tokens=2, max_new_tokens=60, ignore_eos=True)
    answer = batch.submit(PROMPTS[0], max_new_tokens=60, ignore_eos=True)
    found, want = list(answer), list(stream)
    assert found == want
    assert [piece.origin for piece in found] == [piece.origin for piece in want]
    assert list(answer) == []


def test_clients_in_threads(target: TextModel, batch: outrider.ContinuousBatch) -> None:
    want = wanted(target, "suffix")

    def client(i: int) -> outrider.Result:
        answer = batch.submit(PROMPTS[i], **{"seed": want[i].seed, **asked(i)})
        text = "".join(answer)
        assert text == answer.result(60).text
        return answer.result()

    found = side_by_side([lambda i=i: client(i) for i in range(len(PROMPTS))])  # type: ignore[misc]
    assert all(isinstance(one, outrider.Result) and same(one, other) for one, other in zip(found, want, strict=True))


def test_clients_of_asyncio(target: TextModel, batch: outrider.ContinuousBatch) -> None:
    want = wanted(target, "suffix")

    async def client(i: int) -> outrider.Result:
        answer = batch.submit(PROMPTS[i], **{"seed": want[i].seed, **asked(i)})
        if i % 2:
            return await answer
        text = "".join([piece async for piece in answer])
        result = await answer
        assert text == result.text
        return result

    async def all_of_them() -> list[outrider.Result]:
        return await asyncio.gather(*map(client, range(len(PROMPTS))))

    assert all(same(one, other) for one, other in zip(asyncio.run(all_of_them()), want, strict=True))


def test_an_awaiting_client_can_be_cancelled(batch: outrider.ContinuousBatch) -> None:
    async def leave() -> None:
        answer = batch.submit(PROMPTS[0], **ENDLESS)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(answer, 0.05)
        answer.cancel()
        assert (await answer).finish_reason == "cancelled"

    asyncio.run(leave())


def test_an_adapted_length_of_a_seed_follows_from_the_request_alone(target: TextModel, draft: TextModel) -> None:
    """Adapted: a seed's text is the same in any company, since its lengths follow from the request alone."""
    texts = set()
    for company in (0, 3):
        with outrider.ContinuousBatch(target, draft=draft, batch_size=4) as batch:
            others = [batch.submit(PROMPTS[i], temperature=1.0, **ENDLESS) for i in range(company)]
            texts.add(batch.submit("abc", temperature=1.0, seed=7, max_new_tokens=40, ignore_eos=True).result(120).text)
            for other in others:
                other.cancel()
    assert len(texts) == 1


def until(condition: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_others_go_on_while_a_long_prompt_is_read(target: TextModel, batch: outrider.ContinuousBatch) -> None:
    other = batch.submit("abc", **ENDLESS)
    next(other)
    before = len(other._asked.task.rounds)
    long = batch.submit("the quick brown fox " * 58, max_new_tokens=4, ignore_eos=True)
    next(long)
    assert len(other._asked.task.rounds) - before >= long.result(60).prompt_tokens // 64
    want = outrider.generate(
        target, "the quick brown fox " * 58, draft="suffix", num_draft_tokens=2, max_new_tokens=4, ignore_eos=True
    )
    assert long.result().tokens == want.tokens
    other.cancel()


def test_an_answer_that_is_cancelled_frees_its_place(batch: outrider.ContinuousBatch) -> None:
    long = [batch.submit(prompt, **ENDLESS) for prompt in PROMPTS[:3]]
    waiting = batch.submit("abc", max_new_tokens=3)
    pieces = [next(one) for one in long]
    assert batch.load == 4
    long[0].cancel()
    long[0].cancel()  # again does nothing
    assert len(waiting.result(60).tokens) == 3
    gone = long[0].result(60)
    assert gone.finish_reason == "cancelled"
    assert 0 < len(gone.tokens) < 5000
    assert pieces[0] + "".join(long[0]) == gone.text
    for one in long[1:]:
        one.cancel()


def test_one_that_waits_may_leave_before_its_turn(batch: outrider.ContinuousBatch) -> None:
    long = [batch.submit(prompt, **ENDLESS) for prompt in PROMPTS[:3]]
    next(long[0])
    waiting = batch.submit("abc", max_new_tokens=3)
    waiting.cancel()
    result = waiting.result(60)
    assert (result.finish_reason, result.tokens, result.text, list(waiting)) == ("cancelled", [], "", [])
    for one in long:
        one.cancel()


def test_what_nobody_holds_any_more_ends(batch: outrider.ContinuousBatch) -> None:
    answer: Any = batch.submit(PROMPTS[0], **ENDLESS)
    next(answer)
    task = answer._asked.task
    del answer
    gc.collect()
    until(lambda: batch.load == 0)
    assert task.result().finish_reason == "cancelled"
    assert len(task.result().tokens) < 5000


def test_a_result_that_takes_longer_than_somebody_waits_goes_on(batch: outrider.ContinuousBatch) -> None:
    answer = batch.submit(PROMPTS[0], **ENDLESS)
    with pytest.raises(TimeoutError, match=r"not done after 0.01 s: wait longer, or cancel"):
        answer.result(0.01)
    next(answer)
    answer.cancel()
    assert answer.result(60).finish_reason == "cancelled"


def test_the_end_of_a_block_waits_and_an_error_in_it_does_not(target: TextModel) -> None:
    with outrider.ContinuousBatch(target, draft=None, batch_size=2) as batch:
        answers = [batch.submit(prompt, max_new_tokens=20, ignore_eos=True) for prompt in PROMPTS]
    assert all(len(answer.result(0).tokens) == 20 for answer in answers)
    with pytest.raises(ParameterError, match="before the batch is closed"):
        batch.submit("abc")
    batch.close()  # again does nothing
    answers = []

    def interrupted() -> None:
        with outrider.ContinuousBatch(target, draft=None, batch_size=2) as batch:
            answers.extend(batch.submit(prompt, **ENDLESS) for prompt in PROMPTS)
            next(answers[0])
            raise MineError

    with pytest.raises(MineError):
        interrupted()
    assert [answer.result(0).finish_reason for answer in answers] == ["cancelled"] * len(PROMPTS)


def test_a_batch_lives_as_long_as_somebody_waits_for_it(target: TextModel) -> None:
    answer = outrider.ContinuousBatch(target, draft=None).submit("abc", max_new_tokens=30, ignore_eos=True)
    gc.collect()
    worker: _Worker = answer._leave.__self__  # type: ignore[attr-defined]
    assert len(answer.result(60).tokens) == 30
    gc.collect()  # the answer may be kept, and keeps nothing else
    worker.join(10)
    assert not worker._thread.is_alive()


@pytest.mark.slow
def test_a_process_ends_in_the_middle_of_a_round(target_folder: Path) -> None:
    lines = f"""
import os
import outrider
batch = outrider.ContinuousBatch(outrider.load({str(target_folder)!r}), draft=None)
answer = batch.submit("abc", max_new_tokens=400, ignore_eos=True)
next(answer)
child = os.fork()
if not child:
    try:
        batch.submit("abc")
    except outrider.OutriderError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print("ends")
"""
    forked = "requests must come from the process that made the batch: make one after the fork"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", lines], check=False, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{forked}\nends\n", "")


def test_a_constraint_and_processors_of_ones_own(target: TextModel, batch: outrider.ContinuousBatch) -> None:
    def evens(tokens: Tensor, logits: Tensor) -> Tensor:
        logits = logits.clone()
        logits[..., 1::2] = -float("inf")
        return logits

    followed = regex(target, "[ab]{4,6}")
    answers = [
        batch.submit("abc", processors=[evens], max_new_tokens=8),
        batch.submit("abc", processors=[followed], max_new_tokens=12),
        batch.submit("zebra", processors=[followed], max_new_tokens=12),
        batch.submit("abc", max_new_tokens=8),
    ]
    even, *patterned, plain = [answer.result(60) for answer in answers]
    assert all(token % 2 == 0 for token in even.tokens)
    assert even.tokens != plain.tokens
    assert all(4 <= len(one.text) <= 6 and set(one.text) <= set("ab") for one in patterned)
    want = outrider.generate(target, "abc", draft="suffix", num_draft_tokens=2, processors=[followed], max_new_tokens=12)
    assert patterned[0].tokens == want.tokens


def test_a_piece_can_be_read_as_soon_as_it_is_made_and_nobody_waits_to_submit(target: TextModel) -> None:
    """While the next round is under way."""
    options: dict[str, Any] = {"max_new_tokens": 8, "ignore_eos": True}
    whole = outrider.generate(target, "the quick", draft=None, **options)
    tracker, tokens = TextTracker(target.tokenizer, target.tokenizer.encode("the quick")), 0
    while not (first := tracker.take()):  # which may take several tokens, if they are parts of a character
        tracker(whole.tokens[tokens : tokens + 1])
        tokens += 1
    gate = Gate(tokens + 1)
    with outrider.ContinuousBatch(target, draft=None) as batch:
        answer = batch.submit("the quick", processors=[gate], **options)
        assert gate.reached.wait(60)
        assert next(answer) == first[0][0]
        other = batch.submit("abc", max_new_tokens=2)
        assert len(answer._asked.task.rounds) == tokens
        gate.opened.set()
        assert len(other.result(60).tokens) <= 2


def test_who_awaits_takes_nothing_from_who_reads(batch: outrider.ContinuousBatch) -> None:
    async def both() -> None:
        answer = batch.submit("the quick", max_new_tokens=30, ignore_eos=True)
        result = await answer
        assert "".join([piece async for piece in answer]) == result.text
        answer = batch.submit("the quick", max_new_tokens=30, ignore_eos=True)

        async def read() -> str:
            return "".join([piece async for piece in answer])

        text, again = await asyncio.gather(read(), asyncio.ensure_future(answer))
        assert text == again.text == result.text

    asyncio.run(both())


def test_who_gives_up_waiting_is_forgotten(batch: outrider.ContinuousBatch) -> None:
    long = [batch.submit(prompt, **ENDLESS) for prompt in PROMPTS[:3]]
    waiting = batch.submit("abc")

    async def poll() -> None:
        for _ in range(5):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(waiting), 0.001)
        await asyncio.sleep(0)
        assert waiting._asked._waiting == []

    asyncio.run(poll())
    for one in (*long, waiting):
        one.cancel()


def test_no_thread_is_left(target: TextModel) -> None:
    def alive() -> list[threading.Thread]:
        return [one for one in threading.enumerate() if one.name == "outrider-continuous-batch"]

    before = alive()
    for _ in range(3):
        with outrider.ContinuousBatch(target, draft=None) as batch:
            batch.submit("abc", max_new_tokens=2)
            assert len(alive()) == len(before) + 1
    assert alive() == before
