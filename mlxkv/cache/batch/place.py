"""Where each row of a batch stands in the step that is being built: made once a step, read by all layers.

A step has a *width*: how many tokens each row takes, 1 but for a verify step. The truth are host ints
(``Batch.positions``, ``Ring.index``). They become one int32 array [1 + rings, slots] per step, an argument of the step,
so that nothing of an earlier step can be stale and a compiled step sees it as an input.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import mlx.core as mx

T = TypeVar("T")

#: columns of a step that is not compiled are rounded up to this, so that shapes, and with them buffers, repeat
GRANULE = 32


class Ring:
    """The write index of each row in windows of one kind: where the solo cache (``RotatingKVCache._idx``) has it
    before its next step; ``max_size`` where it is about to wrap."""

    def __init__(self, number: int, max_size: int, keep: int, slots: int) -> None:
        #: row of ``Place.writes`` that belongs to this ring is ``number``
        self.number, self.max_size, self.keep = number, max_size, keep
        self.index = [0] * slots

    def writes(self) -> list[int]:
        """By row, the column that the next step writes."""
        return [self.keep if i == self.max_size else i for i in self.index]

    def advance(self, kept: list[int]) -> None:
        """Row r keeps kept[r] tokens more; 0: its slot is free."""
        for slot, n in enumerate(kept):
            for _ in range(n):
                self.index[slot] = (self.keep if self.index[slot] == self.max_size else self.index[slot]) + 1
            if n == 0:
                self.index[slot] = 0


class Seat:
    """The slot a row has, which a resize may change."""

    def __init__(self, slot: int) -> None:
        self.slot = slot


class Place:
    """The arrays of one step. ``offsets`` [slots]: the position of each row's first new token."""

    def __init__(self, slots: int) -> None:
        #: by slot, the position the row stands at; 0 where free
        self.positions = [0] * slots
        #: tokens that each row takes in this step
        self.width = 1
        self._where: mx.array | None = None
        #: columns that attention reads; None for all there are
        self.columns: int | None = None
        self._offsets: mx.array | None = None
        self._after: mx.array | None = None
        self._at: mx.array | None = None
        self._writes: dict[tuple[int, int, int], mx.array] = {}
        self._masks: dict[tuple[int, int | None, int], mx.array] = {}
        self._once: dict[Hashable, Any] = {}

    def begin(self, where: mx.array, columns: int | None, width: int = 1) -> None:
        """``where``: [1 + rings, slots] int32, positions first, then each ring's index before the step."""
        self.clear()
        self._where, self.columns, self.width = where, columns, width
        self._offsets = where[0]

    def clear(self) -> None:
        """Nothing of a step is kept beyond it."""
        self._where = self._offsets = self._after = self._at = None
        self._writes.clear()
        self._masks.clear()
        self._once.clear()

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` gives, made by the first layer of a step that asks for ``key``."""
        if key not in self._once:
            self._once[key] = make()
        return self._once[key]

    @property
    def offsets(self) -> mx.array:
        assert self._offsets is not None, "no step is being built"
        return self._offsets

    @property
    def after(self) -> mx.array:
        """The positions after the step: one array for all layers."""
        if self._after is None:
            self._after = self.offsets + self.width
        return self._after

    @property
    def at(self) -> mx.array:
        """[slots, width]: the position of each new token."""
        if self._at is None:
            self._at = self.offsets[:, None]
            if self.width > 1:
                self._at = self._at + mx.arange(self.width)
        return self._at

    def index(self, ring: Ring) -> mx.array:
        """[slots]: the ring's index before the step."""
        assert self._where is not None
        return self._where[1 + ring.number]

    def writes(self, heads: int, size: int, ring: Ring | None = None) -> mx.array:
        """[slots, heads, width, size]: the columns to write, in ``ring`` (one token) or, for growing rows, at the
        positions."""
        key = (-1 if ring is None else ring.number, heads, size)
        if key not in self._writes:
            at = self.at
            if ring is not None:
                index = self.index(ring)[:, None]
                at = mx.where(index == ring.max_size, ring.keep, index)
            self._writes[key] = mx.broadcast_to(at[:, None, :, None], (at.shape[0], heads, at.shape[1], size))
        return self._writes[key]

    def read(self, capacity: int) -> int:
        """How many of ``capacity`` columns attention reads."""
        return capacity if self.columns is None else min(self.columns, capacity)

    def mask(self, columns: int, window: int | None = None, ring: Ring | None = None) -> mx.array:
        """[slots, 1, width, columns] bool: what each row's new tokens see. Columns beyond a token are never seen.

        Growing rows: column c is position c. In a ring all that was written is seen, whatever its order; a ``window``
        shorter than the ring is cut out of it as ``RotatingKVCache.make_mask`` does, so that both see the same. A ring
        takes one token.
        """
        key = (columns, window, -1 if ring is None else ring.number)
        if key not in self._masks:
            c, at = mx.arange(columns), self.at[:, :, None]
            seen = c <= at
            if window is not None and ring is None:
                seen = seen & (at < c + window)
            elif window is not None and ring is not None and window < ring.max_size:
                index = self.index(ring)[:, None, None]
                index = mx.where(index >= ring.max_size, 0, index)
                size = mx.minimum(at + 1, ring.max_size)
                age = (c + size - index - 1) % size
                seen = seen & ((at < window) | (age >= size - window))
            self._masks[key] = seen[:, None]
        return self._masks[key]
