"""The writer thread: private host bytes become durable records, a group at a time, and only then visible.

A group is written to temporary names, made durable, renamed, and entered in the index in one transaction. Whatever goes
wrong drops the group: that costs a later miss, never a wrong hit.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

from .durable import sync_folder, sync_group
from .folder import CacheFolder
from .index import Entry, Index
from .keys import pack
from .planner import Planner
from .record import Body, Meta, RecordError, write

log = logging.getLogger("mlxkv.cache")

#: after these the next group would fare no better; any other failure costs one group (too many open files, say)
_LASTING = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM, errno.ENOENT}
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
    for."""

    def __init__(
        self, folder: CacheFolder, planner: Callable[[Index, bytes], Planner], *, limit: int, floor: int, name: str
    ) -> None:
        self._folder, self._planner, self._limit, self._floor = folder, planner, limit, floor
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
                    self._commit(index, group)
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
            index.close()

    def _stop(self, why: str) -> None:
        if not self._stopped_because:
            self._stopped_because = why
            log.warning("the prefix store stops writing: %s. Answers go on; what is stored is still read.", why)

    def _commit(self, index: Index, group: list[Draft]) -> None:
        stat = os.statvfs(self._folder.path)
        if stat.f_bavail * stat.f_frsize - sum(d.nbytes for d in group) < self._floor:
            raise OSError(28, f"less than {self._floor >> 20} MiB would be left on the disk")
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
        if not todo:
            return
        temporaries: list[tuple[Path, Path]] = []
        sizes: list[dict[str, int]] = []
        try:
            for draft, kinds in todo:
                sizes.append({})
                for kind in kinds:
                    target = self._folder.file(draft.meta.key, kind)
                    temporary = self._folder.temporary(target.name)
                    temporary.unlink(missing_ok=True)
                    temporaries.append((temporary, target))
                    sizes[-1][kind] = write(temporary, replace(draft.meta, kind=kind), draft.bodies[kind])
            sync_group(t for t, _ in temporaries)
            folders = set()
            for temporary, target in temporaries:
                target.parent.mkdir(mode=0o700, exist_ok=True)
                if target.parent.is_symlink():
                    raise OSError(errno.ELOOP, f"{target.parent} is a symbolic link")
                os.replace(temporary, target)
                folders.add(target.parent)
            for folder in (*folders, self._folder.records):
                sync_folder(folder)
        except BaseException:
            for temporary, _ in temporaries:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
            raise
        with index.transaction():
            for (draft, _), size in zip(todo, sizes, strict=True):
                m = draft.meta
                index.add_root(m.root, m.model, m.fingerprint, m.compute, m.layout, m.block)
                packed = Entry(
                    m.key, m.root, m.parent, m.start, m.end, m.row_start, m.base, pack(m.tokens), frozenset()
                )
                if size:
                    index.add_entry(packed, size)
                if draft.answer is not None:
                    index.add_answer(draft.answer[0], m.key, draft.answer[1], draft.answer[2])
        self.counters.written_records += sum(len(s) for s in sizes)
        self.counters.written_bytes += sum(sum(s.values()) for s in sizes)
