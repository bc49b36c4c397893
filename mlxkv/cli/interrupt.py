"""What Ctrl-C does: the first one cancels at the next step edge, the second one ends the process."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any, Literal, Protocol

from .options import INTERRUPTED

Phase = Literal["loading", "idle", "generating", "closing"]


class Cancels(Protocol):
    """What can be told to stop, from a signal handler."""

    def cancel(self) -> None: ...


class Interrupt:
    """Handles SIGINT while it is entered.

    Loading a model: the process ends, nothing has been computed. Idle: KeyboardInterrupt. Generating: the ticket is
    cancelled and what was computed is kept. Closing: the first one is told that state is being written. A second one
    always ends the process at once; the store's files stay whole, because only durable ones are visible.
    """

    def __init__(self) -> None:
        self.phase: Phase = "loading"
        self.count = 0
        self._ticket: Cancels | None = None
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def idle(self) -> None:
        """Nothing runs; start counting anew."""
        self.phase, self.count, self._ticket = "idle", 0, None

    def loading(self) -> None:
        """Another model is being loaded; Ctrl-C ends the process."""
        self.phase, self._ticket = "loading", None

    def watch(self, ticket: Cancels) -> None:
        """``ticket`` is what the next Ctrl-C cancels."""
        self.phase, self.count, self._ticket = "generating", 0, ticket

    def closing(self) -> None:
        """The engine is being closed."""
        self.phase, self._ticket = "closing", None

    def _handle(self, *_: object) -> None:
        self.count += 1
        if self.phase == "idle":
            raise KeyboardInterrupt
        if self.phase == "loading" or self.count > 1:
            end_now()
        if self._ticket is not None:
            self._ticket.cancel()
        _say("\nStopping at the next step and keeping what was computed. Ctrl-C again ends at once.\n")


def end_now() -> None:
    """Leave without waiting for the engine's thread."""
    if sys.stderr.isatty():
        _say("\x1b[?25h\n")  # a live display may have hidden the cursor
    os._exit(INTERRUPTED)


def _say(text: str) -> None:
    os.write(2, text.encode())  # a signal handler must not enter a buffered stream that it interrupted
