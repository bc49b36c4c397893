"""Who decodes with whom: groups are made, widened, divided and put together as ``grouping`` decides, each state copied
once a move and paid for in the memory ledger first."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import mlx.core as mx

from .. import numerics
from ..cache.batch import Batch, BatchError, obstacle, obstacle_of_drafts
from ..cache.batch.head_traced import TracedHeads
from ..cache.head import head_in
from ..cache.state import SequenceState
from . import grouping
from .batched import Batched
from .group import Ended, Group, Row
from .grouping import Divide, Grouping, Resize, Unite
from .pool import Pool
from .reservation import OPEN_END, ladder, reserve
from .runtime import Runtime
from .sequence import Sequence
from .solo import Allotment, MemoryFull, Solo, fits
from .speculation import Speculation
from .step import Compile, Steps
from .threads import elsewhere
from .tracking import LANES

log = logging.getLogger("mlxkv.engine")

#: snapshots that can wait for the writer at the same time: rows are at a rung rarely
SNAPSHOTS = LANES
#: cycles of a shape until they are compiled, where depths adapt: one that is only tried is not worth a trace, which
#: takes four times as long as it does, and stays
RARE = 2


class Seats:
    """``groups`` that decode. Moves happen between steps, to settled groups: no token is in flight then."""

    def __init__(self, rt: Runtime, max_rows: int, compile: Compile) -> None:
        self._rt = rt
        self.groups: list[Group] = []
        journals = rt.drafting.journals if rt.drafting is not None else None
        self._compiled = compile == "on"
        #: a head's rows are stored: in ``exact`` their bits are those of forwards that are not compiled
        self._heads = TracedHeads() if self._compiled and numerics.mode() == "fast" else None
        self.steps = Steps(rt.model, compile=compile, journals=journals)
        fixed = rt.drafting.fixed if rt.drafting is not None else None
        self.trace_after(RARE if fixed is None else 0)
        self.pool = Pool.of(rt.live, SNAPSHOTS) if rt.live is not None and rt.store is not None else Pool([], 0)
        #: None where nothing drafts
        self.speculation = None if rt.drafting is None else Speculation(rt.drafting.drafter, rt.drafting.depth())
        self._grouping = Grouping(max_rows)
        self._alone: dict[Sequence, Allotment] = {}
        self._ended: list[Ended] = []
        #: the groups that the latest call changed, until ``ended`` is asked: where it failed, their rows' states cannot
        #: be trusted
        self.touched: list[Group] = []
        #: why rows take turns instead of sharing a batch
        self.obstacle: str | None = None if rt.live is not None else "its state has no known layout"
        self._asked = False
        #: widths that are traced when a row joins; depths that adapt are many, and traced once they came a few times
        self._widths = () if fixed is None else (fixed + 1,)
        #: drafts of a cycle of several rows at most; 0 where such a forward is not what single steps are
        self._drafts = rt.drafting.most if rt.drafting is not None else 0
        #: nothing is drafted for whoever comes now
        self.resting = False
        #: for so many calls no change of groups is tried: there was no room for the last one
        self._patience = 0

    @property
    def rows(self) -> int:
        """Sequences that decode."""
        n = 0
        for group in self.groups:
            n += len(group.rows)
        return n

    def sequences(self) -> Iterator[Sequence]:
        for group in self.groups:
            for row in group.rows.values():
                yield row.sequence

    def reserved_rows(self) -> int:
        """Rows that caches of decoding sequences are charged for."""
        batches = [g.executor.batch for g in self.groups if isinstance(g.executor, Batched)]
        return sum(a.rows for a in self._alone.values()) + sum(b.slots * b.capacity for b in batches)

    def _shown(self) -> list[grouping.Group]:
        """The groups as ``grouping`` sees them; keys of rows are their sequences."""
        return [
            grouping.Group(
                group,
                group.executor.slots,
                tuple(grouping.Row(group.rows[slot].sequence, at) for slot, at in group.positions().items()),
                group.rested,
            )
            for group in self.groups
        ]

    def _together(self) -> bool:
        """Whether rows of this model can share a batch; asked of the model itself when it first matters."""
        rt = self._rt
        if not self._asked and rt.live is not None:
            self.obstacle, self._drafts = elsewhere(self._ask, "mlxkv-asked")
            self._asked = True
        return self.obstacle is None

    def trace_after(self, cycles: int) -> None:
        """Cycles of a shape are compiled from that many on."""
        self.steps.rare = cycles
        if self._heads is not None:
            self._heads.rare = cycles

    def learn(self, other: Seats) -> None:
        """Take over what others of the same engine know of its model."""
        self._asked, self.obstacle, self._drafts = other._asked, other.obstacle, other._drafts

    def _ask(self) -> tuple[str | None, int]:
        """Why rows cannot share a batch, and drafts of a cycle of several rows at most."""
        rt, drafts = self._rt, self._drafts
        assert rt.live is not None
        apart = obstacle(rt.model, rt.make_cache, rt.live)
        if apart:
            log.info("requests take turns: %s", apart)
        elif rt.drafting is not None:
            why = obstacle_of_drafts(rt.model, rt.make_cache, rt.live, rt.drafting.journals, drafts)
            if why:
                log.info("nothing is drafted for several requests at once: %s", why)
                drafts = 0
        return apart, drafts

    # coming and going

    def ended(self) -> list[Ended]:
        """Who has come to an end since this was last asked; to be asked after each call, also after one that
        raised."""
        self._give_back(end.sequence for end in self._ended)
        self._drop_empty()
        ended, self._ended[:], self.touched = list(self._ended), [], []
        return ended

    def place(self, sequence: Sequence, state: SequenceState, allotment: Allotment) -> None:
        """A sequence whose prompt was read joins a group, or begins one. On return the sequence decodes."""
        self.touched = []
        row = Row(sequence, state.position)
        row.asleep = self.speculation is not None and (self.resting or self.speculation.sleeps(row))
        if row.asleep and self._rt.store is None and (head := head_in(state.caches)) is not None:
            head.deafen()
        decision = self._grouping.place(grouping.Row(sequence, state.position), self._shown())
        if decision is not None and self._together():
            group: Group = decision.group  # type: ignore[assignment]
            self.touched = [group]
            self._settle(group)
            try:
                if group.rows:
                    self._join(group, row, state, decision.slots)
                    allotment.give_back()
                    return
            except (BatchError, MemoryFull) as e:  # not yet, or not here
                log.debug("a row decodes by itself: %s", e)
        self._seat_alone(row, state, allotment)
        if self._compiled:
            self._compile_alone(self.groups[-1])

    def _compile_alone(self, group: Group) -> None:
        """Compiled steps are those of batches: where the user wants them, a sequence alone is a batch of one."""
        if self._together():
            try:
                self._batch_of(group, 1, 0)
                self._admit(group)
            except (BatchError, MemoryFull) as e:
                log.debug("a row is not compiled: %s", e)

    def _admit(self, group: Group) -> None:
        """Trace what the group's batch needs."""
        assert isinstance(group.executor, Batched)
        self.steps.admit(group.executor.batch, self.pool, self._widths if self._drafts else ())

    def _seat_alone(self, row: Row, state: SequenceState, allotment: Allotment) -> None:
        run = Solo(self._rt.model, state, allotment.need, self._rt.drafting, self._rt.context_length)
        group = Group(run, self._rt.async_kv_limit, self._ended, None if row.asleep else self.speculation)
        self.touched.append(group)
        self._alone[row.sequence] = allotment
        group.add(0, row)
        self.groups.append(group)

    def drain(self, group: Group) -> None:
        """Say what is verified, and leave nothing of a group in flight. Fails as ``step`` does."""
        self.touched = [group]
        self._settle(group)

    def step(self, group: Group, cycle: bool = True) -> None:
        """One step of a group, a ``cycle`` where that is allowed and it speculates. If it raises, the group's rows have
        failed: call ``discard``."""
        self.touched = [group]
        flew = group.flies
        if isinstance(group.executor, Batched):
            capacity, longest = group.executor.batch.capacity, max(group.positions().values())
            if longest >= capacity:
                self._settle(group)
                self._lengthen(group, capacity + 1)
            elif cycle and longest + 1 + self._drafts > capacity:
                self._look_ahead(group)
        if flew and not group.flies and cycle and group.speculates:
            return  # what was read is this step: with a cycle behind it newcomers would wait for more than a run
        if group.rows:
            group.step(cycle)

    def interrupt(self) -> None:
        """What comes next has waited for something else: it is no measure of a step."""
        self.steps.interrupt()
        if self.speculation is not None:
            self.speculation.interrupt()

    def _look_ahead(self, group: Group) -> None:
        """Room for the drafts of a cycle too, where answers go on past the columns there are. Without it cycles are
        narrow, and it is asked for again when a token needs it."""
        run = group.executor
        assert isinstance(run, Batched)
        rows = {slot: self._rows_for(row.sequence, run.position(slot)) for slot, row in group.rows.items()}
        need = max(min(run.position(slot) + 1 + self._drafts, n) for slot, n in rows.items())
        if need <= run.batch.capacity or self._capacity(need) <= run.batch.capacity:
            return
        self._settle(group)
        try:
            if group.rows:
                self._resize(group, run.slots, need)
        except MemoryFull as e:
            log.debug("no room for drafts: %s", e)

    def _lengthen(self, group: Group, need: int) -> None:
        """Room for ``need`` rows; where there is none, those who need them have failed, and the others go on."""
        if not any(at + 1 >= need for at in group.positions().values()):
            return
        try:
            self._resize(group, group.executor.slots, need)
        except MemoryFull as e:
            for slot, at in group.positions().items():
                if at + 1 >= need:
                    group.end(slot, Ended(group.rows[slot].sequence, "cancelled", e))  # stored: asking again is cheap

    def _settle(self, group: Group) -> list[Ended]:
        """Settle a group; what those who ended had is free for what follows."""
        ended = group.settle()
        self._give_back(end.sequence for end in ended)
        return ended

    def discard(self, group: Group) -> None:
        """A step of this group failed: it is gone, with its rows."""
        lost = [row.sequence for row in group.rows.values()]
        for slot in list(group.rows):
            group.leave(slot)
        self._forget(lost)
        if isinstance(group.executor, Batched):  # what its step left in the pool cannot be trusted, and all share it
            for other in self.groups:
                if isinstance(other.executor, Batched):
                    other.executor.forget()
            self.pool.forget()
        self._give_back(lost)
        self._drop_empty()

    def clear(self) -> list[Sequence]:
        """Nobody decodes any more, and nothing of what was there is looked at again; who that was."""
        lost = list(self.sequences())
        self._forget(lost)
        for group in self.groups:
            self._rt.memory.release(group)
        self._rt.memory.release(self.pool)
        self._give_back(lost)
        self.groups.clear()
        self.pool = Pool(self.pool.specs, self.pool.slots)
        return lost

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out between steps, as cancelled."""
        self.touched = []
        for group in self.groups:
            slot = next((s for s, row in group.rows.items() if row.sequence is sequence), None)
            if slot is not None:
                self.touched = [group]
                group.settle()
                if slot in group.rows:  # it has not come to its end just now
                    group.end(slot, Ended(sequence, "cancelled"))
                return

    def _forget(self, sequences: Iterable[Sequence]) -> None:
        """Nothing is drafted for them any more."""
        if self.speculation is not None:
            for sequence in sequences:
                self.speculation.forget(sequence)

    def _give_back(self, sequences: Iterable[Sequence]) -> None:
        """Their solo caches are no longer needed."""
        for sequence in sequences:
            allotment = self._alone.pop(sequence, None)
            if allotment is not None:
                allotment.give_back()

    def _drop_empty(self) -> None:
        for group in [g for g in self.groups if not g.rows]:
            self.groups.remove(group)
            self._rt.memory.release(group)

    def tidy(self) -> None:
        """At the end of a turn: without groups nobody captures."""
        if not self.groups and not self.pool.used:
            self.pool.forget()
            self._rt.memory.release(self.pool)
        self.pool.check_integrity()

    # groups

    def regroup(self, admitted: bool) -> None:
        """The one change that is due, if any. ``admitted``: somebody has just joined or begun to decode. Steps are
        traced only then, so that at other times a group takes only shapes that are known."""
        self.touched = []
        if self._patience and not admitted:
            self._patience -= 1
            return
        decision = self._grouping.regroup(self._shown())
        if decision is None or not self._together() or not (admitted or self._known(decision)):
            return
        group: Group = decision.group  # type: ignore[assignment]
        others: list[Group] = [decision.other] if isinstance(decision, Unite) else []  # type: ignore[list-item]
        self.touched = [group, *others]
        if [end for g in (group, *others) for end in self._settle(g)]:  # it is another picture now
            return
        try:
            if isinstance(decision, Resize):
                if isinstance(group.executor, Batched):
                    self._resize(group, decision.slots, 0)
            elif isinstance(decision, Unite):
                self._unite(group, others[0], decision.slots)
            else:
                self._divide(group, decision)
        except (BatchError, MemoryFull) as e:
            log.info("groups stay as they are: %s", e)
            self._patience = grouping.REST
        for g in (group, *others):
            g.rested = 0
        self._drop_empty()

    def _known(self, decision: Resize | Divide | Unite) -> bool:
        batch = decision.group.batch
        slots = 1 if isinstance(decision, Divide) else decision.slots
        widths = self._widths if self._drafts else ()
        return self.steps.knows(slots, batch.capacity if batch is not None else 0, widths)

    def _unite(self, group: Group, other: Group, slots: int) -> None:
        for slot in list(other.rows):
            row, state = other.rows[slot], self._state(other, slot)
            self._join(group, row, state, slots)
            other.leave(slot)
            self._give_back([row.sequence])

    def _divide(self, group: Group, decision: Divide) -> None:
        slots = {row.sequence: slot for slot, row in group.rows.items()}
        for part in decision.parts[1:]:
            apart: Group | None = None
            for key in part:
                slot = slots[key]  # type: ignore[index]
                row = group.rows[slot]
                if apart is None:
                    rows = reserve(self._rows_for(row.sequence, group.positions()[slot]))
                    fits(self._rt.memory, row.sequence, self._rt.memory.sequence_bytes(rows, self._rt.chunk), rows)
                    allotment = Allotment(self._rt, row.sequence, rows)
                    self._seat_alone(row, self._state(group, slot, rows), allotment)
                    apart = self.groups[-1]
                else:
                    self._join(apart, row, self._state(group, slot), grouping.bucket(len(part)))
                group.leave(slot)
        slots_left = grouping.bucket(len(group.rows))
        if slots_left < group.executor.slots:
            self._resize(group, slots_left, 0)

    def _state(self, group: Group, slot: int, rows: int = 0) -> SequenceState:
        """The solo state of a row, evaluated, with room for ``rows`` if it comes out of a batch; what the store has not
        been given of it is copied out first."""
        run = group.executor
        if isinstance(run, Solo):
            return run.state
        assert isinstance(run, Batched)
        mx.eval(run.live())
        group.flush(slot)
        state = run.batch.take(slot)
        if rows:
            state.reserve(rows)
        mx.eval(state.live())
        return state

    def _join(self, group: Group, row: Row, state: SequenceState, slots: int) -> None:
        """One copy of a row's state into a settled group, whose caches become a batch, wider or longer first where
        they must. Raises NotYet, MemoryFull; nothing has changed then."""
        run = group.executor
        if not isinstance(run, Batched):
            run = self._batch_of(group, slots, self._rows_for(row.sequence, state.position))
        need = self._rows_for(row.sequence, state.position)
        slots = max(slots, run.slots)
        if slots > run.slots or need > run.batch.capacity:
            self._resize(group, slots, need)
        slot = next(s for s in range(run.slots) if s not in group.rows)
        shape = run.slots, run.batch.capacity
        with self._paying(group, shape, shape):
            run.batch.join(slot, state)
            mx.eval(run.live())
        group.add(slot, row)
        if self.speculation is not None and not row.asleep:
            group.wake(self.speculation)
        self._admit(group)

    def _batch_of(self, group: Group, slots: int, need: int) -> Batched:
        """Make a batch of a group that is one sequence on its own caches."""
        rt, solo = self._rt, group.executor
        assert isinstance(solo, Solo)
        row = group.rows[0]
        capacity = self._capacity(max(need, self._rows_for(row.sequence, solo.state.position)))
        assert rt.live is not None
        if not rt.memory.held_by(self.pool):  # from now on: a step's graph has it, whether anybody tracks or not
            fits(rt.memory, self.pool, self.pool.full_nbytes, capacity)
            rt.memory.charge("snapshots", self.pool, self.pool.full_nbytes)
        with self._paying(group, None, (slots, capacity)):
            batch = Batch(rt.make_cache, rt.live, slots, capacity, spare=self._drafts)
            for head in batch.heads:
                head.rows.traced = self._heads
            batch.join(0, solo.state)
            mx.eval(batch.live())
        group.executor = batched = Batched(batch, self.steps, self.pool, self._drafts)
        group.renumber({0: 0})
        self._give_back([row.sequence])
        return batched

    def _resize(self, group: Group, slots: int, need: int) -> None:
        """A batch with ``slots`` slots and room for ``need`` rows, and for what it has. Raises MemoryFull."""
        run = group.executor
        assert isinstance(run, Batched)
        capacity = max(run.batch.capacity, self._capacity(need)) if need else run.batch.capacity
        if (slots, capacity) == (run.slots, run.batch.capacity):
            return
        keep = {old: new for new, old in enumerate(sorted(group.rows))}
        mx.eval(run.live())
        for slot in group.rows:
            if run.tracks(slot):  # by its slot, which may change
                group.flush(slot)
        with self._paying(group, (run.slots, run.batch.capacity), (slots, capacity), need):
            run.batch.resize(slots, capacity, keep)
            mx.eval(run.live())
        group.renumber(keep)
        self._admit(group)

    @contextmanager
    def _paying(
        self, group: Group, before: tuple[int, int] | None, after: tuple[int, int], rows: int = 0
    ) -> Iterator[None]:
        """A batch goes from one shape (slots, capacity) to another: both are there meanwhile. Raises MemoryFull, which
        speaks of ``rows`` tokens."""
        memory = self._rt.memory
        extra = memory.join_extra(before, after)
        fits(memory, group, extra, rows or after[1])
        memory.charge("joins", group, extra)
        try:
            yield
            memory.charge("caches", group, memory.batch_bytes(*after))
        finally:
            memory.release(group, "joins")

    def _rows_for(self, sequence: Sequence, position: int) -> int:
        """Rows that a sequence is given room for, drafts too: all that it can have, or for some time where that is
        far."""
        rows, context = min(sequence.full_length, position + OPEN_END) + self._rt.lookahead, self._rt.context_length
        return rows if context is None else min(rows, context)

    def capacity_for(self, sequence: Sequence) -> int:
        """Rows of a slot that has room for ``sequence``, once its prompt was read."""
        return self._capacity(self._rows_for(sequence, sequence.end))

    def _capacity(self, rows: int) -> int:
        return ladder(rows, self._rt.context_length)
