"""Who has an engine: one thread at a time, in turns, whatever interrupts, collects or leaves."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from outrider.support import alone
from outrider.support.alone import Alone
from tests.helpers.threads import Engine, side_by_side


@pytest.fixture(autouse=True)
def many_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


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


@pytest.mark.slow
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
