"""The object tier as a connector: what a request lacks is looked for, promised, downloaded, verified and delivered.

A look-up lists the places where the prompt's blocks and leaves would be (``names``); a plan over what is there says
what to download. Verdicts are shared by the requests that are under way: what was listed is not listed again, and what
could not be loaded is a miss for all of them. What fails a check is never used, and stays where it is: only its next
upload from here replaces it. A download that is late for its request goes on, and is there for the next one. A store
that does not answer is left alone for a while, so that not every request waits for it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from ..connectors import ConnectorError, Delivery, Offer, Question, Remote
from ..index import Entry
from ..keys import pack
from ..layout import Layout
from ..planner import Plan, Planner
from ..ram import Answer, Draft, RamReader
from ..reach import Asked
from ..readers import bare
from ..record import Body, Meta, RecordError, decode
from ..verdicts import Verdict, Verdicts
from .found import CHAIN, Found, Item, Objects
from .names import Names, parse
from .place import AT_ONCE, Loop, Place, Replaced, Stopped, describe
from .seal import Secret

log = logging.getLogger("mlxkv.cache")

#: seconds that a request waits for the store at most, look-up and downloads together
SECONDS = 5.0
#: bytes that one request downloads at most, and that downloads under way and late ones may hold
BYTES = 2 << 30
#: seconds that a download may take, whether or not somebody waits for it, and that one which nobody fetched is kept
_LATE, _KEPT = 60.0, 120.0
#: seconds that a store which does not answer is left alone: at first, and at most
REST, _MOST_REST = 5.0, 120.0
#: blocks that are looked for at a time, at first and at most; then blocks whose leaves are
_WAVE, _MOST_WAVE, _BACK = 4, 16, 4
#: entries whose listings are remembered
_LISTED = 50_000


@dataclass
class Counters:
    """Since the tier was opened. asked, served: requests that looked there, and that got something. ``faults`` by
    reason: of look-ups and downloads."""

    asked: int = 0
    served: int = 0
    #: also what came too late, or failed its check
    downloaded_records: int = 0
    downloaded_bytes: int = 0
    uploaded_records: int = 0
    uploaded_bytes: int = 0
    upload_faults: int = 0
    faults: dict[str, int] = field(default_factory=dict)

    def fault(self, reason: str) -> None:
        self.faults[reason] = self.faults.get(reason, 0) + 1


class Outage:
    """Whether the store answers. Any thread."""

    def __init__(self, url: str, rest: float) -> None:
        self._url, self._first = url, rest
        self._rest, self._until = rest, 0.0
        self.why = ""
        #: when it answered last
        self.answered = float("-inf")

    @property
    def resting(self) -> bool:
        return time.monotonic() < self._until

    def down(self, why: str) -> None:
        if not self.why:
            log.warning("the object store %s is left alone for a while: %s. Requests go on without it.", self._url, why)
        if not self.resting:  # those that were under way together count once
            self._until = time.monotonic() + self._rest
            self._rest = min(2 * self._rest, _MOST_REST)
        self.why = why

    def up(self) -> None:
        if self.why:
            log.info("the object store %s answers again", self._url)
        self._rest, self._until, self.why = self._first, 0.0, ""
        self.answered = time.monotonic()


class ObjectTier(Remote):
    """``url`` of the store, ``secret`` or None for payloads in the clear, ``seconds`` that a request waits at most.
    Raises ConfigError."""

    source = "object"

    def __init__(
        self,
        url: str,
        block: int,
        secret: str | None = None,
        *,
        seconds: float = SECONDS,
        rest: float = REST,
        nbytes: int = BYTES,
        at_once: int = AT_ONCE,
    ) -> None:
        self.url, self.seconds, self._nbytes = url, seconds, nbytes
        self.secret = Secret(secret) if secret is not None else None
        self.names = Names(self.secret.names if self.secret is not None else None, block)
        self.place, self.loop = Place(url, at_once), Loop()
        self.counters, self.outage = Counters(), Outage(url, rest)
        #: paths of objects that failed a check: the next upload of the same record replaces them
        self.bad: set[str] = set()
        self.verdicts: Verdicts[str] = Verdicts(self._probe, _elsewhere)
        self._listed: OrderedDict[str, Objects] = OrderedDict()
        self._errors: dict[str, str] = {}
        self._asked: dict[int, tuple[Found, Plan]] = {}
        self._transfers: OrderedDict[str, _Transfer] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return True  # states are objects like others

    # what a request asks

    def ask(self, question: Question) -> Offer | None:
        self.counters.asked += 1
        if self.outage.resting:
            raise self._failed(self.outage.why)
        found, begun = Found(question, self.names, self._known(question.request)), time.monotonic()
        try:
            plan = self._search(found)
        except TimeoutError:
            why = "it did not answer in time"
            if self.outage.answered < begun:  # else there was much to look for, and it answers
                self.outage.down(why)
            raise self._failed(why) from None
        except Stopped:
            return Offer()
        if plan.position <= max(question.common, question.asked if plan.state is None else 0):
            return Offer()
        with self._lock:
            self._asked[question.request] = found, plan
        if plan.position > question.asked:
            return Offer(tokens=plan.position - question.asked)
        return Offer(stands=plan.position)

    def _failed(self, why: str, reason: str = "io_error") -> ConnectorError:
        self.counters.fault(reason)
        return ConnectorError(f"{self.url}: {why}", reason)

    def _search(self, found: Found) -> Plan:
        """What leads furthest. Raises TimeoutError, Stopped, ConnectorError."""
        q, block = found.question, found.block
        first, blocks = q.asked // block, q.limit // block
        depth, wave = first, _WAVE
        chain = Asked(CHAIN, block, found.verdict, first)
        while depth < blocks:
            upto = min(depth + wave, blocks)
            self._look(found, [(d, block) for d in range(depth, upto)])
            depth = chain.deepest(upto * block) // block
            if depth < upto:
                break
            wave = min(2 * wave, _MOST_WAVE)
        low = first if q.common >= q.asked else q.common // block
        last, back = depth, 1
        while True:
            begin = max(low, last - back + 1)
            ask = [place for d in range(begin, last + 1) for place in found.leaves(d)]
            if q.layout.growing_only and depth * block < found.most == (depth + 1) * block:
                ask.append((depth, block))  # the block that the prompt ends with, up to its last token
            ask += [(d, block) for d in {*range(begin, min(last + 1, first)), *found.reached_back(begin * block)}]
            self._look(found, ask)
            plan = self._plan(found)
            if plan.position >= begin * block or begin <= low:
                return plan
            last, back = begin - 1, _BACK

    def _plan(self, found: Found) -> Plan:
        """The longest plan that is not too much to download."""
        q = found.question
        planner, limit, most = Planner(found, found.space, q.layout), q.limit, min(self._nbytes, q.most)
        found.parent(limit // found.block)
        while True:
            plan = planner.plan(list(q.tokens), limit)
            items = found.items(plan)
            if plan.position <= q.common or sum(item.size for item in items) <= most:
                return plan
            limit = plan.position - max(1, (plan.position - q.asked) // 4)

    def _look(self, found: Found, places: Collection[tuple[int, int]]) -> None:
        """Have it known whether these entries are there. Raises TimeoutError, Stopped, ConnectorError."""
        q = found.question
        keys = [found.name(*place) for place in places]
        for key in keys:
            self.verdicts.lookup(key, q.request)
        self.verdicts.flush()
        if not self.verdicts.wait(keys, q.until, q.stopped):
            raise Stopped if q.stopped() else TimeoutError
        with self._lock:
            why = next((self._errors[key] for key in keys if key in self._errors), None)
        if why is not None:
            raise self._failed(why)

    def _known(self, request: int) -> Callable[[str], Objects | None]:
        def known(name: str) -> Objects | None:
            if self.verdicts.lookup(name, request) is not Verdict.HIT:
                return None
            with self._lock:
                return self._listed.get(name)

        return known

    def _probe(self, keys: list[str]) -> dict[str, bool]:
        """Which of these entries are there: their places are listed. On a thread of its own."""
        places = list({key.rpartition("/")[0] for key in keys})

        async def listed() -> list[dict[str, int]]:
            return await asyncio.gather(*(self.place.names(place, self.seconds) for place in places))

        try:
            listings = self.loop.run(listed(), time.monotonic() + self.seconds)
        except Exception as e:
            why = describe(e)
            if not isinstance(e, concurrent.futures.CancelledError):  # the tier is being closed
                self.outage.down(why)
            with self._lock:
                if len(self._errors) > _LISTED:
                    self._errors.clear()
                self._errors.update((key, why) for key in keys)
            raise
        self.outage.up()
        found: dict[str, dict[tuple[str, int], int]] = {}
        for place, listing in zip(places, listings, strict=True):
            for name, size in listing.items():
                if (named := parse(name)) is not None and f"{place}/{name}" not in self.bad:
                    found.setdefault(f"{place}/{named[0]}", {})[named[1], named[2]] = size
        with self._lock:
            for key in keys:
                self._errors.pop(key, None)
                if key in found:
                    self._listed[key] = found[key]
                    self._listed.move_to_end(key)
            while len(self._listed) > _LISTED:
                self._listed.popitem(last=False)
        return {key: key in found for key in keys}

    # what it gets

    def load(self, question: Question, offer: Offer) -> Delivery:
        with self._lock:
            asked = self._asked.pop(question.request, None)
        if asked is None:
            raise ConnectorError("nothing was offered")
        found, plan = asked
        items = found.items(plan)
        first = [*(i for i in items if i.kind == "state"), *(i for i in items if i.kind != "state")]
        transfers = {item.path: self._transfer(item, question.layout) for item in first}
        while True:
            futures = [t.future for t in transfers.values()]
            ended = concurrent.futures.wait(futures, min(0.05, max(0.0, question.until - time.monotonic())))
            if not ended.not_done or time.monotonic() >= question.until or question.stopped():
                break
        return self._delivered(found, items, transfers)

    def _delivered(self, found: Found, items: list[Item], transfers: dict[str, _Transfer]) -> Delivery:
        """What has arrived, as far as all before it has: what follows a gap hangs on nothing."""
        out = Delivery()
        parts: dict[bytes, dict[str, tuple[Meta, Body]]] = {}
        lacking: set[str] = set()  # entries of which not all has arrived
        late: set[str] = set()
        for item in items:
            transfer = transfers[item.path]
            if not transfer.future.done():
                late.add(item.name)
                lacking.add(item.name)
                out.failure = out.failure or "pending"
                out.detail = out.detail or f"downloads take more than {self.seconds:g} s, and go on"
                continue
            self._forget(item.path)
            error = None if transfer.future.cancelled() else transfer.future.exception()
            if error is not None or transfer.future.cancelled():
                lacking.add(item.name)
                reason = self._failure(item, error)
                self.counters.fault(reason)
                if out.failure in (None, "pending"):
                    out.failure = reason
                    out.detail = f"{item.path}: {describe(error) if error is not None else 'given up'}"
                continue
            meta, body = transfer.future.result()
            if out.failure is None:
                parts.setdefault(item.entry.key, {})[item.kind] = meta, body
            else:
                lacking.add(item.name)
        if late:
            self.counters.fault("pending")
        names = {item.name for item in items} - late
        self.verdicts.loaded(names, names - lacking)
        entries = {item.entry.key: item.entry for item in items if item.entry.key in parts}
        for key, entry in entries.items():
            out.drafts.append(_draft(found, entry, parts[key]))
        self.counters.served += bool(out.drafts)
        return out

    def _failure(self, item: Item, error: BaseException | None) -> str:
        """Why a download failed, as a reason; what is to be done about it."""
        if isinstance(error, RecordError):
            self.bad.add(item.path)
            log.warning("an object is not used: %s: %s", item.path, error)
            return error.reason
        if isinstance(error, (FileNotFoundError, Replaced)):
            return "evicted"
        if error is not None:
            self.outage.down(describe(error))
        return "io_error"

    def _transfer(self, item: Item, layout: Layout) -> _Transfer:
        """The download of a record, which may be under way already, or have come late for another request."""
        with self._lock:
            if (transfer := self._transfers.get(item.path)) is not None:
                return transfer
            held = sum(t.size for t in self._transfers.values())
            for path, old in list(self._transfers.items()):
                if held + item.size <= self._nbytes:
                    break
                if old.future.done():
                    held -= old.size
                    del self._transfers[path]
            transfer = _Transfer(self.loop.begin(self._download(item, layout)), item.size)
            self._transfers[item.path] = transfer
        self.loop.begin(self._let_go(item.path, weakref.ref(transfer)))
        return transfer

    async def _let_go(self, path: str, transfer: weakref.ref[_Transfer]) -> None:
        """What came late is not kept for ever."""
        await asyncio.sleep(_LATE + _KEPT)
        with self._lock:
            if path in self._transfers and self._transfers[path] is transfer():
                del self._transfers[path]

    def _forget(self, path: str) -> None:
        with self._lock:
            self._transfers.pop(path, None)

    async def _download(self, item: Item, layout: Layout) -> tuple[Meta, Body]:
        data = await self.place.get(item.path, _LATE, item.size)
        self.counters.downloaded_bytes += len(data)  # whoever may want it, and whatever it is
        self.counters.downloaded_records += 1
        return await asyncio.to_thread(self._verified, item, layout, data)

    def _verified(self, item: Item, layout: Layout, data: memoryview) -> tuple[Meta, Body]:
        """The record in an object, if it is the one that was asked for. Raises RecordError."""
        try:
            plain = data if self.secret is None else self.secret.open(item.entry.key, item.kind, data)
            meta, body = decode(plain)
            e, rows = item.entry, item.kind != "state"
            same = (meta.kind, meta.key, meta.root, meta.parent) == (item.kind, e.key, e.root, e.parent)
            same = same and (meta.start, meta.end, pack(meta.tokens)) == (e.start, e.end, e.tokens)
            same = same and (meta.block, meta.layout) == (self.names.block, layout.digest)
            if not same or (rows and (meta.row_start, meta.base) != (e.row_start, e.base)):
                raise RecordError("the object holds another record than its name says")
            RamReader(meta, body).require(layout.tensors(item.kind), meta.end - meta.row_start if rows else 0)
        except RecordError as error:
            raise bare(error) from None
        return meta, body

    def end(self, question: Question) -> None:
        with self._lock:
            self._asked.pop(question.request, None)
        self.verdicts.cleanup(question.request)

    def close(self, timeout: float) -> None:
        self.loop.close(timeout)


@dataclass(frozen=True)
class _Transfer:
    future: concurrent.futures.Future[tuple[Meta, Body]]
    size: int


def _elsewhere(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="mlxkv-objects-ask", daemon=True).start()


def _draft(found: Found, entry: Entry, parts: dict[str, tuple[Meta, Body]]) -> Draft:
    """What was downloaded of an entry, as something to be stored. Its rows say where they start; where they are here
    already, the entry does."""
    meta = next(parts[kind][0] for kind in ("rows", "window", "state") if kind in parts)
    role = parts["state"][0].role if "state" in parts else meta.role
    meta = replace(meta, kind="", role=role, row_start=entry.row_start, base=entry.base)
    needs = [key for key in (entry.parent, entry.base) if key is not None and key != found.space.root]
    if "rows" not in parts and entry.base is None:
        needs.append(entry.key)  # a state alone, of rows that are here
    return Draft(meta, {kind: body for kind, (_, body) in parts.items()}, tuple(needs), answer_of(meta))


def answer_of(meta: Meta) -> Answer | None:
    """The answer that ends at a record, as it says itself."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        said = json.loads(meta.answer)
        last = None if said["last"] is None else int(said["last"])
        return bytes.fromhex(said["digest"]), int(said["start"]), last
    return None
