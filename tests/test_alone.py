"""One loaded model in several threads: each has the text that it has alone."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import outrider
from outrider.alone import Alone
from outrider.beam import beam_search
from outrider.models.base import TextModel

PROMPTS = ("the quick brown fox", "a b a b", "one two three one", "zebra")


@pytest.fixture(autouse=True)
def many_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(scope="module")
def pair(target_folder: Path, draft_folder: Path) -> tuple[TextModel, TextModel]:
    return outrider.load(target_folder), outrider.load(draft_folder)


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


@pytest.mark.parametrize("draft", [None, "prompt-lookup", "model", "early-exit:layers=1", "both ways"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
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


def test_an_interrupt_while_it_waits_leaves_nothing_locked() -> None:
    class Engine:
        pass

    first, second = Engine(), Engine()
    alone, both = Alone([second]), Alone([first, second])
    locks = both._own

    class Interrupted:
        """Of a lock: the wait for it is interrupted."""

        def acquire(self) -> None:
            raise KeyboardInterrupt

    both._own = [locks[0], Interrupted()]  # type: ignore[list-item]
    with pytest.raises(KeyboardInterrupt), both:
        raise AssertionError
    both._own = locks

    def enter() -> str:
        with both, alone, both:
            return "entered"

    assert side_by_side([enter, enter]) == ["entered", "entered"]
