"""Journals: what recurrent layers write down in a forward of which a part may be taken back.

A verify forward runs over D tokens of each row, and of some of them it may turn out that they were never there. A state
that has gone on cannot be led back, as decayed digits are lost. So a layer keeps the state before the forward and what
its recurrence took in, a few small arrays; the state after any number of those tokens is then made by the same
recurrence, without projections, norms or outputs. A convolution's window after r tokens is a slice of what it took in.

Bits: in ``exact`` on a CPU, outputs and states are those of as many plain steps of one token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList

#: how many tokens of a verify forward: the same for all rows, or [rows] int32
Rows = int | mx.array
#: the arrays that a layer keeps; None for a state that there was not yet
Kept = Sequence[Any]


class Replay(Protocol):
    def __call__(self, kept: Kept, rows: Rows) -> Sequence[mx.array]:
        """The arrays of some slots after the first ``rows`` tokens, 0 <= rows <= width, from what was kept; lazy. An
        int is at least 1."""
        ...


@dataclass(frozen=True)
class Entry:
    """What one layer writes down of some slots of its cache; no arrays."""

    slots: tuple[int, ...]
    replay: Replay
    #: which of the kept arrays are there
    there: tuple[bool, ...]
    #: whether the slots held nothing before
    fresh: bool


@dataclass(frozen=True)
class Outline:
    """A journal without its arrays: what stays the same in every forward of one shape. Holds neither arrays nor caches,
    so that a trace may keep it."""

    width: int
    #: (number of the cache, entry) in the order in which layers wrote them
    entries: tuple[tuple[int, Entry], ...]

    def journal(self, arrays: Sequence[mx.array], caches: Sequence[Any]) -> Journal:
        """The journal of a forward over ``caches`` that gave back ``arrays`` (``Journal.arrays``)."""
        made = Journal(self.width)
        made._entries = [(caches[i], entry, [None] * len(entry.there)) for i, entry in self.entries]
        made.bind(arrays)
        return made


class Journal:
    """What layers wrote down of one forward over ``width`` tokens a row. Drop it once the caches have been led back: it
    holds on to the states before."""

    def __init__(self, width: int) -> None:
        self.width = width
        # the caches are held: their ids stay their own
        self._entries: list[tuple[Any, Entry, list[mx.array | None]]] = []

    def keep(self, cache: Any, slots: Sequence[int], kept: Kept, replay: Replay, *, fresh: bool = False) -> None:
        """A layer writes down ``kept`` of ``slots``, before it rebinds them. ``fresh``: they hold nothing yet."""
        entry = Entry(tuple(slots), replay, tuple(a is not None for a in kept), fresh)
        self._entries.append((cache, entry, list(kept)))

    def covers(self, cache: Any) -> bool:
        """Whether all that ``cache`` holds can be told: each slot was written down, and once only. A cache that its
        layer has not filled is not covered: it may hold more after the next token."""
        told = [slot for owner, entry, _ in self._entries if owner is cache for slot in entry.slots]
        return bool(told) and sorted(told) == [i for i, a in enumerate(cache.cache) if a is not None]

    def slots(self, cache: Any, rows: int) -> dict[int, mx.array]:
        """One sequence: slot number -> array after the first ``rows`` tokens of the forward, lazy. 0: as it was before,
        where slots that held nothing are left out; ``width``: as the forward left them, so that ``cache`` must stand
        there still. Raises ValueError for other numbers, and for a cache that is not covered."""
        if not 0 <= rows <= self.width:
            raise ValueError(f"A journal of {self.width} tokens was asked for the state after {rows}.")
        self._check(cache)
        if rows == self.width:
            return {i: a for i, a in enumerate(cache.cache) if a is not None}
        found: dict[int, mx.array] = {}
        for entry, kept in self._of(cache):
            if rows > 0:
                found |= zip(entry.slots, entry.replay(kept, rows), strict=True)
            elif not entry.fresh:
                found |= zip(entry.slots, entry.replay(kept, mx.zeros((self._count(kept),), mx.int32)), strict=True)
        return found

    def slots_by_row(self, cache: Any, rows: mx.array) -> dict[int, mx.array]:
        """Slot number -> array [rows, ...], row r after ``rows[r]`` of its tokens ([rows] int32, 0 … width); lazy. What
        was not there before counts as zeros. Raises ValueError for a cache that is not covered."""
        self._check(cache)
        found: dict[int, mx.array] = {}
        for entry, kept in self._of(cache):
            found |= zip(entry.slots, entry.replay(kept, rows), strict=True)
        return found

    def arrays(self) -> list[mx.array]:
        """All arrays that it keeps, in a fixed order: to be evaluated with the forward, or given back by a compiled
        one."""
        return [a for _, _, kept in self._entries for a in kept if a is not None]

    def bind(self, arrays: Sequence[mx.array]) -> None:
        """Take over ``arrays``, in the order of ``arrays()``."""
        given = iter(arrays)
        self._entries = [
            (cache, entry, [next(given) if there else None for there in entry.there])
            for cache, entry, _ in self._entries
        ]
        assert next(given, None) is None, "a journal was given more arrays than it keeps"

    def outline(self, caches: Sequence[Any]) -> Outline:
        """What a trace may keep of it. ``caches``: all caches of the forward, recurrent ones at least; another forward
        of the same shape has others at the same places. Raises ValueError if one is missing."""
        number = {id(cache): i for i, cache in enumerate(caches)}
        if any(id(cache) not in number for cache, _, _ in self._entries):
            raise ValueError("A layer wrote down a cache that is not among those given.")
        return Outline(self.width, tuple((number[id(cache)], entry) for cache, entry, _ in self._entries))

    def _of(self, cache: Any) -> Iterator[tuple[Entry, list[mx.array | None]]]:
        return ((entry, kept) for owner, entry, kept in self._entries if owner is cache)

    def _check(self, cache: Any) -> None:
        if not self.covers(cache):
            raise ValueError("The layer of this cache wrote no journal of it.")

    @staticmethod
    def _count(kept: Kept) -> int:
        return next(a.shape[0] for a in kept if a is not None)


class Journals:
    """Shared by all layers of a model that can write a journal; inert outside ``recording``."""

    def __init__(self) -> None:
        self._journal: Journal | None = None

    @contextmanager
    def recording(self, width: int) -> Iterator[Journal]:
        """The forward that is built in this block is one over ``width`` tokens of each row, unpadded; layers write down
        what it takes to lead their caches back into it."""
        assert self._journal is None, "another forward is being written down"
        self._journal = Journal(width)
        try:
            yield self._journal
        finally:
            self._journal = None


def joined(past: mx.array | None, inputs: mx.array, keep: int) -> mx.array:
    """[B, keep + S, C]: a convolution's window (zeros for None), then ``inputs`` [B, S, C]."""
    if past is None:
        past = mx.zeros((inputs.shape[0], keep, inputs.shape[2]), dtype=inputs.dtype)
    return mx.concatenate([past, inputs], axis=1)


def keep_window(journal: Journal, cache: Any, slot: int, inputs: mx.array, keep: int) -> mx.array:
    """Write down the window of a convolution, which is in ``slot``, and what it is about to take in; gives back both
    (``joined``)."""
    window = joined(cache[slot], inputs, keep)
    journal.keep(cache, (slot,), [window], partial(_window_after, keep=keep), fresh=cache[slot] is None)
    return window


def _window_after(kept: Kept, rows: Rows, keep: int) -> list[mx.array]:
    window = kept[0]
    if isinstance(rows, int):
        return [mx.contiguous(window[:, rows : rows + keep])]
    at = rows[:, None] + mx.arange(keep)
    return [mx.take_along_axis(window, at[..., None], axis=1)]


def scan(step: Callable[..., mx.array], state: mx.array | None, inputs: Sequence[mx.array], rows: Rows) -> mx.array:
    """The state after ``rows`` tokens of ``inputs`` [B, D, ...], token by token: ``step(state, *token)`` gives the next
    one, for inputs of length 1."""
    for t in range(rows if isinstance(rows, int) else inputs[0].shape[1]):
        new = step(state, *(x[:, t : t + 1] for x in inputs))
        if isinstance(rows, int):
            state = new
        else:
            before = mx.zeros_like(new) if state is None else state
            state = mx.where((t < rows).reshape(-1, *[1] * (new.ndim - 1)), new, before)
    assert state is not None, "no token, and no state before"
    return state


def uncovered(
    model: Callable[..., mx.array], make_cache: Callable[[], list[Any]], journals: Journals, width: int = 3
) -> list[str]:
    """The recurrent caches that ``model`` writes no journal of, by the numbers of their layers ("4", or "4.0" inside a
    list). A forward is built, on throw-away caches, and never computed."""
    caches = make_cache()
    with journals.recording(width) as journal:
        model(mx.zeros((1, width), dtype=mx.int32), cache=caches)

    def walk(each: Sequence[Any], path: str) -> Iterator[str]:
        for i, cache in enumerate(each):
            if isinstance(cache, CacheList):
                yield from walk(cache.caches, f"{path}{i}.")
            elif isinstance(cache, ArraysCache) and not journal.covers(cache):
                yield f"{path}{i}"

    return list(walk(caches, ""))
