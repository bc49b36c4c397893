"""A function of explicit arrays in two kinds: plain, and compiled with ``mx.compile``; and which of the two is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

#: a tuple of arrays and lists of arrays
Out = tuple[Any, ...]

#: steps of one kind in a row while both are timed, and how many of them at the start are not counted
_RUN, _SKIP = 8, 2
#: how often both kinds get their turn
_TURNS = 2
#: a compiled step must be this much faster to be used
_GAIN = 0.98


class Traced:
    """What is known of a function at one set of shapes."""

    def __init__(self, wants_compiled: bool, rare: int = 0) -> None:
        self.wants_compiled = wants_compiled
        self.traced = False
        self.checked = False
        #: whether the last call was of the compiled kind
        self.chosen = False
        #: so often it is not compiled yet
        self.rare = rare
        self.race = Race()
        self._function: Any = None
        self._cell: list[Any] = []

    def compiled(self, body: Callable[..., Out], subject: Any, args: tuple[Any, ...]) -> Out:
        """``body(subject, *args)``, compiled. args: arrays and lists of arrays; shapes and dtypes are those of the
        first call. ``body`` reads nothing else that may change, and of ``subject`` only what follows from the shapes: a
        trace is of shapes, and keeps no subject."""
        if self._function is None:
            cell = self._cell
            self._function = mx.compile(lambda *args: body(cell[0], *args))
        self._cell.append(subject)
        try:
            out = self._function(*args)
            self.traced, self.rare = True, 0
            return out
        finally:
            self._cell.clear()


class Race:
    """Which kind of step is faster, found with steps that are made anyway: runs of either kind in turn. The time of a
    step is that until the next one; the first ones of a run, and those something came between, do not count."""

    def __init__(self) -> None:
        #: whether compiled steps won; None while both are timed
        self.winner: bool | None = None
        self._seconds: tuple[list[float], list[float]] = ([], [])
        self._taken = 0
        self._before: float | None = None

    def interrupt(self) -> None:
        """Something else is done before the next step."""
        self._before = None

    def next(self, now: float) -> bool:
        """Whether the step that begins ``now`` (seconds) is to be compiled."""
        if self.winner is not None:
            return self.winner
        run, place = divmod(self._taken - 1, _RUN)  # of the step that ends now
        if self._before is not None and place >= _SKIP:
            self._seconds[run % 2].append(now - self._before)
        self._before = now
        if self._taken >= 2 * _TURNS * _RUN and all(self._seconds):
            plain, compiled = (sorted(s)[len(s) // 4] for s in self._seconds)
            self.winner = compiled < _GAIN * plain
            return self.winner
        self._taken += 1
        return (self._taken - 1) // _RUN % 2 == 1


def same_bits(a: Out, b: Out) -> bool:
    flat = [[x for part in out for x in (part if isinstance(part, list) else [part])] for out in (a, b)]
    same = [mx.array_equal(x, y, equal_nan=True) for x, y in zip(*flat, strict=True)]
    return all(s.item() for s in same)
