"""The batch form of a window (``RotatingKVCache``): each row keeps the order and the write index of its solo ring.

A ring is never put in order here: a row's next step finds the rows where the solo cache would find them, so that its
softmax and its weighted sum run over them in the same order.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

from ..kinds import Window
from ..layout import MemberSpec
from ..member import Arrays, Member
from .form import BatchError
from .place import Place, Ring, Seat
from .rows import BatchRows, empty


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


class BatchWindow(BatchRows):
    """``keys``, ``values``: [slots, heads, min(max_size, capacity), width]."""

    def __init__(self, place: Place, ring: Ring, spec: MemberSpec, slots: int, capacity: int) -> None:
        super().__init__(place, min(ring.max_size, capacity))
        self.ring: Ring = ring
        self.max_size, self.keep = ring.max_size, ring.keep
        self.rebind(empty(spec, slots, self.columns))

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
        columns = min(self.max_size, capacity)
        self._resize(slots, columns, keep, {old: min(n, self.max_size) for old, n in positions.items()})

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
