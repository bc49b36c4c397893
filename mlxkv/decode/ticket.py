"""A ticket: the caller's end of one request. Events come out of it; cancellation goes in."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from .request import Completion, Event, Finished, Request

#: what comes out of a ticket: events, then an error if it failed, then None
Item = Event | BaseException | None


class Caller(Protocol):
    """Who a sequence answers. ``received``: when its request came, ``time.monotonic()``."""

    request: Request
    received: float

    @property
    def cancelled(self) -> bool: ...

    def put(self, event: Event) -> None: ...

    def fail(self, error: BaseException) -> None: ...


class Ticket:
    """Iterate it for events, the last of which is ``Finished``; a failure is raised from the iterator.

    Thread-safe: each event goes to one of the threads that wait, and all of them see the end.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.received = time.monotonic()
        self._events: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._cancelled = threading.Event()
        self._told: Callable[[Item], None] | None = None
        self._telling = threading.Lock()

    def cancel(self) -> None:
        """Stop at the next step edge. What was computed is kept; the completion's finish_reason is ``cancelled``. A
        request that still waits in the queue gets an EngineError instead."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def listen(self, told: Callable[[Item], None]) -> None:
        """From now on ``told`` gets every item, first those that came already, and the queue none: no thread need wait.
        It is called by whoever puts the item, mostly the engine's thread, so it returns at once and raises nothing."""
        with self._telling:
            while not self._events.empty():
                told(self._events.get())
            self._told = told

    def next_event(self, timeout: float | None = None) -> Event:
        """The next event. Raises the request's error, StopIteration after the last event, TimeoutError after
        ``timeout`` seconds."""
        try:
            event = self._events.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"no event within {timeout} s") from None
        if event is None:
            self._events.put(None)  # for other threads that wait
            raise StopIteration
        if isinstance(event, BaseException):
            raise event
        return event

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        return self.next_event()

    def result(self) -> Completion:
        """Wait for the whole answer. Raises the request's error."""
        for event in self:
            if isinstance(event, Finished):
                return event.completion
        raise RuntimeError("the events of this ticket were taken already")

    # the engine's end

    def put(self, event: Event) -> None:
        self._tell(event)
        if isinstance(event, Finished):
            self._tell(None)

    def fail(self, error: BaseException) -> None:
        self._tell(error)
        self._tell(None)

    def _tell(self, item: Item) -> None:
        with self._telling:
            if self._told is not None:
                self._told(item)
            else:
                self._events.put(item)
