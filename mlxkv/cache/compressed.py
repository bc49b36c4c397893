"""The state of one layer of compressed attention: a window of raw rows, entries, and rings of rows that entries need.

Every part is a function of the position alone: the row of position p stands at p % size of its ring, the entry of
tokens [n·ratio, (n+1)·ratio) at place n. So tokens are taken back by counting back, as long as nothing that is needed
again was written over (``Geometry.most_width``), and bits do not depend on how a prompt was cut.

A forward reads each ring before it writes into it: its own rows may take the places of those that it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

#: entries by which their buffer grows
_STEP = 256


@dataclass(frozen=True)
class Seen:
    """What queries see: ``rows`` [B, K, d], and by query the ``index`` [B, S, window] into them, oldest first, of which
    ``mask`` [B, S, window] says whether there is such a token. Where there is none, ``index`` names the query's own
    row, so that no row is read that nobody wrote. B: 1, or the slots of a batch, whose rows stand at positions of their
    own."""

    rows: mx.array
    index: mx.array
    mask: mx.array


#: pool(windows [B, n, window, width], first position of each group [B, n], which rows there are [B, n, window]) ->
#: [B, n, d]. Rows that there are not are zero. The groups of a row follow each other: RoPE may be given
#: first[:, 0] // ratio as its offset and ``ratio`` as its scale. In a batch, whose shapes are fixed, groups that do not
#: close yet are among them; nobody reads what comes of those.
Pool = Callable[[mx.array, mx.array, mx.array], mx.array]


class PositionRing:
    """Rows [1, 1, size, width] of the last positions, that of position p at p % size. ``offset``: tokens seen."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.offset = 0
        self.rows: mx.array | None = None

    def joined(self, new: mx.array) -> mx.array:
        """[1, size + S, width]: what is held, then ``new`` [1, S, width]; ``at`` says where a position stands."""
        if self.rows is None:
            self.rows = mx.zeros((1, 1, self.size, new.shape[2]), new.dtype)
        return mx.concatenate([self.rows[:, 0], new], axis=1)

    def at(self, positions: mx.array) -> mx.array:
        """Where rows of ``positions`` stand in ``joined``, for a forward that begins at ``offset``."""
        return mx.where(positions < self.offset, positions % self.size, self.size + positions - self.offset)

    def write(self, new: mx.array) -> None:
        """The rows of the next S positions, of which the last ``size`` are kept."""
        start, end = self.offset, self.offset + new.shape[1]
        first = max(start, end - self.size)
        assert self.rows is not None
        self.rows[:, 0, mx.arange(first, end) % self.size] = new[:, first - start :]
        self.offset = end


class Compressing:
    """Entries of one name, and the ring of raw rows that those of later tokens need.

    ``window``: rows that an entry is made from, its group and, with ``overlap``, the group before.
    """

    def __init__(self, ratio: int, overlap: bool, size: int) -> None:
        self.ratio, self.overlap = ratio, overlap
        self.window = ratio * (2 if overlap else 1)
        self.ring = PositionRing(size)
        self.buffer: mx.array | None = None

    @property
    def count(self) -> int:
        return self.ring.offset // self.ratio

    def update(self, rows: mx.array, pool: Pool, dim: int, dtype: mx.Dtype) -> mx.array:
        """Take ``rows`` [1, S, width] of the next tokens; gives back all entries [1, E, dim] there are then."""
        before, start, end = self.count, self.ring.offset, self.ring.offset + rows.shape[1]
        if (n := end // self.ratio - before) > 0:
            ends = (before + 1 + mx.arange(n)) * self.ratio
            positions = ends[:, None] - self.window + mx.arange(self.window)
            there = positions >= 0
            index = self.ring.at(mx.where(there, positions, ends[:, None] - 1))
            windows = mx.where(there[None, ..., None], self.ring.joined(rows)[:, index], 0)
            made = pool(windows, (ends - self.ratio)[None], there[None])
            self._grow(before + n, dim, dtype)
            assert self.buffer is not None
            self.buffer[:, 0, before : before + n] = made.astype(dtype)
        else:
            self.ring.joined(rows)
        self.ring.write(rows)
        assert self.ring.offset == end and start <= end
        return self.entries(dim, dtype)

    def entries(self, dim: int, dtype: mx.Dtype) -> mx.array:
        if self.buffer is None:
            return mx.zeros((1, 0, dim), dtype)
        return self.buffer[:, 0, : self.count]

    def _grow(self, count: int, dim: int, dtype: mx.Dtype) -> None:
        held = 0 if self.buffer is None else self.buffer.shape[2]
        if count <= held:
            return
        room = mx.zeros((1, 1, (count - held + _STEP - 1) // _STEP * _STEP, dim), dtype)
        self.buffer = room if self.buffer is None else mx.concatenate([self.buffer, room], axis=2)


class CompressedCache:
    """One sequence's state of one layer. ``ratio`` 0: only the window. ``spare``: drafts that can be taken back."""

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
        self.window, self.ratio, self.overlap, self.spare, self.dtype = window, ratio, overlap, spare, dtype
        self.dims = {"kv": head_dim} | ({} if index_dim is None else {"index": index_dim})
        self.raw = PositionRing(window + spare)
        pooled = ratio * (2 if overlap else 1)
        size = pooled if not spare else -(-(pooled + spare) // ratio) * ratio if ratio else 0
        self.parts = {name: Compressing(ratio, overlap, size) for name in self.dims} if ratio else {}

    @property
    def offset(self) -> int:
        """Tokens seen, those of the forward under way too once ``update_window`` was called. In a batch: [slots] int32,
        as RoPE takes it too; ``offset[:, None] + arange(S)`` are positions then."""
        return self.raw.offset

    def update_window(self, kv: mx.array) -> Seen:
        """Raw rows [1, S, head_dim] of the next tokens, and what their queries see of these and earlier ones."""
        kv = kv.astype(self.dtype)
        own = self.raw.offset + mx.arange(kv.shape[1])[:, None]
        positions = own - self.window + 1 + mx.arange(self.window)
        mask = positions >= 0
        index = self.raw.at(mx.where(mask, positions, own))
        rows = self.raw.joined(kv)
        self.raw.write(kv)
        return Seen(rows, index[None], mask[None])

    def compress(self, name: str, rows: mx.array, pool: Pool) -> mx.array:
        """Raw rows [1, S, width] of "kv" or "index" of the next tokens; all entries [1, E, dim] there are then. The
        query at p sees those n < (p + 1) // ratio."""
        return self.parts[name].update(rows, pool, self.dims[name], self.dtype)

    def entries(self, name: str) -> mx.array:
        return self.parts[name].entries(self.dims[name], self.dtype)

    @property
    def state(self) -> list[Any]:
        arrays = [self.raw.rows, *(a for part in self.parts.values() for a in (part.ring.rows, part.buffer))]
        return [a for a in arrays if a is not None]

    def is_trimmable(self) -> bool:
        return False

    def empty(self) -> bool:
        return self.offset == 0

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.state)
