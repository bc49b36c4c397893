"""From the engine's thread to the event loop: events of a ticket as an async iterator, and a client that leaves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import Request

from ..decode.request import Event

if TYPE_CHECKING:
    from ..decode.engine import Ticket


async def events(ticket: Ticket, ping: float | None = None) -> AsyncIterator[Event | None]:
    """The events of ``ticket``, Finished last; its errors are raised. None after each ``ping`` seconds of silence.

    A thread waits for the engine, so that the loop never does; it ends when the ticket does. Leaving the iterator early
    cancels the ticket.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[Event | BaseException | None] = asyncio.Queue()

    def post(item: Event | BaseException | None) -> None:
        try:
            loop.call_soon_threadsafe(queue.put_nowait, item)
        except RuntimeError:  # the loop was closed; nobody listens
            ticket.cancel()

    def pump() -> None:
        try:
            for event in ticket:
                post(event)
        except BaseException as error:
            post(error)
        else:
            post(None)

    threading.Thread(target=pump, name="mlxkv-events", daemon=True).start()
    try:
        getter: asyncio.Task[Event | BaseException | None] | None = None
        while True:
            getter = getter or asyncio.create_task(queue.get())
            try:
                done, _ = await asyncio.wait({getter}, timeout=ping)
            except asyncio.CancelledError:
                getter.cancel()
                raise
            if not done:
                yield None
                continue
            item, getter = getter.result(), None
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        ticket.cancel()  # does nothing to a ticket that is done


@asynccontextmanager
async def cancelled_with(request: Request, ticket: Ticket) -> AsyncIterator[None]:
    """While entered, a client that hangs up cancels the ticket. The body must have been read."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        ticket.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
