"""Uploads: what has become durable here is sent to the object store, in the background, some entries at a time.

A thread with an index of its own, which never touches MLX. Records are read and verified before they are sent. A full
block is sent whole, whatever its pieces are here; a leaf as it is where its rows begin at the start of its block or
after a leaf that is there already, else whole too: who downloads needs nothing whose name it cannot compute. What is
there is not sent again. Nothing is written down: after a restart, the entries that were used last are compared with
what is there, so that what was interrupted, or stored while the store could not be reached, goes on.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ..connectors import ConnectorError
from ..folder import CacheFolder
from ..index import Entry, Index
from ..keys import KeySpace
from ..layout import Layout
from ..planner import Piece, Planner
from ..record import Body, Meta, MissingRecord, Reader, RecordError, encode
from .names import file_name, parse
from .place import describe
from .tier import ObjectTier

log = logging.getLogger("mlxkv.cache")

#: entries that wait to be sent at most; beyond it the oldest is left for the next start
_MOST = 20_000
#: entries that are compared with what is there after a start
_COMPARED = 5_000
#: seconds after the start until they are: whoever waits for the first answer goes first
_BEGIN = 2.0
#: seconds for a listing, and for an upload: so many, and one more for each so many bytes
_LIST, _PUT, _RATE = 10.0, 30.0, 1 << 20
#: seconds until the next try after a failure, at first and at most
_AGAIN, _MOST_AGAIN = 1.0, 60.0
#: entries that are sent at a time, and bytes of them that are under way
_BATCH, _UNDER_WAY = 8, 64 << 20
_TICK = 0.05
#: places whose listings are remembered
_PLACES = 1024


class Uploads:
    """``roots``: the key spaces that are compared after a start, asked for with the thread's index."""

    def __init__(
        self, tier: ObjectTier, folder: CacheFolder, layout: Layout, roots: Callable[[Index], list[bytes]]
    ) -> None:
        self._tier, self._folder, self._layout, self._roots = tier, folder, layout, roots
        self._queue: OrderedDict[bytes, None] = OrderedDict()
        self._backlog: deque[bytes] = deque()
        self._batch: list[bytes] = []  # which is being sent
        self._compared = False
        self._there: OrderedDict[str, set[str]] = OrderedDict()  # place -> names
        self._puts: list[_Put] = []  # under way
        self._given: set[bytes] = set()  # of the batch: entries that the store has, or will have with the puts
        self._until = float("inf")
        self._closing = self._failing = False
        self._begun = time.monotonic()
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="mlxkv-uploads", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Entries that were stored since the start and wait to be sent, or are being sent."""
        return len(self._queue) + len(self._batch)

    def offer(self, key: bytes) -> None:
        """Something of this entry has become durable. Any thread."""
        with self._wake:
            self._queue[key] = None
            if len(self._queue) > _MOST:
                self._queue.popitem(last=False)
            self._wake.notify_all()

    def flush(self, timeout: float) -> bool:
        """Wait until nothing waits to be sent, the comparison after the start excepted; False on time-out."""
        with self._wake:
            return self._wake.wait_for(lambda: not self.waiting, timeout)

    def wait_compared(self, timeout: float) -> bool:
        """Have what was here at the start compared now, and wait until all is sent; False on time-out."""
        with self._wake:
            self._begun = float("-inf")
            self._wake.notify_all()
            return self._wake.wait_for(lambda: self._compared and not self._backlog and not self.waiting, timeout)

    def close(self, timeout: float) -> bool:
        """Send what waits, for at most so many seconds and unless the store does not answer; the rest is for the next
        start. False if something is still being sent."""
        with self._wake:
            self._closing = True
            self._until = time.monotonic() + timeout
            self._wake.notify_all()
        self._thread.join(timeout + 1.0)
        if left := self.waiting:
            log.info("%d entries are left to be sent to the object store after the next start", left)
        return not self._thread.is_alive()

    # the thread

    def _run(self) -> None:
        index: Index | None = None
        again = _AGAIN
        while (batch := self._next()) is not None:
            self._given.clear()
            try:
                if index is None or index.replaced():
                    if index is not None:
                        index.close()
                    index = Index(self._folder.path, create=False)  # it is only read
                if batch:
                    self._send_all(index, batch)
                else:
                    self._compare(index)
            except Exception as e:
                again = self._pause(e, batch, again)
                continue
            self._failing, again = False, _AGAIN
            with self._wake:
                self._batch = []
                self._wake.notify_all()
        if index is not None:
            index.close()

    def _next(self) -> list[bytes] | None:
        """The entries to be sent now, none for the comparison; None: that was all."""
        with self._wake:
            while True:
                hopeless = self._failing or self._tier.outage.resting
                if self._closing and (not self._queue or hopeless or time.monotonic() > self._until):
                    return None
                most = 1 if self._failing else _BATCH  # one that is refused must not cost the others
                if self._queue:
                    self._batch = [self._queue.popitem(last=False)[0] for _ in range(min(most, len(self._queue)))]
                    return self._batch
                if self._backlog:
                    self._batch = [self._backlog.popleft() for _ in range(min(most, len(self._backlog)))]
                    return self._batch
                left = self._begun + _BEGIN - time.monotonic()
                if not self._compared and left <= 0:
                    return []
                self._wake.wait(None if self._compared else left)

    def _pause(self, e: Exception, batch: list[bytes], seconds: float) -> float:
        """The store does not answer, or the index; what it has not taken of the batch is tried again. How long to wait
        the next time."""
        for put in self._puts:
            put.future.cancel()
            self._given.discard(put.key)
        self._puts = []
        nothing, batch = not batch, [key for key in batch if key not in self._given]
        self._tier.counters.upload_faults += 1
        self._there.clear()
        if not self._failing and not self._closing:
            log.warning("nothing is sent to the object store for now: %s", describe(e))
        self._failing = True
        with self._wake:
            self._batch = []
            for key in batch:  # behind the others: it may be one of these that the store does not want
                self._queue[key] = None
                self._queue.move_to_end(key)
            if nothing:
                self._compared = True  # after the next start
            self._wake.notify_all()
            self._wake.wait_for(lambda: self._closing, seconds)
        return min(2 * seconds, _MOST_AGAIN)

    def _compare(self, index: Index) -> None:
        roots = self._roots(index)
        marks = ",".join("?" * len(roots))
        query = f"SELECT key FROM entries WHERE root IN ({marks}) ORDER BY used DESC LIMIT ?"
        keys = [key for (key,) in index.execute(query, (*roots, _COMPARED)).fetchall()]
        with self._wake:
            self._backlog.extend(keys)
            self._compared = True

    # a batch

    def _send_all(self, index: Index, batch: list[bytes]) -> None:
        """Raises ConnectorError where the store does not answer; what cannot be read here costs its entry."""
        names = self._tier.names
        entries = [entry for key in batch if (entry := index.entry(key)) is not None]
        self._list([names.place(e.root, e.parent, e.tokens) for e in entries])
        for entry in entries:
            try:
                self._send(index, entry)
                self._given.add(entry.key)
            except MissingRecord:  # evicted, or merged, a moment ago
                continue
            except (RecordError, OSError) as e:
                self._tier.counters.upload_faults += 1
                log.info("%s is not sent to the object store: %s", entry.key.hex()[:12], describe(e))
        self._settle()

    def _send(self, index: Index, entry: Entry) -> None:
        """Send what the store lacks of an entry. Raises RecordError, ConnectorError."""
        names = self._tier.names
        place, entry_id = names.place(entry.root, entry.parent, entry.tokens), names.id(entry.key)
        named = [n for name in self._listed(place) if (n := parse(name)) is not None and n[0] == entry_id]
        have = {(kind, cut) for _, kind, cut in named}
        cut, pieces = self._cut(index, entry, entry.end - entry.start == names.block)
        mine = [kind for kind in self._layout.row_kinds if pieces and all(kind in p.entry.kinds for p in pieces)]
        if not any(all((kind, c) in have for kind in mine) for c in {c for kind, c in have if kind == "rows"}):
            for kind in mine:
                if (kind, cut) not in have:
                    self._put(entry.key, place, file_name(entry_id, kind, cut), *self._joined(entry, pieces, kind))
        if "state" in entry.kinds and ("state", 0) not in have:
            with Reader.open(self._folder.file(entry.key, "state")) as reader:
                self._put(entry.key, place, file_name(entry_id, "state", 0), reader.meta, _body(reader))

    def _list(self, places: list[str]) -> None:
        """Have these places listed, all at once. Raises ConnectorError."""
        tier, todo = self._tier, list({place for place in places if place not in self._there})

        async def listed() -> list[dict[str, int]]:
            return await asyncio.gather(*(tier.place.names(place, _LIST) for place in todo))

        if not todo:
            return
        try:
            found = tier.loop.run(listed(), time.monotonic() + 2 * _LIST, self._late)
        except Exception as e:
            raise ConnectorError(describe(e)) from None
        for place, listing in zip(todo, found, strict=True):
            self._there[place] = set(listing)
        while len(self._there) > max(_PLACES, len(todo)):
            self._there.popitem(last=False)

    def _listed(self, place: str) -> set[str]:
        """Names of the objects in a place, without those that failed a check. Raises ConnectorError."""
        self._list([place])
        self._there.move_to_end(place)
        return {name for name in self._there[place] if f"{place}/{name}" not in self._tier.bad}

    def _cut(self, index: Index, entry: Entry, full: bool) -> tuple[int, list[Piece]]:
        """Where the rows that are sent begin, in tokens of the entry, and the pieces that hold them; no pieces where
        some are not here."""
        pieces = Planner(index, KeySpace(entry.root, self._tier.names.block), self._layout).pieces(entry)
        if pieces is None or not pieces:
            return 0, []
        cut, names = entry.row_start - entry.start, self._tier.names
        if full or not 0 < cut < entry.end - entry.start or pieces[-1].entry.key != entry.key:
            return 0, pieces
        before = entry.tokens[: 4 * cut]
        base = KeySpace(entry.root, names.block).key_packed(entry.parent, before)
        if base != entry.base:
            return 0, pieces
        base_id = names.id(base)
        there = (parse(name) for name in self._listed(names.place(entry.root, entry.parent, before)))
        known = any(n is not None and n[:2] == (base_id, "rows") for n in there)
        return (cut, pieces[-1:]) if known else (0, pieces)

    def _joined(self, entry: Entry, pieces: list[Piece], kind: str) -> tuple[Meta, Body]:
        """The rows of the pieces as one record of the entry. Raises RecordError."""
        specs = self._layout.tensors(kind)
        parts: dict[str, list[np.ndarray]] = {t.name: [] for t in specs}
        meta: Meta | None = None
        for piece in pieces:
            with Reader.open(self._folder.file(piece.entry.key, kind)) as reader:
                m = reader.meta
                if (m.kind, m.key, m.root) != (kind, piece.entry.key, entry.root) or m.row_start > piece.start:
                    raise RecordError("the file holds another record than its name says")
                if pieces == [piece] and piece.entry.key == entry.key and m.row_start == piece.start:
                    return m, _body(reader)
                reader.require(specs, m.end - m.row_start)
                meta = m if piece.entry.key == entry.key else meta
                for t in specs:
                    parts[t.name].append(reader.read(t.name)[:, :, t.part(piece.start, piece.end, m.row_start)])
        arrays = {t.name: (t.dtype, np.ascontiguousarray(np.concatenate(parts[t.name], axis=2))) for t in specs}
        meta = meta or self._meta(entry)
        return replace(meta, kind=kind, row_start=pieces[0].start, base=None), Body.of(arrays)

    def _meta(self, entry: Entry) -> Meta:
        """Of an entry whose rows are in another's file. Raises RecordError."""
        for kind in sorted(entry.kinds):
            with contextlib.suppress(MissingRecord), Reader.open(self._folder.file(entry.key, kind)) as reader:
                if reader.meta.key == entry.key:
                    return reader.meta
        raise MissingRecord("no file of the entry is left")

    def _late(self) -> bool:
        return time.monotonic() > self._until

    def _put(self, key: bytes, place: str, name: str, meta: Meta, body: Body) -> None:
        """Begin to send a record; several are under way at a time. Raises ConnectorError."""
        tier = self._tier
        header, data = encode(meta, body)
        secret = tier.secret
        whole = b"".join([header, *data]) if secret is None else secret.seal(meta.key, meta.kind, [header, *data])
        if self._puts and sum(put.size for put in self._puts) + len(whole) > _UNDER_WAY:
            self._settle()
        within = _PUT + len(whole) / _RATE
        future = tier.loop.begin(tier.place.put(f"{place}/{name}", whole, within))
        self._puts.append(_Put(future, f"{place}/{name}", len(whole), key))
        self._there.setdefault(place, set()).add(name)

    def _settle(self) -> None:
        """Wait for what is under way: one that fails costs its entry, not the others. Raises ConnectorError."""
        tier, failed, why = self._tier, set[bytes](), ""
        while self._puts:
            put = self._puts[0]
            try:
                put.future.result(_TICK)
            except Exception as e:
                if isinstance(e, concurrent.futures.TimeoutError) and not put.future.done():
                    if self._late():
                        self._given -= failed
                        raise ConnectorError(describe(e)) from None
                    continue
                self._puts.pop(0)
                failed.add(put.key)
                why = why or describe(e)
                continue
            self._puts.pop(0)
            tier.bad.discard(put.path)
            tier.counters.uploaded_records += 1
            tier.counters.uploaded_bytes += put.size
            tier.outage.up()
        if failed:
            self._given -= failed
            raise ConnectorError(why)


@dataclass(frozen=True)
class _Put:
    future: concurrent.futures.Future[None]
    path: str
    size: int
    key: bytes


def _body(reader: Reader) -> Body:
    """All tensors of a record, verified. Raises RecordError."""
    return Body({name: (spec[0], reader.read(name)) for name, spec in reader.tensors.items()}, dict(reader.sums))
