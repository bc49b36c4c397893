"""The ledger of a cache folder: one budget for everything in it, for all models and processes.

What counts is ``st_size`` of every regular file under the folder. Space is reserved in the index before it is written,
and a reservation stands until the files it was for are entered, or gone. So at every moment

    files + what others may be writing + index + room for its WAL  ≤  budget

holds on disk, whoever is killed or stopped. Rows of the index know what records weigh; other files are counted when a
store opens and now and then (``Ledger.rescan``). This module does not own: what to give up (``eviction``), when to
write (``writer``).
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from .adoption import take_in_all
from .eviction import Evicted, free
from .folder import CacheFolder, adopt, parse, weight
from .index import MISC_ROOM, PAGE, Index, OverBudget, shm_room, wal_room
from .layout import Layout
from .process import Process, this_process
from .tensors import RECORD_KINDS

#: the default: this part of the disk that would be free without the folder, and at most so many bytes
PART, MOST = 10, 32 * 10**9
#: one model may have this much of the budget when space is short and others have entries
SHARE = 0.8
#: seconds between counts of foreign files while something is written
RESCAN = 20.0
#: what is evicted at least when something has to be, as a part of the budget: it need not be done for every group
_STEP = 64
#: an index with the tables alone, and what a few entries need
_FIRST_PAGES = 40
_HEADER = 16 << 10


def default_budget(folder: Path, size: int) -> int:
    """A tenth of the disk space that would be free without the ``size`` bytes in ``folder``, at most 32 GB."""
    return min(MOST, (shutil.disk_usage(folder).free + size) // PART)


def minimum(layout: Layout, block: int) -> int:
    """The least budget that one entry and the index can live in, bytes."""
    entry = sum(t.nbytes(block) for kind in RECORD_KINDS for t in layout.tensors(kind))
    header = _HEADER + 24 * block + 512 * len(layout.tensors(*RECORD_KINDS))
    wal = wal_room(None)
    fixed = PAGE * (_FIRST_PAGES + growth([block])) + wal + shm_room(wal) + MISC_ROOM
    return fixed + entry + 3 * header


def growth(lengths: Iterable[int]) -> int:
    """Pages that the index may grow by for entries of so many tokens."""
    return 8 + sum(2 + 4 * n // 2000 for n in lengths)


class Ledger:
    """The account of one store. Belongs to the thread of its ``index``; others of the same ``store`` may be used at the
    same time."""

    def __init__(self, index: Index, folder: CacheFolder, store: int) -> None:
        self.index, self.folder, self.store = index, folder, store
        self._scanned = time.monotonic()
        self._stranded: set[int] = set()

    @classmethod
    def join(cls, index: Index, folder: CacheFolder, budget: int) -> Ledger:
        """Take part in a folder. The smallest budget of those who do counts. Raises sqlite3.Error."""
        with index.transaction(checked=False):
            store = _hold(index, folder, None, budget, 0, [])
            index.execute("UPDATE holds SET store = id WHERE id = ?", (store,))
        return cls(index, folder, store)

    def leave(self) -> None:
        """Give up what this store has reserved. Raises sqlite3.Error, OSError."""
        self.reclaim(own=True)
        with self.index.transaction():
            self.index.execute("DELETE FROM holds WHERE id = ?", (self.store,))

    def others(self) -> int:
        """Bytes that are reserved, by other stores since this one has none when it asks."""
        return self.index.execute("SELECT coalesce(sum(bytes), 0) FROM holds").fetchone()[0]

    def room(self) -> int:
        """Bytes that a reservation could have if every record and other reservation went. Negative if even then there
        is no place at all."""
        query = "SELECT sum(bytes) + (SELECT coalesce(sum(bytes), 0) FROM holds) FROM ledger"
        query += " WHERE name IN ('records', 'waiting')"
        (passing,) = self.index.execute(query).fetchone()
        return (self.index.budget() or 0) - self.index.charge() + passing

    def reserve(self, size: int, entries: Iterable[int], files: list[str]) -> int:
        """Reserve ``size`` bytes for ``files`` (names of records) and what the index needs for entries of so many
        tokens. Returns the reservation's id. Raises OverBudget, sqlite3.Error."""
        size += PAGE * growth(entries)
        with self.index.transaction():
            mine = self.index.execute("SELECT pid FROM holds WHERE id = ?", (self.store,)).fetchone()
            if mine != (this_process().pid,):
                raise sqlite3.OperationalError("this store is no longer in the ledger of its folder")
            return _hold(self.index, self.folder, self.store, None, size, files)

    def release(self, hold: int, size: int | None = None) -> None:
        """Give back ``size`` bytes, or the whole reservation. Within a transaction of the index."""
        if size is None:
            self.index.execute("DELETE FROM holds WHERE id = ?", (hold,))
        else:
            self.index.execute("UPDATE holds SET bytes = max(0, bytes - ?) WHERE id = ?", (size, hold))

    def abandon(self, hold: int) -> None:
        """Its files were not all entered: take in those that are whole, and give the rest back. Where the index cannot
        be written now, the reservation stands until it can."""
        self._stranded.add(hold)
        with contextlib.suppress(Exception):
            self._settle(hold)

    def reclaim(self, *, own: bool = False) -> bool:
        """Settle what processes that are gone had reserved, and what this store could not settle before; with ``own``
        everything of this store. True if there was any. Raises sqlite3.Error, OSError."""
        todo = []
        for hold, store, pid, started, boot, budget in self.index.execute(
            "SELECT id, store, pid, started, boot, budget FROM holds"
        ).fetchall():
            mine = store == self.store and budget is None and (own or hold in self._stranded)
            if mine or not Process(pid, started, boot).alive():
                todo.append(hold)
        for hold in todo:
            self._settle(hold)
        return bool(todo)

    def _settle(self, hold: int) -> None:
        """Take in the files of a reservation that are whole, remove the others, and release it."""
        index, folder = self.index, self.folder
        row = index.execute("SELECT files, temporaries FROM holds WHERE id = ?", (hold,)).fetchone()
        names = json.loads(row[0]) if row is not None else []
        if row is not None and row[1] != folder.temporaries:
            folder.remove_temporaries(row[1])
        step = max(1, index.pages() // 24)
        for i in range(0, len(names), step):
            with contextlib.suppress(OverBudget), index.transaction():
                for key, kind in map(parse, names[i : i + step]):
                    # of another size: written again, or others merged into it, in place of one that had been entered
                    if dict(index.records_of(key)).get(kind) != weight(folder.file(key, kind)):
                        adopt(folder, index, key, kind, folder.file(key, kind), index.last_used(key))
        for key, kind in map(parse, names):
            if kind not in dict(index.records_of(key)):
                folder.remove(key, kind)
        with index.transaction(checked=False):
            self.count()  # what failed is in quarantine now
            self.release(hold)
        self._stranded.discard(hold)

    def rescan(self, *, every: float = RESCAN) -> None:
        """Count the files beside the records anew, if that was not done for ``every`` seconds."""
        if time.monotonic() - self._scanned < every:
            return
        self._scanned = time.monotonic()
        with self.index.transaction(checked=False):  # if it is too much, the next reservation makes room
            self.count()

    def count(self) -> None:
        """Count the files beside the records. Within a transaction."""
        self.index.count("outside", self.folder.outside(self.index.writing()))

    def make_room(
        self,
        short: int,
        *,
        pinned: Collection[bytes] = (),
        root: bytes = b"",
        incoming: int = 0,
        share: float = SHARE,
        within: float = float("inf"),
    ) -> Evicted:
        """Evict ``short`` bytes or more. ``root``, ``incoming``: for whom and how much. What waits to be taken into the
        index is taken in first, since nobody knows yet what it hangs on; if that takes longer than ``within`` seconds,
        nothing is evicted this time. Raises sqlite3.Error."""
        if not take_in_all(self.folder, self.index, within=within):
            return Evicted()
        budget = self.index.budget() or 0
        target = max(short, budget // _STEP)
        done = free(self.folder, self.index, target, pinned=pinned, most=int(share * budget), incoming=(root, incoming))
        if done.bytes < short:
            self.folder.empty_quarantine()  # it serves nobody but the curious
            self.rescan(every=0)
        self.index.shrink()
        return done


def _hold(index: Index, folder: CacheFolder, store: int | None, budget: int | None, size: int, files: list[str]) -> int:
    me = this_process()
    row = (store, me.pid, me.started, me.boot, folder.temporaries, budget, size, json.dumps(files))
    added = index.execute(
        "INSERT INTO holds (store, pid, started, boot, temporaries, budget, bytes, files)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        row,
    )
    return int(added.lastrowid or 0)
