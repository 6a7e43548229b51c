"""Who is alive: one connection from every rank to rank 0, beside the engine's own, on which a process's end shows at once.

A collective call says at best that some connection broke, and some engines wait instead. Here the system closes the
connection of a process that ends, however it ends; a rank that fails says why first; and a machine that falls silent is
noticed by the signs of life that each side sends. Threads read the connections, since the main thread may be waiting in a
collective call.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SILENCE = 30.0  # seconds without a sign of life
BEAT = 2.0  # seconds between two
GRACE = 4.0  # seconds that the main thread has to end by itself after a rank was lost
CONNECT = 120.0
LONGEST = 65536  # bytes of a message
_LOCAL = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Address:
    """Where rank 0 listens, and the word that shows that a caller belongs to this job."""

    host: str
    port: int
    word: str


class _Line:
    """A connection with messages of one JSON line each; an empty line is a sign of life."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.heard = time.monotonic()
        self.closed = False
        self._buffer = b""
        self._sending = threading.Lock()

    def send(self, message: dict[str, object] | None) -> None:
        text = "" if message is None else json.dumps(message)
        with self._sending:
            try:
                self.socket.sendall(text.encode() + b"\n")
            except OSError:
                self.closed = True

    def read(self) -> list[dict[str, object]]:
        """The messages that have come; sets `closed` at the end of the connection, and where something else comes."""
        try:
            data = self.socket.recv(LONGEST)
        except OSError:
            data = b""
        self.heard = time.monotonic()
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        messages = [_message(line) for line in lines if line]
        self.closed = self.closed or not data or None in messages or len(self._buffer) > LONGEST
        return [message for message in messages if message is not None]


class LeaderWatch:
    """Rank 0's side. reason: why the job can't go on, None as long as all ranks are there."""

    def __init__(self, ranks: int) -> None:
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        family = socket.AF_INET6 if host == "::1" else socket.AF_INET
        local = host if family is socket.AF_INET6 else "127.0.0.1"
        self._server = socket.create_server((local if host in _LOCAL else "", 0), family=family)
        self.address = Address(host, self._server.getsockname()[1], secrets.token_hex(16))
        self._ranks = ranks
        self._lines: dict[int, _Line] = {}
        self._errors: dict[int, str] = {}
        self._lost: str | None = None
        self._changed = threading.Event()
        self._told = False
        self._ended = False

    def connect(self) -> None:
        """Wait for all other ranks to call, then watch them. Raises `TimeoutError` if one does not."""
        callers: dict[socket.socket, _Line] = {}  # who have not said who they are: one that is silent keeps nobody waiting
        deadline = time.monotonic() + CONNECT
        while len(self._lines) < self._ranks - 1:
            ready = select.select([self._server, *callers], [], [], max(0.0, deadline - time.monotonic()))[0]
            if not ready or time.monotonic() > deadline:
                raise TimeoutError(f"ranks that have called within {CONNECT:.0f} s: {len(self._lines)} of {self._ranks - 1}")
            for each in ready:
                if each is self._server:
                    connection = self._server.accept()[0]
                    callers[connection] = _Line(connection)
                elif self._greeted(callers[each]):
                    del callers[each]
                    deadline = time.monotonic() + CONNECT
                elif callers[each].closed:
                    callers.pop(each).socket.close()
        for stranger in (self._server, *callers):
            stranger.close()
        threading.Thread(target=self._watch, daemon=True, name="outrider watch").start()

    def _greeted(self, line: _Line) -> bool:
        """Whether a caller has said that it is one of the ranks, which are watched from now on."""
        messages = line.read()
        if not messages:
            return False
        hello, *more = messages
        rank = hello.get("rank")
        ours = hmac.compare_digest(str(hello.get("word", "")).encode(), self.address.word.encode())
        if not ours or not isinstance(rank, int):
            line.closed = True
            return False
        self._lines[rank] = line
        self._note(rank, more)
        return True

    @property
    def reason(self) -> str | None:
        return self._lost

    def wait(self, seconds: float) -> str | None:
        """The reason, given some time to become known."""
        self._changed.wait(seconds)
        return self._lost

    def tell(self) -> None:
        """The main thread knows the reason and ends the job by itself."""
        self._told = True

    def end(self) -> None:
        """Tell the other ranks to end now, wherever they are, and stop watching."""
        self._ended = True
        for line in self._lines.values():
            line.send({"end": True})

    def close(self) -> None:
        """Stop watching: the others end by themselves."""
        self._ended = True

    def _watch(self) -> None:
        beaten = 0.0
        while not self._ended and self._lost is None:
            ranks = {line.socket: rank for rank, line in self._lines.items()}
            for ready in select.select(list(ranks), [], [], BEAT / 4)[0]:
                self._hear(ranks[ready])
            now = time.monotonic()
            for rank, line in self._lines.items():
                if now - line.heard > SILENCE:
                    self._lose(f"rank {rank} gave no sign of life for {SILENCE:.0f} s")
            if now - beaten > BEAT:
                beaten = now
                for line in self._lines.values():
                    line.send(None)
        if self._lost is not None and not self._ended:
            self._force()

    def _hear(self, rank: int) -> None:
        line = self._lines[rank]
        self._note(rank, line.read())
        if line.closed and not self._ended:
            said = self._errors.get(rank)
            self._lose(
                f"rank {rank}: {said}" if said else f"rank {rank} has ended without a word: it was killed, or crashed"
            )

    def _note(self, rank: int, messages: Sequence[Mapping[str, object]]) -> None:
        """What a rank says before it ends."""
        for message in messages:
            if "error" in message:
                self._errors[rank] = str(message["error"])

    def _lose(self, reason: str) -> None:
        self._lost = self._lost or reason
        self._changed.set()

    def _force(self) -> None:
        """The main thread may wait for the lost rank for ever."""
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline:
            if self._told or self._ended:
                return
            time.sleep(0.05)
        _say(f"outrider: {self._lost}")
        self.end()
        os._exit(1)


class FollowerWatch:
    """Another rank's side: it ends this process when rank 0 ends it, or is gone."""

    def __init__(self, address: Address, rank: int) -> None:
        self._rank = rank
        self._ended = threading.Event()
        self._line = _Line(socket.create_connection((address.host, address.port), timeout=CONNECT))
        self._line.socket.settimeout(None)
        self._line.send({"rank": rank, "word": address.word})
        threading.Thread(target=self._watch, daemon=True, name="outrider watch").start()
        threading.Thread(target=self._beat, daemon=True, name="outrider beat").start()

    def fail(self, reason: str) -> None:
        """Tell rank 0 why this rank ends."""
        self._ended.set()
        self._line.send({"error": reason})

    def close(self) -> None:
        """Stop watching: rank 0 ends the job."""
        self._ended.set()

    def _beat(self) -> None:
        while not self._ended.is_set() and not self._line.closed:
            time.sleep(BEAT)
            self._line.send(None)

    def _watch(self) -> None:
        while not self._ended.is_set():
            ready = select.select([self._line.socket], [], [], SILENCE)[0]
            told = any("end" in message for message in self._line.read()) if ready else False
            if self._ended.is_set():
                return
            if told:
                os._exit(0)
            if not ready or self._line.closed:
                if self._rank == 1:  # rank 0 can't say it any more
                    _say("outrider: rank 0 has ended without a word: it was killed, or crashed; the other ranks end, too")
                os._exit(1)


def _message(line: bytes) -> dict[str, object] | None:
    """None for what is none of ours."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
