"""From the engine's threads to the event loop, without a thread that waits."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from starlette.requests import Request

if TYPE_CHECKING:
    from ..decode.ticket import Item, Ticket


class Inbox:
    """Collects the items of tickets and hands them over on the loop, in order, as many as there are at once. Made, and
    handed over, on the loop's thread."""

    def __init__(self, take: Callable[[int, Item], None]) -> None:
        """``take(key, item)`` is called on the loop for each item."""
        self._loop = asyncio.get_running_loop()
        self._take = take
        self._items: deque[tuple[int, Item]] = deque()
        self._due = False

    def listen(self, key: int, ticket: Ticket) -> None:
        """Take the items of ``ticket`` from now on."""

        def told(item: Item) -> None:
            self._items.append((key, item))
            if self._due:  # whoever set it has not begun to take: this item is taken too
                return
            self._due = True
            try:
                self._loop.call_soon_threadsafe(self._hand_over)
            except RuntimeError:  # the loop is closed: nobody is there to read it
                ticket.cancel()

        ticket.listen(told)

    def _hand_over(self) -> None:
        self._due = False  # before looking, so that an item that comes now is not missed
        while self._items:
            self._take(*self._items.popleft())


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
