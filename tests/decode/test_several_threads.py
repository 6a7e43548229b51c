"""One loaded model in several threads: each has the text that it has alone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import outrider
from outrider.beam import beam_search
from outrider.drafters import PromptLookupDrafter, SpeculativeDrafter
from outrider.models.base import LanguageModel, TextModel
from outrider.support import alone
from tests.helpers.marks import slow
from tests.helpers.threads import side_by_side

PROMPTS = ("the quick brown fox", "a b a b", "one two three one", "zebra")


@pytest.fixture(autouse=True)
def many_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class SeesLocks(PromptLookupDrafter):
    """An inner draft that looks who holds the engine that it is bound to."""

    def bind(self, target: LanguageModel) -> None:
        free: list[bool] = []

        def attempt() -> None:
            lock = alone._place_of(target).lock
            free.append(lock.acquire(blocking=False))
            if free[0]:
                lock.release()

        other = threading.Thread(target=attempt)
        other.start()
        other.join()
        self.was_free = free[0]


def test_drafts_are_bound_while_no_other_thread_runs_their_engines(pair: tuple[TextModel, TextModel]) -> None:
    target, draft = pair
    inner = SeesLocks()
    outrider.generate(target, "abc", draft=SpeculativeDrafter(draft, inner), max_new_tokens=2)
    assert not inner.was_free


@pytest.fixture(scope="module")
def pair(target_folder: Path, draft_folder: Path) -> tuple[TextModel, TextModel]:
    return outrider.load(target_folder), outrider.load(draft_folder)


_FORKED = """
import multiprocessing, sys, threading, time
import outrider
target = outrider.load(sys.argv[1])
outrider.generate(target, "abc", draft=None, max_new_tokens=5)  # passes are recorded by now
ending = threading.Event()
def busy():
    while not ending.is_set():
        outrider.generate(target, "abc", draft=None, max_new_tokens=40, ignore_eos=True)
other = threading.Thread(target=busy)
other.start()
time.sleep(0.5)
def child(queue):
    queue.put(outrider.generate(target, "the man", draft=None, max_new_tokens=5, ignore_eos=True).tokens)
context = multiprocessing.get_context("fork")
queue = context.Queue()
process = context.Process(target=child, args=(queue,), daemon=True)
process.start()
try:
    found = queue.get(timeout=60)
finally:
    ending.set()
other.join()
assert found == outrider.generate(target, "the man", draft=None, max_new_tokens=5, ignore_eos=True).tokens
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes can't be forked here")
def test_a_forked_process_does_not_wait_for_threads_that_it_has_not(target_folder: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # torch's own threads don't outlive a fork either
    command = [sys.executable, "-c", _FORKED, str(target_folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("draft", [slow(None), "prompt-lookup", "model", slow("early-exit:layers=1"), "both ways"])
@pytest.mark.parametrize("temperature", [slow(0.0), 1.0])
def test_threads_do_not_disturb_each_other(pair: tuple[TextModel, TextModel], draft: str | None, temperature: float) -> None:
    target, small = pair

    def call(i: int) -> Callable[[], object]:
        first, second = (small, target) if draft == "both ways" and i % 2 else (target, small)
        drafter = second if draft in ("model", "both ways") else draft
        return lambda: (
            outrider.generate(
                first,
                PROMPTS[i],
                draft=drafter,
                num_draft_tokens=3,
                max_new_tokens=40,
                temperature=temperature,
                seed=i,
                ignore_eos=True,
            ).tokens
        )

    calls = [call(i) for i in range(len(PROMPTS))]
    wanted = [one() for one in calls]
    for _ in range(3):
        assert side_by_side(calls) == wanted


def test_beams_beside_a_batch(pair: tuple[TextModel, TextModel]) -> None:
    target, small = pair
    calls: list[Callable[[], object]] = [
        lambda: [one.tokens for one in outrider.generate(target, list(PROMPTS), draft=small, max_new_tokens=24)],
        lambda: [
            one.tokens for one in beam_search(target, PROMPTS[0], num_beams=3, draft=small, max_new_tokens=24).sequences
        ],
        lambda: [one.tokens for one in beam_search(target, PROMPTS[1], num_beams=2, max_new_tokens=24).sequences],
    ]
    wanted = [one() for one in calls]
    assert side_by_side(calls) == wanted


def test_a_stream_that_waits_keeps_nobody_waiting(pair: tuple[TextModel, TextModel]) -> None:
    target, small = pair
    whole = outrider.generate(target, PROMPTS[0], draft=small, max_new_tokens=40)
    pieces = outrider.stream(target, PROMPTS[0], draft=small, max_new_tokens=40)
    begun = [next(pieces)]
    other = outrider.generate(target, PROMPTS[1], draft=small, max_new_tokens=20).tokens
    assert side_by_side([lambda: outrider.generate(target, PROMPTS[1], draft=small, max_new_tokens=20).tokens]) == [other]
    assert "".join([*begun, *pieces]) == whole.text


def test_what_is_left_is_freed_by_whoever_was_at_work(pair: tuple[TextModel, TextModel]) -> None:
    """A client goes while its reader and other generations are at work: neither end sees an error, and nothing stays."""
    target, small = pair
    ending = threading.Event()
    failed: list[BaseException] = []

    def others() -> None:
        while not ending.is_set():
            outrider.generate(target, PROMPTS[1], draft=small, max_new_tokens=6)

    def read(stream: outrider.Stream, begun: threading.Event) -> None:
        try:
            for _ in stream:
                begun.set()
        except BaseException as error:
            failed.append(error)

    company = threading.Thread(target=others)
    company.start()
    try:
        for number in range(12):
            stream = outrider.stream(target, PROMPTS[0], draft=small, max_new_tokens=120, ignore_eos=True, seed=number)
            begun = threading.Event()
            reader = threading.Thread(target=read, args=(stream, begun))
            reader.start()
            assert begun.wait(60)
            stream.close()
            reader.join(60)
            assert not reader.is_alive()
            assert stream.result.finish_reason == "cancelled"
            with pytest.raises(StopIteration):
                next(stream)
    finally:
        ending.set()
        company.join(60)
    assert not failed
    for model in pair:
        assert not model._open  # type: ignore[attr-defined]


def test_two_readers_of_one_stream_are_told(pair: tuple[TextModel, TextModel]) -> None:
    """Nothing is lost silently, as where a stream was closed."""
    target, _ = pair
    found: list[str] = []

    def asks(tokens: Tensor, scores: Tensor) -> Tensor:
        if not found:
            with pytest.raises(ValueError, match="already executing") as error:
                next(stream)
            found.append(str(error.value))
        return scores

    stream = outrider.stream(target, PROMPTS[0], draft=None, processors=[asks], max_new_tokens=4)
    assert "".join(stream) == stream.result.text
    assert found


@pytest.mark.slow
def test_a_stream_that_is_open_when_python_ends_says_nothing(target_folder: Path) -> None:
    code = "import sys, outrider; s = outrider.stream(outrider.load(sys.argv[1]), 'abc', draft=None); next(s)"
    told = subprocess.run([sys.executable, "-c", code, str(target_folder)], capture_output=True, text=True, check=True)
    assert not told.stderr


def test_a_generation_inside_of_a_round_of_the_same_engine(pair: tuple[TextModel, TextModel]) -> None:
    target, _ = pair
    options: dict[str, Any] = {"draft": None, "max_new_tokens": 12, "ignore_eos": True}
    wanted = [outrider.generate(target, prompt, **options).tokens for prompt in PROMPTS[:2]]
    inner: list[list[int]] = []

    def asks(tokens: Tensor, scores: Tensor) -> Tensor:
        if len(inner) < 3:
            inner.append(outrider.generate(target, PROMPTS[1], **options).tokens)
        return scores

    assert outrider.generate(target, PROMPTS[0], processors=[asks], **options).tokens == wanted[0]
    assert inner == [wanted[1]] * 3
    assert not target._open  # type: ignore[attr-defined]


_FORKED_WHILE_OTHERS_RECORD = """
import multiprocessing, sys, threading
from outrider.support.alone import OneAtATime
from outrider.models.passes import recording
entered, ending = threading.Event(), threading.Event()
def recording_something():
    with recording._recording.lock:
        entered.set()
        ending.wait()
other = threading.Thread(target=recording_something)
other.start()
entered.wait()
def child(queue):
    with recording._recording.lock:
        queue.put("free")
context = multiprocessing.get_context("fork")
queue = context.Queue()
process = context.Process(target=child, args=(queue,), daemon=True)
process.start()
try:
    assert queue.get(timeout=60) == "free"
finally:
    ending.set()
other.join()
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes can't be forked here")
def test_a_forked_process_does_not_wait_for_passes_that_others_record() -> None:
    command = [sys.executable, "-c", _FORKED_WHILE_OTHERS_RECORD]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
