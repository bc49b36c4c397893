"""Rows of a batch that stand by position, and entries that stand by number.

A step writes them where they belong, so that what is taken back is taken back by counting: the next step writes over it
before anybody reads it. A ring must be long enough for the widest step (``compress.geometry``).
"""

from __future__ import annotations

import mlx.core as mx

from .form import moved, put_row
from .place import Place
from .rows import filled


class Rolling:
    """``array`` [slots, 1, size + 1, width]: position p in column p % size; the last column is a dummy that nobody
    reads, as of ``compress.arrays``."""

    def __init__(self, place: Place, size: int, slots: int, width: int, dtype: mx.Dtype) -> None:
        self.place, self.size = place, size
        self.array = mx.zeros((slots, 1, size + 1, width), dtype)

    def write(self, new: mx.array) -> None:
        """``new`` [slots, D, width] at the positions of this step, D ≤ size. In place once nobody else holds the
        array."""
        at = self.place.once(("rolling", self.size), lambda: self.place.at % self.size)
        at = mx.broadcast_to(at[:, None, :, None], (at.shape[0], 1, at.shape[1], new.shape[2]))
        self.array = mx.put_along_axis(self.array, at, new[:, None].astype(self.array.dtype), axis=2)

    def put(self, slot: int, rows: mx.array | None, end: int) -> None:
        """The last rows before position ``end`` ([1, 1, n, width], n ≤ size; None for none) into a slot, all of it
        overwritten."""
        row = mx.zeros((1, *self.array.shape[1:]), self.array.dtype)
        if rows is not None and rows.shape[2]:
            n = rows.shape[2]
            at = mx.arange(end - n, end) % self.size
            row = mx.put_along_axis(
                row, mx.broadcast_to(at[None, None, :, None], rows.shape), rows.astype(row.dtype), axis=2
            )
        self.array = put_row(self.array, slot, row)

    def rows(self, slot: int, a: int, b: int) -> mx.array:
        """Rows [a, b) of a slot, at most ``size``, in order of position: [1, 1, b − a, width], lazily."""
        row, first = self.array[slot : slot + 1], a % self.size
        if first + b - a <= self.size:
            return row[:, :, first : first + b - a]
        return mx.concatenate([row[:, :, first : self.size], row[:, :, : first + b - a - self.size]], axis=2)

    def resize(self, slots: int, capacity: int, keep: dict[int, int], positions: dict[int, int]) -> None:
        self.array = moved(self.array, (slots, *self.array.shape[1:]), keep, None)


class Numbered:
    """``array`` [slots, 1, entries + 1, width]: an entry for each ``per`` tokens, and a dummy column for those that are
    not wanted, which nobody reads."""

    def __init__(self, place: Place, per: int, slots: int, capacity: int, width: int, dtype: mx.Dtype) -> None:
        self.place, self.per = place, per
        self.columns = capacity // per
        self.array = mx.zeros((slots, 1, self.columns + 1, width), dtype)

    def write(self, number: mx.array, wanted: mx.array, new: mx.array) -> None:
        """``new`` [slots, n, width] as entries ``number`` [slots, n] where they are ``wanted`` [slots, n]."""
        at = mx.where(wanted, number, self.columns)
        at = mx.broadcast_to(at[:, None, :, None], (at.shape[0], 1, at.shape[1], new.shape[2]))
        self.array = mx.put_along_axis(self.array, at, new[:, None].astype(self.array.dtype), axis=2)

    def read(self) -> mx.array:
        """[slots, E, width]: all that any row may see in this step are among them."""
        n = self.columns if self.place.columns is None else min(-(-self.place.columns // self.per), self.columns)
        return self.array[:, 0, :n]

    def put(self, slot: int, rows: mx.array | None) -> None:
        """``rows`` [1, 1, n, width], the first n entries, into a slot, all of it overwritten."""
        row = mx.zeros((1, *self.array.shape[1:]), self.array.dtype)
        if rows is not None and rows.shape[2]:
            row = filled(rows.astype(row.dtype), row.shape[2])
        self.array = put_row(self.array, slot, row)

    def rows(self, slot: int, a: int, b: int) -> mx.array:
        """The entries of tokens [a, b): [1, 1, n, width], lazily."""
        return self.array[slot : slot + 1, :, a // self.per : b // self.per]

    def resize(self, slots: int, capacity: int, keep: dict[int, int], positions: dict[int, int]) -> None:
        self.columns = capacity // self.per
        held = {old: n // self.per for old, n in positions.items()}
        shape = (slots, 1, self.columns + 1, self.array.shape[3])
        self.array = moved(self.array, shape, keep, held)
