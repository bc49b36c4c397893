"""The kinds of state: one for every cache class of mlx-lm that a model's ``make_cache()`` may return.

Each cache object, and each member inside a ``CacheList``, becomes one *member* of a known kind. What a class is not
registered for is never guessed: ``members_of`` raises ``UnknownCache`` and the store is off for that model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from .member import Arrays, Member, OwnCache, PositionError, UnknownCache

if TYPE_CHECKING:
    from .inside import Inside, Replay


class _Rows(Member):
    """Rows of keys and values in arrays that the cache assigns into; what its classes share."""

    @property
    def position(self) -> int:
        return self.cache.offset

    def arrays(self) -> Arrays:
        keys, values = self.cache.keys, self.cache.values
        return {} if keys is None or values is None else {"keys": keys, "values": values}

    def rewind(self, n: int) -> None:
        if n > self.rewindable() or self.cache.trim(n) != n:
            raise PositionError(f"Member {self.label} cannot go back {n} tokens: only {self.rewindable()} are held.")


class Growing(_Rows):
    """Plain attention: one row of keys and values a token, rewound by forgetting rows (``KVCache``)."""

    kind = "growing"
    record = "rows"
    packable = True
    cache: KVCache

    def reserve(self, capacity: int) -> None:
        self.cache.step = capacity
        # its own growth cuts the buffer back to what is used first, and so ends at another length
        wider = {name: self._widened(array, capacity) for name, array in self.arrays().items()}
        if any(array is not wider[name] for name, array in self.arrays().items()):
            self.resume(wider, self.cache.offset)

    @staticmethod
    def _widened(array: mx.array, capacity: int) -> mx.array:
        missing = capacity - array.shape[2]
        if missing <= 0:
            return array
        return mx.concatenate([array, mx.zeros((*array.shape[:2], missing, array.shape[3]), array.dtype)], axis=2)

    def hold(self) -> Any:
        # `a[:]` is another handle on the same buffer; a second reference to the same object would follow its rebinding.
        keys, values = self.cache.keys, self.cache.values
        return (None if keys is None else keys[:], None if values is None else values[:], self.cache.offset)

    def put_back(self, held: Any) -> None:
        self.cache.keys, self.cache.values, self.cache.offset = held

    def rows(self, a: int, b: int) -> Arrays:
        if not 0 <= a <= b <= self.cache.offset:
            raise PositionError(f"Member {self.label} holds rows [0, {self.cache.offset}), not [{a}, {b}).")
        return {name: array[..., a:b, :] for name, array in self.arrays().items()}

    def rewindable(self) -> int:
        return self.cache.offset

    def most_drafts(self) -> int | None:
        return None

    def resume(self, arrays: Arrays, position: int) -> None:
        self.cache.keys, self.cache.values, self.cache.offset = arrays["keys"], arrays["values"], position


class Concatenated(Growing):
    """The same rows in arrays that are exactly as long (``ConcatenateKVCache``)."""

    cache: ConcatenateKVCache  # type: ignore[assignment]

    def reserve(self, capacity: int) -> None:
        """There is no spare room: each token makes new arrays."""

    def rewind(self, n: int) -> None:
        if n > self.rewindable():
            raise PositionError(f"Member {self.label} cannot go back {n} tokens: only {self.rewindable()} are held.")
        if n:  # its own trim() keeps the rows, and the next update would take them for data again
            self.resume(self.arrays(), self.cache.offset - n)

    def resume(self, arrays: Arrays, position: int) -> None:
        super().resume({name: mx.contiguous(a[..., :position, :]) for name, a in arrays.items()}, position)


class Quantised(Growing):
    """Rows packed into integers, with a scale and a bias a group (``QuantizedKVCache``)."""

    packable = False  # they are already, in the model's own way
    cache: QuantizedKVCache  # type: ignore[assignment]
    _PARTS = ("packed", "scales", "biases")

    def params(self) -> dict[str, int]:
        return {"group_size": self.cache.group_size, "bits": self.cache.bits}

    def arrays(self) -> Arrays:
        both = (("keys", self.cache.keys), ("values", self.cache.values))
        return {
            f"{name}.{part}": array
            for name, arrays in both
            if arrays is not None
            for part, array in zip(self._PARTS, arrays, strict=True)
        }

    def hold(self) -> Any:
        return {name: array[:] for name, array in self.arrays().items()}, self.cache.offset

    def put_back(self, held: Any) -> None:
        arrays, offset = held
        if arrays:
            self.resume(arrays, offset)
        else:
            self.cache.keys, self.cache.values, self.cache.offset = None, None, offset

    def resume(self, arrays: Arrays, position: int) -> None:
        keys, values = (tuple(arrays[f"{name}.{part}"] for part in self._PARTS) for name in ("keys", "values"))
        self.cache.keys, self.cache.values, self.cache.offset = keys, values, position


class Window(_Rows):
    """Attention over the last ``max_size`` rows, the first ``keep`` among them (``RotatingKVCache``)."""

    kind = "window"
    record = "window"
    cache: RotatingKVCache

    def __init__(self, cache: RotatingKVCache, path: tuple[int, ...]) -> None:
        super().__init__(cache, path)
        if cache.max_size <= cache.keep:
            raise UnknownCache(
                f"Layer {self.label} keeps the first {cache.keep} rows in a window of {cache.max_size}: "
                "there is no room for others."
            )

    def params(self) -> dict[str, int]:
        return {"window": self.cache.max_size, "keep": self.cache.keep}

    def window(self) -> int:
        return self.cache.max_size - self.cache.keep

    def keep(self) -> int:
        return self.cache.keep

    def hold(self) -> Any:
        keys, values, offset, keep, max_size, index = self.cache.state
        return (None if keys is None else keys[:], None if values is None else values[:], offset, keep, max_size, index)

    def put_back(self, held: Any) -> None:
        self.cache.state = held

    def _in_order(self) -> Arrays:
        """The rows held, oldest first: the ``keep`` first ones, then a run that ends at ``offset``."""
        _, _, offset, keep, _, index = self.cache.state

        def order(v: mx.array) -> mx.array:
            if index == v.shape[2]:
                return v
            if index < offset:  # wrapped: the oldest row stands at the write index
                return mx.concatenate([v[..., :keep, :], v[..., index:, :], v[..., keep:index, :]], axis=2)
            return v[..., :index, :]  # the buffer is larger than what was written

        return {name: order(array) for name, array in self.arrays().items()}

    def rows(self, a: int, b: int) -> Arrays:
        ordered = self._in_order()
        held = next(iter(ordered.values())).shape[2] if ordered else 0
        first = 0 if self.cache.offset <= held else self.cache.offset - (held - self.cache.keep)
        shift = 0 if first == 0 else self.cache.keep - first
        if not first <= a <= b <= self.cache.offset:
            raise PositionError(f"Member {self.label} holds rows [{first}, {self.cache.offset}), not [{a}, {b}).")
        return {name: array[..., a + shift : b + shift, :] for name, array in ordered.items()}

    def rewindable(self) -> int:
        # A ring as large as its window has overwritten what a rewind would need once it has wrapped.
        return self.cache.offset if self.cache.offset < self.cache.max_size else 0

    def settle(self) -> None:
        if self.cache.keys is None:
            return
        size, keep = self.cache.max_size, self.cache.keep
        ordered = self._in_order()
        held = ordered["keys"].shape[2]
        if held > size:  # a chunk leaves more rows than the window; the next step would drop them
            ordered = {
                name: mx.concatenate([v[..., :keep, :], v[..., held - (size - keep) :, :]], axis=2)
                for name, v in ordered.items()
            }
        self.resume({name: mx.contiguous(v) for name, v in ordered.items()}, self.cache.offset)

    def resume(self, arrays: Arrays, position: int) -> None:
        cache = self.cache
        keys, values = arrays["keys"], arrays["values"]
        cache.state = (keys, values, position, cache.keep, cache.max_size, keys.shape[2])


class Chunked(_Rows):
    """Attention within chunks: a token sees no row of an earlier chunk than its own (``ChunkedKVCache``).

    Stored like a window, not like growing rows: to resume at p, only rows [p // chunk · chunk, p) are read, none where
    a chunk begins. That is what is left of a run in memory at a boundary, too, so that both go on with the same bits.
    ``maybe_trim_front`` leaves up to ``chunk_size`` rows before a forward; its mask hides those of the chunk before.
    """

    kind = "chunked"
    record = "window"
    cache: ChunkedKVCache

    def params(self) -> dict[str, int]:
        return {"chunk": self.cache.chunk_size}

    def window(self) -> int:
        return self.cache.chunk_size

    def _first(self, position: int) -> int:
        """The first row that is seen from ``position`` on."""
        return position // self.cache.chunk_size * self.cache.chunk_size

    def hold(self) -> Any:
        keys, values, offset, size, start = self.cache.state
        return (None if keys is None else keys[:], None if values is None else values[:], offset, size, start)

    def put_back(self, held: Any) -> None:
        self.cache.state = held

    def rows(self, a: int, b: int) -> Arrays:
        start, offset = self.cache.start_position, self.cache.offset
        if not start <= a <= b <= offset:
            raise PositionError(f"Member {self.label} holds rows [{start}, {offset}), not [{a}, {b}).")
        return {name: array[..., a - start : b - start, :] for name, array in self.arrays().items()}

    def rewindable(self) -> int:
        # to where the chunk of the first row that is held begins, or the next one if its first rows are gone
        whole = -self._first(-self.cache.start_position)
        return max(0, self.cache.offset - whole)

    def most_drafts(self) -> int | None:
        # rows are cut off before a forward only, so that all rows of the last one can go: what stays is what
        # ``maybe_trim_front`` found there, and more than the next call of it leaves
        return None

    def settle(self) -> None:
        if self.cache.keys is None:
            return
        offset = self.cache.offset
        rows = self.rows(self._first(offset), offset)
        self.resume({name: mx.contiguous(v) for name, v in rows.items()}, offset)

    def resume(self, arrays: Arrays, position: int) -> None:
        first = self._first(position)
        keys, values = (arrays["keys"], arrays["values"]) if first < position else (None, None)
        if keys is not None and keys.shape[2] != position - first:
            raise PositionError(f"Member {self.label} needs rows [{first}, {position}), not {keys.shape[2]} rows.")
        self.cache.state = (keys, values, position, self.cache.chunk_size, first)


class Recurrent(Member):
    """A state of fixed size that each token rewrites: SSM, linear attention, short convolution (``ArraysCache``).

    Slots that hold nothing are left out; which ones do is part of the layout.
    """

    kind = "recurrent"
    record = "state"
    cache: ArraysCache

    def params(self) -> dict[str, int]:
        return {"slots": len(self.cache.cache)}

    def arrays(self) -> Arrays:
        if self.cache.left_padding is not None or self.cache.lengths is not None:
            raise PositionError(f"Member {self.label} is padded for a batch: its state is not that of one sequence.")
        return {f"slot{i}": a for i, a in enumerate(self.cache.cache) if a is not None}

    def hold(self) -> Any:
        return list(self.cache.cache)  # steps rebind slots, they never write into them

    def put_back(self, held: Any) -> None:
        self.cache.cache = list(held)

    def rewindable(self) -> int:
        return 0

    def rewind(self, n: int) -> None:
        if n:
            raise PositionError(f"Member {self.label} is recurrent and cannot go back.")

    def commit(self, kept: int, width: int, replay: Replay | None) -> None:
        """Its state after the first ``kept`` of the last ``width`` tokens, lazily, from what its layer wrote down."""
        if kept == width:
            return
        if replay is None or not replay.covers(self.cache):
            raise PositionError(f"Member {self.label} is recurrent, and its layer wrote no journal to go back by.")
        found = replay.slots(self.cache, kept)
        self.cache.cache = [found.get(i) for i in range(len(self.cache.cache))]

    def state_at(self, position: int, inside: Inside) -> Arrays:
        return {f"slot{i}": a for i, a in sorted(inside.slots(self.cache, position).items())}

    def resume(self, arrays: Arrays, position: int) -> None:
        self.cache.cache = [arrays.get(f"slot{i}") for i in range(len(self.cache.cache))]


#: Exact classes only: a subclass may keep something else in the same place.
KINDS: dict[type, type[Member]] = {
    KVCache: Growing,
    ConcatenateKVCache: Concatenated,
    QuantizedKVCache: Quantised,
    RotatingKVCache: Window,
    ChunkedKVCache: Chunked,
    ArraysCache: Recurrent,
}


def members_of(caches: list[Any]) -> list[Member]:
    """All members of a model's cache, depth first. Raises UnknownCache with the class and its place."""

    def walk(cache: Any, path: tuple[int, ...]) -> Iterator[Member]:
        if type(cache) is CacheList:
            for i, inner in enumerate(cache.caches):
                yield from walk(inner, (*path, i))
        elif isinstance(cache, OwnCache):
            yield from cache.members(path)
        elif type(cache) in KINDS:
            yield KINDS[type(cache)](cache, path)
        else:
            raise UnknownCache(
                f"Layer {'.'.join(map(str, path))} keeps its state in {type(cache).__name__}, "
                "for which mlxkv has no state kind."
            )

    return [member for i, cache in enumerate(caches) for member in walk(cache, (i,))]
