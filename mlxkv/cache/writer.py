"""The writer thread: private host bytes become durable records, a group at a time, and only then visible on disk.

A group is written to temporary names, made durable, renamed, and entered in the index in one transaction. Whatever goes
wrong drops the group: that costs a later miss, never a wrong hit. Tips are written behind: when they leave RAM, after
some idle seconds, or on closing, unless the next turn's tip comes first.
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
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from .durable import sync_folder, sync_group
from .folder import CacheFolder
from .index import Entry, Index
from .keeper import Chain, Keeper, Skipped
from .keys import pack
from .layout import ROW_KINDS
from .planner import Planner
from .ram import Draft, Ram
from .record import RecordError, write

log = logging.getLogger("mlxkv.cache")

#: after these the next group would fare no better; any other failure costs one group (too many open files, say)
_LASTING = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM, errno.ENOENT}
#: seconds that a group which is being written may take beyond the time that closing has
GRACE = 5.0
_LASTING_SQLITE = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY}


@dataclass
class Job:
    """A group to be written; with ``chain``, what lies on it is thinned afterwards."""

    drafts: list[Draft]
    chain: Chain | None = None

    @property
    def nbytes(self) -> int:
        return sum(d.nbytes for d in self.drafts)


@dataclass
class Tip:
    """A state at n−1 that waits, in RAM, to be written or to be superseded."""

    draft: Draft
    chain: Chain


@dataclass
class Counters:
    """What happened since the store was opened. Bytes are record bytes."""

    skipped: Skipped
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
    for. ``busy`` says whether a request is running: tips are not written meanwhile."""

    def __init__(
        self,
        folder: CacheFolder,
        planner: Callable[[Index, bytes], Planner],
        *,
        ram: Ram,
        keeper: Keeper,
        limit: int,
        floor: int,
        idle_s: float,
        name: str,
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._folder, self._planner, self._limit, self._floor = folder, planner, limit, floor
        self._ram, self._keeper, self._idle_s, self._busy = ram, keeper, idle_s, busy
        self._queue: deque[Job] = deque()
        self._tips: dict[bytes, Tip] = {}
        self._bytes = 0
        self._used = time.monotonic()
        self._closing = False
        self._deadline = float("inf")
        self._stopped_because = ""
        self._wake = threading.Condition()
        self.counters = Counters(skipped=keeper.skipped)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def stopped_because(self) -> str:
        """Why nothing is written any more, or ''."""
        return self._stopped_because

    @property
    def tips(self) -> int:
        """How many tips wait in RAM to be written."""
        with self._wake:
            return len(self._tips)

    def submit(self, group: list[Draft], chain: Chain | None = None) -> bool:
        """Queue a group, whose entries are pinned in RAM until it is done; False if it is refused because too many
        bytes wait or writing has stopped."""
        return self._enqueue(Job(group, chain), self._limit)

    def hold(self, draft: Draft, chain: Chain) -> None:
        """Let a tip wait. Those that it supersedes are not written any more."""
        with self._wake:
            self._used = time.monotonic()
            if self._stopped_because or self._closing:
                return
            for key in [key for key, tip in self._tips.items() if chain.holds(tip.draft)]:
                del self._tips[key]
            self._tips[draft.meta.key] = Tip(draft, chain)
            self._wake.notify_all()

    def evicted(self, key: bytes, kind: str) -> None:
        """A record has left RAM: if it was a tip that waits, it is written now."""
        if kind == "state":
            with self._wake:
                tips = [self._tips.pop(key)] if key in self._tips else []
            self._write_tips(tips, self._limit)

    def write_tips(self) -> None:
        """Queue all tips that wait."""
        with self._wake:
            tips, self._tips = list(self._tips.values()), {}
        self._write_tips(tips, None)  # they are in RAM as it is, and RAM is bounded

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all that was submitted is durable or dropped, tips that wait excepted; False on time-out
        (seconds)."""
        with self._wake:
            return self._wake.wait_for(lambda: not self._queue, timeout)

    def close(self, timeout: float = 10.0) -> None:
        """Write what waits, tips too, for at most so many seconds; what is left is dropped, and said."""
        self.write_tips()
        with self._wake:
            self._closing = True
            self._deadline = time.monotonic() + timeout
            self._wake.notify_all()
        self._thread.join(timeout + GRACE)
        if self._thread.is_alive():
            log.warning("the disk has not answered for %.0f s: what was being written is lost", timeout + GRACE)

    def _enqueue(self, job: Job, limit: int | None) -> bool:
        with self._wake:
            self._used = time.monotonic()
            full = limit is not None and self._queue and self._bytes + job.nbytes > limit
            if self._stopped_because or self._closing or full:
                self.counters.refused_bytes += job.nbytes
                return False
            self._queue.append(job)
            self._bytes += job.nbytes
            self._wake.notify_all()
        return True

    def _write_tips(self, tips: list[Tip], limit: int | None) -> None:
        for tip in tips:
            self._ram.put(tip.draft, pin=True)  # still seen until it is on disk
            if not self._enqueue(Job([tip.draft], tip.chain), limit):
                self._ram.unpin([tip.draft.meta.key])

    def _next(self) -> Job | None:
        """The job to do now; waits for one. None: closed, and nothing is left."""
        while True:
            with self._wake:
                if self._queue:
                    return self._queue[0]
                if self._closing:
                    return None
                idle = self._used + self._idle_s - time.monotonic() if self._tips else None
                if idle is None or idle > 0:
                    self._wake.wait(idle)
                    continue
                self._used = time.monotonic()
            if not self._busy():
                self.write_tips()

    def _run(self) -> None:
        index: Index | None = None
        try:
            index = Index(self._folder.path)
        except (sqlite3.Error, OSError) as e:
            self._stop(f"the index cannot be opened ({e})")
        late = 0
        while (job := self._next()) is not None:
            try:
                if time.monotonic() > self._deadline:
                    late += job.nbytes
                elif index is not None and not self._stopped_because:
                    self._do(index, job)
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
            self._ram.unpin([d.meta.key for d in job.drafts])  # first: whoever waits in flush() sees what is left
            with self._wake:
                self._queue.popleft()
                self._bytes -= job.nbytes
                self._wake.notify_all()
        if late:
            self.counters.fault("close", f"{late} bytes were not written in time")
            log.warning("closing took too long: %.1f MB of cache records were not written", late / 1e6)
        if index is not None:
            index.close()

    def _do(self, index: Index, job: Job) -> None:
        drafts = job.drafts
        if drafts:
            drafts = self._keeper.admit(index, drafts, job.chain, self._planner(index, drafts[0].meta.root))
        if drafts:
            self._commit(index, drafts)
        if job.chain is not None:
            self._keeper.clean(index, job.chain)

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
            kinds = [k for k in draft.bodies if k not in have or (k in ROW_KINDS and not whole)]
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
        size = sum(sum(s.values()) for s in sizes)
        self.counters.written_bytes += size
        self._keeper.daily.add(size)
