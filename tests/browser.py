"""A page in headless Chromium through the WebDriver protocol: console messages, requests, layout. No library needed."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def missing() -> bool:
    """Whether there is no Chromium with a driver here (Debian: chromium, chromium-driver)."""
    return shutil.which("chromedriver") is None or shutil.which("chromium") is None


class Browser:
    """One window."""

    def __init__(self, port: int, capabilities: dict[str, Any]) -> None:
        self._base = f"http://127.0.0.1:{port}"
        session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
        self._base += f"/session/{session['sessionId']}"

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, address: str) -> None:
        self._call("POST", "/url", {"url": address})

    def run(self, script: str) -> Any:
        """What a script in the page returns."""
        return self._call("POST", "/execute/sync", {"script": script, "args": []})

    def devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def console(self) -> list[str]:
        """Messages since the last call."""
        return [entry["message"] for entry in self._call("POST", "/se/log", {"type": "browser"})]

    def requests(self) -> list[str]:
        """Addresses that the page asked for since the last call."""
        entries = [json.loads(e["message"])["message"] for e in self._call("POST", "/se/log", {"type": "performance"})]
        return [e["params"]["request"]["url"] for e in entries if e["method"] == "Network.requestWillBeSent"]

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("GET", "/screenshot")))

    def close(self) -> None:
        self._call("DELETE", "")


@contextmanager
def browser(profile: Path, width: int = 1000, height: int = 800) -> Iterator[Browser]:
    """A browser with an empty profile, closed afterwards."""
    arguments = [*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"]
    capabilities = {
        "browserName": "chrome",
        "goog:chromeOptions": {"args": arguments, "binary": shutil.which("chromium")},
        "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
    }
    command = [str(shutil.which("chromedriver")), "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as driver:
        try:
            assert driver.stdout is not None
            line = next(line for line in driver.stdout if "started successfully on port" in line)
            window = Browser(int(line.rsplit(" ", 1)[1].strip().rstrip(".")), capabilities)
            try:
                yield window
            finally:
                window.close()
        finally:
            driver.terminate()
