"""``plan`` as MLX operations, for several sequences at once, each at its own position, with fixed shapes.

Rows of a forward come as a rectangle [sequences, width, d], of which the first ``extend[s]`` are real. One array holds
all rings, [sequences, ring + 1, d]: the last row of each is the *dummy* that takes what is not to be written, and that
nobody reads. No index is ever negative or out of range, for MLX would read another row without a word.

A step is: ``plan``; ``gather`` (from the old ring and the rows of this forward); make entries; ``write``. Since
``write`` gives back another array, what was gathered comes from the ring as it was before.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from .geometry import Geometry


class Plan(NamedTuple):
    """Of one forward over [sequences, width] rows; all int32 but for the masks.

    ``prefix`` [sequences]: tokens before it.
    Entries, [sequences, entries]: ``closes``: whether there is one (the real ones come first); ``end``: one past its
    last token; ``from_ring``: how many rows of its window, the first ones, come from the ring.
    Writes, [sequences, writes]: ``row``: which row of the forward; ``slot``: the row of the ring that it goes to, the
    dummy where ``writes`` is False; ``position``: its token's.
    """

    prefix: mx.array
    closes: mx.array
    end: mx.array
    from_ring: mx.array
    writes: mx.array
    row: mx.array
    position: mx.array
    slot: mx.array


def plan(
    geometry: Geometry,
    prefix: mx.array,
    extend: mx.array,
    width: int,
    *,
    entries: int | None = None,
    page: int | None = None,
) -> Plan:
    """``prefix``: tokens before this forward, ``extend``: its real rows, 0 … width, both [sequences] int32.

    ``entries``: how many at most are made of a sequence, where the caller knows (0 … ceil(width / ratio)); None: as
    many as a width can close. ``page``: tokens of a page where rows are kept by page (``paged_slots``): the last
    ``ratio`` rows of every page are written too; ``slot`` is then the row inside the page's ring.
    """
    ratio, ring = geometry.ratio, geometry.ring
    before, prefix, extend = prefix, prefix[:, None], extend[:, None]
    seq = prefix + extend
    n = -(-width // ratio) if entries is None else entries
    end = (prefix // ratio + 1 + mx.arange(n)) * ratio
    closes = end <= seq
    from_ring = geometry.window - mx.minimum(end - prefix, geometry.window)

    # beyond a ring's length nothing older than it is kept, unless pages keep it
    most = width if page else min(width, ring)
    row = extend - most + mx.arange(most)
    position = prefix + row
    first = seq // ratio * ratio - (ratio if geometry.overlap else 0)
    first = mx.minimum(first, seq - geometry.write_pad)
    wanted = position >= first
    if page and geometry.overlap:
        wanted = wanted | (position % page >= page - ratio)
    writes = wanted & (row >= 0)
    row, position = mx.maximum(row, 0), mx.maximum(position, 0)
    slot = mx.where(writes, (position % page if page else position) % ring, ring)
    return Plan(before, closes, end, from_ring, writes, row, position, slot)


def gather(geometry: Geometry, plan: Plan, ring: mx.array, rows: mx.array) -> tuple[mx.array, mx.array]:
    """The windows that entries are made of, and which of their rows there are.

    ``ring``: [sequences, ring + 1, d] as it was before this forward; ``rows``: [sequences, width, d]. Returns
    [sequences, entries, window, d] and a mask [sequences, entries, window]. Rows that do not exist (before the first
    token, or of an entry that is none) are 0 whatever the ring holds.
    """
    window, size = geometry.window, geometry.ring
    sequences, n = plan.end.shape
    i = mx.arange(window)
    position = plan.end[..., None] - window + i
    there = plan.closes[..., None] & (position >= 0)
    old = there & (i < plan.from_ring[..., None])
    new = there & ~old
    if not n or not rows.shape[1]:
        return mx.zeros((sequences, n, window, rows.shape[2]), rows.dtype), there
    held = _take(ring, mx.where(old, position % size, size))
    now = _take(rows, mx.where(new, position - plan.prefix[:, None, None], 0))
    none = mx.zeros((), rows.dtype)
    return mx.where(old[..., None], held, mx.where(new[..., None], now, none)), there


def write(plan: Plan, ring: mx.array, rows: mx.array) -> mx.array:
    """The ring after this forward: another array. Shapes as of ``gather``."""
    if not rows.shape[1]:
        return ring
    flat = ring.reshape(-1, ring.shape[2])
    flat[_flat(plan.slot, ring)] = _take(rows, plan.row).astype(ring.dtype)
    return flat.reshape(ring.shape)


def empty(geometry: Geometry, sequences: int, d: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Rings of sequences that have no tokens."""
    return mx.zeros((sequences, geometry.ring + 1, d), dtype)


def decode(geometry: Geometry, seq: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """A plain step, which may write before it reads. ``seq``: [sequences] tokens with this one, 0 where there is none.

    Returns the slot that the step's row goes to [sequences], whether an entry is made [sequences], and the rows of the
    ring that it is made of [sequences, window], the dummy for those that do not exist.
    """
    ratio, window, size = geometry.ratio, geometry.window, geometry.ring
    slot = mx.where(seq > 0, mx.maximum(seq - 1, 0) % size, size)
    closes = (seq > 0) & (seq % ratio == 0)
    position = seq[:, None] - window + mx.arange(window)
    there = closes[:, None] & (position >= 0)
    return slot, closes, mx.where(there, mx.maximum(position, 0) % size, size)


def paged_slots(geometry: Geometry, plan: Plan, table: mx.array, page: int, pages: int) -> mx.array:
    """Where rows go that are kept by page: [sequences, writes] into a pool of ``pages`` · ring rows and one dummy row.

    ``table``: [sequences, n] int32, the page of each ``page`` tokens of a sequence.
    """
    at = mx.minimum(plan.position // page, table.shape[1] - 1)
    slot = mx.take_along_axis(table, at, axis=1) * geometry.ring + plan.slot
    return mx.where(plan.writes, slot, pages * geometry.ring)


def _take(rows: mx.array, index: mx.array) -> mx.array:
    """rows [s, n, d] at index [s, …]: [s, …, d]. Whole rows are copied, faster than by an index for each number."""
    return mx.take(rows.reshape(-1, rows.shape[2]), _flat(index, rows), axis=0)


def _flat(index: mx.array, rows: mx.array) -> mx.array:
    first = mx.arange(rows.shape[0]) * rows.shape[1]
    return index + first.reshape(-1, *[1] * (index.ndim - 1))
