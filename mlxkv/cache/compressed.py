"""The state of one layer of compressed attention: a window of raw rows, entries, and rings of rows that entries need.

Everything is a function of the position alone: the row of position p stands at p % size of its ring, the entry of
tokens [n·ratio, (n+1)·ratio) at place n. So tokens are taken back by counting back, as long as nothing that is needed
again was written over (``Geometry.most_width``), and bits do not depend on how a prompt was cut.

A forward reads each ring before it writes into it: its own rows may take the places of those that it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .compress import arrays
from .compress.geometry import Geometry
from .compress.plan import first_write
from .member import Member, OwnCache, PositionError

#: entries by which their buffer grows, where nobody says how many there will be
_STEP = 256

#: pool(windows [B, n, window, width], first position of each group [B, n], which rows there are [B, n, window]) ->
#: [B, n, d]. Rows that there are not are zero. In a batch, whose shapes are fixed, groups that do not close yet are
#: among them: nobody reads what comes of those.
Pool = Callable[[mx.array, mx.array, mx.array], mx.array]


@dataclass(frozen=True)
class Seen:
    """What queries see: ``rows`` [B, K, d], and by query the ``index`` [B, S, window] into them, oldest first, of which
    ``mask`` [B, S, window] says whether there is such a token. Where there is none, ``index`` names the query's own
    row, so that no row is read that nobody wrote. B: 1, or the slots of a batch, whose rows stand at positions of their
    own."""

    rows: mx.array
    index: mx.array
    mask: mx.array


@dataclass(frozen=True)
class Forward:
    """The last forward, where it had more rows than the ring keeps: the ring before it, which held those of positions
    [low, start), and its own rows, [1, n, width]."""

    low: int
    start: int
    before: mx.array
    rows: mx.array


class PositionRing:
    """Rows of the last positions, that of position p at p % ``size``. Arrays are rebound, never assigned into.

    ``rows``: [1, size + 1, width], of which the last is the dummy row that nobody reads; None before the first forward.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.rows: mx.array | None = None
        #: tokens seen
        self.offset = 0
        #: rows of positions [low, offset) are held
        self.low = 0
        self.last: Forward | None = None

    def need(self, position: int) -> int:
        """The first position whose row is needed again by a sequence that stands at ``position``."""
        raise NotImplementedError

    def held(self, new: mx.array) -> mx.array:
        """The ring as it was before the forward over ``new`` [1, S, width]."""
        if self.rows is None:
            return mx.zeros((1, self.size + 1, new.shape[2]), new.dtype)
        return self.rows

    def wrote(self, rows: mx.array, before: mx.array, new: mx.array, first: int) -> None:
        """``rows`` is the ring with those of the next S positions that are not before ``first``."""
        start, low, self.rows = self.offset, self.low, rows
        self.offset += new.shape[1]
        self.low = max(self.low, self.offset - self.size, first if first > start else 0)
        # only then may somebody ask for rows that are not in the ring
        self.last = Forward(low, start, before, new) if self.low > start else None

    def can_stand(self, position: int) -> bool:
        return 0 <= position <= self.offset and self.need(position) >= self.low

    def back(self, n: int) -> None:
        """Take back the last ``n`` tokens. Raises PositionError where rows that are needed there were written over."""
        if n and not self.can_stand(self.offset - n):
            raise PositionError(
                f"A ring of {self.size} rows cannot go back {n} tokens: it holds those of [{self.low}, {self.offset})."
            )
        self.offset -= n
        if n:
            self.last = None

    def read(self, a: int, b: int) -> mx.array:
        """Rows [a, b) of positions up to ``offset``, lazily: [1, b − a, width]. Raises PositionError."""
        positions, last = mx.arange(a, b), self.last
        if self.rows is not None and self.low <= a <= b <= self.offset:
            return self.rows[:, positions % self.size]
        if last is not None and last.low <= a <= b <= self.offset:
            split = min(max(a, last.start), b)
            old = last.before[:, positions[: split - a] % self.size]
            return mx.concatenate([old, last.rows[:, split - last.start : b - last.start]], axis=1)
        raise PositionError(f"A ring of {self.size} rows holds those of [{self.low}, {self.offset}), not [{a}, {b}).")

    def take(self, rows: mx.array, start: int, position: int) -> None:
        """Stand at ``position`` with ``rows`` [1, n, width] of the positions from ``start`` on, and no others."""
        empty = mx.zeros((1, self.size + 1, rows.shape[2]), rows.dtype)
        empty[:, mx.arange(start, start + rows.shape[1]) % self.size] = rows
        self.rows, self.offset, self.low, self.last = empty, position, start, None

    def hold(self) -> tuple[Any, ...]:
        return self.rows, self.offset, self.low, self.last

    def put_back(self, held: tuple[Any, ...]) -> None:
        self.rows, self.offset, self.low, self.last = held

    def live(self) -> list[mx.array]:
        return [] if self.rows is None else [self.rows]


class Latents(PositionRing):
    """The raw rows that queries see: those of the last ``window`` tokens, and ``spare`` more that may be taken back."""

    def __init__(self, window: int, spare: int) -> None:
        super().__init__(window + spare)
        self.window, self.spare = window, spare

    def need(self, position: int) -> int:
        return max(0, position - self.window + 1)

    def update(self, new: mx.array) -> Seen:
        """``new``: [1, S, width]."""
        start, count, before = self.offset, new.shape[1], self.held(new)
        own = mx.arange(start, start + count)[:, None]
        positions = own - self.window + 1 + mx.arange(self.window)
        mask = positions >= 0
        positions = mx.where(mask, positions, own)
        index = mx.where(positions < start, positions % self.size, self.size + 1 + positions - start)
        kept = min(count, self.size)
        rows = before[:]
        rows[:, mx.arange(start + count - kept, start + count) % self.size] = new[:, count - kept :]
        self.wrote(rows, before, new, start)
        return Seen(mx.concatenate([before, new], axis=1), index[None], mask[None])


class Pending(PositionRing):
    """The rows that entries of later tokens are made from."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry.ring)
        self.geometry = geometry

    def need(self, position: int) -> int:
        return position - self.geometry.pending(position)

    def update(self, new: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """The windows [1, n, window, width] that the next tokens' rows ``new`` [1, S, width] complete, the first
        position of each group [1, n], and which rows there are [1, n, window]."""
        g, before, start, count = self.geometry, self.held(new), self.offset, new.shape[1]
        made = g.entries(start + count) - g.entries(start)
        plan = arrays.plan(g, mx.array([start]), mx.array([count]), count, entries=made)
        windows, there = arrays.gather(g, plan, before, new)
        self.wrote(arrays.write(plan, before, new), before, new, first_write(g, start + count))
        return windows, plan.end - g.ratio, there


class Entries:
    """Entries of one name and what later ones need. There are as many as the position says: those of tokens that were
    taken back are made again."""

    def __init__(self, geometry: Geometry) -> None:
        self.pending = Pending(geometry)
        #: [1, 1, room, d]
        self.buffer: mx.array | None = None
        #: entries by which the buffer grows
        self.step = _STEP

    @property
    def geometry(self) -> Geometry:
        return self.pending.geometry

    @property
    def count(self) -> int:
        return self.geometry.entries(self.pending.offset)

    def update(self, rows: mx.array, pool: Pool, dim: int, dtype: mx.Dtype) -> mx.array:
        """Take ``rows`` [1, S, width] of the next tokens; gives back all entries [1, E, dim] that there are then."""
        before = self.count
        windows, first, there = self.pending.update(rows)
        self.grow(max(1, self.count), dim, dtype)
        assert self.buffer is not None
        if self.count > before:
            self.buffer[:, 0, before : self.count] = pool(windows, first, there).astype(dtype)
        return self.buffer[:, 0, : self.count]

    def grow(self, count: int, dim: int, dtype: mx.Dtype) -> None:
        held = 0 if self.buffer is None else self.buffer.shape[2]
        if count > held:
            self.widen(-(-count // self.step) * self.step, dim, dtype)

    def widen(self, room: int, dim: int, dtype: mx.Dtype) -> None:
        """Room for so many entries, those that are there stay."""
        parts = [] if self.buffer is None else [self.buffer]
        held = 0 if self.buffer is None else self.buffer.shape[2]
        self.buffer = mx.concatenate([*parts, mx.zeros((1, 1, room - held, dim), dtype)], axis=2)


class CompressedCache(OwnCache):
    """One sequence's state of one layer. ``ratio`` 0: only the window. ``spare``: drafts that can be taken back.

    A forward calls ``update_window`` once, and ``compress`` once for "kv" and, where there is an ``index_dim``, for
    "index". ``dtype`` is that of window and entries; rings keep the one of the rows that they are given.
    """

    def __init__(
        self,
        *,
        window: int,
        ratio: int,
        overlap: bool,
        head_dim: int,
        index_dim: int | None = None,
        spare: int = 0,
        dtype: mx.Dtype = mx.float32,
    ) -> None:
        """Raises ValueError for numbers that cannot be."""
        if window < 2:
            raise ValueError(f"a window of {window} rows")
        self.window, self.ratio, self.overlap, self.spare, self.dtype = window, ratio, overlap, spare, dtype
        self.head_dim, self.index_dim = head_dim, index_dim
        self.latents = Latents(window, spare)
        self.dims = {"kv": head_dim} | ({} if index_dim is None else {"index": index_dim}) if ratio else {}
        self.parts = {name: Entries(Geometry.serving(ratio, overlap, spare + 1)) for name in self.dims}

    def with_spare(self, spare: int) -> CompressedCache:
        """A fresh cache like this one that takes back ``spare`` drafts."""
        return CompressedCache(
            window=self.window,
            ratio=self.ratio,
            overlap=self.overlap,
            head_dim=self.head_dim,
            index_dim=self.index_dim,
            spare=spare,
            dtype=self.dtype,
        )

    @property
    def offset(self) -> int:
        """Tokens seen, those of the forward under way too once ``update_window`` was called."""
        return self.latents.offset

    def update_window(self, kv: mx.array) -> Seen:
        """Raw rows [1, S, head_dim] of the next tokens, and what their queries see of these and earlier ones."""
        return self.latents.update(kv.astype(self.dtype))

    def compress(self, name: str, rows: mx.array, pool: Pool) -> mx.array:
        """Raw rows [1, S, width] of "kv" or "index" of the next tokens; all entries [1, E, dim] that there are then.
        The query at p sees those n < (p + 1) // ratio."""
        return self.parts[name].update(rows, pool, self.dims[name], self.dtype)

    def entries(self, name: str) -> mx.array:
        """All entries [1, E, dim]."""
        part = self.parts[name]
        if part.buffer is None:
            return mx.zeros((1, 0, self.dims[name]), self.dtype)
        return part.buffer[:, 0, : part.count]

    def members(self, path: tuple[int, ...]) -> list[Member]:
        from .compressed_members import members

        return members(self, path)

    @property
    def state(self) -> list[mx.array]:
        rings = [self.latents, *(part.pending for part in self.parts.values())]
        buffers = [part.buffer for part in self.parts.values() if part.buffer is not None]
        return [*(a for ring in rings for a in ring.live()), *buffers]

    def is_trimmable(self) -> bool:
        return False

    def empty(self) -> bool:
        return self.offset == 0

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.state)
