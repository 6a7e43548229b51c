"""The connection that tells of ranks: whoever else calls neither ends nor holds up the start of a job."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from outrider.sharded import watch
from outrider.sharded.watch import FollowerWatch, LeaderWatch


@pytest.fixture
def leader(monkeypatch: pytest.MonkeyPatch) -> Iterator[LeaderWatch]:
    """Of two ranks."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    found = LeaderWatch(2)
    yield found
    found.close()
    for thread in threading.enumerate():
        if thread.name == "outrider watch":
            thread.join(10)
    for connection in (found._server, *(line.socket for line in found._lines.values())):
        connection.close()


def call(leader: LeaderWatch, data: bytes = b"") -> socket.socket:
    connection = socket.create_connection((leader.address.host, leader.address.port), timeout=10)
    connection.sendall(data)
    return connection


def test_strangers_are_turned_away_and_silent_ones_keep_nobody_waiting(leader: LeaderWatch) -> None:
    thread = threading.Thread(target=leader.connect, daemon=True)
    thread.start()
    silent = call(leader)
    said = [b"5\n", b"[]\n", b"{\n", b"\xff\n", b'{"word": 3}\n', b'{"rank": 1, "word": "guessed"}\n', b"x" * 200_000]
    for data in said:
        with suppress(ConnectionError), call(leader, data) as stranger:  # nor is all read that it says
            assert stranger.recv(1) == b""
    half = call(leader, json.dumps({"rank": 1, "word": leader.address.word}).encode())  # without its end yet
    assert thread.is_alive()
    half.sendall(b"\n")
    thread.join(10)
    assert not thread.is_alive()
    assert silent.recv(1) == b""
    silent.close()
    assert leader.reason is None
    leader.tell()  # this test ends by itself
    half.close()
    assert "rank 1 has ended without a word" in (leader.wait(10) or "")


def test_a_rank_that_says_what_is_no_message_is_lost(leader: LeaderWatch) -> None:
    thread = threading.Thread(target=leader.connect, daemon=True)
    thread.start()
    rank = call(leader, json.dumps({"rank": 1, "word": leader.address.word}).encode() + b"\n")
    thread.join(10)
    leader.tell()  # this test ends by itself
    rank.sendall(b'{"error": "no memory"}\nnonsense\n')
    assert leader.wait(10) == "rank 1: no memory"
    rank.close()


def test_what_a_rank_says_with_its_greeting_is_heard(leader: LeaderWatch) -> None:
    greeting = json.dumps({"rank": 1, "word": leader.address.word}).encode()
    call(leader, greeting + b'\n{"error": "no memory"}\n').close()
    leader.tell()  # this test ends by itself
    leader.connect()
    assert leader.wait(10) == "rank 1: no memory"


def test_ranks_that_do_not_call_are_not_waited_for_for_ever(leader: LeaderWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "CONNECT", 0.05)
    with pytest.raises(TimeoutError, match="ranks that have called within 0 s: 0 of 1"):
        leader.connect()


def test_a_follower_is_one_of_them(leader: LeaderWatch) -> None:
    thread = threading.Thread(target=leader.connect, daemon=True)
    thread.start()
    follower = FollowerWatch(leader.address, 1)
    thread.join(10)
    assert not thread.is_alive()
    leader.tell()
    follower.fail("it has no weights")
    follower._line.socket.shutdown(socket.SHUT_RDWR)  # as when its process ends
    assert leader.wait(10) == "rank 1: it has no weights"
    for thread in threading.enumerate():
        if thread.name == "outrider beat":
            thread.join(10)
    follower._line.socket.close()
