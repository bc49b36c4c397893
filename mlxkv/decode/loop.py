"""The loop of the engine: one turn takes what is new, admits what there is room for, reads a chunk of one prompt and
makes a step of one group. It belongs to the engine's thread; what it decides is in ``scheduler``."""

from __future__ import annotations

import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import mlx.core as mx

from ..cache.lookup import Lookup
from ..cache.planner import Plan
from ..cache.restoring import Restoring
from ..cache.state import SequenceState
from ..cache.status import StoreStatus
from ..errors import EngineClosed, EngineError, MlxkvError, RequestCancelled
from .batched import Batched
from .group import Group
from .handoff import Event, Handoff, Picture, State
from .memory import TOKEN_BYTES, Memory, give_back
from .needs import Needs
from .options import Options
from .pace import Ladder
from .pool import Pool
from .prefill import Prefill
from .reading import Patience, Reading
from .runtime import Runtime
from .scheduler import Admission, Rounds, max_gap
from .seats import Seats
from .sequence import Sequence
from .solo import Allotment
from .speculation import Counts
from .status import Status
from .ticket import Ticket

log = logging.getLogger("mlxkv.engine")

#: times that a stream which could make a step looks for newcomers first; then the others wait for a plain one
LOOKS = 4


class Loop:
    """``failed`` is told of errors that may be the device's; it gives back the error that requests are told."""

    def __init__(self, rt: Runtime, options: Options, failed: Callable[[BaseException], EngineError]) -> None:
        self.rt, self._failed = rt, failed
        self._max_rows = options.max_rows
        self._admission, self._rounds = Admission(), Rounds()
        #: how a stream that speculates lets others in
        self.handoff = Handoff()
        self.tickets: deque[Ticket] = deque()
        #: prompts that wait for room, in the order in which they came
        self.waiting: list[Sequence] = []
        self.restoring: dict[Sequence, Restoring] = {}
        self.seats = Seats(rt, options.max_rows, options.compile)
        self._needs = Needs(rt, self.seats)
        #: whether newcomers have their first chunks before anybody's next step, instead of a turn each
        self._lets_in = self.seats.speculation is not None
        self._reading = Reading(Ladder.up_to(rt.chunk), max_gap(options.max_gap_ms, rt.device), self._lets_in)
        #: rows of the caches of those who do not decode yet
        self._allotments: dict[Sequence, Allotment] = {}
        self._patience = Patience()
        self._steps, self._step_s = 0, 0.0
        self._rested = 0
        self._admitted = False
        #: told when somebody was admitted, within a turn
        self.changed: Callable[[], None] = lambda: None
        #: puts what was queued meanwhile into ``tickets``
        self.look: Callable[[], None] = lambda: None

    # what others see

    @property
    def prefills(self) -> dict[Sequence, Prefill]:
        """Prompts that are read."""
        return self._reading.prefills

    @property
    def groups(self) -> list[Group]:
        return self.seats.groups

    @property
    def pool(self) -> Pool:
        return self.seats.pool

    @property
    def memory(self) -> Memory:
        return self.rt.memory

    @property
    def sequences(self) -> list[Sequence]:
        """All that were admitted."""
        return [*self.restoring, *self.prefills, *self.seats.sequences()]

    @property
    def active(self) -> int:
        return len(self.restoring) + len(self.prefills) + self.seats.rows

    @property
    def idle(self) -> bool:
        """A turn would have nothing to do."""
        return not (self.active or self.waiting or self.tickets)

    def status(self) -> Status:
        memory = self.rt.memory
        shapes = [
            (g.executor.slots, g.executor.batch.capacity if isinstance(g.executor, Batched) else 0) for g in self.groups
        ]
        drafts = self.seats.speculation.counts if self.seats.speculation is not None else Counts()
        return Status(
            running=self.seats.rows,
            prefilling=len(self.prefills),
            restoring=len(self.restoring),
            waiting=len(self.waiting),
            queued=len(self.tickets),
            reserved_bytes=memory.reserved,
            reserved_rows=self.seats.reserved_rows() + sum(a.rows for a in self._allotments.values()),
            pool_used=self.pool.used,
            groups=tuple(shapes),
            steps=self._steps,
            step_s=self._step_s,
            traces=self.seats.steps.traces,
            memory=memory.ledger(),
            turns=self.seats.obstacle,
            handoff=self.handoff.state.value,
            handoffs=self.handoff.changes(),
            cycles=drafts.cycles,
            drafted=drafts.proposed,
            accepted=drafts.accepted,
            depth=self.seats.speculation.last if self.seats.speculation is not None and self.groups else 0,
            memory_limit=memory.limit,
            store=StoreStatus.of(self.rt.store) if self.rt.store is not None else None,
        )

    def allotted(self, sequence: Sequence) -> int:
        """Rows that the caches of a sequence have, or will have, which does not decode yet."""
        return self._allotments[sequence].rows if sequence in self._allotments else 0

    def rehearse(self, on: bool) -> None:
        """What is asked from now on, or no longer, is only there to be timed."""
        if self.seats.speculation is not None:
            self.seats.speculation.depth.rehearse(on)

    def check_integrity(self) -> None:
        """Raises where books contradict each other, or somebody holds what nobody needs."""
        self.pool.check_integrity()
        drafts = [] if self.seats.speculation is None else self.seats.speculation.owners(self.sequences)
        self.rt.memory.check_integrity([*self.waiting, *self.sequences, *self.groups, self.pool, *drafts])

    # a turn

    def turn(self) -> None:
        """Whatever goes wrong is told to the requests that it concerns; raises only what ends the engine."""
        self._receive()
        self._leave()
        self._admit()
        self.changed()
        self._restore()
        self._see()
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

    def _forget(self) -> None:
        """Whose turn it was is of no use where there is nobody; and what is remembered by names keeps those alive, with
        all their caches."""
        if not self.groups:
            self._rounds = Rounds()
        self._reading.forget()
        if not self.waiting:
            self._admission = Admission()

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

    def close(self) -> None:
        """Everybody leaves: who was admitted as cancelled, the others with an error."""
        self.handoff.on(Event.SHUT_DOWN)

        def closed() -> EngineClosed:  # each its own: whoever raises it adds to its traceback
            return EngineClosed("The engine was closed before this request was answered.")

        for ticket in self.tickets:
            ticket.fail(closed())
        self.tickets.clear()
        for sequence in list(self.waiting):
            self._fail(sequence, closed())
        for sequence in self.sequences:
            self._cancel(sequence)
        if self.active:  # what could not be taken out in order
            self.reset(closed())
        self._see()
        self.seats.tidy()  # no turn comes that would

    def give_up(self, error: BaseException) -> None:
        """The device cannot be trusted: nobody is answered."""
        self.reset(error)
        for ticket in self.tickets:
            ticket.fail(error)
        self.tickets.clear()

    def reset(self, error: BaseException) -> None:
        """Nothing that is here can be trusted: all that were taken in have failed. Who was not is still answered."""
        self.handoff.on(Event.FAILED)
        lost = [*self.waiting, *self.restoring, *self.prefills, *self.seats.clear()]
        self._tell_ended()
        for sequence in lost:
            try:
                self._fail(sequence, error)
            except Exception:
                log.exception("a failed request left something behind")
                self._release(sequence)
                sequence.fail(error)
        for books in (self.waiting, self.restoring, self.prefills, self._allotments):
            books.clear()
        self._see()
        self._forget()

    # the handoff

    @property
    def _streams(self) -> list[Group]:
        """Groups whose next step may be a cycle."""
        return [group for group in self.groups if group.rows and group.speculates]

    @property
    def _knocking(self) -> int:
        """Requests that nobody has looked at, as far as there are places for them."""
        return min(len(self.tickets), max(0, self._max_rows - self.active - len(self.waiting)))

    def _see(self) -> None:
        """Tell the handoff what there is."""
        through, new = len(self._reading.through), len(self._reading.new)
        self.handoff.see(
            Picture(
                streams=len(self._streams),
                rows=self.seats.rows,
                newcomers=self._knocking + new,
                reading=len(self.prefills) - through - new,
                through=through,
            )
        )

    def _let_in(self) -> None:
        """Before a step: whoever was queued up to now has its first chunk, if it can have one. Those who come faster
        than that wait for one step, which is no cycle."""
        for _ in range(LOOKS):
            self.look()
            if not (self._knocking or self._reading.new):
                break
            self._receive()
            self._leave()
            self._admit()
            self.changed()
            self._restore()
            self._see()
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

    def _cancel(self, sequence: Sequence) -> None:
        self.handoff.on(Event.CANCELLED)
        try:
            if sequence in self.restoring:
                self.restoring.pop(sequence).cancel()
                sequence.fail(RequestCancelled("The request was cancelled before it started."))
            elif sequence in self.prefills:
                prefill = self.prefills.pop(sequence)
                mx.eval(prefill.state.live())
                sequence.keep(prefill.state, "cancelled")
                sequence.finish("cancelled")
            else:
                with self._changing():
                    self.seats.remove(sequence)
        except Exception as e:
            self._lost(e, self._told(e), [sequence])
        self._release(sequence)

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

    # ends

    @contextmanager
    def _changing(self, *coming: Sequence) -> Iterator[None]:
        """Groups are changed in the block. Who came to an end is told so, whatever else fails; if it raises, the rows
        of those groups have failed, and who was ``coming``."""
        try:
            yield
        except Exception as e:
            error, touched = self._told(e), list(self.seats.touched)
            self._tell_ended()
            self._lost(e, error, coming, touched)
        else:
            self._tell_ended()

    def _tell_ended(self) -> None:
        for end in self.seats.ended():
            try:
                self._release(end.sequence)
                if end.error is not None or end.reason == "cancelled":
                    self.handoff.on(Event.FAILED if end.error is not None else Event.CANCELLED)
                if end.error is not None:
                    end.sequence.fail(self._its_own(end.error))
                else:
                    assert end.reason is not None
                    end.sequence.finish(end.reason)
            except Exception as e:
                end.sequence.fail(self._its_own(e))

    def _lost(
        self,
        e: BaseException,
        error: BaseException,
        sequences: Iterable[Sequence] = (),
        groups: Iterable[Group] = (),
    ) -> None:
        """What was done for these failed with ``e``; they are told ``error``. On a GPU an error may surface later than
        the command that caused it: nobody's state can be trusted then."""
        if self.rt.device != "cpu" and isinstance(e, RuntimeError):
            sequences, groups = [*sequences, *self.restoring, *self.prefills], self.groups
        self.handoff.on(Event.FAILED)
        for sequence in list(sequences):
            self._fail(sequence, error)
        for group in list(groups):
            for row in group.rows.values():
                self._fail(row.sequence, error)
            self.seats.discard(group)

    def _fail(self, sequence: Sequence, error: BaseException) -> None:
        restoring = self.restoring.pop(sequence, None)
        self.prefills.pop(sequence, None)
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        try:
            if restoring is not None:
                restoring.cancel()
            sequence.drop()
            self._release(sequence)
        finally:  # it is in no book any more: nobody else would tell it
            sequence.fail(error)

    def _release(self, sequence: Sequence) -> None:
        self._allotments.pop(sequence, None)
        self.rt.memory.release(sequence)

    def _told(self, e: BaseException) -> BaseException:
        """What a request is told of an error."""
        traceback.clear_frames(e.__traceback__)  # they hold the request's state, and callers keep errors
        return e if isinstance(e, MlxkvError) else self._failed(e)

    def _its_own(self, e: BaseException) -> BaseException:
        """What a request is told of an error in what is done for it alone, on the host: the device is not to blame,
        however often that happens."""
        traceback.clear_frames(e.__traceback__)
        if isinstance(e, MlxkvError):
            return e
        log.error("a request failed", exc_info=e)
        error = EngineError(f"The request failed: {type(e).__name__}: {e}.", "The engine goes on.")
        error.__cause__ = e
        return error
