"""Batch forms of growing rows: row r's token at position p stands in column p of slot r, as it does alone.

So the order of sums is that of the solo run; what lies beyond a row is hidden by a mask, and finite.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ConcatenateKVCache, KVCache, QuantizedKVCache, _BaseCache

from ..kinds import Concatenated, Growing, Quantised
from ..layout import MLX_DTYPE, MemberSpec, tensor_name
from ..member import Member
from .form import BatchError, Form, moved
from .place import Place, Ring, Seat


def empty(spec: MemberSpec, slots: int, columns: int) -> dict[str, mx.array]:
    """Zeros [slots, heads, columns, width] by name (``keys``, ``values``, or their parts)."""
    out = {}
    for tensor in spec.tensors:
        name = tensor.name.removeprefix(tensor_name(spec, ""))
        out[name] = mx.zeros((slots, *tensor.sized(columns)[1:]), MLX_DTYPE[tensor.dtype])
    return out


def filled(rows: mx.array, columns: int) -> mx.array:
    """``rows`` [1, heads, n, width] with zeros up to ``columns``."""
    tail = columns - rows.shape[2]
    if not tail:
        return rows
    zeros = mx.zeros((*rows.shape[:2], tail, rows.shape[3]), rows.dtype)
    return mx.concatenate([rows, zeros], axis=2)


class BatchRows(Form, _BaseCache):
    """What growing rows and windows share: arrays with columns that take ``Place.width`` tokens a step.

    ``keys``, ``values``: [slots, heads, columns, width], or what a form has in their place.
    """

    keys: Any
    values: Any
    #: where each row writes next; None: at its position
    ring: Ring | None = None

    def __init__(self, place: Place, columns: int) -> None:
        self.place, self.columns = place, columns
        #: the position of the next token, [slots], while a step is being built; after ``update_and_fetch`` that of the
        #: one behind it
        self.offset: Any = None

    def begin(self) -> None:
        self.offset = self.place.offsets

    def end(self) -> None:
        self.offset = None

    def write(self, array: mx.array, new: mx.array) -> mx.array:
        """``array`` [slots, heads, columns, width] with ``new`` [slots, heads, D, width] at each row's own columns.

        In place once nobody else holds it. Of the ways to write (scatter, one slice_update a row, where) the fastest on
        a CPU from two rows on, at any capacity."""
        if array.shape[3] == 0:  # a member that keeps keys only
            return array
        at = self.place.writes(array.shape[1], array.shape[3], self.ring)
        return mx.put_along_axis(array, at, new.astype(array.dtype), axis=2)

    def parts(self) -> dict[str, mx.array]:
        return {"keys": self.keys, "values": self.values}

    def rebind(self, parts: dict[str, mx.array]) -> None:
        self.keys, self.values = parts["keys"], parts["values"]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """``keys``, ``values``: [slots, heads, D, width]."""
        self.keys, self.values = self.write(self.keys, keys), self.write(self.values, values)
        self.offset = self.place.after
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        n = self.place.read(self.columns)
        if n == self.columns:
            return self.keys, self.values
        return self.keys[:, :, :n], self.values[:, :, :n]

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> mx.array:
        if self.place.width != N:
            raise BatchError(f"This step of a batch takes {self.place.width} tokens a row, not {N}.")
        return self.place.mask(self.place.read(self.columns), window_size, self.ring)

    def size(self) -> int:
        return self.place.read(self.columns)

    def arrays(self) -> list[mx.array]:
        return list(self.parts().values())

    def bind(self, arrays: list[mx.array]) -> None:
        self.rebind(dict(zip(self.parts(), arrays, strict=True)))

    def empty(self) -> bool:
        return False

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays())

    def _check_rows(self, theirs: dict[str, mx.array], n: int) -> None:
        mine = self.parts()
        if theirs.keys() != mine.keys() or any(
            (a.dtype, a.shape[0], a.shape[1], a.shape[3]) != (mine[k].dtype, 1, mine[k].shape[1], mine[k].shape[3])
            for k, a in theirs.items()
        ):
            raise BatchError("The rows of this sequence have other shapes or dtypes than the batch's.")
        if n > self.columns:
            raise BatchError(f"A sequence of {n} rows does not fit into {self.columns} columns.")

    def _put(self, slot: int, rows: dict[str, mx.array]) -> None:
        at = mx.array([slot], mx.int32)
        self.rebind(
            {
                name: mx.slice_update(array, filled(rows[name], self.columns), at, axes=[0])
                for name, array in self.parts().items()
            }
        )

    def _resize(self, slots: int, columns: int, keep: dict[int, int], rows: dict[int, int]) -> None:
        self.columns = columns
        self.rebind(
            {name: moved(a, (slots, a.shape[1], columns, a.shape[3]), keep, rows) for name, a in self.parts().items()}
        )


class BatchGrowing(BatchRows):
    """``keys``, ``values``: [slots, heads, capacity, width]."""

    solo: type[Growing] = Growing

    def __init__(self, place: Place, spec: MemberSpec, slots: int, capacity: int) -> None:
        super().__init__(place, capacity)
        self.rebind(empty(spec, slots, capacity))

    def check(self, cache: Any, position: int) -> None:
        if cache.offset != position:
            raise BatchError(f"A cache stands at {cache.offset}, its sequence at {position}.")
        self._check_rows(self.solo(cache, ()).arrays(), position)

    def join(self, slot: int, cache: Any, position: int) -> None:
        self._put(slot, self.solo(cache, ()).rows(0, position))

    def resize(self, slots: int, capacity: int, keep: dict[int, int], positions: dict[int, int]) -> None:
        self._resize(slots, capacity, keep, positions)

    def row(self, seat: Seat, path: tuple[int, ...]) -> list[Member]:
        return [self.solo(_Row(self, seat), path)]  # type: ignore[arg-type]

    def take(self, slot: int, cache: Any) -> None:
        position = self.place.positions[slot]
        mine = {name: mx.contiguous(a[slot : slot + 1, :, :position]) for name, a in self.parts().items()}
        self.solo(cache, ()).resume(mine, position)


class BatchConcatenated(BatchGrowing):
    solo = Concatenated


class BatchQuantised(BatchGrowing):
    """``keys``, ``values``: (packed, scales, biases), each [slots, heads, capacity, …]."""

    solo = Quantised
    _PARTS = ("packed", "scales", "biases")

    def __init__(self, place: Place, spec: MemberSpec, slots: int, capacity: int) -> None:
        BatchRows.__init__(self, place, capacity)
        numbers = dict(spec.params)
        self.bits, self.group_size = numbers["bits"], numbers["group_size"]
        self.rebind(empty(spec, slots, capacity))

    def parts(self) -> dict[str, mx.array]:
        both = (("keys", self.keys), ("values", self.values))
        return {f"{name}.{part}": a for name, arrays in both for part, a in zip(self._PARTS, arrays, strict=True)}

    def rebind(self, parts: dict[str, mx.array]) -> None:
        self.keys, self.values = (tuple(parts[f"{name}.{p}"] for p in self._PARTS) for name in ("keys", "values"))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:

        def add(held: Any, new: mx.array) -> tuple[mx.array, ...]:
            packed = mx.quantize(new, group_size=self.group_size, bits=self.bits)
            return tuple(self.write(a, p) for a, p in zip(held, packed, strict=True))

        self.keys, self.values = add(self.keys, keys), add(self.values, values)
        self.offset = self.place.after
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        n = self.place.read(self.columns)
        keys, values = (tuple(a[:, :, :n] for a in arrays) for arrays in (self.keys, self.values))
        return keys, values


class _Row:
    """One row of ``BatchGrowing`` as the solo cache its member reads; slices are made when asked for."""

    def __init__(self, form: BatchGrowing, seat: Seat) -> None:
        self._form, self._seat = form, seat

    def _mine(self, held: Any) -> Any:
        if isinstance(held, tuple):
            return tuple(self._mine(a) for a in held)
        return held[self._seat.slot : self._seat.slot + 1]

    @property
    def keys(self) -> Any:
        return self._mine(self._form.keys)

    @property
    def values(self) -> Any:
        return self._mine(self._form.values)

    @property
    def offset(self) -> int:
        return self._form.place.positions[self._seat.slot]

    @property
    def bits(self) -> int:
        return self._form.bits  # type: ignore[attr-defined]

    @property
    def group_size(self) -> int:
        return self._form.group_size  # type: ignore[attr-defined]


GROWING: dict[type, type[BatchGrowing]] = {
    KVCache: BatchGrowing,
    ConcatenateKVCache: BatchConcatenated,
    QuantizedKVCache: BatchQuantised,
}
