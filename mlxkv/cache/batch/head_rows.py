"""The keys and values of the heads of a batch: one pair of arrays for all slots, and each slot's part as a cache of its
own. So a head runs over several rows in one forward, or over one row alone, on the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ..layout import MemberSpec
from .head_traced import TracedHeads
from .place import GRANULE, Place
from .rows import BatchGrowing

#: columns beyond the capacity: speculative rows, and those that pad the rows of a joint forward
SPARE = 32


class HeadRowsOfAll:
    """``form``: keys and values [slots, heads, capacity + SPARE, width]. ``made``: by slot, the rows that count; what
    stands behind them is overwritten before anybody sees it."""

    def __init__(self, spec: MemberSpec, slots: int, capacity: int) -> None:
        self._place = Place(slots)
        self.form = BatchGrowing(self._place, spec, slots, capacity + SPARE)
        #: where forwards are compiled, what compiles them
        self.traced: TracedHeads | None = None

    @property
    def made(self) -> list[int]:
        return self._place.positions

    def arrays(self) -> list[mx.array]:
        return self.form.arrays()

    def run(self, head: Callable[..., mx.array], tokens: mx.array, hidden: mx.array, step: int = 0) -> mx.array:
        """One forward of all slots: ``tokens`` [slots, n], ``hidden`` [slots, n, H] -> m [slots, n, H]. Row r stands
        behind the rows made of slot r; ``made`` is the caller's to raise. n is at most SPARE."""
        n = tokens.shape[1]
        where = mx.array([self.made], mx.int32)
        m = self.traced.run(self, head, tokens, hidden, where, step) if self.traced is not None else None
        if m is not None:
            return m
        longest = max(self.made) + n
        columns = min(-(-longest // GRANULE) * GRANULE, self.form.columns)
        return self.over(head, tokens, hidden, where, columns, step)

    def over(
        self,
        head: Callable[..., mx.array],
        tokens: mx.array,
        hidden: mx.array,
        where: mx.array,
        columns: int | None,
        step: int = 0,
    ) -> mx.array:
        """The forward itself, over ``columns`` (None: all), with rows made as ``where`` [1, slots] says."""
        self._place.begin(where, columns, tokens.shape[1])
        self.form.begin()
        try:
            return head(tokens, hidden, self.form, step)
        finally:
            self.form.end()
            self._place.clear()

    def join(self, slot: int, kv: KVCache) -> None:
        """Take over the rows of a solo cache, evaluated."""
        self.made[slot] = kv.offset
        if kv.offset:
            self.form.join(slot, kv, kv.offset)
            mx.eval(self.arrays())  # the solo cache can be let go of

    def take(self, slot: int, kv: KVCache) -> None:
        """Bring a fresh solo cache to the rows of the slot, lazily, by one copy."""
        if self.made[slot]:
            self.form.take(slot, kv)

    def leave(self, slot: int) -> None:
        self.made[slot] = 0

    def resize(self, slots: int, capacity: int, keep: dict[int, int]) -> None:
        made = {old: self.made[old] for old in keep}
        self.form.resize(slots, capacity + SPARE, keep, made)
        self._place.positions = [0] * slots
        for old, slot in keep.items():
            self.made[slot] = made[old]
        mx.eval(self.arrays())


class SlotRows(KVCache):
    """One slot's part, as the cache of a head that runs alone: its keys and values [1, heads, columns, width] are
    slices, made when asked for."""

    def __init__(self, rows: HeadRowsOfAll, slot: int) -> None:
        self._rows, self.slot = rows, slot

    @property
    def offset(self) -> int:  # type: ignore[override]
        return self._rows.made[self.slot]

    @offset.setter
    def offset(self, n: int) -> None:
        self._rows.made[self.slot] = n

    @property
    def keys(self) -> mx.array:  # type: ignore[override]
        return self._rows.form.keys[self.slot : self.slot + 1]

    @property
    def values(self) -> mx.array:  # type: ignore[override]
        return self._rows.form.values[self.slot : self.slot + 1]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """``keys``, ``values``: [1, heads, n, width]."""
        form, start = self._rows.form, mx.array([self.slot, self.offset], mx.int32)
        form.keys = mx.slice_update(form.keys, keys.astype(form.keys.dtype), start, axes=[0, 2])
        form.values = mx.slice_update(form.values, values.astype(form.values.dtype), start, axes=[0, 2])
        self.offset += keys.shape[2]
        return self.keys[:, :, : self.offset], self.values[:, :, : self.offset]
