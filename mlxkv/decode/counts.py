"""Which token ids were seen and how often: what penalties look at."""

from __future__ import annotations

from collections import deque

import numpy as np


class Counts:
    """Distinct ids of the last ``window`` tokens (None: of all) and their counts.

    Host arrays with room to grow, so that one token costs the same after a hundred thousand of them, and a step at most
    a copy of the vocabulary's size.
    """

    def __init__(self, tokens: list[int], window: int | None = None) -> None:
        self._place: dict[int, int] = {}  # id -> where it stands in the arrays
        self._ids = np.zeros(64, np.int32)
        self._counts = np.zeros(64, np.float32)
        self._window = window
        self._order: deque[int] = deque()  # the window's tokens, oldest first
        for token in tokens if window is None else tokens[-window:]:
            self.add(token)

    def __len__(self) -> int:
        return len(self._place)

    def add(self, token: int) -> None:
        at = self._place.get(token)
        if at is None:
            at = self._place[token] = len(self._place)
            if at == len(self._ids):
                self._ids, self._counts = (np.concatenate([a, np.zeros_like(a)]) for a in (self._ids, self._counts))
            self._ids[at], self._counts[at] = token, 0
        self._counts[at] += 1
        if self._window is not None:
            self._order.append(token)
            if len(self._order) > self._window:
                self._remove(self._order.popleft())

    def _remove(self, token: int) -> None:
        at = self._place[token]
        self._counts[at] -= 1
        if self._counts[at] == 0:
            del self._place[token]
            last = len(self._place)
            if at != last:  # the last one takes the free place
                moved = int(self._ids[last])
                self._ids[at], self._counts[at] = moved, self._counts[last]
                self._place[moved] = at

    def ids(self) -> np.ndarray:
        """int32 [distinct], each id once; the next token may change it."""
        return self._ids[: len(self)]

    def counts(self) -> np.ndarray:
        """float32 [distinct], in the order of ``ids``; the next token may change it."""
        return self._counts[: len(self)]
