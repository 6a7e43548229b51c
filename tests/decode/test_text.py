"""Streaming text: whole characters, stop strings wherever they fall, origins kept."""

from __future__ import annotations

import sys
from functools import cache
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import ParameterError
from outrider.support.text import Detokenizer, TextTracker
from tests.helpers.folders import make_tokenizer


@cache
def tokenizer() -> Any:
    return make_tokenizer()


def ids(text: str) -> list[int]:
    return list(tokenizer().encode(text))


@pytest.mark.slow
@given(st.text(max_size=60))
def test_pieces_add_up_and_no_character_is_split(text: str) -> None:
    detokenizer = Detokenizer(tokenizer(), ids("def "))
    pieces = [detokenizer.push(token) for token in ids(text)]
    rest = detokenizer.flush()
    assert "".join(pieces) + rest == tokenizer().decode(ids(text))
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_of_several_tokens_comes_with_its_last() -> None:
    tokens = ids("🦊")
    assert len(tokens) > 1
    detokenizer = Detokenizer(tokenizer(), [])
    assert [detokenizer.push(token) for token in tokens] == [""] * (len(tokens) - 1) + ["🦊"]


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    detokenizer = Detokenizer(tokenizer(), [])
    detokenizer.push(ids("🦊")[0])
    assert detokenizer.flush() == "\ufffd"


def feed(text: str, stop: tuple[str, ...], by: int = 1) -> tuple[TextTracker, int | None]:
    """Feed a text's tokens `by` at a time; → the tracker, and the number of tokens kept in all if it stopped."""
    tracker = TextTracker(tokenizer(), [], stop)
    tokens = ids(text)
    for start in range(0, len(tokens), by):
        kept = tracker(tokens[start : start + by])
        if kept is not None:
            tracker.finish()
            return tracker, start + kept
    tracker.finish()
    return tracker, None


@pytest.mark.parametrize("by", [1, 2, 5, 100])
def test_generation_stops_before_the_stop_string(by: int) -> None:
    tracker, kept = feed("the quick brown fox jumps over", ("fox j",), by)
    assert tracker.text == "the quick brown "
    assert kept is not None
    assert "fox j" in tokenizer().decode(ids("the quick brown fox jumps over")[:kept])
    assert "fox j" not in tokenizer().decode(ids("the quick brown fox jumps over")[: kept - 1])


def test_the_earliest_of_several_stop_strings_wins() -> None:
    assert feed("the quick brown fox", ("fox", "brown", "zebra"))[0].text == "the quick "


def test_a_beginning_that_comes_to_nothing_is_released() -> None:
    tracker, kept = feed("the quick brown fox", ("brown bear",))
    assert (tracker.text, kept) == ("the quick brown fox", None)


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    tracker = TextTracker(tokenizer(), [], ("fox jumps",))
    tracker(ids("the fox"))
    assert "".join(text for text, _ in tracker.take()) == "the "
    tracker(ids(" sleeps"))
    assert "".join(text for text, _ in tracker.take()) == "fox sleeps"


@given(
    st.text(alphabet="ab 🙂", min_size=1, max_size=30),
    st.text(alphabet="ab 🙂", min_size=1, max_size=3),
    st.integers(1, 9),
)
def test_the_text_is_what_comes_before_the_first_stop_string(text: str, stop: str, by: int) -> None:
    tracker, kept = feed(text, (stop,), by)
    assert tracker.text == text.split(stop, maxsplit=1)[0]
    assert (kept is not None) == (stop in text)


def test_pieces_know_the_token_they_came_from() -> None:
    tracker = TextTracker(tokenizer(), [], ())
    tokens = ids("def f(x): 🦊 return")
    tracker(tokens)
    tracker.finish()
    pieces = tracker.take()
    assert "".join(text for text, _ in pieces) == "def f(x): 🦊 return"
    assert [number for _, number in pieces] == sorted(number for _, number in pieces)
    fox = next(number for text, number in pieces if "🦊" in text)
    assert tokenizer().decode(tokens[: fox + 1]).endswith("🦊")


class InterruptedAtLine:
    """Raises `KeyboardInterrupt` at the n-th line of text.py that is run."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame: FrameType, event: str, arg: object) -> InterruptedAtLine | None:
        del arg
        if not frame.f_code.co_filename.endswith("outrider/support/text.py"):
            return None
        self.left -= event == "line"
        if self.left < 0:
            raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("finish", [False, True])
def test_an_interrupt_while_pieces_are_taken_loses_and_doubles_nothing(finish: bool) -> None:
    tokens = ids("naïve 🦊 f(x)")
    before = sys.gettrace()
    for line in range(1000):
        tracker = TextTracker(tokenizer(), ids("def "))
        tracker(tokens)
        sys.settrace(InterruptedAtLine(line))
        try:
            tracker.take()
            if finish:
                tracker.finish()
        except KeyboardInterrupt:
            interrupted = True
        else:
            interrupted = False
        finally:
            sys.settrace(before)
        assert tracker.text == "naïve 🦊 f(x)"
        if not interrupted:
            break
    assert 50 < line < 999


@pytest.mark.parametrize("stop", [("",), (3,)])
def test_empty_and_non_text_stop_strings_are_refused(stop: Any) -> None:
    with pytest.raises(ParameterError, match="stop"):
        TextTracker(tokenizer(), [], stop)
