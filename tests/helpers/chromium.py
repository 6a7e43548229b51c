"""A real browser for tests: headless Chromium, spoken to by the DevTools protocol over its pipe: nothing else is needed.

The protocol's messages are JSON, each ended by a NUL byte, on file descriptors 3 (to the browser) and 4 (from it).
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
    "about:blank",
)
TIMEOUT = 60.0


class Browser:
    """One page. complaints: errors, warnings and console messages; requests: addresses asked for, since `open`."""

    def __init__(self, to: int, since: int) -> None:
        self._to, self._from = to, since
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self._seen: set[str] = set()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        made = self._call("Target.createTarget", url="about:blank")
        self._session = self._call("Target.attachToTarget", targetId=made["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, path: Path, width: int = 1200, height: int = 900, dark: bool = False, media: str = "") -> None:
        """Load a file and wait until it is there."""
        self.complaints, self.requests = [], []
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self._seen.clear()
        self._call("Page.navigate", url=path.resolve().as_uri())
        self._wait("Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        got = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in got, got["exceptionDetails"]
        return got["result"].get("value")

    def move_to(self, selector: str) -> None:
        """Point at the first element of a selector, scrolled into view."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{found}.scrollIntoView({{block: 'center'}})")
        x, y, width, height = self.evaluate(f"(r => [r.x, r.y, r.width, r.height])({found}.getClientRects()[0])")
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x + width / 2, y=y + height / 2)

    def screenshot(self, path: Path, whole: bool = True) -> None:
        """The page (whole: beyond the window, too) as PNG."""
        got = self._call("Page.captureScreenshot", captureBeyondViewport=whole, **({"clip": self._clip()} if whole else {}))
        path.write_bytes(base64.b64decode(got["data"]))

    def pdf(self, path: Path) -> None:
        """The page as it is printed."""
        path.write_bytes(base64.b64decode(self._call("Page.printToPDF", printBackground=False)["data"]))

    def _clip(self) -> dict[str, float]:
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        return {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 12000), "scale": 1}

    def _call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._number, "method": method, "params": parameters, **session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (got := self._read()).get("id") != self._number:
            self._note(got)
        assert "error" not in got, (method, got["error"])
        return got["result"]

    def _wait(self, event: str) -> None:
        while event not in self._seen:
            self._note(self._read())

    def _note(self, message: dict[str, Any]) -> None:
        method, given = message.get("method", ""), message.get("params", {})
        self._seen.add(method)
        if method == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(json.dumps(given["args"]))
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(given["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.complaints.append(given["entry"]["text"])

    def _read(self) -> dict[str, Any]:
        until = time.monotonic() + TIMEOUT
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, until - time.monotonic()))
            block = os.read(self._from, 1 << 20) if ready else b""
            if not block:
                raise TimeoutError("Chromium does not answer")
            self._buffer += block
        one, _, self._buffer = self._buffer.partition(b"\0")
        got: dict[str, Any] = json.loads(one)
        return got


def _pipe() -> tuple[int, int]:
    """A pipe with numbers well above 3 and 4, or the shell's redirections might overwrite one another."""
    low = os.pipe()
    read, write = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in low)
    for end in low:
        os.close(end)
    return read, write


@contextmanager
def browser() -> Iterator[Browser]:
    """A Chromium of its own, with an empty profile, ended with the block."""
    assert CHROMIUM is not None
    with TemporaryDirectory() as profile:
        (in_end, to), (since, out_end) = _pipe(), _pipe()
        shell = f'exec "$@" 3<&{in_end} 4>&{out_end}'
        command = ["bash", "-c", shell, "chromium", CHROMIUM, f"--user-data-dir={profile}", *_FLAGS]
        quiet = subprocess.DEVNULL
        with subprocess.Popen(command, pass_fds=(in_end, out_end), stdin=quiet, stdout=quiet, stderr=quiet) as process:
            os.close(in_end)
            os.close(out_end)
            try:
                yield Browser(to, since)
            finally:
                os.close(to)  # the browser ends when its pipe is closed
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                os.close(since)
