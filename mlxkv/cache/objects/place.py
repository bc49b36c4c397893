"""The object store itself, reached through obstore: listing, getting and putting objects, each with a time limit.

One thread runs an event loop for all that is under way; at most ``at_once`` requests are with the store at a time.
Whoever wants something hands a coroutine over and waits for it (``Loop.run``), or does not (``Loop.begin``).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import time
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any, TypeVar

from ...errors import ConfigError
from ..connectors import ConnectorError
from .url import check_url

T = TypeVar("T")

#: downloads and uploads that are with the store at a time, and look-ups besides; of them, uploads at most
AT_ONCE, _PUTS = 16, 8
#: names of one place that are listed at most: what is used, not what an adversary may have put there
_NAMES, _PAGE = 5000, 1000
#: seconds for a connection, and without a byte of an answer
_CONNECT, _SILENT = 2.0, 30.0
_TICK = 0.05
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


class Stopped(Exception):
    """Nobody waits for it any more."""


class Replaced(Exception):
    """An object is not the one that was listed."""


def open_store(url: str) -> Any:
    """obstore's object for a URL; nothing is asked of it yet. Raises ConfigError."""
    check_url(url)
    try:
        from obstore.store import from_url
    except ImportError:
        raise ConfigError("An object store needs the package obstore.", "pip install 'mlxkv[object]'") from None
    more: dict[str, Any] = {}
    if url.lower().startswith("file:"):
        more = {"mkdir": True}
    else:
        endpoint = next((v for n in _ENDPOINTS if (v := os.environ.get(n))), "")
        more["client_options"] = {
            "connect_timeout": timedelta(seconds=_CONNECT),
            "timeout": timedelta(seconds=_SILENT),
            # who names an endpoint without TLS means it
            "allow_http": endpoint.startswith("http://") or os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true",
        }
        more["retry_config"] = {"max_retries": 2, "retry_timeout": timedelta(seconds=5)}
    try:
        return from_url(url, **more)
    except Exception as e:
        raise ConfigError(
            f"The object store {url} cannot be used: {_first_line(e)}.", "See docs/object-store.md."
        ) from None


def _first_line(e: BaseException) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0][:300]


def _below(path: str, place: str) -> str:
    """The name of an object directly under ``place``, else ''."""
    above, _, name = path.rpartition("/")
    return name if above == place else ""


class Loop:
    """A thread with an event loop, started when it is first needed."""

    def __init__(self, name: str = "mlxkv-objects") -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False

    def begin(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Have it done. Raises ConnectorError once closed."""
        with self._lock:
            if self._closed:
                work.close()
                raise ConnectorError("the object tier is closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T], until: float, stopped: Callable[[], bool] = lambda: False) -> T:
        """Have it done and wait for it. Raises what it raises, TimeoutError at ``until`` (``time.monotonic()``), and
        Stopped; it is cancelled then."""
        future = self.begin(work)
        while True:
            left = until - time.monotonic()
            try:
                return future.result(max(0.0, min(left, _TICK)))
            except concurrent.futures.TimeoutError:
                if future.done():  # the work's own time-out
                    raise
                if left <= 0 or stopped():
                    future.cancel()
                    raise (TimeoutError if left <= 0 else Stopped)() from None

    def close(self, timeout: float) -> None:
        with self._lock:
            self._closed = True
            loop, thread, self._loop = self._loop, self._thread, None
        if loop is None or thread is None:
            return

        async def cancel_all() -> None:
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(cancel_all(), loop).result(timeout)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout)


class Place:
    """Objects under a URL. All methods are coroutines of the loop's thread and raise what obstore raises, or
    TimeoutError."""

    def __init__(self, url: str, at_once: int = AT_ONCE) -> None:
        self.url = url
        self._store = open_store(url)
        # a look-up waits for nothing that may take long, and a download for uploads no longer than for a part of them
        self._looking, self._moving = asyncio.Semaphore(at_once), asyncio.Semaphore(at_once)
        self._putting = asyncio.Semaphore(max(1, min(_PUTS, at_once // 2)))

    async def names(self, place: str, within: float) -> dict[str, int]:
        """name -> bytes of the objects directly under ``place``."""
        import obstore

        async def listed() -> dict[str, int]:
            found: dict[str, int] = {}
            async for page in obstore.list(self._store, place, chunk_size=_PAGE):
                found.update((name, int(o["size"])) for o in page if (name := _below(str(o["path"]), place)))
                if len(found) >= _NAMES:
                    break
            return found

        async with self._looking:
            return await asyncio.wait_for(listed(), within)

    async def get(self, path: str, within: float, nbytes: int | None = None) -> memoryview:
        """``nbytes``: how many it has. Raises Replaced, before more than the beginning is read, if it has not."""
        import obstore

        async def got() -> memoryview:
            result = await obstore.get_async(self._store, path)
            if nbytes is not None and (size := int(result.meta["size"])) != nbytes:
                raise Replaced(f"it was listed with {nbytes} bytes, and has {size}")
            return memoryview(await result.bytes_async())

        async with self._moving:
            return await asyncio.wait_for(got(), within)

    async def put(self, path: str, data: bytes, within: float) -> None:
        """Whole, or not at all; in place of what was there."""
        import obstore

        async with self._putting, self._moving:
            await asyncio.wait_for(obstore.put_async(self._store, path, data, max_concurrency=4), within)

    async def delete(self, path: str, within: float) -> None:
        """For what a check has put there itself."""
        import obstore

        await asyncio.wait_for(obstore.delete_async(self._store, path), within)


def describe(e: BaseException) -> str:
    """What went wrong, in one line."""
    if isinstance(e, TimeoutError):
        return "it did not answer in time"
    return _first_line(e)
