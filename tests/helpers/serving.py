"""Our server on a port of its own, in a thread: real HTTP, for real clients."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import openai
import requests

import outrider
from outrider.models.base import TextModel
from outrider.serve.app import make_app
from outrider.serve.server import Server
from outrider.serve.service import Service

TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + ' ' }}{% endfor %}"


class Served:
    """A service, and where it answers."""

    def __init__(self, service: Service, server: Server, url: str, key: str | None) -> None:
        self.service, self.server, self.url, self._key = service, server, url, key

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self._key or "none", max_retries=0, timeout=60)

    def post(self, path: str, body: Any, **how: Any) -> requests.Response:
        return requests.post(f"{self.url}/v1/{path}", json=body, timeout=60, **how)

    def wait_for(self, load: int) -> None:
        """Until the batch has as many answers to give."""
        ends = time.monotonic() + 60
        while self.service.batch.load != load:
            assert time.monotonic() < ends
            time.sleep(0.01)


@contextmanager
def serving(
    target: TextModel,
    *,
    key: str | None = None,
    origins: Sequence[str] = (),
    size: int = 3,
    most_waiting: int = 8,
    most_tokens: int = 64,
    grace: float = 5.0,
    **how: Any,
) -> Iterator[Served]:
    """how: draft and length, as `ContinuousBatch` takes them."""
    batch = outrider.ContinuousBatch(target, batch_size=size, **{"draft": "suffix", "num_draft_tokens": 2, **how})
    service = Service(batch, ["tiny", "models/tiny"], most_tokens, size, most_waiting)
    ready = threading.Event()
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()  # before the application says that it is ready, as `outrider serve` does
    app = make_app(service, key, ready.set, origins)
    server = Server(app, service, grace=grace)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        assert ready.wait(60)
        yield Served(service, server, f"http://127.0.0.1:{listening.getsockname()[1]}", key)
    finally:
        server.should_exit = True
        thread.join(60)
        listening.close()
    assert not thread.is_alive()
    assert not batch.open
