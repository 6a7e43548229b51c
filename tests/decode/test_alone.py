"""One loaded model in several threads: each has the text that it has alone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import outrider
from outrider.beam import beam_search
from outrider.drafters import PromptLookupDrafter, SpeculativeDrafter
from outrider.models.base import LanguageModel, TextModel
from outrider.support import alone
from outrider.support.alone import Alone
from tests.helpers.marks import slow

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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes can't be forked here")
def test_a_forked_process_does_not_wait_for_threads_that_it_has_not(target_folder: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # torch's own threads don't outlive a fork either
    command = [sys.executable, "-c", _FORKED, str(target_folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr


def side_by_side(calls: list[Callable[[], object]]) -> list[object]:
    """What each gives in a thread of its own."""
    found: list[object] = [None] * len(calls)

    def run(i: int) -> None:
        try:
            found[i] = calls[i]()
        except BaseException as error:  # to be compared with what was wanted
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    return found


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


class Engine:
    """Anything that can be weakly referred to."""


INTERRUPTED = """
import _thread, signal, threading, time
from outrider.support.alone import Alone, _here

class Engine: pass
engines = [Engine(), Engine()]
both, armed, hits = Alone(engines), False, 0

def handler(*_):
    global armed, hits
    if armed:
        armed, hits = False, hits + 1
        raise KeyboardInterrupt

def interrupts():
    while time.time() < end:
        _thread.interrupt_main()
        time.sleep(0.0002)

signal.signal(signal.SIGINT, handler)
end = time.time() + 4
threading.Thread(target=interrupts, daemon=True).start()
while time.time() < end:
    try:
        armed = True
        both.run(both.hold, int), both.hold(int), both.finish(int)
        armed = False
    except KeyboardInterrupt:
        pass
assert (_here.rounds, _here.held) == (0, ()), (_here.rounds, _here.held)
both.run(int)
assert not _here.later
other = threading.Thread(target=both.run, args=(int,), daemon=True)
other.start()
other.join(20)
print(hits, "locked" if other.is_alive() else "free")
"""


def test_interrupts_anywhere_leave_nothing_locked() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    hits, state = done.stdout.split()
    assert int(hits) > 100
    assert state == "free"


def test_what_ends_in_the_middle_of_a_round_ends_after_it() -> None:
    """As where the collector finds a forgotten stream there: waiting for its engine could be for ever."""
    first, second = Engine(), Engine()
    mine, theirs = Alone([first]), Alone([second])
    order: list[str] = []
    inside, done = threading.Event(), threading.Event()

    def holds_it() -> None:
        def wait() -> None:
            inside.set()
            assert done.wait(60)

        theirs.run(wait)

    def ends_another() -> None:
        def round_() -> None:
            assert inside.wait(60)
            theirs.finish(lambda: order.append("ended"))
            order.append("made")
            done.set()

        mine.run(round_)

    assert side_by_side([holds_it, ends_another]) == [None, None]
    assert order == ["made", "ended"]


def test_threads_take_turns() -> None:
    """Whoever has just made a round does not make the next one where others wait: a lock alone lets it."""
    both, together = Alone([Engine()]), threading.Barrier(3)
    order: list[int] = []

    def round_(number: int) -> None:
        time.sleep(0.001)
        order.append(number)

    def rounds(number: int) -> Callable[[], None]:
        def go() -> None:
            together.wait(60)
            for _ in range(60):
                both.run(round_, number)

        return go

    side_by_side([rounds(number) for number in range(3)])
    while_all_go = order[: min(len(order) - 1 - order[::-1].index(number) for number in range(3))]
    again = sum(one == other for one, other in pairwise(while_all_go))
    assert len(while_all_go) > 100
    assert again < len(while_all_go) / 10


def test_whoever_leaves_does_not_wait_for_the_rounds_of_others() -> None:
    first, second = Engine(), Engine()
    one, both = Alone([first]), Alone([first, second])
    inside, left = threading.Event(), threading.Event()
    freed: list[str] = []

    def round_() -> None:
        def wait() -> None:
            inside.set()
            assert left.wait(60)
            freed.append("not yet")

        one.run(wait)

    def leaves() -> None:
        assert inside.wait(60)
        both.finish(lambda: freed.append(threading.current_thread().name), wait=False)
        assert not freed
        left.set()

    side_by_side([round_, leaves])
    assert freed[0] == "not yet"
    assert len(freed) == 2
    both.finish(lambda: freed.append("at once"), wait=False)  # nobody is there
    assert freed[2:] == ["at once"]


def test_what_is_left_while_another_one_ends_is_freed_as_well() -> None:
    """Two that leave at once: the second finds the first one at work, which makes no round after it."""
    one = Alone([Engine()])
    inside, left = threading.Event(), threading.Event()
    freed: list[str] = []

    def ends() -> None:
        def slowly() -> None:
            inside.set()
            assert left.wait(60)
            freed.append("first")

        one.finish(slowly)

    def leaves() -> None:
        assert inside.wait(60)
        one.finish(lambda: freed.append("second"), wait=False)
        left.set()

    side_by_side([ends, leaves])
    assert freed == ["first", "second"]


@pytest.mark.parametrize("how", ["hold", "finish", "run"])
def test_what_the_collector_ends_while_places_are_taken_waits_for_no_later_one(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One place is held by then: waiting for another that its holder wants the first of would be for ever."""
    first, second = Engine(), Engine()
    both, other = Alone([first, second]), Alone([second])
    collected = Alone([(third := Engine())])
    inside, wanted = threading.Event(), threading.Event()
    ended: list[str] = []
    plain = alone.OneAtATime.give_way

    def give_way(place: alone.OneAtATime) -> None:
        plain(place)
        if threading.current_thread() is taking and place is both._places[1]:
            inside.set()
            assert wanted.wait(60)
            collected.finish(lambda: ended.append("collected"))

    def holds_third() -> None:
        def wants_first() -> None:
            assert inside.wait(60)
            wanted.set()
            Alone([first]).run(ended.append, "wanted")

        collected.run(wants_first)

    def takes() -> None:
        getattr(both, how)(lambda: ended.append("taken"))

    monkeypatch.setattr(alone.OneAtATime, "give_way", give_way)
    taking = threading.Thread(target=takes, daemon=True)
    holding = threading.Thread(target=holds_third, daemon=True)
    for thread in (holding, taking):
        thread.start()
    for thread in (holding, taking):
        thread.join(20)
        assert not thread.is_alive()
    assert sorted(ended) == ["collected", "taken", "wanted"]
    other.run(ended.append, "free")
    del third


def test_what_an_interrupt_left_undone_any_thread_does() -> None:
    one = Alone([Engine()])
    done: list[str] = []

    def interrupted() -> None:
        if not done:
            done.append("interrupted")
            raise KeyboardInterrupt
        done.append(threading.current_thread().name)

    with pytest.raises(KeyboardInterrupt):
        one.finish(interrupted)
    other = threading.Thread(target=one.run, args=(int,), name="another")
    other.start()
    other.join(20)
    assert done == ["interrupted", "another"]


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


def test_engines_without_weak_references_or_hashes_are_kept_apart_too() -> None:
    class Slotted:
        __slots__ = ()

    class Equal:
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            return True

    for kind in (Slotted, Equal):
        one, other = kind(), kind()
        assert Alone([one, other]).run(lambda: 3) == 3
        assert len(Alone([one, other, one])._places) == 2


def test_what_was_put_off_is_done_once_and_whatever_puts_it_off() -> None:
    first, second = Engine(), Engine()
    mine, theirs = Alone([first]), Alone([second])
    order: list[str] = []

    def ends() -> None:
        order.append("first")
        theirs.finish(lambda: order.append("second"))  # as where the collector finds a stream meanwhile

    mine.finish(ends)
    assert order == ["first", "second"]
    mine.run(lambda: theirs.finish(lambda: order.append(str(theirs.run(lambda: len(order))))))  # its end makes a round, too
    assert order == ["first", "second", "2"]

    def fails() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        mine.finish(fails)
    assert mine.run(lambda: theirs.finish(fails)) is None  # another's
    assert not alone._here.later


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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes can't be forked here")
def test_a_forked_process_does_not_wait_for_passes_that_others_record() -> None:
    command = [sys.executable, "-c", _FORKED_WHILE_OTHERS_RECORD]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
