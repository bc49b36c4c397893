"""From the engine's threads to the event loop, without a thread that waits."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from starlette.requests import Request

from ..decode.request import Delta

if TYPE_CHECKING:
    from ..decode.ticket import Item, Ticket


#: seconds between two hand-overs while text comes fast. Each of them takes the interpreter from the engine's thread and
#: sends a packet; a screen shows nothing sooner
FRAME = 1 / 60


class Inbox:
    """Collects the items of tickets and hands them over on the loop, in order, as many as there are at once: the first
    at once, text that follows it within a frame together, an end at once again. Made, and handed over, on the loop's
    thread."""

    def __init__(self, take: Callable[[int, Item], None]) -> None:
        """``take(key, item)`` is called on the loop for each item."""
        self._loop = asyncio.get_running_loop()
        self._take = take
        self._items: deque[tuple[int, Item]] = deque()
        #: somebody will look at what comes now
        self._due = False

    def listen(self, key: int, ticket: Ticket) -> None:
        """Take the items of ``ticket`` from now on."""

        def told(item: Item) -> None:
            self._items.append((key, item))
            if self._due and isinstance(item, Delta) and not self._loop.is_closed():
                return
            take = self._empty if self._due else self._hand_over
            self._due = True
            try:
                self._loop.call_soon_threadsafe(take)
            except RuntimeError:  # the loop is closed: nobody is there to read it
                ticket.cancel()

        ticket.listen(told)

    def _hand_over(self) -> None:
        if self._empty():
            self._loop.call_later(FRAME, self._hand_over)
            return
        self._due = False  # before looking again, so that an item that comes now is not missed
        if self._items:
            self._due = True
            self._hand_over()

    def _empty(self) -> bool:
        """Whether there was text."""
        text = False
        while self._items:
            key, item = self._items.popleft()
            text |= isinstance(item, Delta)
            self._take(key, item)
        return text


@contextmanager
def hang_up(http: Request, gone: Callable[[], None]) -> Iterator[None]:
    """While entered, ``gone`` is called if the client hangs up. The body must have been read."""

    async def watch() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        gone()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
