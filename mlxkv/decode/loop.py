"""The loop of the engine: one turn takes what is new, admits what there is room for, reads a chunk of one prompt and
makes a step of one group. It belongs to the engine's thread; what it decides is in ``scheduler``, what it keeps in
``books``, and how requests leave it in ``ends``."""

from __future__ import annotations

import time

from ..cache.lookup import Lookup
from ..cache.planner import Plan
from ..cache.state import SequenceState
from ..errors import RequestCancelled
from .ends import Ends
from .group import Group
from .handoff import Event, State
from .memory import TOKEN_BYTES, give_back
from .prefill import Prefill
from .sequence import Sequence
from .solo import Allotment

#: times that a stream which could make a step looks for newcomers first; then the others wait for a plain one
LOOKS = 4


class Loop(Ends):
    """``turn`` after ``turn`` while there is something to do."""

    def turn(self) -> None:
        """Whatever goes wrong is told to the requests that it concerns; raises only what ends the engine."""
        self._come_and_go()
        groups = self.groups
        step = self._rounds.next(groups) if groups else None
        if step is None or step.first:
            self._read()
            self._regroup()
        if step is None and self.groups:  # whose prompt was read just now
            step = self._rounds.next(self.groups)
        if step is not None and step.group in self.groups and not self._waits(step.group):  # type: ignore[arg-type]
            self._step(step.group)  # type: ignore[arg-type]
        if self.prefills:
            self._greet()
        self._see()
        self.rt.memory.measure()
        if not (self.prefills or self.groups):
            self._wait()
        self.seats.tidy()
        self._forget()

    def understudy(self) -> Loop:
        """One like it, idle, for the thread that asks. No two of them may be at work at the same time."""
        other = Loop(self.rt, self._options, self._failed)
        other.seats.learn(self.seats)
        other.seats.trace_after(0)  # what is timed is what will be
        return other

    def rest(self) -> None:
        """There has been nothing to do for a while."""
        if self._steps > self._rested:
            self._rested = self._steps
            give_back()

    def _wait(self) -> None:
        """Nothing can be computed now: records are read, or a request waits for the system to have memory."""
        if self.restoring:
            next(iter(self.restoring.values())).wait(0.005)
        elif self.waiting:
            time.sleep(0.02)

    # the handoff

    def _let_in(self) -> None:
        """Before a step: whoever was queued up to now has its first chunk, if it can have one. Those who come faster
        than that wait for one step, which is no cycle."""
        for _ in range(LOOKS):
            self.look()
            if not (self.tickets or self.prefills):  # what was seen last is what there is
                return
            if not (self._knocking or self._reading.new):
                break
            self._come_and_go()
            self._seat()
            self._chunks(self._reading.besides())
        else:
            self.look()
        self._see()

    def _drain(self) -> None:
        """Nothing of the streams is in flight, if somebody waits for that."""
        if self.handoff.state is State.DRAINING:
            for group in self._streams:
                with self._changing():
                    self.seats.drain(group)
            self._see()

    # requests

    def _come_and_go(self) -> None:
        before = self.shape
        self._receive()
        self._leave()
        self._admit()
        if self.shape != before:
            self.changed()
        self._restore()
        self._see()

    def _receive(self) -> None:
        """Build prompts: one a turn while others decode, whose tokens would wait for it; where something drafts, of all
        for whom there are places: the next step waits for their first chunks."""
        while self.tickets:
            ticket = self.tickets.popleft()
            if ticket.cancelled:
                ticket.fail(RequestCancelled("The request was cancelled before it started."))
                continue
            try:
                sequence = Sequence(self.rt, ticket)
                self._needs.refuse_what_never_fits(sequence)
                self.rt.memory.charge("queue", sequence, TOKEN_BYTES * len(sequence.prompt.tokens))
            except BaseException as e:  # what is written in Rust may panic
                ticket.fail(self._its_own(e))
                continue
            self.waiting.append(sequence)
            if self.groups and not (self._lets_in and self._knocking):
                break

    def _leave(self) -> None:
        """Who no longer wants an answer goes, with all that was held for it. Rows notice at their next token."""
        for ticket in [t for t in self.tickets if t.cancelled]:
            self.tickets.remove(ticket)
            ticket.fail(RequestCancelled("The request was cancelled before it started."))
        for sequence in [s for s in self.waiting if s.cancelled()]:
            self._fail(sequence, RequestCancelled("The request was cancelled before it started."))
        for sequence in [s for s in (*self.restoring, *self.prefills) if s.cancelled()]:
            self._cancel(sequence)

    def _admit(self) -> None:
        while self.waiting and self.active < self._max_rows:
            found = self._admission.next(self.waiting, lambda s: self._needs.fit(s, self.active))
            if found is None:
                return
            sequence: Sequence = found  # type: ignore[assignment]
            self.waiting.remove(sequence)
            try:
                self._begin(sequence)
            except Exception as e:
                self._lost(e, self._told(e), [sequence])

    def _begin(self, sequence: Sequence) -> None:
        """Look up, and start to read what is stored."""
        rt, store = self.rt, sequence.store
        rows = self._needs.rows(sequence, self._needs.alone(self.active))
        allotment = self._allotments[sequence] = Allotment(rt, sequence, rows, "restores" if store else "caches")
        rt.memory.release(sequence, "queue")

        if store is None:
            self._begun(sequence, allotment.fresh(), Lookup(0, "none", "off", 0), Plan())
            return
        started = time.monotonic()
        plan = store.lookup(sequence.prompt.tokens, sequence.request.salt, legacy=False)
        looked = time.monotonic()
        sequence.lookup_s = looked - started
        sequence.restoring_since = looked
        self.restoring[sequence] = store.begin(
            plan, sequence.prompt.tokens, allotment.fresh, rows, sequence.request.salt
        )

    def _restore(self) -> None:
        for sequence, restoring in list(self.restoring.items()):
            if sequence not in self.restoring:
                continue
            try:
                if not restoring.advance():
                    continue
                del self.restoring[sequence]
                sequence.restore_s = time.monotonic() - sequence.restoring_since
                self._begun(sequence, *restoring.finish())
            except Exception as e:
                self._lost(e, self._told(e), [sequence])

    def _begun(self, sequence: Sequence, state: SequenceState, lookup: Lookup, plan: Plan) -> None:
        self._allotments[sequence].restored()
        sequence.begin(state, lookup, plan)
        self.prefills[sequence] = Prefill(sequence, state)

    # work

    def _read(self) -> None:
        """A chunk of one prompt, and where something drafts of all that have had none; those that are read, or restored
        to their end, begin to decode."""
        self._seat()
        if self.prefills:
            self._chunks(self._reading.next())

    def _seat(self) -> None:
        self._drain()
        for sequence in self._reading.through:
            self._place(sequence)

    def _chunks(self, chosen: list[Sequence]) -> None:
        """A chunk of each. Then those whose prompt was read begin to decode: nobody's first chunk waits for that."""
        for i, sequence in enumerate(chosen):
            if sequence not in self.prefills:  # lost with another
                continue
            shapes = [(g.executor.slots, max(g.positions().values(), default=0)) for g in self.groups if g.rows]
            try:
                self._reading.chunk(sequence, shapes, len(chosen) - i)
            except Exception as e:
                self._lost(e, self._told(e), [sequence])
            else:
                self.seats.interrupt()
        for sequence in chosen:
            if sequence in self.prefills and not self.prefills[sequence].remaining:
                self._place(sequence)

    def _place(self, sequence: Sequence) -> None:
        if sequence not in self.prefills:  # lost with another
            return
        if sequence.cancelled():  # within this turn: no step is made for it
            self._cancel(sequence)
            return
        self._see()
        self._drain()
        if self.handoff.state is State.DRAINING:
            self.handoff.on(Event.DRAINED)
        if sequence not in self.prefills:  # lost with what was drained
            return
        prefill = self.prefills.pop(sequence)
        self._admitted = True
        with self._changing(sequence):
            self.seats.place(sequence, prefill.state, self._allotments.pop(sequence))
        if self.handoff.state is State.HANDOFF:
            self.handoff.on(Event.JOINED)

    def _regroup(self) -> None:
        with self._changing():
            self.seats.regroup(self._admitted)
            self._admitted = False

    def _step(self, group: Group) -> None:
        self._see()
        if self._lets_in:
            self._let_in()
            if group not in self.groups:
                return
        started, made = time.monotonic(), group.forwards
        rows = [row.sequence for row in group.rows.values()]
        known = sum(len(sequence.sampled) for sequence in rows)
        with self._changing(), self.pool.step():
            self.seats.step(group, self.handoff.may_cycle)
        seconds = time.monotonic() - started
        self._steps += 1
        self._step_s += seconds
        # what was in flight may only have been read, and who left took columns along
        says = bool(group.rows) and group.forwards > made
        self._reading.stepped(
            group.executor.slots,
            max(group.positions().values(), default=0),
            seconds if says else 0.0,
            said=sum(len(sequence.sampled) for sequence in rows) > known,
        )

    def _waits(self, group: Group) -> bool:
        """Whether a stream that shares its time with a newcomer makes no cycle between these two chunks."""
        drafts = self.seats.speculation
        if drafts is None or self.handoff.state is not State.SHARING or not self.prefills:
            self._patience.forget()
            return False
        if not drafts.last or self._reading.hurried or not group.speculates:
            return False
        return self._patience.waits(*drafts.depth.seconds(len(group.rows), drafts.last))

    def _greet(self) -> None:
        """First tokens are read at once: they would wait for the next chunk of another's prompt. By a step, so that the
        next ones are in flight while that is read."""
        for group in list(self.groups):
            if any(not row.sequence.sampled for row in group.rows.values()):
                self._step(group)
