"""A server of OpenAI's completions around one function, for engines that have none: the standard library alone, one request
at a time, since a contest asks for one at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

Answer = Callable[[dict[str, Any]], tuple[list[int], dict[str, Any]]]
"""A request's body → the new tokens, and further fields of the answer."""


def serve(port: int, answer: Answer) -> None:
    """Until it is killed. GET says that it is up."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send({"status": "ok"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            tokens, more = answer(body)
            finish_reason = "length" if len(tokens) >= body["max_tokens"] else "stop"
            choice = {"index": 0, "text": "", "tokens": tokens, "finish_reason": finish_reason}
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(tokens)}
            self._send({"choices": [choice], "usage": usage, **more})

        def _send(self, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None: ...

    HTTPServer(("127.0.0.1", port), Handler).serve_forever()
