"""The process that serves, and how it ends: texts under way have some time, and clients are told if that was too short."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from outrider.serve.service import Service

GRACE = 10.0  # seconds that texts under way have to end in
_ANSWERING = 10.0  # that their clients have to be told in that they are over


class Server(uvicorn.Server):
    """Ends by SIGINT and SIGTERM; by another one of these at once.

    ending: called if texts are still under way then.
    """

    def __init__(
        self, app: Starlette, service: Service, ending: Callable[[], None] = lambda: None, grace: float = GRACE
    ) -> None:
        patience = round(grace + _ANSWERING)
        super().__init__(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=patience))
        self._service, self._ending, self._grace = service, ending, grace
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal. uvicorn's own would let the process die by it in the end, before all has been said and closed."""
        del sig, frame
        if self.should_exit and self._loop is not None:
            self._loop.call_soon_threadsafe(self._service.end)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._service.batch.load:
            self._ending()
        timer = asyncio.get_running_loop().call_later(self._grace, self._service.end)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
