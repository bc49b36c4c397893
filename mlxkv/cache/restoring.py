"""Restores under way: the engine's thread makes arrays, other threads read into them, it attaches them.

``Restoring`` is one of them, in steps; ``Restores`` are all of a store. What is read, and by which checks, is
``restore``'s affair; which records there are, the planner's. Everything here belongs to the engine's thread, but for
``done`` and ``wait``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .lookup import Lookup
from .planner import Plan, Planner
from .readers import Job, Readers, Task
from .record import MissingRecord, OtherRows
from .restore import RestoreFailed, Restorer
from .state import SequenceState

if TYPE_CHECKING:
    from .exchange import Exchange
    from .legacy.tier import Fetch
    from .store import PrefixStore

#: what reads so few bytes (a millisecond or two) is done before ``begin`` returns: with threads it would take longer
AT_ONCE = 4 << 20
#: bytes of destinations that are made in one step: fresh memory costs a system some 0.3 s a GB
PORTION = 32 << 20
#: how long closing waits for threads that read, seconds: a disk may not answer
READERS_WITHIN = 5.0

#: destinations into which a thread may still write, of stores that are closed. They are never freed.
_stuck: list[Restoring] = []
#: seconds between looks at whether somebody who is asked has had his time
_TICK = 0.05

Restored = tuple[SequenceState, Lookup, Plan]


class RestoreCancelled(Exception):
    """The restore was cancelled, or its store closed: there is no result."""


class Restoring:
    """One request's restore. ``tokens`` must not change meanwhile.

    Where a record fails, the plan is made again without it and reading goes on, so that ``advance`` is called until it
    says that the result is there; ``done`` says when that is worth while. It ends with a result or with ``cancel()``;
    until then its records are pinned. ``new_state`` is called once a plan.
    """

    def __init__(
        self,
        store: PrefixStore,
        plan: Plan,
        tokens: list[int],
        new_state: Callable[[], SequenceState],
        capacity: int,
        salt: str,
    ) -> None:
        self._store, self._plan, self._tokens, self._capacity = store, plan, tokens, capacity
        self._new_state: Callable[[], SequenceState] | None = new_state
        self._limit = len(tokens) - 1
        space = self._space = store.space(salt)
        self._planner = Planner(store.view, space, store.layout)
        self._restorer = Restorer(store.view.tiers, store.ram, space, store.layout, tokens)
        self._bad: set[tuple[bytes, str]] = set()
        self._adopted: set[tuple[bytes, str]] = set()
        self._failure: str | None = None
        self._wanted = 0  # where the first plan that failed would have led
        self._legacy = plan.legacy
        self._fetch: Fetch | Exchange | None = None
        self._exchange: Exchange | None = None
        self._legacy_too = plan.unasked
        self._state: SequenceState | None = None
        self._tasks: list[Task] = []  # which wait for their destinations
        self._job: Job | None = None
        self._result: Restored | None = None
        self.cancelled = False
        store.restores.tidy()
        store.restores.add(self)
        try:
            if store.remote is not None and plan.position < self._limit:
                self._exchange = store.remote.begin(store, tokens, space, plan, self._limit)
                if self._exchange is None:
                    self._failure = store._fault("io_error", "nobody is asked who has not answered others")
                    self._wanted = self._limit
            self._fetch_or_read(self._exchange)
        except BaseException:
            self.cancel()
            raise

    # any thread

    @property
    def done(self) -> bool:
        """Whether nothing is being read: ``advance`` has something to do, or there is nothing left to be done."""
        job = self._job
        return job is None or job.ended or (self._asking is not None and self._asking.overdue)

    @property
    def _asking(self) -> Exchange | None:
        """What a connector is being asked, if it is."""
        return self._exchange if self._fetch is self._exchange else None

    def wait(self, timeout: float | None = None) -> bool:
        """Until it is ``done``; False on time-out (seconds)."""
        job = self._job
        return job is None or job.wait(timeout)

    # the engine's thread

    def advance(self) -> bool:
        """Do what is to be done now, without waiting; True if the result is there. Raises RestoreCancelled, and what
        ``new_state`` raises: it is cancelled then."""
        if self.cancelled:
            raise RestoreCancelled
        if self._result is None and self.done:
            try:
                self._go_on()
            except BaseException:
                self.cancel()
                raise
        return self._result is not None

    def finish(self) -> Restored:
        """The state, what was restored, and the plan that was executed; waits for it, and helps. Raises as ``advance``
        does."""
        while not self.advance():
            try:
                if self._asking:
                    self.wait(_TICK)  # who does not answer is not waited for longer than it may take
                elif self._job is not None:
                    self._job.help()
            except BaseException:  # Ctrl-C
                self.cancel()
                raise
        assert self._result is not None
        return self._result

    def cancel(self) -> None:
        """Nobody wants the result any more; after it is there, this changes nothing. Threads that read stop as soon as
        they can, which is not waited for; what they write into is kept until then."""
        if self._result is not None or self.cancelled:
            return
        self.cancelled = self._restorer.stopped = True
        if self._fetch is not None:
            self._fetch.stopped = True
        if self._job is not None:
            self._job.stop()
        if self._asking:
            self._job = None  # who answers late writes into nothing of ours
        self._end()
        self._store.restores.leave(self)

    def tidy(self) -> bool:
        """Let go of what was read into, if no thread is at it any more; whether that is so."""
        if not self.done:
            return False
        self._restorer.discard()
        self._job = self._fetch = None
        return True

    @property
    def pinned(self) -> frozenset[bytes]:
        """The entries that are read."""
        entries = [*(p.entry for p in self._plan.pieces), self._plan.state]
        return frozenset(e.key for e in entries if e is not None)

    # steps

    def _fetch_or_read(self, fetch: Fetch | Exchange | None) -> None:
        """Ask elsewhere for more, legacy folders last; then read."""
        store, plan = self._store, self._plan
        if fetch is None and self._legacy_too and store.legacy is not None and plan.position < self._limit:
            self._legacy_too = False
            fetch = store.legacy.begin(store, self._tokens, plan.position)
        self._fetch = fetch
        if fetch is not None:
            self._job = fetch.start()
        else:
            self._read()

    def _go_on(self) -> None:
        """What was being read has been read, or has failed."""
        if self._fetch is not None:
            self._fetched(self._fetch)
            return
        if self._job is None:
            self._make()
            return
        error, self._job = self._job.error, None
        if isinstance(error, RestoreFailed):
            self._failed(error)
        elif error is not None:
            self._give_up(error)
        elif self._attach():
            self._succeeded()
            return
        self._read()

    def _read(self) -> None:
        """Have the plan read, or end with a miss."""
        store = self._store
        while self._plan.position > 0:
            plan = self._plan
            store.restores.pin()  # a plan may have been made again
            store.ram.touch([*([plan.state.key] if plan.state else []), *(p.entry.key for p in reversed(plan.pieces))])
            self._state = self._fresh()  # may take memory of the RAM tier's: not of what is read now, if it can be
            try:
                self._tasks = self._restorer.prepare(plan, self._capacity)
            except Exception as e:
                self._give_up(e)
                continue
            self._make()
            return
        reason = (self._failure or self._plan.reason or "empty") if self._limit > 0 else None
        self._conclude(self._fresh(), Lookup(0, "none", reason, None if reason is None else 0))

    def _make(self) -> None:
        """Make some destinations; once all are there, have them read into."""
        try:
            if not self._restorer.make(PORTION):
                return
        except Exception as e:
            self._give_up(e)
            self._read()
            return
        self._job, self._tasks = Job(self._tasks), []
        if self._restorer.nbytes(self._plan) <= AT_ONCE:
            self._job.help()
        else:
            self._store.restores.readers.submit(self._job)

    def _fresh(self) -> SequenceState:
        assert self._new_state is not None
        return self._new_state()

    def _attach(self) -> bool:
        assert self._state is not None
        try:
            self._restorer.attach(self._state)
        except Exception as e:
            self._give_up(e)
            return False
        return True

    def _give_up(self, error: Exception) -> None:
        """Something that no record explains: nothing is restored."""
        self._failure = self._store._fault("corrupt", repr(error))
        self._restorer.discard()
        self._state, self._tasks = None, []
        self._plan = Plan(parent=self._space.root)

    def _succeeded(self) -> None:
        store, plan, restorer = self._store, self._plan, self._restorer
        assert self._state is not None
        for entry in restorer.other.values():
            store._adopt(entry)
        # what it hangs on stays as long as it does
        store._note_use(plan.state.key if plan.state is not None else plan.pieces[-1].entry.key)
        # what failed cost nothing if other records lead as far
        failure = self._failure if plan.position < self._wanted else None
        reason = failure or plan.reason if plan.position < self._limit else None
        source = "ssd" if "ssd" in restorer.used else "ram"
        if self._exchange is not None and self._exchange.keys & self.pinned:
            source = self._exchange.source
        if self._legacy & self.pinned:
            source = "legacy"
        self._conclude(self._state, Lookup(plan.position, source, reason, None if reason is None else plan.position))

    def _failed(self, e: RestoreFailed) -> None:
        """A record failed: its verdict, and the next plan."""
        store, key = self._store, (e.entry.key, e.kind)
        self._state = None
        self._wanted = max(self._wanted, self._plan.position)
        first = key not in self._adopted
        other = isinstance(e.error, OtherRows) and first and store._adopt(e.entry, e.kind)
        if other or (first and store._merged(e)):
            self._adopted.add(key)
            self._plan = self._again()
        elif e.tier == "ram":  # the one on disk may be good; it is asked next
            store._fault(e.error.reason, str(e))
            store.ram.drop(*key)
            self._plan = self._again()
            self._failure = self._failure or (e.error.reason if self._plan.position < self._limit else None)
        else:
            # rows without their state: said as a look-up after a restart would say it
            rows = e.entry.row_start == e.entry.end or store.folder.file(e.entry.key, "rows").exists()
            gone = e.kind == "state" and isinstance(e.error, MissingRecord) and rows
            self._failure = self._failure or ("no_state" if gone else e.error.reason)
            self._bad.add(key)
            store._discard(e)
            self._plan = self._again()

    def _again(self) -> Plan:
        try:
            return self._planner.plan(self._tokens, self._limit, self._bad)
        except Exception as e:
            self._store._fault("io_error", f"the index: {e}")
            return Plan(parent=self._space.root)

    def _fetched(self, fetch: Fetch | Exchange) -> None:
        """A step of asking elsewhere has been done."""
        store = self._store
        if (job := fetch.go_on(store)) is not None:
            self._job = job
            return
        self._job = self._fetch = None
        if fetch.keys:
            pending = self._plan.reason == "pending"
            self._plan = self._again()
            if fetch is not self._exchange:
                self._legacy = fetch.keys
            if pending and self._plan.reason in ("empty", "different_tokens", "no_state"):
                self._plan.reason = "pending"
        if self._exchange is not None and fetch is self._exchange:
            self._exchange.settle(self._plan)
            if self._exchange.failure is not None:  # nobody knows what more there would have been
                self._failure, self._wanted = self._exchange.failure, self._limit
            self._wanted = max(self._wanted, self._exchange.hit.tokens)
        self._fetch_or_read(None)

    def _conclude(self, state: SequenceState, lookup: Lookup) -> None:
        self._restorer.discard()
        self._result = state, lookup, self._plan
        self._end()
        self._store.restores.leave(self)

    def _end(self) -> None:
        self._state = self._new_state = None  # they may hold much
        if self._exchange is not None and self._store.remote is not None:
            self._store.remote.leave(self._exchange)
        self._tasks = []
        for tier, nbytes in self._restorer.nbytes_read.items():
            self._store.restores.nbytes_read[tier] += nbytes


class Restores:
    """All restores of one store, and the threads that read for them."""

    def __init__(self) -> None:
        self.readers = Readers()
        #: entries that are being read; any thread may look
        self.pinned: frozenset[bytes] = frozenset()
        #: bytes of records that were read and verified, by tier
        self.nbytes_read = {"ram": 0, "ssd": 0}
        self._under_way: list[Restoring] = []
        self._leaving: list[Restoring] = []

    @property
    def under_way(self) -> int:
        """How many have neither a result nor been cancelled."""
        return len(self._under_way)

    def add(self, restoring: Restoring) -> None:
        self._under_way.append(restoring)
        self.pin()

    def pin(self) -> None:
        """Pin what all of them read."""
        self.pinned = frozenset().union(*(r.pinned for r in self._under_way))

    def leave(self, restoring: Restoring) -> None:
        """It has ended, though threads may still be at it."""
        self._under_way.remove(restoring)
        self._leaving.append(restoring)
        self.pin()
        self.tidy()

    def tidy(self) -> None:
        """Let go of what cancelled restores read into, where no thread is at it any more."""
        self._leaving = [r for r in self._leaving if not r.tidy()]

    def close(self, timeout: float) -> None:
        """Cancel all, and wait for threads that read, for at most so many seconds."""
        for restoring in list(self._under_way):
            restoring.cancel()
        self.readers.wait(min(timeout, READERS_WITHIN))
        self.tidy()
        _stuck.extend(self._leaving)
        self._leaving = []
