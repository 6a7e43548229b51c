"""A server of OpenAI's completions, for tests of what talks to one."""

from __future__ import annotations

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class Server:
    """An OpenAI server that answers what it is told to, on a port of its own."""

    def __init__(self, answer: Callable[[dict[str, Any]], tuple[int, bytes]]) -> None:
        outer = self
        self.asked: list[dict[str, Any]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                """Whatever is asked for isn't there, but a server is."""
                self.send_error(404)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append(body)
                code, content = answer(body)
                self.send_response(code)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self) -> Server:
        Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
