"""The watch over the loop: a turn that takes too long is seen from other threads while it lasts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Watchdog:
    """``limit`` in seconds of ``time.monotonic()``, which stands still while a machine sleeps or jumps with nobody's
    clock. Nothing is ended: a step that hangs may yet go on, and then all is well again."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._since: float | None = None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The engine's thread is at work while the block runs."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None

    def rest(self) -> None:
        """There is nothing to do."""
        self._since = None

    @property
    def reason(self) -> str | None:
        """Why the loop is not ready, from any thread; None if it is."""
        since = self._since
        if since is None or (lasted := time.monotonic() - since) <= self._limit:
            return None
        return f"a step of the engine has taken {lasted:.0f} s so far, more than the {self._limit:g} s that are allowed"
