"""The batch form of a window (``RotatingKVCache``): each row keeps the order and the write index of its solo ring.

A ring is never put in order here: a row's next step finds the rows where the solo cache would find them, so that its
softmax and its weighted sum run over them in the same order. The drafts of a verify step go to spare columns behind
the ring in rows that would overwrite with them what a rejection needs back (``cache.ring``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

from .. import ring as rings
from ..kinds import Window
from ..layout import MemberSpec
from ..member import Arrays, Member
from .form import BatchError, moved
from .journal import Journal
from .place import Place, Ring, Seat
from .rows import BatchRows, empty, filled


def settled(cache: RotatingKVCache) -> tuple[Arrays, int]:
    """The rows that ``cache`` holds as its next step of one token finds them (at most ``max_size``, in the ring's own
    order), and the index it would write at; ``max_size`` where it wraps first. Before the first wrap a buffer may be
    longer than what was written."""
    keys, values, offset, keep, size, index = cache.state
    if keys is None or values is None:
        return {}, 0
    held = keys.shape[2]
    rows: Arrays = {"keys": keys, "values": values}
    if held > size:  # a chunk left more rows than the window: that step would drop them first
        drop = held - size
        return {n: mx.concatenate([a[..., :keep, :], a[..., drop + keep :, :]], axis=2) for n, a in rows.items()}, size
    return {n: a[..., : min(offset, held), :] for n, a in rows.items()}, index


#: the classes that it stands for
WINDOWS = (RotatingKVCache, rings.RingKVCache)


class BatchWindow(BatchRows):
    """``keys``, ``values``: [slots, heads, min(max_size, capacity) + tail, width]. A batch none of whose rows can wrap
    has no tail.

    ``drafts``: keys and values [slots, heads, spare, width] of the drafts of the last verify step. What is kept of them
    is taken from there: a read of ``keys`` in the step that writes into them would make MLX copy all of them.
    """

    replays = True

    def __init__(self, place: Place, ring: Ring, spec: MemberSpec, slots: int, capacity: int, spare: int = 0) -> None:
        super().__init__(place, min(ring.max_size, capacity))
        self.ring: Ring = ring
        self.max_size, self.keep, self.spare = ring.max_size, ring.keep, spare
        self._fit(capacity)
        self.rebind(empty(spec, slots, self.columns + self.tail))
        self.drafts = list(empty(spec, slots, spare).values()) if spare else []

    def _fit(self, capacity: int) -> None:
        self.columns = min(self.max_size, capacity)
        #: whether a row may come to overwrite its first ones
        self.wraps = capacity > self.max_size
        self.tail = self.spare if self.wraps else 0

    # a step

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """``keys``, ``values``: [slots, heads, D, width]. Raises BatchError for more drafts than there are spare
        columns for."""
        drafts = self.place.width - 1
        if self.wraps and drafts > self.tail:
            raise BatchError(f"A window of {self.max_size} rows, {self.tail} spare, cannot take {drafts} drafts back.")
        if drafts and self.tail:
            both = zip((keys, values), self.drafts, strict=True)
            self.drafts = [filled(a[:, :, 1:], self.spare).astype(d.dtype) for a, d in both]
        return super().update_and_fetch(keys, values)

    def arrays(self) -> list[mx.array]:
        return super().arrays() + self.drafts

    def bind(self, arrays: list[mx.array]) -> None:
        super().bind(arrays[:2])
        self.drafts = list(arrays[2:])

    def _drafts(self) -> bool:
        """Whether attention reads drafts in the tail: not where no row of this step wraps."""
        columns = self.place.columns
        return self.place.width > 1 and self.tail > 0 and (columns is None or columns > self.max_size)

    def _numbers(self) -> rings.Ring:
        return rings.Ring(self.max_size, self.keep, max(self.spare, 1))

    def _shared(self, name: str, make: Callable[..., mx.array], *more: Any) -> mx.array:
        """``make(ring, …)`` for this step, once for all windows of one kind."""
        place, ring = self.place, self._numbers()
        where = (place.index(self.ring),) if make is rings.order else (place.offsets, place.index(self.ring))
        return place.once((name, self.ring.number, *more), lambda: make(ring, *where, place.width, *more))

    def write(self, array: mx.array, new: mx.array) -> mx.array:
        if self.place.width == 1 or array.shape[3] == 0:
            return super().write(array, new)
        at = self._along(self._shared("writes", rings.writes), array)
        return mx.put_along_axis(array, at, new.astype(array.dtype), axis=2)

    @staticmethod
    def _along(columns: mx.array, array: mx.array) -> mx.array:
        """``columns`` [slots, n] as indices [slots, heads, n, width] into axis 2 of ``array``."""
        shape = (columns.shape[0], array.shape[1], columns.shape[1], array.shape[3])
        return mx.broadcast_to(columns[:, None, :, None], shape)

    def keys_and_values(self) -> tuple[Any, Any]:
        if self._drafts():
            if rings.in_order():
                return self._ordered(self.keys), self._ordered(self.values)
            n = self.max_size + self.place.width - 1
        else:
            n = self.place.read(self.columns)
        if n == self.keys.shape[2]:
            return self.keys, self.values
        return self.keys[:, :, :n], self.values[:, :, :n]

    def _ordered(self, array: mx.array) -> mx.array:
        return mx.take_along_axis(array, self._along(self._shared("order", rings.order), array), axis=2)

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> mx.array:
        if N == 1 or self.place.width != N:
            return super().make_mask(N, window_size, return_array)
        drafts = self._drafts()
        columns = self.max_size if drafts else self.place.read(self.columns)
        mask = self._shared("seen", rings.seen, window_size, columns, drafts)
        if drafts and rings.in_order():
            order = self._shared("order", rings.order)
            mask = mx.take_along_axis(mask, mx.broadcast_to(order[:, None], mask.shape), axis=2)
        return mask[:, None]

    def replay(self, kept: mx.array, journal: Journal | None) -> None:
        if not self.tail:  # drafts stand where they belong
            return
        place, ring = self.place, self._numbers()
        to = place.once(
            ("targets", self.ring.number),
            lambda: rings.targets(ring, place.offsets, place.index(self.ring), place.width, kept),
        )
        both = zip((self.keys, self.values), self.drafts, strict=True)
        self.keys, self.values = (
            mx.put_along_axis(a, self._along(to, a), d[:, :, : place.width - 1], axis=2) if a.shape[3] else a
            for a, d in both
        )

    # rows come and go

    def check(self, cache: Any, position: int) -> None:
        if cache.offset != position or (cache.max_size, cache.keep) != (self.max_size, self.keep):
            raise BatchError(f"A window stands at {cache.offset}, its sequence at {position}.")
        rows, index = settled(cache)
        if index != position if position < self.max_size else not self.keep <= index <= self.max_size:
            raise BatchError(f"A window of {self.max_size} rows at {position} would be written at {index}.")
        self._check_rows(rows, rows["keys"].shape[2])

    def join(self, slot: int, cache: Any, position: int) -> None:
        rows, index = settled(cache)
        self.ring.index[slot] = index
        self._put(slot, rows)

    def leave(self, slot: int) -> None:
        self.ring.index[slot] = 0

    def resize(self, slots: int, capacity: int, keep: dict[int, int], positions: dict[int, int]) -> None:
        self._fit(capacity)
        rows, columns = {old: min(n, self.max_size) for old, n in positions.items()}, self.columns + self.tail
        self.rebind(
            {name: moved(a, (slots, a.shape[1], columns, a.shape[3]), keep, rows) for name, a in self.parts().items()}
        )
        self.drafts = [mx.zeros((slots, *d.shape[1:]), d.dtype) for d in self.drafts]

    def row(self, seat: Seat, path: tuple[int, ...]) -> list[Member]:
        return [Window(_Row(self, seat), path)]  # type: ignore[arg-type]

    def take(self, slot: int, cache: Any) -> None:
        position = self.place.positions[slot]
        n = min(position, self.max_size)
        keys, values = (mx.contiguous(a[slot : slot + 1, :, :n]) for a in (self.keys, self.values))
        cache.state = (keys, values, position, self.keep, self.max_size, self.ring.index[slot])


class _Row:
    """One row as the ``RotatingKVCache`` that ``kinds.Window`` reads; slices are made when asked for."""

    def __init__(self, form: BatchWindow, seat: Seat) -> None:
        self._form, self._seat = form, seat
        self.max_size, self.keep = form.max_size, form.keep

    @property
    def offset(self) -> int:
        return self._form.place.positions[self._seat.slot]

    def _mine(self, array: mx.array) -> mx.array:
        slot = self._seat.slot
        return array[slot : slot + 1, :, : min(self.offset, self.max_size)]

    @property
    def keys(self) -> mx.array:
        return self._mine(self._form.keys)

    @property
    def values(self) -> mx.array:
        return self._mine(self._form.values)

    @property
    def state(self) -> tuple[Any, ...]:
        index = self._form.ring.index[self._seat.slot]
        return self.keys, self.values, self.offset, self.keep, self.max_size, index
