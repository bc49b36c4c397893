"""The life of a serving process: it listens at once, loads, answers, reloads its settings, drains, and ends.

Signals belong to the event loop here, not to uvicorn, which would raise them again after its end, when an engine still
has state to write.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import uvicorn

from ..errors import MlxkvError
from .guard import MAX_HEAD
from .protocol import protocol_of

if TYPE_CHECKING:
    from .server import Server

log = logging.getLogger("mlxkv.serve")

#: seconds between two looks for models that have been idle for long, and at what still runs when the server stops
TICK_S, DRAIN_TICK_S = 1.0, 0.02
#: seconds that answers which were ended by the server have to reach their clients
LAST_WORDS_S = 5


def uvicorn_config(server: Server, **more: Any) -> uvicorn.Config:
    """How uvicorn runs the application of ``server``."""
    from .app import create_app

    settings: dict[str, Any] = {
        "http": protocol_of(server),
        "ws": "none",
        "h11_max_incomplete_event_size": MAX_HEAD,
        "log_level": "warning",
        "log_config": None,  # what it says goes where everything does
        "access_log": False,
        "server_header": False,
        "timeout_graceful_shutdown": LAST_WORDS_S,
    }
    return uvicorn.Config(create_app(server), **(settings | more))


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Life:
    """One run of ``server`` on ``listener``.

    ``on_ready`` is called once what is to be there from the start is loaded. ``reloaded`` makes new settings take
    effect; it raises MlxkvError, and has then changed nothing. ``clean``, at the end: no thread is left that still
    loads a model.
    """

    def __init__(
        self,
        server: Server,
        listener: socket.socket,
        *,
        on_ready: Callable[[], None] = lambda: None,
        reloaded: Callable[[], None] = lambda: None,
    ) -> None:
        self.server, self.listener = server, listener
        self._on_ready, self._reloaded = on_ready, reloaded
        self._stop = asyncio.Event()
        self.clean = True
        self._reload_later = False
        self._reloading: asyncio.Task[None] | None = None  # a task that nobody holds may be collected
        self._error: MlxkvError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self) -> None:
        """Serve until ``stop``. Raises what ended it, if it was not asked to."""
        self._loop = asyncio.get_running_loop()
        http = _Uvicorn(uvicorn_config(self.server))
        serving = asyncio.create_task(http.serve(sockets=[self.listener]))
        working = asyncio.create_task(self._work())
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
            self.server.draining = True
            await self._drain()
            working.cancel()
            self.clean = await self.server.models.close(self.server.limits.grace_s)
        finally:
            working.cancel()
            http.should_exit = True
            await serving
        if self._error is not None:
            raise self._error

    def stop(self, error: MlxkvError | None = None) -> None:
        """Drain and end, at once if ``error`` is why. From any thread, also more than once."""
        self._error = self._error or error
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._stop.set)

    def reload(self) -> None:
        """Read the settings again, once the server is ready. What is wrong with them is logged, and the old ones stay.
        On the loop."""
        if self.server.loading is not None:
            self._reload_later = True
            return
        try:
            self._reloaded()
        except MlxkvError as error:
            log.error("the settings were not reloaded: %s", error)
            return
        log.info("the settings were reloaded")
        self._reloading = asyncio.get_running_loop().create_task(self._preload())

    async def _work(self) -> None:
        self.server.loading = ", ".join(entry.name for entry in self.server.models.first())
        try:
            await self.server.models.preload()
        except MlxkvError as error:
            cause = error.__cause__
            self.stop(cause if isinstance(cause, MlxkvError) else error)
            return
        self.server.loading = None
        self._on_ready()
        if self._reload_later:
            self.reload()
        while True:
            await asyncio.sleep(TICK_S)
            self.server.models.expire()

    async def _preload(self) -> None:
        try:
            await self.server.models.preload()
        except MlxkvError as error:
            log.error("after the reload: %s", error)

    async def _drain(self) -> None:
        """Wait for requests that are being answered, but not longer than the grace."""
        until = time.monotonic() + (0 if self._error is not None else self.server.limits.grace_s)
        while self.server.working and time.monotonic() < until:
            await asyncio.sleep(DRAIN_TICK_S)
        if self.server.working:
            log.warning("%d requests are ended by the server", self.server.working)
