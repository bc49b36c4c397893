"""A ticket: the caller's end of one request. Events come out of it; cancellation goes in."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from ..errors import RequestCancelled, RequestTimeout
from .request import Completion, Delta, Event, Finished, Progress, Request, Started
from .status import Row

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

    Thread-safe: each event goes to one of the threads that wait, and all of them see the end. Where the request has a
    deadline that goes by, the iterator raises RequestTimeout, whatever the engine does; the request is given up at the
    next step edge, as if it had been cancelled.
    """

    _numbers = itertools.count(1)

    def __init__(self, request: Request) -> None:
        self.request = request
        self.received = time.monotonic()
        #: what it is called in status and logs
        self.name = request.name or f"request-{next(self._numbers)}"
        #: told when the engine has no more to say, on the engine's thread mostly
        self.on_end: Callable[[Ticket], None] = lambda ticket: None
        self._events: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._cancelled = threading.Event()
        self._told: Callable[[Item], None] | None = None
        self._telling = threading.Lock()
        self._late = False  # its caller was told so
        self._started: Started | None = None
        self._read = self._generated = 0

    def cancel(self) -> None:
        """Stop at the next step edge. What was computed is kept; the completion's finish_reason is ``cancelled``. A
        request that still waits in the queue gets an EngineError instead."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        """It is to stop: it was cancelled, or its deadline has gone by."""
        return self._cancelled.is_set() or self._overdue

    @property
    def _overdue(self) -> bool:
        deadline = self.request.deadline
        return deadline is not None and time.monotonic() >= deadline

    def listen(self, told: Callable[[Item], None]) -> None:
        """From now on ``told`` gets every item, first those that came already, and the queue none: no thread need wait.
        It is called by whoever puts the item, mostly the engine's thread, so it returns at once and raises nothing. Of
        a deadline it hears when the engine does, which may hang: who listens keeps a clock of its own."""
        with self._telling:
            while not self._events.empty():
                told(self._events.get())
            self._told = told

    def next_event(self, timeout: float | None = None) -> Event:
        """The next event. Raises the request's error, StopIteration after the last event, TimeoutError after
        ``timeout`` seconds."""
        if self._late:
            raise StopIteration
        deadline, wait = self.request.deadline, timeout
        if deadline is not None:
            left = min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
            wait = left if timeout is None else min(timeout, left)
        try:
            event = self._events.get(timeout=wait)
        except queue.Empty:
            if deadline is not None and self._overdue:
                self._late = True
                raise self._timeout() from None
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

    def _timeout(self) -> RequestTimeout:
        assert self.request.deadline is not None
        seconds = self.request.deadline - self.received
        where = "while it was answered" if self._generated else "before its answer began"
        return RequestTimeout(
            f"The request timed out after {seconds:.1f} s, {where}.",
            "What was computed of its prompt is kept where there is a prefix store; allow more time, or ask for less.",
        )

    # the engine's end

    def put(self, event: Event) -> None:
        if isinstance(event, Delta):
            self._generated += len(event.token_ids)
        elif isinstance(event, Started):
            self._started = event
        elif isinstance(event, Progress):
            self._read = event.done
        elif event.completion.finish_reason == "cancelled" and not self._cancelled.is_set() and self._overdue:
            self.fail(self._timeout())
            return
        self._tell(event)
        if isinstance(event, Finished):
            self._tell(None)
            self.on_end(self)

    def fail(self, error: BaseException) -> None:
        """The request ends with ``error``; where its time was up, with that."""
        given_up = isinstance(error, RequestCancelled) and not self._cancelled.is_set() and self._overdue
        self._tell(self._timeout() if given_up else error)
        self._tell(None)
        self.on_end(self)

    def _tell(self, item: Item) -> None:
        with self._telling:
            if self._told is not None:
                self._told(item)
            else:
                self._events.put(item)

    def row(self, context_length: int | None) -> Row:
        """What has become of it so far; from any thread."""
        started = self._started
        prompt = started.prompt_tokens if started is not None else None
        if started is None:
            state = "waiting"
        else:
            state = "decoding" if self._generated else "prefilling"
        left = None
        if prompt is not None and context_length is not None:
            left = max(0, context_length - prompt - self._generated)
        return Row(
            id=self.name,
            state="leaving" if self.cancelled else state,
            age_s=time.monotonic() - self.received,
            prompt_tokens=prompt,
            done_tokens=prompt if self._generated and prompt is not None else self._read,
            generated_tokens=self._generated,
            cached_tokens=started.cached_tokens if started is not None else 0,
            context_left=left,
        )
