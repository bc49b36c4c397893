"""What one request asks a remote connector, in steps, so that the engine's thread waits for nobody.

``RemoteTier`` has the connector, the threads that ask it, and what one request may spend; ``Exchange`` is one
request's: ask, load, hand over. What arrives goes the way of a request's own records, through RAM and the writer, and
is planned and verified like these: a promise is checked when it was to be kept, and what is not there is not stood on.
"""

from __future__ import annotations

import itertools
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .connectors import ConnectorError, Delivery, Question, Remote
from .hits import BrokenPromise, Group, Hit, Offer, Places, Rows, resolve_hit
from .keys import KeySpace
from .planner import Plan, Planner
from .ram import Draft
from .readers import Job, Readers

if TYPE_CHECKING:
    from .store import PrefixStore

log = logging.getLogger("mlxkv.cache")

#: threads that ask: each is one request's
THREADS = 4
#: one request's share: seconds of asking and loading, and bytes of records
SECONDS = 10.0
BYTES = 2 << 30
#: seconds that a connector has to notice that its time is over, before it is left alone
GRACE = 1.0


@dataclass
class Counters:
    """Of this process: requests that asked, those that were served, promises that were not kept, faults, bytes handed
    over."""

    asked: int = 0
    served: int = 0
    broken: int = 0
    faults: int = 0
    bytes: int = 0


class RemoteTier:
    """A connector below the local tiers. ``seconds`` and ``most`` (bytes) bound what one request spends there. Belongs
    to the engine's thread."""

    def __init__(self, connector: Remote, *, seconds: float = SECONDS, most: int = BYTES) -> None:
        self.connector, self.seconds, self.most = connector, seconds, most
        self.counters = Counters()
        self.readers = Readers(THREADS + 1, "mlxkv-connector")  # a job has all but one of them
        self._requests = itertools.count(1)
        self._late: list[Exchange] = []

    def begin(self, store: PrefixStore, tokens: list[int], space: KeySpace, plan: Plan, limit: int) -> Exchange | None:
        """What a request that may stand where ``plan`` says asks for more. None if nobody is asked: all threads wait
        for answers that are overdue."""
        self._late = [late for late in self._late if not late.tidy()]
        if len(self._late) >= THREADS:
            self.counters.faults += 1
            return None
        self.counters.asked += 1
        groups: list[Group] = [Rows(plan.reach)]
        if not store.layout.growing_only:
            groups.append(Places({plan.position}))
        return Exchange(self, next(self._requests), tokens[:], space, store, groups, limit)

    def leave(self, exchange: Exchange) -> None:
        """A request is over; what it asked may still be on its way."""
        exchange.stopped = True
        if not exchange.tidy():
            self._late.append(exchange)

    def close(self, timeout: float) -> None:
        """Once no request asks any more, and all have been told so; waits for at most so many seconds."""
        until = time.monotonic() + timeout
        self.readers.wait(min(timeout, 2 * GRACE))  # they have been told that nobody waits
        self._late = [late for late in self._late if not late.tidy()]
        self.connector.close(max(0.0, until - time.monotonic()))


@dataclass
class Exchange:
    """``groups`` are what the local tiers hold of the prompt, as ``hits`` counts it. Never raises; ``failure`` is why
    nothing, or less than was promised, is there (one of ``lookup.REASONS``), None if that is all there is."""

    tier: RemoteTier
    request: int
    tokens: list[int]
    space: KeySpace
    store: PrefixStore
    groups: list[Group]
    limit: int
    #: nobody wants it any more; any thread may say so
    stopped: bool = False
    hit: Hit = field(default_factory=lambda: Hit(0))
    failure: str | None = None
    #: entries that were handed over
    keys: frozenset[bytes] = frozenset()
    _offer: Offer | None = None
    _delivery: Delivery | None = None
    _error: Exception | None = None
    _job: Job | None = None
    _question: Question | None = None
    _held: list[bytes] = field(default_factory=list)  # pinned in RAM for this request

    @property
    def source(self) -> str:
        return self.tier.connector.source

    @property
    def overdue(self) -> bool:
        """Whether it has had its time, and more."""
        return self._question is not None and time.monotonic() > self._question.until + GRACE

    def start(self) -> Job:
        """Have it asked elsewhere."""
        self.hit = self._resolve()  # it has not answered yet, so it says from where it is asked
        self._question = Question(
            tokens=self.tokens,
            space=self.space,
            layout=self.store.layout,
            asked=self.hit.asked or 0,
            common=self.hit.common,
            limit=self.limit,
            until=time.monotonic() + self.tier.seconds,
            most=self.tier.most,
            stopped=lambda: self.stopped,
            request=self.request,
        )
        return self._elsewhere(self._ask)

    def go_on(self, store: PrefixStore) -> Job | None:
        """A step was done, or is overdue: what is to be done elsewhere next; None: all is done, as ``keys`` says."""
        if self._job is not None and not self._job.ended:
            self.stopped = True
            return self._failed("io_error", f"the {self.source} store has not answered for {self.tier.seconds:g} s")
        if self._error is not None:
            reason = self._error.reason if isinstance(self._error, ConnectorError) else "io_error"
            return self._failed(reason, f"the {self.source} store: {self._error or type(self._error).__name__}")
        if self._delivery is None:
            try:
                self.hit = self._resolve()
            except BrokenPromise as e:
                return self._failed("corrupt", f"the {self.source} store: {e}")
            if self.hit.pending:
                self.failure = "pending"
            return self._elsewhere(self._load) if self.hit.promised else None
        self._hand_over(self._delivery)
        return None

    def settle(self, plan: Plan) -> None:
        """Compare what was promised with the plan that was made of what is there."""
        self.tier.counters.served += bool(self.keys)
        if not self.hit.promised or plan.position >= self.hit.tokens:
            return
        self.tier.counters.broken += 1
        if self.failure is None:
            self._failed(
                "no_state" if plan.reach >= self.hit.tokens else "evicted",
                f"the {self.source} store promised {self.hit.tokens} tokens and brought {plan.position}",
            )

    def tidy(self) -> bool:
        """The request is over: let go of what was held for it, and have the connector forget it, if no thread is at it
        any more; whether that is so."""
        self.store.ram.unpin(self._held)
        self._held = []
        if self._job is not None and not self._job.ended:
            return False
        if self._question is not None:
            self.tier.connector.end(self._question)
            self._question = None
        return True

    # steps

    def _resolve(self) -> Hit:
        capable = self.tier.connector.supports_divergent_local_hybrid_hits
        return resolve_hit(self.groups, self.limit, capable, lambda at: self._offer, block=self.space.block)

    def _elsewhere(self, step) -> Job:
        self._job = Job([step])
        self.tier.readers.submit(self._job)
        return self._job

    def _failed(self, reason: str, detail: str) -> None:
        self.tier.counters.faults += 1
        self.failure = self.store._fault(reason, detail)

    def _hand_over(self, delivery: Delivery) -> None:
        store = self.store
        if delivery.failure is not None:
            self._failed(delivery.failure, f"the {self.source} store: {delivery.detail or delivery.failure}")
        try:
            planner = Planner(store.view, self.space, store.layout)
            drafts = [d for d in delivery.drafts if self._is_ours(d)]
            if len(drafts) < len(delivery.drafts):
                self._failed("corrupt", f"the {self.source} store brought records of something else")
            todo = [d for d in drafts if not _there(planner, d)]
        except Exception as e:  # an index that cannot be read
            self._failed("io_error", f"the index: {e}")
            return
        keys = [d.meta.key for d in todo]
        for draft in reversed(todo):  # what others hang on is the last to leave RAM
            store.ram.put(draft, pin=True)
        self._held = keys  # until the request has it, whatever the writer can do with it
        if todo and store.keeps:
            for draft in todo:
                store.ram.put(draft, pin=True)
            if not store.writer.submit(todo):
                store.ram.unpin(keys)
        self.tier.counters.bytes += sum(d.nbytes for d in todo)
        self.keys = frozenset(keys)

    def _is_ours(self, draft: Draft) -> bool:
        """Whether a draft is of this prompt: nothing else is taken in."""
        m = draft.meta
        return (
            (m.root, m.block, m.layout) == (self.space.root, self.space.block, self.store.layout.digest)
            and m.consistent()
            and list(m.tokens) == self.tokens[m.start : m.end]
            and {*draft.bodies} <= {*self.store.layout.kinds}
        )

    # on another thread

    def _ask(self) -> None:
        assert self._question is not None
        try:
            self._offer = self.tier.connector.ask(self._question)
        except Exception as e:
            self._error = e

    def _load(self) -> None:
        assert self._question is not None and self._offer is not None
        try:
            self._delivery = self.tier.connector.load(self._question, self._offer)
        except Exception as e:
            self._error = e


def _there(planner: Planner, draft: Draft) -> bool:
    """Whether RAM or disk has what a draft brings, and all rows that it needs."""
    entry = planner.index.entry(draft.meta.key)
    return entry is not None and planner.complete(draft.meta.key) and {*draft.bodies} <= entry.kinds
