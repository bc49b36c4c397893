"""Boundary tracking: which rows of a decoding step keep their recurrent state, and in which slot of the pool.

A row *captures* when it stands, after the step, at exactly the position whose state is wanted. A step has a fixed
number of *lanes*, through each of which one row's state goes to the pool; a lane that no row uses goes to the pool's
dummy row. So the step has the same graph whether anybody tracks or not, and no index is ever −1 or out of range, which
MLX would take for the last element or for anything. What a step is given is built from host lists each time: nothing of
an earlier, larger batch can stay armed.

Plans exist twice, as a host loop and as MLX array operations of fixed shape; both give the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

#: how many rows can capture in one step. Copying every row's state each step, to the dummy for most, would cost more
#: than the ladder is worth; rows that find no lane go without, which is a miss
LANES = 2


@dataclass(frozen=True)
class Track:
    """What one step over ``slots`` rows tracks. Always there and always of full length, also when nobody tracks.

    mask: [slots] bool, whether the row captures. slot: [slots] int32, the pool slot it captures into, the dummy where
    it does not. length: [slots] int32, the absolute position captured, 0 where it does not. rows, into: [lanes] int32,
    the same by lane: the row (0 where the lane is free) and the pool slot (then the dummy).
    """

    mask: mx.array
    slot: mx.array
    length: mx.array
    rows: mx.array
    into: mx.array

    @classmethod
    def of(
        cls, slots: int, dummy: int, captures: Mapping[int, tuple[int, int]] | None = None, lanes: int = LANES
    ) -> Track:
        """``captures``: row -> (pool slot, absolute position). ``dummy``: how many slots the pool has.

        Raises ValueError for a row outside the batch, a slot outside the pool, more captures than lanes, and two rows
        with one slot: which of the two MLX would keep is not defined.
        """
        captures = captures or {}
        if len(captures) > lanes:
            raise ValueError(f"{len(captures)} rows want to capture in a step of {lanes} lanes.")
        if len({into for into, _ in captures.values()}) < len(captures):
            raise ValueError(f"Several rows capture into one slot: {dict(captures)}.")
        mask, slot, length = [False] * slots, [dummy] * slots, [0] * slots
        for row, (into, position) in captures.items():
            if not 0 <= row < slots:
                raise ValueError(f"Row {row} is not one of the {slots} rows of this step.")
            if not 0 <= into < dummy:
                raise ValueError(f"Row {row} captures into slot {into} of a pool of {dummy}.")
            mask[row], slot[row], length[row] = True, into, position
        free = lanes - len(captures)
        rows, slots_by_lane = sorted(captures), [captures[row][0] for row in sorted(captures)]
        return cls(
            mx.array(mask, mx.bool_),
            mx.array(slot, mx.int32),
            mx.array(length, mx.int32),
            mx.array(rows + [0] * free, mx.int32),
            mx.array(slots_by_lane + [dummy] * free, mx.int32),
        )

    @classmethod
    def bind(cls, arrays: Sequence[mx.array]) -> Track:
        """The inverse of ``arrays()``, for the inside of a compiled step."""
        return cls(*arrays)

    def arrays(self) -> list[mx.array]:
        """In a fixed order: the arguments of a compiled step."""
        return [self.mask, self.slot, self.length, self.rows, self.into]


def scatter(pool: Sequence[mx.array], state: Sequence[mx.array], track: Track) -> list[mx.array]:
    """The pool's arrays after this step: pool[slot of row] = state[row] for rows that capture.

    pool: arrays [N+1, ...], row N the dummy. state: arrays [slots, ...] in the same order, as the step left them. The
    arrays given are as they were afterwards; MLX writes in place if the caller lets go of them before the evaluation.
    """
    lanes = [(track.rows[i : i + 1], track.into[i : i + 1]) for i in range(track.rows.size)]
    out = []
    for new, rows in zip(pool, state, strict=True):
        for row, into in lanes:
            # by offset: on a CPU about a tenth of what an assignment by index takes
            one = mx.slice(rows, row, axes=[0], slice_size=(1, *rows.shape[1:]))
            new = mx.slice_update(new, one.astype(new.dtype), into, axes=[0])
        out.append(new)
    return out


def plan(
    positions: Sequence[int], wanted: Sequence[int], free: Sequence[int], lanes: int = LANES
) -> dict[int, tuple[int, int]]:
    """Row -> (pool slot, position) of the rows that capture in this step, for ``Track.of``.

    positions: by row, after the step. wanted: by row, the position whose state is wanted, 0 for none. free: slots of
    the pool, given out in order; rows that find no slot, or no lane, go without.
    """
    hits = [row for row, (at, want) in enumerate(zip(positions, wanted, strict=True)) if at == want > 0]
    return {row: (slot, positions[row]) for row, slot in zip(hits[:lanes], free, strict=False)}


def plan_arrays(
    positions: mx.array, wanted: mx.array, free: mx.array, count: mx.array, dummy: int, lanes: int = LANES
) -> Track:
    """``plan`` and ``Track.of`` as array operations. positions, wanted: [slots] int32. free: [lanes] int32, of which
    the first ``count`` ([] int32) are slots."""
    hit = (positions == wanted) & (wanted > 0)
    lane = mx.cumsum(hit.astype(mx.int32)) - 1
    mask = hit & (lane < mx.minimum(count, lanes))
    slot = mx.where(mask, free[mx.clip(lane, 0, lanes - 1)], dummy)
    taken = mask[None] & (lane[None] == mx.arange(lanes)[:, None])  # [lanes, slots]
    used = taken.any(axis=1)
    rows = mx.where(used, taken.astype(mx.int32).argmax(axis=1), 0)
    return Track(
        mask,
        slot.astype(mx.int32),
        mx.where(mask, positions, 0).astype(mx.int32),
        rows.astype(mx.int32),
        mx.where(used, slot[rows], dummy).astype(mx.int32),
    )


@dataclass(frozen=True)
class Marks:
    """Positions whose state is wanted: first, 2·first, 4·first, … tokens, as ``cache.policy.ladder`` has them beyond
    the end of a prompt, or with ``doubling`` off every ``first`` tokens. ``first`` 0: none."""

    first: int
    doubling: bool = True

    def last(self, position: int) -> int:
        """The last mark at or before ``position``; 0 if there is none."""
        if self.first == 0 or position < self.first:
            return 0
        n = position // self.first
        return self.first * (1 << (n.bit_length() - 1) if self.doubling else n)

    def next(self, position: int) -> int:
        """The first mark after ``position``; 0 if there is none."""
        if self.first == 0:
            return 0
        last = self.last(position)
        return self.first if last == 0 else 2 * last if self.doubling else last + self.first

    def last_arrays(self, positions: mx.array) -> mx.array:
        """``last`` of each of ``positions``, int32."""
        if self.first == 0:
            return mx.zeros_like(positions)
        n = positions // self.first
        if self.doubling:
            for shift in (1, 2, 4, 8, 16):  # all bits below the highest
                n = n | (n >> shift)
            n = n - (n >> 1)
        return n * self.first


def next_rung(position: int, first: int, gap: int = 0) -> int:
    """The first rung of the ladder (first·2^i tokens) that is after ``position`` and at least ``gap`` tokens away; 0
    for none (``first`` 0). At the end of a prompt, ``gap`` is what ``cache.policy.ladder`` leaves free before it."""
    return Marks(first).next(max(position, position + gap - 1))


def crossing(before: int, accepted: int, marks: Marks) -> int | None:
    """Which row of a verify step, counted from 0, leaves its state at a mark; None if none does.

    before: tokens committed before the step. accepted: rows committed by it, the root included (1 for a plain step). Of
    several marks crossed, the last. (``reference/state-handoff.md`` §B.3)
    """
    mark = marks.last(before + accepted)
    return mark - before - 1 if mark > before else None


def crossings(before: mx.array, accepted: mx.array, marks: Marks) -> tuple[mx.array, mx.array]:
    """``crossing`` by row: (mask [rows] bool, row of the step [rows] int32, 0 where masked)."""
    mark = marks.last_arrays(before + accepted)
    mask = mark > before
    return mask, mx.where(mask, mark - before - 1, 0)


@dataclass(frozen=True)
class Windows:
    """Windows of input rows that a step of several tokens a row leaves to a short convolution (§B.2).

    chunk: only multiples of it, counted from where the row began, are tracked. width: rows of a window. carried: rows
    of the window before that stand in front of each row's own input; 0 where the gather reads this step's input only.
    """

    chunk: int = 64
    width: int = 3
    carried: int = 0

    def plan(
        self, tracked: Sequence[int], prefix: Sequence[int], widths: Sequence[int], rows: int
    ) -> tuple[list[list[int]], list[bool]]:
        """([rows][width] numbers of input rows, mask [rows]).

        tracked: absolute length to track by row. prefix: tokens before the step. widths: input rows of each, carried
        ones included, one after the other in the step's input. rows: of the batch, padding included. A row whose window
        does not lie inside its own input is masked; all numbers are in range.
        """
        live = min(rows, len(tracked), len(prefix), len(widths))
        last = max(sum(widths[:live]) - 1, 0)
        windows, mask, start = [[0] * self.width for _ in range(rows)], [False] * rows, 0
        for row in range(live):
            aligned = max(tracked[row] - prefix[row], 0) // self.chunk * self.chunk
            first = start + self.carried + aligned - self.width
            windows[row] = [min(max(first + i, 0), last) for i in range(self.width)]
            mask[row] = aligned > 0 and self.width <= self.carried + aligned <= widths[row]
            start += widths[row]
        return windows, mask

    def plan_arrays(
        self, tracked: mx.array, prefix: mx.array, widths: mx.array, live: mx.array
    ) -> tuple[mx.array, mx.array]:
        """The same from arrays [rows] int32 of which the first ``live`` ([] int32) count: ([rows, width] int32, mask
        [rows] bool)."""
        row = mx.arange(widths.size)
        widths = mx.where(row < live, widths, 0)
        ends = mx.cumsum(widths)
        aligned = mx.maximum(tracked - prefix, 0) // self.chunk * self.chunk
        first = ends - widths + self.carried + aligned - self.width
        windows = mx.clip(first[:, None] + mx.arange(self.width), 0, mx.maximum(ends[-1] - 1, 0))
        there = self.carried + aligned
        mask = (row < live) & (aligned > 0) & (there >= self.width) & (there <= widths)
        return mx.where((row < live)[:, None], windows, 0), mask
