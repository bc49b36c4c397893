"""Boundary tracking: which rows of a decoding step keep their recurrent state, and in which slot of the pool.

A row *captures* when it stands, after the step, at exactly the position whose state is wanted. Rows that do not are
written to the pool's dummy row: the step has the same graph whether anybody tracks or not, and no index is ever −1 or
out of range, which MLX would take for the last element or for anything. What a step is given is built from host lists
each time, so nothing of an earlier, larger batch can stay armed.

Plans exist twice, as a host loop and as MLX array operations of fixed shape; both give the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Track:
    """What one step over ``slots`` rows tracks. Always there and always of full length, also when nobody tracks.

    mask: [slots] bool, whether the row captures. slot: [slots] int32, the pool slot it captures into, the dummy where
    it does not. length: [slots] int32, the absolute position captured, 0 where it does not.
    """

    mask: mx.array
    slot: mx.array
    length: mx.array

    @classmethod
    def of(cls, slots: int, dummy: int, captures: Mapping[int, tuple[int, int]] | None = None) -> Track:
        """``captures``: row -> (pool slot, absolute position). ``dummy``: how many slots the pool has.

        Raises ValueError for a row outside the batch, a slot outside the pool, and for two rows with one slot: which
        of the two MLX would keep is not defined.
        """
        captures = captures or {}
        mask, slot, length = [False] * slots, [dummy] * slots, [0] * slots
        for row, (into, position) in captures.items():
            if not 0 <= row < slots:
                raise ValueError(f"Row {row} is not one of the {slots} rows of this step.")
            if not 0 <= into < dummy:
                raise ValueError(f"Row {row} captures into slot {into} of a pool of {dummy}.")
            mask[row], slot[row], length[row] = True, into, position
        if len({into for into, _ in captures.values()}) < len(captures):
            raise ValueError(f"Several rows capture into one slot: {dict(captures)}.")
        return cls(mx.array(mask, mx.bool_), mx.array(slot, mx.int32), mx.array(length, mx.int32))

    @classmethod
    def bind(cls, arrays: Sequence[mx.array]) -> Track:
        """The inverse of ``arrays()``, for the inside of a compiled step."""
        return cls(*arrays)

    def arrays(self) -> list[mx.array]:
        """In a fixed order: the arguments of a compiled step."""
        return [self.mask, self.slot, self.length]


def scatter(pool: Sequence[mx.array], state: Sequence[mx.array], track: Track) -> list[mx.array]:
    """The pool's arrays after this step: pool[slot of row] = state[row] for rows that capture.

    pool: arrays [N+1, ...], row N the dummy. state: arrays [slots, ...] in the same order, as the step left them. The
    arrays given are as they were afterwards; MLX writes in place if the caller lets go of them before the evaluation.
    """
    out = []
    for old, rows in zip(pool, state, strict=True):
        new = old[:]  # another handle: the assignment rebinds this one only
        new[mx.where(track.mask, track.slot, old.shape[0] - 1)] = rows.astype(old.dtype)
        out.append(new)
    return out
