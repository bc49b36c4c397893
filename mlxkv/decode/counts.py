"""Which token ids were seen and how often: what penalties look at."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np


@dataclass(frozen=True)
class Seen:
    """``ids`` int32 [distinct], each once, and their ``counts`` float32, in the same order; not to be written to."""

    ids: np.ndarray
    counts: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)


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

    def seen(self, more: Sequence[int] = ()) -> Seen:
        """What it would have after ``more`` tokens, which are not added; the next ``add`` may change it. Costs what
        the distinct ids do, however many tokens they stand for."""
        n = len(self)
        ids, counts = self._ids[:n], self._counts[:n]
        if not more:
            return Seen(ids, counts)
        over = 0 if self._window is None else max(0, len(self._order) + len(more) - self._window)
        change: dict[int, int] = {}
        for token in more:
            change[token] = change.get(token, 0) + 1
        for token in islice(chain(self._order, more), over):
            change[token] = change.get(token, 0) - 1
        new = [t for t, by in change.items() if by > 0 and t not in self._place]
        counts = np.concatenate([counts, np.array([change[t] for t in new], np.float32)])
        ids = np.concatenate([ids, np.array(new, np.int32)])
        for token, by in change.items():
            if (at := self._place.get(token)) is not None:
                counts[at] += by
        left = counts > 0
        return Seen(ids, counts) if left.all() else Seen(ids[left], counts[left])
