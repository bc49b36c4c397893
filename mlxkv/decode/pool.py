"""The snapshot pool: where states that decoding steps capture live until the writer has them.

Each recurrent tensor of a layout has one array [N+1, ...]; row N is the dummy that unused lanes write to, and nobody
reads it. Who owns which slot is kept in plain Python: what is freed is owned by the queue as host ints, never as a view
of somebody's table, and whose slot it is was decided when it was queued.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx

from ..cache.layout import MLX_DTYPE, Layout
from ..cache.recorder import Recorder
from ..cache.state import Member
from ..errors import MlxkvError

Owner = Hashable
Transition = Literal["take", "capture", "read", "free", "release"]
Stage = Literal["free", "owned", "captured", "queued"]

#: which stages a transition may start from
_FROM: dict[Transition, tuple[Stage, ...]] = {
    "take": ("free",),
    "capture": ("owned",),
    "read": ("captured",),
    "free": ("owned", "captured"),
    "release": ("queued",),
}


class PoolError(MlxkvError):
    """The pool was asked for what it cannot do; nothing has changed."""


class TransitionError(PoolError):
    """A slot was to go from a stage that ``transition`` does not start from, or by one that does not own it."""

    def __init__(self, slot: int, owner: Owner, transition: Transition, found: str) -> None:
        super().__init__(f"Slot {slot} cannot go through {transition!r} for {owner!r}: it is {found}.")
        self.slot, self.owner, self.transition = slot, owner, transition


class IntegrityError(PoolError):
    """The pool's books contradict each other: a slot is lost, or is in two places."""


@dataclass(frozen=True)
class _Tag:
    stage: Stage
    owner: Owner = None

    def __str__(self) -> str:
        return self.stage if self.owner is None else f"{self.stage} by {self.owner!r}"


_FREE = _Tag("free")


class Pool:
    """``slots`` snapshots of the tensors in ``specs``, a list of (shape without the batch axis, dtype).

    A slot is *free*, *owned* by a request whose step may write it, *captured* (written, waiting for the writer) or
    *queued* to be free at the end of the step. Without tensors there are no slots.
    """

    def __init__(self, specs: Sequence[tuple[tuple[int, ...], mx.Dtype]], slots: int) -> None:
        if slots < 0:
            raise ValueError(f"A pool of {slots} slots.")
        self.specs = [(tuple(shape), dtype) for shape, dtype in specs]
        self.slots = slots if self.specs else 0
        self._arrays: list[mx.array] | None = None
        self._tags = [_FREE] * self.slots
        self._free = list(range(self.slots))
        self._queue: list[int] | None = None  # None: frees take effect at once

    @classmethod
    def of(cls, layout: Layout, slots: int) -> Pool:
        """A pool for the recurrent members of ``layout``, whose arrays stand in the order of its tensors."""
        tensors = [t for m in layout.members if m.kind == "recurrent" for t in m.tensors]
        return cls([(t.shape[1:], MLX_DTYPE[t.dtype]) for t in tensors], slots)

    # arrays

    @property
    def dummy(self) -> int:
        """The row that nobody reads."""
        return self.slots

    @property
    def arrays(self) -> list[mx.array]:
        """[slots+1, ...] each; made, and evaluated, when first asked for. A step rebinds them."""
        if self._arrays is None:
            self._arrays = [mx.zeros((self.slots + 1, *shape), dtype) for shape, dtype in self.specs]
            mx.eval(self._arrays)
        return self._arrays

    @arrays.setter
    def arrays(self, arrays: Sequence[mx.array]) -> None:
        want = [((self.slots + 1, *shape), dtype) for shape, dtype in self.specs]
        if [(a.shape, a.dtype) for a in arrays] != want:
            raise PoolError(f"A step left arrays of {[(a.shape, a.dtype) for a in arrays]} for a pool of {want}.")
        self._arrays = list(arrays)

    @property
    def nbytes(self) -> int:
        """Of the arrays that are there: 0 before the first use."""
        return sum(a.nbytes for a in self._arrays or ())

    @property
    def full_nbytes(self) -> int:
        """Of the arrays once they are there."""
        return sum((self.slots + 1) * math.prod(shape) * dtype.size for shape, dtype in self.specs)

    def forget(self) -> None:
        """Let go of the arrays: none are there until they are asked for again. Raises PoolError if any slot is in
        use."""
        if self.used:
            raise PoolError(f"{self.used} slots of the pool are in use.")
        self._arrays = None

    # slots

    @property
    def used(self) -> int:
        """How many slots are not free."""
        return self.slots - len(self._free)

    @property
    def free_slots(self) -> tuple[int, ...]:
        """In the order in which ``take`` gives them."""
        return tuple(self._free)

    def count(self) -> dict[Stage, int]:
        """How many slots are in each stage."""
        counts = Counter(tag.stage for tag in self._tags)
        return {stage: counts[stage] for stage in ("free", "owned", "captured", "queued")}

    def of_owner(self, owner: Owner) -> list[int]:
        """The slots that are ``owner``'s now, written or not."""
        return [slot for slot, tag in enumerate(self._tags) if tag.owner == owner and tag.owner is not None]

    def take(self, owner: Owner, slot: int | None = None) -> int | None:
        """Give ``owner`` a free slot (the one named, or the next); None if there is none. What is in it is whatever
        was left there."""
        if owner is None:
            raise PoolError("A slot is taken in nobody's name.")
        if slot is None:
            if not self._free:
                return None
            slot = self._free[0]
        self._check(slot, owner, "take")
        self._free.remove(slot)
        self._tags[slot] = _Tag("owned", owner)
        return slot

    def capture(self, slot: int, owner: Owner) -> None:
        """The step that writes ``owner``'s state into ``slot`` was built: from now on it waits for the writer."""
        self._check(slot, owner, "capture")
        self._tags[slot] = _Tag("captured", owner)

    def read(self, slot: int, owner: Owner) -> list[mx.array]:
        """What was captured for ``owner``: private arrays [1, ...] in the order of ``arrays``, not evaluated yet. The
        slot may be freed and written anew: they are of now."""
        self._check(slot, owner, "read")
        index = mx.array([slot], mx.int32)
        # a gather is always a copy; a slice, contiguous or not, may share the pool's buffer and cost the next step one
        return [mx.take(a, index, axis=0) for a in self.arrays]

    def free(self, indices: Any, owner: Owner) -> None:
        """``owner``'s slots are of no more use: free them, inside ``step()`` at its end.

        indices: a list, tuple, NumPy or MLX array, or one int. They are read now; what the caller's object or table
        says later changes nothing. Raises TransitionError, and then frees none of them.
        """
        slots = _ints(indices)
        seen: set[int] = set()
        for slot in slots:
            self._check(slot, owner, "free")
            if slot in seen:
                raise TransitionError(slot, owner, "free", "named twice")
            seen.add(slot)
        for slot in slots:
            self._tags[slot] = _Tag("queued")
        if self._queue is None:
            self._release(slots)
        else:
            self._queue.extend(slots)

    def free_all(self, owner: Owner) -> list[int]:
        """Free whatever is ``owner``'s now, none included; which slots that were. What it takes later is not meant."""
        slots = self.of_owner(owner)
        self.free(slots, owner)
        return slots

    @contextmanager
    def step(self) -> Iterator[None]:
        """Slots freed inside stay out of use until the end, also when it ends with an exception. Groups do not
        nest."""
        if self._queue is not None:
            raise PoolError("A step of the pool is open already.")
        self._queue = []
        try:
            yield
        finally:
            queue, self._queue = self._queue, None
            self._release(queue)

    def check_integrity(self) -> None:
        """Every slot is in exactly one place, and the lists and the tags agree. Raises IntegrityError."""
        queue = self._queue or []
        for stage, listed in (("free", self._free), ("queued", queue)):
            tagged = [slot for slot, tag in enumerate(self._tags) if tag.stage == stage]
            if sorted(listed) != tagged:
                raise IntegrityError(f"Slots {sorted(listed)} are listed as {stage}, slots {tagged} are tagged so.")
        for slot, tag in enumerate(self._tags):
            if (tag.owner is None) != (tag.stage in ("free", "queued")):
                raise IntegrityError(f"Slot {slot} is {tag.stage}, its owner is {tag.owner!r}.")
        held = sum(tag.stage in ("owned", "captured") for tag in self._tags)
        if len(self._free) + held + len(queue) != self.slots:
            raise IntegrityError(f"{len(self._free)} free, {held} held, {len(queue)} queued: not {self.slots} slots.")

    def _check(self, slot: int, owner: Owner, transition: Transition) -> None:
        if not 0 <= slot < self.slots:
            raise TransitionError(slot, owner, transition, f"not one of {self.slots}")
        tag = self._tags[slot]
        if tag.stage not in _FROM[transition] or (tag.owner is not None and tag.owner != owner):
            raise TransitionError(slot, owner, transition, str(tag))

    def _release(self, slots: list[int]) -> None:
        for slot in slots:
            self._check(slot, None, "release")
        for slot in slots:
            self._tags[slot] = _FREE
        self._free[:0] = slots  # in front: what was used last is used next


def _ints(indices: Any) -> list[int]:
    """A copy as host ints. Raises PoolError for what does not hold whole numbers in one dimension."""
    values = indices.tolist() if hasattr(indices, "tolist") else indices
    values = list(values) if isinstance(values, Iterable) else [values]
    if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        values = [v.item() if hasattr(v, "item") else v for v in values]  # a list of NumPy's numbers
    if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        raise PoolError(f"{indices!r} are not numbers of slots.")
    return values


#: a recurrent slot of a batch: the cache object that holds it, and its number there
Place = tuple[Any, int]


def places(members: Sequence[Member], layout: Layout) -> list[Place]:
    """Where the pool's tensors stand in a batch (or in one sequence), in the order of ``Pool.of``: with
    ``[cache[number] for cache, number in places(...)]`` a step finds the states to capture."""
    return [
        (member.cache, int(tensor.name.rpartition(".slot")[2]))
        for member, spec in zip(members, layout.members, strict=True)
        if spec.kind == "recurrent"
        for tensor in spec.tensors
    ]


class Tracked:
    """States that steps captured for one row, for ``Recorder.flush``: an ``Inside`` (``cache.inside``).

    ``at``: absolute position -> pool slot, captured for ``owner``. ``places``: where the pool's tensors stand in the
    row's caches. The states are copied and evaluated here, so the slots may be freed from now on.
    """

    def __init__(self, pool: Pool, owner: Owner, at: Mapping[int, int], places: Sequence[Place]) -> None:
        self.positions = tuple(sorted(at))
        # by the cache object, which is held: its id stays its own
        self._places = list(places)
        self._arrays = {position: pool.read(at[position], owner) for position in self.positions}
        mx.eval(self._arrays)

    def slots(self, cache: Any, position: int) -> dict[int, mx.array]:
        """Recurrent slot number -> array [1, ...] as ``cache`` held it at ``position``; empty for other caches."""
        arrays = self._arrays.get(position, [])
        return {n: a for (held, n), a in zip(self._places, arrays, strict=bool(arrays)) if held is cache}


def keep(recorder: Recorder, pool: Pool, owner: Owner, at: Mapping[int, int], places: Sequence[Place]) -> None:
    """Record the row up to where it stands, with the states captured since the last flush as rungs of the ladder, and
    free their slots. Arguments are those of ``Tracked``; call it like ``Recorder.flush``, wherever that is called.

    A state captured at the very position where the row stands is not *inside* what is flushed: it is the live one, and
    is recorded as that.
    """
    here = recorder.state.position
    try:
        inside = {position: slot for position, slot in at.items() if position < here}
        recorder.flush(Tracked(pool, owner, inside, places) if inside else None, dict.fromkeys(inside, "ladder"))
        if here in at:
            recorder.boundary(role="ladder")
    finally:
        pool.free(list(at.values()), owner)
