"""The rows of a batch: forwards through ``Steps``, states at rungs through the pool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..cache.batch import Batch, BatchError
from ..cache.batch.head import BatchHead
from ..cache.recorder import Followed, Recorder
from .pool import Pool, keep
from .step import Steps
from .tracking import LANES, Track


@dataclass(frozen=True)
class Passed:
    """Positions that a row went past and whose state its members tell themselves (``cache.inside.Inside``)."""

    positions: tuple[int, ...]

    def slots(self, cache: Any, position: int) -> dict[int, mx.array]:
        return {}


class Batched:
    """``batch`` has the rows' states. Recurrent ones are captured under way: a row owns at most one slot of the pool at
    a time, and without a free one a rung goes by, which is a miss later. Where there are none, a row's state is read
    when it stands at a rung, or has just gone past it in a cycle. ``drafts``: of one verify step at most."""

    def __init__(self, batch: Batch, steps: Steps, pool: Pool, drafts: int = 0) -> None:
        self.batch, self._steps, self._pool, self._drafts = batch, steps, pool, drafts
        #: slot -> (pool slot, position) of a state that was captured, or is by the step in flight
        self._places = batch.tracked()
        self._captures: dict[int, tuple[int, int]] = {}
        #: slot -> position of a rung inside what the row kept of its last cycle, where nothing is captured
        self._passed: dict[int, int] = {}

    @property
    def slots(self) -> int:
        return self.batch.slots

    @property
    def heads(self) -> BatchHead | None:
        """The prediction head's caches of its rows, where the model has a head."""
        return next(iter(self.batch.heads), None)

    def _owner(self, slot: int) -> tuple[int, int]:
        return id(self), slot

    def widest(self) -> int:
        return 1 + self._drafts

    def make_room(self, width: int) -> int:
        """A batch is made longer between steps only."""
        room = self.batch.capacity - max((self.position(slot) for slot in self.batch.rows), default=0)
        return max(1, min(width, room))

    def forward(self, inputs: mx.array, rungs: Mapping[int, int]) -> mx.array:
        with self._capturing(rungs) as track:
            return self._steps.run(self.batch, inputs, track, self._pool)

    def verify(self, inputs: mx.array) -> mx.array:
        """Raises BatchError, with the rows as they were, where one has too few columns left."""
        return self._steps.verify(self.batch, inputs, self._pool)

    def commit(self, kept: Sequence[int], wanted: Mapping[int, int]) -> None:
        """Row r keeps the first kept[r] tokens of the verify step, the unprocessed one counted; 0 for a free slot.
        ``wanted``: slot -> position, in or at the end of what is kept, whose recurrent state is to be captured as far
        as there is room for it. Nothing is evaluated. Raises BatchError for other numbers; nothing has changed then."""
        before = self.batch.check_kept(list(kept)).before
        for slot, position in wanted.items():
            if not before[slot] < position <= before[slot] + kept[slot]:
                raise BatchError(f"Row {slot} does not pass {position} with {kept[slot]} tokens from {before[slot]}.")
        with self._capturing(wanted) as track:
            self._steps.commit(self.batch, list(kept), track, self._pool)
        if not self._places:
            self._passed = {slot: at for slot, at in wanted.items() if at < self.position(slot)}

    @contextmanager
    def _capturing(self, wanted: Mapping[int, int]) -> Iterator[Track | None]:
        """Around what writes into the pool: slots for the rows (slot -> position) as far as there are any."""
        now: dict[int, tuple[int, int]] = {}
        for slot, position in wanted.items():
            if slot not in self._captures and len(now) < LANES:
                into = self._pool.take(self._owner(slot))
                if into is not None:
                    now[slot] = into, position
        try:
            yield Track.of(self.slots, self._pool.dummy, now) if now else None
        except BaseException:
            for slot in now:
                self._pool.free_all(self._owner(slot))
            raise
        for slot, (into, _) in now.items():
            self._pool.capture(into, self._owner(slot))
        self._captures |= now

    def hold(self) -> Any:
        return self.batch.hold(), list(self._pool.arrays), dict(self._captures)

    def put_back(self, held: Any) -> None:
        batch, arrays, captures = held
        self.batch.put_back(batch)
        self._pool.arrays = arrays
        for slot in [s for s in self._captures if s not in captures]:
            self._free(slot)

    def live(self) -> list[mx.array]:
        return [*self.batch.live(), *self._pool.arrays]

    def row(self, slot: int) -> Followed:
        return self.batch.row(slot)

    def position(self, slot: int) -> int:
        return self.batch.positions[slot]

    def tracks(self, slot: int) -> bool:
        """A state of the row waits in the pool."""
        return slot in self._captures

    def due(self, slot: int, rung: bool) -> bool:
        if not self._places:
            return rung or slot in self._passed
        return slot in self._captures and self._captures[slot][1] < self.position(slot)

    def store(self, slot: int, recorder: Recorder, rung: bool) -> None:
        if slot in self._captures:
            into, position = self._captures.pop(slot)
            keep(recorder, self._pool, self._owner(slot), {position: into}, self._places)
            return
        at = self._passed.pop(slot, None)
        recorder.flush(Passed((at,)) if at is not None else None, {at: "ladder"} if at is not None else None)
        if rung and not self._places:
            recorder.boundary(role="ladder")

    def _free(self, slot: int) -> None:
        if slot in self._captures:
            into, _ = self._captures.pop(slot)
            self._pool.free(into, self._owner(slot))

    def forget(self) -> None:
        """The pool's contents are lost: nothing that was captured will be stored."""
        for slot in list(self._captures):
            self._free(slot)

    def leave(self, slot: int) -> None:
        self._free(slot)
        self._passed.pop(slot, None)
        self.batch.leave(slot)
