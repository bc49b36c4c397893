"""A window inside a ring with spare rows: drafts are verified, and those that are not kept destroy nothing.

``RotatingKVCache`` of mlx-lm has as many rows as its window: a draft that it writes has replaced a row which plain
decoding would still see after a rejection. Here the buffer is ``window + spare`` rows long. Of a forward that verifies
D rows the first (always kept) goes to its own place in the window, the drafts to the spare rows; those that are kept
are written into the window afterwards:

    columns   0 … keep … window   window … window + spare
              first     the last   drafts of the forward
              rows      rows       that is being verified

So D ≤ spare + 1 = size − window + 1 (DESIGN §6, Rings). What each query sees is planned twice: ``Cycle`` as a loop over
single steps, ``homes`` and ``seen`` as MLX arrays for many rows at once. Both give the same sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, RotatingKVCache

from .. import numerics
from .compress.geometry import Geometry
from .compressed import CompressedCache
from .kinds import Window
from .member import Arrays, Member, OwnCache, PositionError

if TYPE_CHECKING:
    from .layout import Layout, MemberSpec

#: spare rows of a ring unless configured: drafts of one forward at most
SPARE = 8
_NEVER = 1 << 30


@dataclass(frozen=True)
class Ring:
    """The numbers of a ring: ``size`` rows that a window holds, the first ``keep`` for ever, and ``spare`` more."""

    size: int
    keep: int = 0
    spare: int = SPARE


@dataclass(frozen=True)
class Cycle:
    """One forward that verifies ``width`` rows, as a loop over the single steps that it stands for.

    ``position``: where the sequence stood. ``index``: the column that the next single step would write; ``size`` where
    it is about to wrap. ``window``: a shorter window that the model asks for, None for all of the ring.
    """

    ring: Ring
    position: int
    index: int
    width: int
    window: int | None = None

    @cached_property
    def straight(self) -> bool:
        """All rows find columns that were never written: none of them needs a spare row."""
        return self.position + self.width <= self.ring.size

    @cached_property
    def homes(self) -> list[int]:
        """By row, its column in the window."""
        out, index = [], self.index
        for _ in range(self.width):
            index = self.ring.keep if index == self.ring.size else index
            out.append(index)
            index += 1
        return out

    @cached_property
    def writes(self) -> list[int]:
        """By row, the column it is written to until it is known to be kept."""
        if self.straight:
            return self.homes
        size, spare = self.ring.size, self.ring.spare
        return [self.homes[0], *(size + i % spare for i in range(self.width - 1))]

    def seen(self) -> list[set[int]]:
        """By row, the columns that its query sees: those that a single step would see there."""
        size, out = self.ring.size, []
        at = {column: column for column in range(min(self.position, size))}  # home -> where its row stands now
        index = self.index
        for row, (home, column) in enumerate(zip(self.homes, self.writes, strict=True)):
            at[home] = column
            out.append({at[c] for c in self._within(at, self.position + row, index)})
            index = home + 1
        return out

    def _within(self, held: dict[int, int], position: int, index: int) -> list[int]:
        """The homes that are seen at ``position``: all, or what ``RotatingKVCache.make_mask`` cuts out of them."""
        size, window = self.ring.size, self.window
        if window is None or window >= size or position < window:
            return list(held)
        n = min(position + 1, size)
        oldest = (0 if index >= size else index) + 1
        ages = [False] * (n - window) + [True] * window
        return [c for c in held if ages[(c - oldest) % n]]

    def order(self) -> list[int]:
        """All columns that some query sees, each beside the one that it takes the place of: for each query alone that
        is the order of a single step."""
        held = min(self.position, self.ring.size)
        rows = [(home, row, column) for row, (home, column) in enumerate(zip(self.homes, self.writes, strict=True))]
        old = [(c, -1, c) for c in range(held) if c != self.homes[0]]
        return [column for *_, column in sorted(old + rows)]


# the same with arrays: position, index [slots] int32


def homes(ring: Ring, index: mx.array, width: int) -> mx.array:
    """``Cycle.homes`` of each slot: [slots, width] int32."""
    at = mx.where(index == ring.size, ring.keep, index)[:, None] + mx.arange(width)
    return mx.where(at < ring.size, at, ring.keep + (at - ring.size) % (ring.size - ring.keep))


def writes(ring: Ring, position: mx.array, index: mx.array, width: int) -> mx.array:
    """``Cycle.writes`` of each slot: [slots, width] int32."""
    home, row = homes(ring, index, width), mx.arange(width)
    away = (row > 0) & (position + width > ring.size)[:, None]
    return mx.where(away, ring.size + (row - 1) % ring.spare, home)


def targets(ring: Ring, position: mx.array, index: mx.array, width: int, kept: mx.array) -> mx.array:
    """Where the drafts that ``writes`` put down are written to when the first kept[r] rows are kept ([slots] int32; 0
    where the slot is free): their homes, or where they stand already if they are not kept, or not for long. [slots,
    width − 1] int32; no column twice."""
    home, row = homes(ring, index, width), mx.arange(width)
    last = (home < ring.keep) | (row + ring.size - ring.keep >= kept[:, None])
    return mx.where((row < kept[:, None]) & last, home, writes(ring, position, index, width))[:, 1:]


def seen(
    ring: Ring,
    position: mx.array,
    index: mx.array,
    width: int,
    window: int | None = None,
    columns: int | None = None,
    spare: bool = True,
) -> mx.array:
    """``Cycle.seen`` of each slot: [slots, width, columns + width − 1] bool.

    The first ``columns`` (None: the ring's size) are the window's, then the drafts'. ``spare``: False where no draft
    stands in a spare row; then [slots, width, columns].
    """
    size, columns = ring.size, ring.size if columns is None else columns
    home, row = homes(ring, index, width), mx.arange(width)
    c, j = mx.arange(columns)[None, None], row[None, :, None]
    last = mx.minimum(position[:, None] + row, size - 1)[..., None]  # the last column that is held
    at = _within(ring, position, index, home, window)
    if not spare:
        return at(c, c <= last)
    away, period = (position + width > size)[:, None, None], size - ring.keep
    first = home[:, :1, None]
    # the draft that first takes the place of what stands in column c (the root, where it was written)
    taken = mx.where(c >= first, c - first, mx.where(c >= ring.keep, size - first + c - ring.keep, _NEVER))
    taken = mx.where(c == first, mx.where(first < ring.keep, _NEVER, period), taken)
    old = at(c, (c <= last) & (~away | (j < taken)))
    draft, its = row[None, None, 1:], home[:, None, 1:]
    again = mx.where(its < ring.keep, _NEVER, draft + period)
    return mx.concatenate([old, at(its, away & (draft <= j) & (j < again))], axis=2)


def _within(ring: Ring, position: mx.array, index: mx.array, home: mx.array, window: int | None) -> Any:
    """Gives back a function (homes, which of them hold something) -> which of them are seen."""
    size, width = ring.size, home.shape[1]
    if window is None or window >= size:
        return lambda column, held: mx.broadcast_to(held, (home.shape[0], width, held.shape[2]))
    at = position[:, None] + mx.arange(width)
    before = mx.concatenate([index[:, None], home[:, :-1] + 1], axis=1)  # the index before each row's step
    oldest = mx.where(before >= size, 0, before)[..., None] + 1
    n = mx.minimum(at + 1, size)[..., None]
    all_of_it = (at < window)[..., None]
    return lambda column, held: held & (all_of_it | ((column + n - oldest) % n >= n - window))


def order(ring: Ring, index: mx.array, width: int) -> mx.array:
    """The columns of ``seen`` as single steps have them: [slots, size + width − 1] int32, each draft beside the row
    that it takes the place of."""
    home = homes(ring, index, width)[:, 1:]
    old = mx.broadcast_to(mx.arange(ring.size), (home.shape[0], ring.size))
    places = mx.concatenate([old * width, home * width + mx.arange(1, width)], axis=1)
    return mx.argsort(places, axis=1).astype(mx.int32)


def in_order() -> bool:
    """Whether attention must run over rows in the order of single steps: where bits are promised."""
    return numerics.mode() == "exact" and mx.default_device().type == mx.DeviceType.cpu


class RingKVCache(RotatingKVCache, OwnCache):
    """``RotatingKVCache`` with ``spare`` rows: steps and chunks give its bits, and its state is the same.

    ``keys``, ``values`` may be longer than the window by ``spare`` rows that belong to no position; they come with the
    first forward that needs them and go with the next chunk. A forward whose width was announced by ``expect`` must be
    followed by ``commit``.
    """

    #: rows that the buffers have beyond the window
    tail = 0
    spare = 0
    _width = 0
    _cycle: Cycle | None = None
    #: keys and values of the rows that are not committed yet: what is moved comes from here, since a read of a buffer
    #: in the step that writes into it would make MLX copy all of it
    new: tuple[mx.array, mx.array] | None = None

    def __init__(self, max_size: int, keep: int = 0, spare: int = SPARE) -> None:
        """Raises ValueError for fewer than one spare row."""
        if spare < 1:
            raise ValueError(f"a ring of {spare} spare rows takes nothing back")
        super().__init__(max_size, keep)
        self.spare = spare

    def members(self, path: tuple[int, ...]) -> list[Member]:
        return [RingWindow(self, path)]

    @property
    def ring(self) -> Ring:
        return Ring(self.max_size, self.keep, self.spare)

    @property
    def state(self) -> tuple[Any, ...]:
        """As of ``RotatingKVCache``: without spare rows."""
        keys, values = self.keys, self.values
        if self.tail and keys is not None and values is not None:
            keys, values = keys[..., : self.max_size, :], values[..., : self.max_size, :]
        return keys, values, self.offset, self.keep, self.max_size, self._idx

    @state.setter
    def state(self, v: tuple[Any, ...]) -> None:
        self.keys, self.values, self.offset, self.keep, self.max_size, self._idx = v
        self.tail, self._width, self._cycle, self.new = 0, 0, None, None

    def hold(self) -> tuple[Any, ...]:
        keys, values = self.keys, self.values
        both = (None if keys is None else keys[:], None if values is None else values[:])
        return both, self.offset, self._idx, self.tail, self._width, self._cycle, self.new

    def put_back(self, held: tuple[Any, ...]) -> None:
        both, self.offset, self._idx, self.tail, self._width, self._cycle, self.new = held
        self.keys, self.values = both

    @property
    def pending(self) -> bool:
        """Rows of the last forward were not committed yet."""
        return self._cycle is not None

    def expect(self, width: int) -> None:
        """The next forward has ``width`` rows, of which ``commit`` says how many are kept; 1: a plain step."""
        self._check_committed()
        self._width = width if width > 1 else 0

    def commit(self, kept: int, width: int) -> None:
        """Keep the first ``kept`` (1 … width) of the last ``width`` rows, lazily. Raises PositionError."""
        cycle, new = self._cycle, self.new
        if cycle is None or new is None:
            if kept != 1 or width != 1:
                raise PositionError(f"{kept} of {width} rows are to be kept, but no such forward was made.")
            return
        if cycle.width != width or not 1 <= kept <= width:
            raise PositionError(f"{kept} of {width} rows are to be kept; the last forward had {cycle.width}.")
        for home, a, b in _runs(cycle.homes[1:kept]) if not cycle.straight else ():
            self.keys[..., home : home + b - a, :] = new[0][..., a + 1 : b + 1, :]
            self.values[..., home : home + b - a, :] = new[1][..., a + 1 : b + 1, :]
        self._cycle = self.new = None
        self.offset = cycle.position + kept
        self._idx = cycle.homes[kept - 1] + 1

    def is_trimmable(self) -> bool:
        return self._cycle is None and super().is_trimmable()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """``keys``, ``values``: [1, heads, rows, width]."""
        self._check_committed()
        rows = keys.shape[2]
        if self._width:
            if rows != self._width:
                raise PositionError(f"A forward of {self._width} rows was announced, not one of {rows}.")
            return self._verify(keys, values)
        if rows > 1 and self.tail:
            self.keys, self.values = self.keys[..., : self.max_size, :], self.values[..., : self.max_size, :]
            self.tail = 0
        if not self.tail:
            return super().update_and_fetch(keys, values)
        self._idx = self.keep if self._idx == self.max_size else self._idx
        self.keys[..., self._idx : self._idx + 1, :] = keys
        self.values[..., self._idx : self._idx + 1, :] = values
        self.offset += 1
        self._idx += 1
        return self.keys_and_values()

    def _check_committed(self) -> None:
        if self._cycle is not None:
            raise PositionError("It is not known how many rows of the last forward are kept.")

    def _verify(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        width, self._width = self._width, 0
        if self.keys is None:
            self._idx = self.offset
        elif self.keys.shape[2] - self.tail > self.max_size:  # a chunk left more rows than the window
            self._idx = self.max_size
        cycle = Cycle(self.ring, self.offset, self._idx, width)
        self.keys, self.values = self._roomy(self.keys, keys, cycle), self._roomy(self.values, values, cycle)
        self.tail = self.keys.shape[2] - self.max_size if self.keys.shape[2] > self.max_size else 0
        for at, a, b in _runs(cycle.writes):
            self.keys[..., at : at + b - a, :] = keys[..., a:b, :]
            self.values[..., at : at + b - a, :] = values[..., a:b, :]
        self.offset += width
        self._cycle, self.new = cycle, (keys, values)
        return self.keys_and_values()

    def _roomy(self, held: mx.array | None, new: mx.array, cycle: Cycle) -> mx.array:
        """A buffer with room for ``cycle``, in order of the columns; the same one if it has it already."""
        rows = 0 if held is None else held.shape[2] - self.tail
        want = rows if cycle.straight else self.max_size
        while want < cycle.position + cycle.width and cycle.straight:  # as single steps would come to it
            want += min(self.step, self.max_size - want)
        tail = self.tail if cycle.straight else self.spare
        if held is not None and (rows, self.tail) == (want, tail):
            return held
        parts = [] if held is None else [held[..., : rows if rows <= want else self.keep, :]]
        if held is not None and rows > want:
            parts.append(held[..., rows - want + self.keep :, :])
            rows = want
        dtype = new.dtype if held is None else held.dtype
        parts.append(mx.zeros((*new.shape[:2], want - rows + tail, new.shape[3]), dtype))
        return mx.concatenate(parts, axis=2)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        cycle = self._cycle
        if cycle is None or cycle.straight:
            n = min(self.offset, self.keys.shape[2] - self.tail)
            return self.keys[..., :n, :], self.values[..., :n, :]
        if in_order():
            columns = mx.array(cycle.order(), mx.int32)
            return mx.take(self.keys, columns, axis=2), mx.take(self.values, columns, axis=2)
        n = self.max_size + min(cycle.width - 1, self.spare)
        return self.keys[..., :n, :], self.values[..., :n, :]

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        if not self._width:
            return super().make_mask(N, window_size, return_array)
        index = self._idx
        if self.keys is not None and self.keys.shape[2] - self.tail > self.max_size:
            index = self.max_size
        cycle = Cycle(self.ring, self.offset, index, self._width, window_size)
        if cycle.straight:
            return super().make_mask(N, window_size, return_array)
        where = (mx.array([self.offset], mx.int32), mx.array([index], mx.int32))
        mask = seen(self.ring, *where, N, window_size)[0]
        if in_order():
            return mask[:, mx.array(cycle.order(), mx.int32)]
        return mask[:, : self.max_size + min(N - 1, self.spare)]


def _runs(columns: Sequence[int]) -> list[tuple[int, int, int]]:
    """(column, a, b): rows [a, b) go to columns that rise by one from ``column`` on."""
    out: list[tuple[int, int, int]] = []
    for row, column in enumerate(columns):
        if out and column == out[-1][0] + row - out[-1][1]:
            out[-1] = (*out[-1][:2], row + 1)
        else:
            out.append((column, row, row + 1))
    return out


class RingWindow(Window):
    """A window in a ring: what it holds, stores and resumes from is a ``Window``'s; it takes back as many drafts as
    there are spare rows."""

    cache: RingKVCache

    def arrays(self) -> Arrays:
        keys, values, *_ = self.cache.state
        return {} if keys is None or values is None else {"keys": keys, "values": values}

    def live(self) -> list[mx.array]:
        return [a for a in (self.cache.keys, self.cache.values, *(self.cache.new or ())) if a is not None]

    def hold(self) -> Any:
        return self.cache.hold()

    def put_back(self, held: Any) -> None:
        self.cache.put_back(held)

    def rows(self, a: int, b: int) -> Arrays:
        if self.cache.pending:
            raise PositionError(f"Member {self.label} does not know which of its rows are kept.")
        return super().rows(a, b)

    def most_drafts(self) -> int:
        return self.cache.spare

    def expect(self, width: int) -> None:
        self.cache.expect(width)

    def commit(self, kept: int, width: int, replay: Any = None) -> None:
        self.cache.commit(kept, width)


def with_rings(caches: list[Any], spare: int) -> list[Any]:
    """``caches`` (fresh, of a model's ``make_cache``) with a ring of ``spare`` spare rows for each window; 0: as they
    are."""

    def ring(cache: Any) -> Any:
        if type(cache) is CacheList:
            return CacheList(*(ring(inner) for inner in cache.caches))
        if type(cache) is RotatingKVCache and spare:
            return RingKVCache(cache.max_size, cache.keep, spare)
        if isinstance(cache, CompressedCache):
            return cache.with_spare(spare)
        return cache

    return [ring(cache) for cache in caches]


def spare_bytes(live: Layout, spare: int) -> int:
    """Bytes that rings with ``spare`` spare rows take beyond their windows in one sequence, or in one slot of a batch:
    those rows, and the rows of a forward until it is known which of them are kept."""
    rows = 2 * spare + 1 if spare else 0
    windows = sum(t.nbytes(rows) for m in live.members if m.kind in ("window", "latents") for t in m.tensors)
    return windows + sum(_longer(m, spare) for m in live.members if m.kind == "pending")


def _longer(member: MemberSpec, spare: int) -> int:
    """Bytes that the ring of rows of which entries are made is longer by, as it is and as it was before the last
    forward."""
    params = dict(member.params)
    least = Geometry.serving(params["ratio"], bool(params["overlap"]))
    return sum(t.nbytes(0) for t in member.tensors) * 2 * (least.ring_for(spare + 1) - least.window) // least.window
