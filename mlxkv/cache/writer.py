"""The writer thread: private host bytes become durable records, a group at a time, and only then visible.

A group's bytes are reserved in the ledger, written to temporary names, made durable, renamed, and entered in the index,
which ends the reservation. Whatever goes wrong drops the group: that costs a later miss, never a wrong hit.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from .durable import sync_folder, sync_group
from .folder import CacheFolder
from .index import PAGE, PAGES_A_ROW, Entry, Index, IndexReplaced, OverBudget
from .keys import pack
from .ledger import Ledger, growth
from .planner import Planner
from .record import Body, Meta, RecordError, size, write

log = logging.getLogger("mlxkv.cache")

T = TypeVar("T")

#: after these the next group would fare no better; any other failure costs one group (too many open files, say)
_LASTING = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM, errno.ENOENT}
#: seconds to try to make room for one portion, while other processes take it or have reserved it
_PATIENCE, _PAUSE = 5.0, 0.05
#: seconds after which it is worth saying again that the folder is full
_SAY_AGAIN = 3600.0
#: at most so many bytes, and this part of the budget, are reserved at once
_PORTION, _PORTION_PART = 64 << 20, 8
_LASTING_SQLITE = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY}


@dataclass
class Draft:
    """An entry to be stored: ``meta`` (its ``kind`` is set for each record) and a body for each record kind.

    ``needs`` are keys that must be stored and complete, or be in the same group before this draft.
    """

    meta: Meta
    bodies: dict[str, Body]
    needs: tuple[bytes, ...]
    answer: tuple[bytes, int, int | None] | None = None

    @property
    def nbytes(self) -> int:
        return sum(b.nbytes for b in self.bodies.values())


@dataclass
class Counters:
    """What happened since the store was opened. Bytes are record bytes."""

    written_records: int = 0
    written_bytes: int = 0
    dropped_groups: int = 0
    skipped_drafts: int = 0
    refused_bytes: int = 0
    last_fault: str = ""
    faults: dict[str, int] = field(default_factory=dict)

    def fault(self, kind: str, detail: str) -> None:
        self.faults[kind] = self.faults.get(kind, 0) + 1
        self.last_fault = f"{kind}: {detail}"


class Writer:
    """Owns the thread and its queue. ``limit`` bounds the bytes that wait; beyond it groups are refused, not waited
    for. ``store`` is the store's id in the ledger, ``pinned`` says what must not be evicted now, ``share`` which part
    of the budget one model may have when space is short."""

    def __init__(
        self,
        folder: CacheFolder,
        planner: Callable[[Index, bytes], Planner],
        *,
        store: int,
        pinned: Callable[[], Collection[bytes]],
        share: float,
        limit: int,
        floor: int,
        name: str,
    ) -> None:
        self._folder, self._planner, self._limit, self._floor = folder, planner, limit, floor
        self._store, self._pinned, self._share = store, pinned, share
        self._touched: set[bytes] = set()
        self._said_full = float("-inf")
        self._queue: deque[list[Draft]] = deque()
        self._pending: dict[bytes, int] = {}
        self._bytes = 0
        self._closing = False
        self._stopped_because = ""
        self._wake = threading.Condition()
        self.counters = Counters()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def stopped_because(self) -> str:
        """Why nothing is written any more, or ''."""
        return self._stopped_because

    def submit(self, group: list[Draft]) -> bool:
        """Queue a group; False if it is refused because too many bytes wait or writing has stopped."""
        size = sum(d.nbytes for d in group)
        with self._wake:
            if self._stopped_because or self._closing or (self._queue and self._bytes + size > self._limit):
                self.counters.refused_bytes += size
                return False
            self._queue.append(group)
            self._bytes += size
            for draft in group:
                self._pending[draft.meta.key] = self._pending.get(draft.meta.key, 0) + 1
            self._wake.notify_all()
        return True

    def touch(self, key: bytes) -> None:
        """Note, when something is written next or on closing, that an entry was used."""
        with self._wake:
            self._touched.add(key)

    def waiting(self) -> list[Draft]:
        """What is submitted and not yet durable or dropped, oldest first."""
        with self._wake:
            return [draft for group in self._queue for draft in group]

    def wait_for(self, keys: Collection[bytes], timeout: float) -> bool:
        """Wait until none of ``keys`` is being written any more; False on time-out (seconds)."""
        with self._wake:
            return self._wake.wait_for(lambda: not any(key in self._pending for key in keys), timeout)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all that was submitted is durable or dropped; False on time-out (seconds)."""
        with self._wake:
            return self._wake.wait_for(lambda: not self._pending, timeout)

    def close(self) -> None:
        """Write what waits, then end the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join()

    def _run(self) -> None:
        index: Index | None = None
        try:
            index = Index(self._folder.path)
            ledger = Ledger(index, self._folder, self._store)
        except (sqlite3.Error, OSError) as e:
            self._stop(f"the index cannot be opened ({e})")
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    break
                group = self._queue[0]
            try:
                if index is not None and not self._stopped_because:
                    self._note_uses(index)
                    self._commit(index, ledger, group)
            except OverBudget as e:
                self.counters.dropped_groups += 1
                self.counters.fault("budget", str(e))
                if time.monotonic() > self._said_full + _SAY_AGAIN:
                    self._said_full = time.monotonic()
                    log.warning(
                        "the prefix store stops writing: %s, and nothing that may go would make room. Answers go on; "
                        "what is stored is still read.",
                        e,
                    )
            except IndexReplaced as e:
                self.counters.dropped_groups += 1
                self.counters.fault("write", str(e))
                self._stop(str(e))
            except OSError as e:
                self.counters.dropped_groups += 1
                self.counters.fault("write", str(e))
                if e.errno in _LASTING:
                    self._stop(f"writing to {self._folder.path} failed: {e.strerror or e}")
                else:
                    log.warning("a group of cache records was not stored: %s", e)
            except (sqlite3.Error, RecordError) as e:
                self._folder.suspect(e)
                self.counters.dropped_groups += 1
                self.counters.fault("write", str(e))
                if getattr(e, "sqlite_errorcode", 0) & 0xFF in _LASTING_SQLITE:
                    self._stop(f"the index in {self._folder.path} takes nothing more: {e}")
                else:
                    log.warning("a group of cache records was not stored: %s", e)
            except Exception as e:  # the thread must live: a dead writer would hang flush() for ever
                self.counters.dropped_groups += 1
                self.counters.fault("write", repr(e))
                log.exception("a group of cache records was not stored")
            with self._wake:
                self._queue.popleft()
                self._bytes -= sum(d.nbytes for d in group)
                for draft in group:
                    left = self._pending[draft.meta.key] - 1
                    if left:
                        self._pending[draft.meta.key] = left
                    else:
                        del self._pending[draft.meta.key]
                self._wake.notify_all()
        if index is not None:
            with contextlib.suppress(sqlite3.Error):
                self._note_uses(index)
            index.close()

    def _note_uses(self, index: Index) -> None:
        with self._wake:
            keys, self._touched = list(self._touched), set()
        step = max(1, index.pages() // PAGES_A_ROW)
        for i in range(0, len(keys), step):
            with contextlib.suppress(OverBudget):
                index.touch(keys[i : i + step])

    def _stop(self, why: str) -> None:
        if not self._stopped_because:
            self._stopped_because = why
            log.warning("the prefix store stops writing: %s. Answers go on; what is stored is still read.", why)

    def _commit(self, index: Index, ledger: Ledger, group: list[Draft]) -> None:
        """Store a group, in portions that the budget has room for. Raises OverBudget, OSError, sqlite3.Error."""
        most = min(_PORTION, (index.budget() or _PORTION) // _PORTION_PART)
        for portion in _portions(group, most, lambda draft: draft.nbytes):
            todo = self._missing(index, portion)
            if todo:
                self._store_files(
                    index, ledger, todo, [key for draft in group for key in (*draft.needs, draft.meta.key)]
                )

    def _missing(self, index: Index, group: list[Draft]) -> list[tuple[Draft, list[str]]]:
        """Drafts that can be stored, each with the kinds of records that are not there yet."""
        here: set[bytes] = set()
        taken: set[tuple[bytes, str]] = set()
        todo: list[tuple[Draft, list[str]]] = []
        for draft in group:
            planner = self._planner(index, draft.meta.root)
            if not all(key in here or key == draft.meta.root or planner.complete(key) for key in draft.needs):
                self.counters.skipped_drafts += 1
                continue
            stored = index.entry(draft.meta.key)
            whole = stored is not None and planner.complete(draft.meta.key)
            have = stored.kinds if stored is not None else frozenset()
            # rows of an incomplete entry are written again, with the base that this draft brings
            kinds = [k for k in draft.bodies if k not in have or (k in ("rows", "window") and not whole)]
            kinds = [k for k in kinds if (draft.meta.key, k) not in taken]
            taken.update((draft.meta.key, k) for k in kinds)
            here.add(draft.meta.key)
            if kinds or draft.answer is not None:
                todo.append((draft, kinds))
        return todo

    def _store_files(
        self, index: Index, ledger: Ledger, todo: list[tuple[Draft, list[str]]], needed: list[bytes]
    ) -> None:
        hold = self._reserve(index, ledger, todo, needed)
        temporaries: list[tuple[Path, Path]] = []
        try:
            for draft, kinds in todo:
                for kind in kinds:
                    target = self._folder.file(draft.meta.key, kind)
                    temporary = self._folder.temporary(target.name)
                    temporary.unlink(missing_ok=True)
                    temporaries.append((temporary, target))
                    write(temporary, replace(draft.meta, kind=kind), draft.bodies[kind])
            sync_group(t for t, _ in temporaries)
            folders = set()
            for temporary, target in temporaries:
                target.parent.mkdir(mode=0o700, exist_ok=True)
                os.replace(temporary, target)
                folders.add(target.parent)
            for folder in (*folders, self._folder.records):
                sync_folder(folder)
            for part in _portions(todo, index.pages(), lambda item: PAGES_A_ROW + 8 * len(item[0].meta.tokens) // PAGE):
                with index.transaction():
                    ledger.release(hold, sum(self._enter(index, draft, kinds) for draft, kinds in part))
            with index.transaction():
                ledger.release(hold)
        except BaseException:
            for temporary, _ in temporaries:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
            ledger.abandon(hold)
            raise

    def _enter(self, index: Index, draft: Draft, kinds: list[str]) -> int:
        """Enter a draft whose files are there; returns their bytes."""
        m = draft.meta
        index.add_root(m.root, m.model, m.fingerprint, m.compute, m.layout, m.block)
        sizes = {}
        for kind in kinds:
            with contextlib.suppress(FileNotFoundError):  # removed a moment ago
                # not what was written: another process may have put its own in this place
                sizes[kind] = os.lstat(self._folder.file(m.key, kind)).st_size
        if sizes:
            packed = pack(m.tokens)
            index.add_entry(
                Entry(m.key, m.root, m.parent, m.start, m.end, m.row_start, m.base, packed, frozenset()), sizes
            )
        if draft.answer is not None:
            index.add_answer(draft.answer[0], m.key, draft.answer[1], draft.answer[2])
        self.counters.written_records += len(sizes)
        self.counters.written_bytes += sum(sizes.values())
        return sum(sizes.values())

    def _reserve(self, index: Index, ledger: Ledger, todo: list[tuple[Draft, list[str]]], needed: list[bytes]) -> int:
        """Reserve room for the records of ``todo``; what was used least recently goes for it. Raises OverBudget,
        OSError."""
        files = {
            self._folder.file(draft.meta.key, kind).name: size(replace(draft.meta, kind=kind), draft.bodies[kind])
            for draft, kinds in todo
            for kind in kinds
        }
        total, lengths = sum(files.values()), [len(draft.meta.tokens) for draft, _ in todo]
        root = todo[0][0].meta.root

        def make_room(short: int) -> int:
            pinned = {*needed, *self._pinned()}
            return ledger.make_room(short, pinned=pinned, root=root, incoming=total, share=self._share).bytes

        ledger.rescan()
        missing = self._floor + total - self._free_disk()
        if missing > 0 and (not make_room(missing) or self._free_disk() - total < self._floor):
            raise OSError(errno.ENOSPC, f"less than {self._floor >> 20} MiB would be left on the disk")
        if (short := total + PAGE * growth(lengths) - ledger.room()) > 0:
            raise OverBudget(short)  # whatever goes: so nothing goes for it
        until = time.monotonic() + _PATIENCE
        while True:
            try:
                return ledger.reserve(total, lengths, list(files))
            except OverBudget as e:
                if not ledger.reclaim() and not make_room(e.short):
                    if not ledger.others() or time.monotonic() > until:
                        raise
                    time.sleep(_PAUSE)  # what other processes have reserved is given back soon

    def _free_disk(self) -> int:
        stat = os.statvfs(self._folder.path)
        return stat.f_bavail * stat.f_frsize


def _portions(items: Iterable[T], most: int, weight: Callable[[T], int]) -> Iterator[list[T]]:
    """Cut a sequence into parts of at most ``most``, or of one item."""
    part: list[T] = []
    total = 0
    for item in items:
        if part and total + weight(item) > most:
            yield part
            part, total = [], 0
        part.append(item)
        total += weight(item)
    if part:
        yield part
