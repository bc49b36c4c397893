"""The books of the engine's loop: who waits, is restored, is read and decodes, what each has room for, and what others
see of that."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ..cache.restoring import Restoring
from ..cache.status import StoreStatus
from .batched import Batched
from .group import Group
from .handoff import Handoff, Picture, State
from .memory import Memory
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


class Books:
    """Every request that was taken and has not ended is in one of ``tickets``, ``waiting``, ``restoring``, ``prefills``
    and ``seats``. Belongs to the engine's thread."""

    def __init__(self, rt: Runtime, options: Options) -> None:
        self.rt = rt
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
        #: what the handoff was told last, and its state since
        self._seen: tuple[tuple[int, ...], State] | None = None
        #: told when somebody came, was admitted or left, within a turn
        self.changed: Callable[[], None] = lambda: None
        #: puts what was queued meanwhile into ``tickets``
        self.look: Callable[[], None] = lambda: None

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

    @property
    def shape(self) -> tuple[int, ...]:
        """How many are in each of the books."""
        return len(self.tickets), len(self.waiting), len(self.restoring), len(self.prefills), self.seats.rows

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
            depth=self.seats.speculation.last if self.seats.speculation is not None and self._streams else 0,
            memory_limit=memory.limit,
            store=StoreStatus.of(self.rt.store) if self.rt.store is not None else None,
        )

    def allotted(self, sequence: Sequence) -> int:
        """Rows that the caches of a sequence have, or will have, which does not decode yet."""
        return self._allotments[sequence].rows if sequence in self._allotments else 0

    def rehearse(self, on: bool) -> None:
        """What is asked from now on, or no longer, is only there to be timed. Where depths adapt nothing is drafted for
        it: ``rehearsal`` does that elsewhere."""
        speculation = self.seats.speculation
        self.seats.resting = on and speculation is not None and speculation.depth.fixed is None

    def check_integrity(self) -> None:
        """Raises where books contradict each other, or somebody holds what nobody needs."""
        self.pool.check_integrity()
        drafts = [] if self.seats.speculation is None else self.seats.speculation.owners(self.sequences)
        self.rt.memory.check_integrity([*self.waiting, *self.sequences, *self.groups, self.pool, *drafts])

    # what the handoff is told

    @property
    def _streams(self) -> list[Group]:
        """Groups whose next step may be a cycle."""
        found: list[Group] = []
        if self.seats.speculation is not None:
            for group in self.seats.groups:  # a step's way leads here several times
                if group.rows and group.speculates:
                    found.append(group)
        return found

    @property
    def _knocking(self) -> int:
        """Requests that nobody has looked at, as far as there are places for them."""
        if not self.tickets:
            return 0
        return min(len(self.tickets), max(0, self._max_rows - self.active - len(self.waiting)))

    def _see(self) -> None:
        """Tell the handoff what there is, if that is news: the same thing twice changes nothing."""
        through = new = 0
        if self.prefills:
            through, new = len(self._reading.through), len(self._reading.new)
        there = len(self._streams), self.seats.rows, self._knocking + new, len(self.prefills) - through - new, through
        if self._seen != (there, self.handoff.state):
            self.handoff.see(Picture(*there))
            self._seen = there, self.handoff.state

    def _forget(self) -> None:
        """Whose turn it was is of no use where there is nobody; and what is remembered by names keeps those alive, with
        all their caches."""
        if not self.groups:
            self._rounds = Rounds()
        self._reading.forget()
        if not self.waiting:
            self._admission = Admission()
