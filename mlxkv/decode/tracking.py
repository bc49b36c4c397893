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
