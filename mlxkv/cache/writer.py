"""The writer thread: private host bytes become durable records, a group at a time, and only then visible on disk.

A group is stored by ``commit``: reserved, written, made durable, entered. Whatever goes wrong drops the group: that
costs a later miss, never a wrong hit. Tips are written behind: when they leave RAM, after some idle seconds, or on
closing, unless the next turn's tip comes first. When nothing else is to be done, the pieces of blocks are merged.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from .commit import Commit, Counters
from .folder import CacheFolder
from .index import PAGES_A_ROW, Index, IndexReplaced, OverBudget
from .keeper import Chain, Keeper
from .ledger import Ledger
from .merging import Merger
from .planner import Planner
from .ram import Draft, Ram
from .record import RecordError

log = logging.getLogger("mlxkv.cache")

#: after these the next group would fare no better; any other failure costs one group (too many open files, say)
_LASTING = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM, errno.ENOENT}
#: seconds that a group which is being written may take beyond the time that closing has
GRACE = 5.0
#: seconds after which it is worth saying again that the folder is full
_SAY_AGAIN = 3600.0
_LASTING_SQLITE = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY}


@dataclass
class Job:
    """A group to be written; with ``chain``, what lies on it is thinned afterwards. ``merge``: pieces are merged."""

    drafts: list[Draft]
    chain: Chain | None = None
    merge: bool = False

    @property
    def nbytes(self) -> int:
        return sum(d.nbytes for d in self.drafts)


@dataclass
class Tip:
    """A state at n−1 that waits, in RAM, to be written or to be superseded."""

    draft: Draft
    chain: Chain


class Writer:
    """Owns the thread and its queue. ``limit`` bounds the bytes that wait; beyond it groups are refused, not waited
    for. ``busy`` says whether a request is running: tips are not written meanwhile, and nothing is merged. ``merger``
    makes what merges, from a commit and a function that says whether it has to stop. ``store`` is the store's id in the
    ledger, ``pinned`` says what must not be evicted now, ``share`` which part of the budget one model may have when
    space is short. ``stopped``: why nothing can be written from the start, if that is so. ``stored`` is told which
    entries have become durable."""

    def __init__(
        self,
        folder: CacheFolder,
        planner: Callable[[Index, bytes], Planner],
        *,
        ram: Ram,
        keeper: Keeper,
        store: int,
        pinned: Callable[[], Collection[bytes]],
        share: float,
        limit: int,
        floor: int,
        idle_s: float,
        name: str,
        merger: Callable[[Commit, Callable[[], bool]], Merger],
        busy: Callable[[], bool] = lambda: False,
        stopped: str = "",
        stored: Callable[[bytes], None] = lambda key: None,
    ) -> None:
        self._folder, self._planner, self._limit, self._floor = folder, planner, limit, floor
        self._ram, self._keeper, self._idle_s, self._busy = ram, keeper, idle_s, busy
        self._store, self._pinned, self._share = store, pinned, share
        self._make_merger, self._stored = merger, stored
        self._merger: Merger | None = None
        self._unmerged = True  # something was written since the last pass, perhaps by the process before
        self._touched: set[bytes] = set()
        self._said_full = float("-inf")
        self._queue: deque[Job] = deque()
        self._tips: dict[bytes, Tip] = {}
        self._bytes = 0
        self._used = time.monotonic()
        self._closing = False
        self._deadline = float("inf")
        self._stopped_because = stopped
        self._lost = False
        self._renewed = not stopped
        self._wake = threading.Condition()
        self.counters = Counters(skipped=keeper.skipped)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def stopped_because(self) -> str:
        """Why nothing is written any more, or ''."""
        return self._stopped_because

    @property
    def lost(self) -> bool:
        """Writing has stopped because the folder or its index is not the one that was opened, or cannot be reached:
        once it was opened again, ``renew`` lets it go on."""
        return self._lost

    def pause(self, timeout: float) -> bool:
        """Take nothing more, and give up what waits; True once nothing of it is being written, False on time-out
        (seconds)."""
        self._stop(f"{self._folder.path} was removed or replaced while it was in use", lost=True)
        return self.flush(timeout)

    def renew(self, store: int) -> None:
        """The folder was opened again, and this is the store's id in its ledger: go on."""
        with self._wake:
            self._store, self._renewed, self._lost, self._stopped_because = store, True, False, ""

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the groups in the queue."""
        return self._bytes

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

    def merge(self) -> bool:
        """Merge the pieces of full blocks as soon as nothing else is to be done, without waiting until the store was
        idle for long; what comes between ends it. False if nothing is written any more."""
        return self._enqueue(Job([], merge=True), None)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all that was submitted is durable or dropped, tips that wait excepted; False on time-out
        (seconds)."""
        with self._wake:
            return self._wake.wait_for(lambda: not self._queue, timeout)

    def close(self, timeout: float = 10.0) -> bool:
        """Write what waits, tips too, for at most so many seconds; what is left is dropped, and said. False if the
        disk does not even answer: then something may still be written."""
        self.write_tips()
        with self._wake:
            self._closing = True
            self._deadline = time.monotonic() + timeout
            self._wake.notify_all()
        self._thread.join(timeout + GRACE)
        if self._thread.is_alive():
            log.warning("the disk has not answered for %.0f s: what was being written is lost", timeout + GRACE)
        return not self._thread.is_alive()

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

    def touch(self, key: bytes) -> None:
        """Note, when something is written next or on closing, that an entry was used."""
        with self._wake:
            if not self._stopped_because:
                self._touched.add(key)

    def _pins(self) -> set[bytes]:
        """What must not be evicted now: what is being restored, and what the groups in the queue hang on."""
        with self._wake:
            waiting = {key for job in self._queue for draft in job.drafts for key in draft.needs}
        return waiting | set(self._pinned())

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
                waiting = self._tips or (self._unmerged and not self._stopped_because)
                idle = self._used + self._idle_s - time.monotonic() if waiting else None
                if idle is None or idle > 0:
                    self._wake.wait(idle)
                    continue
                self._used = time.monotonic()
            if not self._busy():
                self.write_tips()
                if self._unmerged:
                    self.merge()

    def _run(self) -> None:
        commit = self._opened(None)
        late = 0
        while (job := self._next()) is not None:
            commit = self._opened(commit)
            try:
                if time.monotonic() > self._deadline:
                    late += job.nbytes
                elif commit is not None and not self._stopped_because:
                    self._note_uses(commit.index)
                    self._do(commit, job)
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
                self._stop(str(e), lost=True)
            except OSError as e:
                self.counters.dropped_groups += 1
                self.counters.fault("write", str(e))
                if e.errno in _LASTING:
                    lost = e.errno == errno.ENOENT  # a folder is gone
                    self._stop(f"writing to {self._folder.path} failed: {e.strerror or e}", lost=lost)
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
        if commit is not None:
            with contextlib.suppress(Exception):  # it only costs the order of eviction
                self._note_uses(commit.index)
            commit.index.close()

    def _opened(self, commit: Commit | None) -> Commit | None:
        """What groups are stored with: opened anew at first, and when the folder was."""
        with self._wake:
            renewed, self._renewed = self._renewed, False
        if not renewed:
            return commit
        if commit is not None:
            commit.index.close()
        self._keeper.forget()
        self._merger, self._unmerged = None, True
        try:
            return self._open()
        except (sqlite3.Error, OSError) as e:
            self._stop(f"the index cannot be opened ({e})", lost=True)
            return None

    def _open(self) -> Commit:
        index = Index(self._folder.path)
        return Commit(
            self._folder,
            index,
            Ledger(index, self._folder, self._store),
            self._planner,
            counters=self.counters,
            daily=self._keeper.daily,
            pinned=self._pins,
            share=self._share,
            floor=self._floor,
            stored=self._stored,
        )

    def _do(self, commit: Commit, job: Job) -> None:
        index, drafts = commit.index, job.drafts
        if job.merge:
            self._merge(commit)
            return
        self._unmerged = True
        try:
            if drafts:
                drafts = self._keeper.admit(index, drafts, job.chain, self._planner(index, drafts[0].meta.root))
            if drafts:
                commit.store(drafts)
        except OverBudget:
            if job.chain is not None:  # the next one may fit then
                self._keeper.clean(index, job.chain, self._pins())
            raise
        if job.chain is not None:
            self._keeper.clean(index, job.chain, self._pins())

    def _merge(self, commit: Commit) -> None:
        if self._merger is None:
            self._merger = self._make_merger(commit, self._interrupted)
        self._unmerged = False  # what is left over now is left until something is written
        try:
            self._unmerged = not self._merger.run()
        except OSError as e:  # nothing is lost; a group that is to be written will find out whether it lasts
            self.counters.fault("merge", str(e))
            log.warning("pieces of blocks were not merged: %s", e)
        if self._interrupted():
            self._unmerged = True

    def _interrupted(self) -> bool:
        """Whether something else than merging is to be done."""
        with self._wake:
            if self._closing or self._stopped_because or len(self._queue) > 1:
                return True
        return self._busy()

    def _note_uses(self, index: Index) -> None:
        with self._wake:
            keys, self._touched = list(self._touched), set()
        step = max(1, index.pages() // PAGES_A_ROW)
        for i in range(0, len(keys), step):
            with contextlib.suppress(OverBudget):
                index.touch(keys[i : i + step])

    def _stop(self, why: str, *, lost: bool = False) -> None:
        with self._wake:
            first = not self._stopped_because
            self._stopped_because = self._stopped_because or why
            self._lost = self._lost or lost
        if first:
            log.warning("the prefix store stops writing: %s. Answers go on; what is stored is still read.", why)
