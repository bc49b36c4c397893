"""A batch: the state of several sequences of different lengths that are decoded together.

Right-padded: a row's token at position p stands where it stands alone, so that alignment, order of sums and masks are
those of the solo run, and each row writes at its own offset. Rows come and go by one copy of their state.

A step takes one token a row. A *verify* step takes as many of each row as there are drafts and one more; a *commit*
follows, after which each row has kept its own number of them, as if they had come one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList

from ..compressed import CompressedCache
from ..head import HeadCache
from ..kinds import members_of
from ..layout import Layout, MemberSpec
from ..member import Member
from ..state import SequenceState
from .compressed import BatchCompressed
from .form import BatchError, Form, NoBatchForm, NotYet
from .head import BatchHead
from .journal import Journal, Journals
from .place import GRANULE, Place, Ring, Seat
from .recurrent import BatchRecurrent
from .rows import GROWING
from .window import WINDOWS, BatchWindow, settled


@dataclass
class Verified:
    """A verify step that was built and waits for its commit. ``before``: positions by slot before it."""

    width: int
    before: list[int]
    journal: Journal | None


class Batch:
    """``slots`` rows of up to ``capacity`` tokens each. ``make_cache`` and ``live`` (a layout as the model keeps it,
    nothing packed) say of what. ``spare``: how many drafts a window can take back.

    Raises NoBatchForm naming the member and its class.
    """

    def __init__(
        self, make_cache: Callable[[], list[Any]], live: Layout, slots: int, capacity: int, spare: int = 0
    ) -> None:
        self._make_cache, self._layout = make_cache, live
        self.slots, self.capacity, self.spare = slots, capacity, spare
        #: the verify step whose commit is due
        self.verified: Verified | None = None
        self._place = Place(slots)
        self._rings: dict[tuple[int, int], Ring] = {}
        self._rows: dict[int, RowState] = {}
        #: what the model is called with, ids [slots, D]
        self.caches: list[Any] = self._forms(make_cache(), live)
        self._leaves: list[Form] = list(_leaves(self.caches))
        self.heads = [form for form in self._leaves if isinstance(form, BatchHead)]
        #: those that a journal speaks of
        self.recurrent = [form for form in self._leaves if isinstance(form, BatchRecurrent)]
        #: those that have arrays, and how many
        self._holders = [(form, n) for form in self._leaves if (n := len(form.arrays()))]

    def _forms(self, caches: list[Any], live: Layout) -> list[Any]:
        specs = {spec.path: spec for spec in live.members}

        def form(cache: Any, path: tuple[int, ...]) -> Any:
            kind, spec = type(cache), specs.get(path)
            if kind is CacheList:
                return CacheList(*(form(inner, (*path, i)) for i, inner in enumerate(cache.caches)))
            if kind is HeadCache and (head := specs.get((*path, 0))) is not None:
                return BatchHead(self._place, head, self.slots, self.capacity)
            if kind is CompressedCache and (mine := [s for s in live.members if s.path[:-1] == path]):
                return BatchCompressed(self._place, cache, mine, self.slots, self.capacity, self.spare)
            if spec is not None and kind in GROWING:
                return GROWING[kind](self._place, spec, self.slots, self.capacity)
            if spec is not None and kind in WINDOWS:
                ring = self._ring(spec)
                return BatchWindow(self._place, ring, spec, self.slots, self.capacity, self.spare)
            if spec is not None and kind is ArraysCache:
                return BatchRecurrent(self._place, spec, self.slots)
            raise NoBatchForm(
                f"Layer {'.'.join(map(str, path))} keeps its state in {kind.__name__}, which has no form for several "
                "sequences at once."
            )

        return [form(cache, (i,)) for i, cache in enumerate(caches)]

    def _ring(self, spec: MemberSpec) -> Ring:
        numbers = dict(spec.params)
        key = (numbers["window"], numbers["keep"])
        if key not in self._rings:
            self._rings[key] = Ring(len(self._rings), *key, self.slots)
        return self._rings[key]

    @property
    def positions(self) -> list[int]:
        """By slot, where its row stands; 0 where free. The truth, of which steps are given arrays."""
        return self._place.positions

    @property
    def rows(self) -> list[int]:
        """The slots that hold a row."""
        return sorted(self._rows)

    @property
    def nbytes(self) -> int:
        """Of the arrays that are there."""
        return sum(a.nbytes for a in self.arrays())

    # rows come and go

    def join(self, slot: int, state: SequenceState) -> None:
        """Copy the evaluated solo ``state`` into ``slot``, all of it overwritten, and evaluate the copy.

        Raises NotYet for a state with a slot that is not filled yet, BatchError for one that does not fit (another
        layout, no free column, the slot taken). Nothing has changed then.
        """
        self._nothing_due()
        if not 0 <= slot < self.slots or slot in self._rows:
            raise BatchError(f"Slot {slot} of {self.slots} is not free.")
        if state.position >= self.capacity:
            raise BatchError(f"A sequence at {state.position} does not fit into {self.capacity} columns.")
        theirs = list(_leaves(state.caches))
        if len(theirs) != len(self._leaves) or state.members is None:
            raise BatchError("This sequence has other caches than the batch.")
        if state.position == 0:
            raise NotYet("This sequence has no state yet.")
        for form, cache in zip(self._leaves, theirs, strict=True):
            form.check(cache, state.position)
        self._check_rings(theirs)
        for form, cache in zip(self._leaves, theirs, strict=True):
            form.join(slot, cache, state.position)
            mx.eval(form.arrays())  # the solo state can be let go of
        self.positions[slot] = state.position
        self._rows[slot] = RowState(self, Seat(slot), self._members)

    def _check_rings(self, caches: list[Any]) -> None:
        """Windows of one kind share one index a row. Raises BatchError where they do not."""
        found: dict[int, int] = {}
        for form, cache in zip(self._leaves, caches, strict=True):
            if isinstance(form, BatchWindow):
                index = settled(cache)[1]
                if found.setdefault(form.ring.number, index) != index:
                    raise BatchError(f"Windows of {form.max_size} rows would be written at {index} and elsewhere.")

    def leave(self, slot: int) -> None:
        """The row in ``slot`` is gone; the slot is free."""
        self._row(slot)
        for form in self._leaves:
            form.leave(slot)
        del self._rows[slot]
        self.positions[slot] = 0
        if self.verified is not None:
            self.verified.before[slot] = 0

    def row(self, slot: int) -> RowState:
        """The row as a ``SequenceState`` that is read only: what a recorder follows. It stays the row's own when a
        ``resize`` moves it, and is of no use once the row has left."""
        return self._row(slot)

    def take(self, slot: int) -> SequenceState:
        """A solo state with the row's values and no room beyond them, by one copy that the caller evaluates. The row
        stays until ``leave``."""
        self._row(slot)
        self._nothing_due()
        caches = self._make_cache()
        for form, cache in zip(self._leaves, _leaves(caches), strict=True):
            form.take(slot, cache)
        state = SequenceState(caches, members_of(caches))
        state.position = self.positions[slot]
        return state

    def resize(self, slots: int, capacity: int, keep: dict[int, int]) -> None:
        """Make room for other numbers of rows and columns. ``keep``: old slot -> new slot, of all rows that stay; the
        others leave. One layer's arrays exist twice at a time. Raises BatchError."""
        self._nothing_due()
        gone = [slot for slot in self._rows if slot not in keep]
        if not keep.keys() <= self._rows.keys() or len(set(keep.values())) < len(keep):
            raise BatchError(f"Rows {sorted(self._rows)} cannot be kept as {keep}.")
        if any(not 0 <= new < slots or self.positions[old] >= capacity for old, new in keep.items()):
            raise BatchError(f"Rows {keep} do not fit into {slots} slots of {capacity} columns.")
        for slot in gone:
            self.leave(slot)
        at = {old: self.positions[old] for old in keep}
        for form in self._leaves:
            form.resize(slots, capacity, keep, at)
            mx.eval(form.arrays())  # one at a time, so that the old arrays go one at a time
        for ring in self._rings.values():
            ring.index = _placed(ring.index, keep, slots)
        self._place.positions = _placed(self.positions, keep, slots)
        rows, self._rows = self._rows, {}
        for old, new in keep.items():
            self._rows[new] = rows[old]
            rows[old].seat.slot = new
        self.slots, self.capacity = slots, capacity

    def _row(self, slot: int) -> RowState:
        if slot not in self._rows:
            raise BatchError(f"Slot {slot} holds no row.")
        return self._rows[slot]

    def _members(self, seat: Seat) -> list[Member]:
        members, paths = [], iter(_paths(self.caches))
        for form in self._leaves:
            members.extend(form.row(seat, next(paths)))
        return members

    # a step

    def where(self, width: int = 1) -> mx.array:
        """[1 + rings, slots] int32: positions and ring indices before the next step of ``width`` tokens a row. Raises
        BatchError if a row has too few columns left, or a commit is due."""
        self._nothing_due()
        if full := [slot for slot in self._rows if self.positions[slot] + width > self.capacity]:
            what = "fill all" if width == 1 else f"have no room for {width} tokens more in"
            raise BatchError(f"Rows {full} {what} {self.capacity} columns.")
        if width > self.capacity:  # a free slot is computed too
            raise BatchError(f"A step of {width} tokens does not fit into {self.capacity} columns.")
        return mx.array([self.positions, *(ring.index for ring in self._rings.values())], mx.int32)

    def columns(self, width: int = 1) -> int:
        """How many columns the next step reads where it is not compiled."""
        longest = max((self.positions[slot] for slot in self._rows), default=0) + width
        return min(-(-longest // GRANULE) * GRANULE, self.capacity)

    def forward(
        self, model: Callable[..., mx.array], ids: mx.array, where: mx.array, columns: int | None
    ) -> tuple[mx.array, list[mx.array]]:
        """Call ``model`` with the next token of each slot: logits [slots, V], and what is to be given to ``shown``.

        ids: [slots] int32. where: as ``where()`` made it. columns: how many are read, None for all. Rebinds
        ``arrays()`` and keeps no other array of the step; ``advance()`` counts it.
        """
        logits, emitted = self._call(model, ids[:, None], where, columns)
        return logits[:, -1], emitted

    def _call(
        self, model: Callable[..., mx.array], ids: mx.array, where: mx.array, columns: int | None
    ) -> tuple[mx.array, list[mx.array]]:
        self._place.begin(where, columns, ids.shape[1])
        for form in self._leaves:
            form.begin()
        try:
            logits = model(ids, cache=self.caches)
            return logits, [a for form in self.heads for a in form.emitted()]
        finally:
            for form in self._leaves:
                form.end()
            self._place.clear()

    def advance(self) -> None:
        """Count the step that was built: every row stands one further."""
        kept = [int(slot in self._rows) for slot in range(self.slots)]
        for form in self._leaves:
            form.built(1)
        self._place.positions = [at + n for at, n in zip(self.positions, kept, strict=True)]
        for ring in self._rings.values():
            ring.advance(kept)

    # a verify step

    def verify(
        self,
        model: Callable[..., mx.array],
        ids: mx.array,
        where: mx.array,
        columns: int | None,
        journals: Journals | None,
    ) -> tuple[mx.array, list[mx.array], Journal | None]:
        """Call ``model`` with the next D tokens of each slot: logits [slots, D, V], what is to be given to ``shown``,
        and what a commit needs of recurrent layers.

        ids: [slots, D] int32, each row's unprocessed token first. Other arguments as in ``forward``, of that width.
        Rebinds ``arrays()``; recurrent states stay what they were. ``hold_open()`` counts the step.

        Raises BatchError where a recurrent layer keeps no journal.
        """
        before = [(form, form.arrays()) for form in self.recurrent]
        with journals.recording(ids.shape[1]) if journals is not None else nullcontext() as journal:
            logits, emitted = self._call(model, ids, where, columns)
        for form, arrays in before:
            if journal is None or not journal.covers(form):
                at = next(p for f, p in zip(self._leaves, _paths(self.caches), strict=True) if f is form)
                raise BatchError(f"Layer {'.'.join(map(str, at))} is recurrent and keeps no journal of its inputs.")
            form.bind(arrays)
        return logits, emitted, journal if before else None

    def hold_open(self, width: int, journal: Journal | None) -> None:
        """Count the verify step that was built: every row stands ``width`` further, until ``commit``."""
        self.verified = Verified(width, list(self.positions), journal)
        for form in self._leaves:
            form.built(width)
        self._place.positions = [at + width * (s in self._rows) for s, at in enumerate(self.positions)]

    def open_step(self) -> Verified:
        """The verify step whose commit is due. Raises BatchError if none is."""
        if self.verified is None:
            raise BatchError("No verify step waits for a commit.")
        return self.verified

    def _nothing_due(self) -> None:
        if self.verified is not None:
            raise BatchError("A verify step waits for its commit.")

    def before(self) -> mx.array:
        """``where()`` as it was before the verify step."""
        return mx.array([self.open_step().before, *(ring.index for ring in self._rings.values())], mx.int32)

    def replay(self, kept: mx.array, where: mx.array, width: int, journal: Journal | None) -> None:
        """Build what the state is once row r keeps the first kept[r] of ``width`` verified tokens: rebinds
        ``replayed()``. kept: [slots] int32, 0 for a free slot. where: as ``before()`` made it. ``commit()`` counts
        it."""
        self._place.begin(where, None, width)
        try:
            for form in self._leaves:
                form.replay(kept, journal)
        finally:
            self._place.clear()

    def commit(self, kept: list[int]) -> None:
        """Count what ``replay`` built: row r stands kept[r] behind where it stood before the verify step.

        kept: by slot, 1 to its width, 0 for a free slot. Raises BatchError for other numbers.
        """
        due = self.check_kept(kept)
        self._place.positions = [at + n for at, n in zip(due.before, kept, strict=True)]
        for ring in self._rings.values():
            ring.advance(kept)
        for form in self._leaves:
            form.committed(kept)
        self.verified = None

    def check_kept(self, kept: list[int]) -> Verified:
        """The verify step that is due. Raises BatchError if its rows cannot keep these numbers of tokens."""
        due = self.open_step()
        fits = [1 <= n <= due.width if slot in self._rows else n == 0 for slot, n in enumerate(kept)]
        if len(kept) != self.slots or not all(fits):
            raise BatchError(f"Rows {self.rows} of {self.slots} slots cannot keep {kept} of {due.width} tokens each.")
        return due

    def states_at(self, rows: mx.array, journal: Journal | None) -> list[mx.array]:
        """``states()`` after the first rows[r] ([slots] int32) verified tokens of row r."""
        return [a for form in self.recurrent for a in form.states_at(rows, journal)] if journal is not None else []

    def replayed(self) -> list[mx.array]:
        """Those of ``arrays()`` that ``replay`` changes, in their order."""
        return [a for form in self._leaves if form.replays for a in form.arrays()]

    def bind_replayed(self, arrays: list[mx.array]) -> None:
        """Take over arrays in the order of ``replayed()``."""
        _deal([(form, n) for form, n in self._holders if form.replays], arrays)

    # all of it

    def arrays(self) -> list[mx.array]:
        """All arrays of the state, in a fixed order."""
        return [a for form, _ in self._holders for a in form.arrays()]

    def bind(self, arrays: list[mx.array]) -> None:
        """Take over arrays in the order of ``arrays()``."""
        _deal(self._holders, arrays)

    def states(self) -> list[mx.array]:
        """The recurrent arrays [slots, …], in the layout's order: what a step may track."""
        return [a for form in self.recurrent for a in form.arrays()]

    def tracked(self) -> list[tuple[Any, int]]:
        """Where ``states()`` stand: (cache object, its slot's number)."""
        return [(form, i) for form in self.recurrent for i in form.used]

    def shown(self, ids: mx.array, emitted: list[mx.array]) -> None:
        """Give heads what a step of these ``ids`` [slots], or a verify step of [slots, D], left for them. Of the latter
        they keep what ``commit`` says."""
        for form, hidden in zip(self.heads, emitted, strict=True):
            if ids.ndim == 1:
                form.shown(ids, hidden)
            else:
                form.verified(ids, hidden)

    def live(self) -> list[mx.array]:
        """All arrays that a step must evaluate."""
        journal = self.verified.journal.arrays() if self.verified and self.verified.journal else []
        return self.arrays() + journal + [a for form in self.heads for a in form.live()]

    def hold(self) -> tuple[Any, ...]:
        """Second handles on all that the next step rebinds. While they live, MLX cannot donate the buffers. Rows must
        not join or leave before they are put back or let go of."""
        rings = [list(ring.index) for ring in self._rings.values()]
        forms = [form.hold() for form in self._leaves]
        return list(self.positions), rings, forms, self.arrays(), self.verified

    def put_back(self, held: tuple[Any, ...]) -> None:
        """Undo what was built since ``hold()``: a step, a verify step, or both it and its commit."""
        positions, rings, forms, arrays, self.verified = held
        self._place.positions = list(positions)
        for ring, index in zip(self._rings.values(), rings, strict=True):
            ring.index = list(index)
        for form, handle in zip(self._leaves, forms, strict=True):
            form.put_back(handle)
        self.bind(arrays)


class RowState:
    """One row of a batch as a ``SequenceState`` that is read only."""

    def __init__(self, batch: Batch, seat: Seat, members: Callable[[Seat], list[Member]]) -> None:
        self._batch, self.seat = batch, seat
        self.members = members(seat)

    @property
    def slot(self) -> int:
        return self.seat.slot

    @property
    def position(self) -> int:
        return self._batch.positions[self.seat.slot]

    def catch_up(self) -> None:
        for member in self.members:
            member.catch_up()

    def live(self) -> list[mx.array]:
        """All arrays that must be evaluated before the row is read: those of the whole batch."""
        return self._batch.live()


def _deal(holders: list[tuple[Form, int]], arrays: list[mx.array]) -> None:
    """Each takes over as many of ``arrays`` as it has, in order; there are enough for all."""
    rest = iter(arrays)
    for form, n in holders:
        form.bind([next(rest) for _ in range(n)])


def _leaves(caches: list[Any]) -> Iterator[Any]:
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from _leaves(list(cache.caches))
        else:
            yield cache


def _paths(caches: list[Any], above: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    for i, cache in enumerate(caches):
        if isinstance(cache, CacheList):
            yield from _paths(list(cache.caches), (*above, i))
        else:
            yield (*above, i)


def _placed(values: list[int], keep: dict[int, int], slots: int) -> list[int]:
    out = [0] * slots
    for old, new in keep.items():
        out[new] = values[old]
    return out
