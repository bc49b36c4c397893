"""Adoption: files that the index knows by name, size and age alone (table ``waiting``) become rows once their header
verifies.

They wait where an index was built again, or where many files came from elsewhere: reading 100,000 headers takes longer
than anyone waits for a folder to open. The newest are taken in at once, what a look-up asks for when it asks, and the
rest *behind*, in the order of their names (neighbours share pages of the index: in another order each would cost
several times as many), by a thread with an index of its own that never touches MLX. A file weighs the same before and
after, and while it waits the ledger keeps room for its row: adoption fits where the folder did. A portion is one
transaction; whoever finds a file taken in by another process goes on with the next.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable

from .eviction import free
from .folder import CacheFolder, adopt, is_record, link, parse, weight
from .index import Index, IndexReplaced, OverBudget
from .record import is_newer

log = logging.getLogger("mlxkv.cache")

#: told (records done, of how many)
Progress = Callable[[int, int], None]

#: so many are taken in when a folder is opened: the last conversations
AT_ONCE = 1000
#: pages of the index that a record changes at most: its own, those of the entry, and of the place where it waited
_PAGES = 24
#: records in one transaction: of the thread, so that it holds neither the index nor the interpreter for long; of
#: who waits for all of them
_SMALL, _LARGE = 32, 128
#: seconds of rest for each second of computing, while nothing else goes on and while a request runs
_REST, _REST_BUSY = 4.0, 20.0
_PAUSE = 0.01
#: seconds until the next try where another process writes the index
_AGAIN = 1.0
#: seconds after opening: whoever waits for the first answer goes first
_BEGIN = 0.3
#: seconds between two lines of the log
_SAY = 10.0


def take_in(folder: CacheFolder, index: Index, files: Iterable[tuple[str, float]]) -> None:
    """Adopt those of these (name, when it was written) that wait, in one transaction. Raises OverBudget,
    sqlite3.Error."""
    with index.transaction():
        for name, written in files:
            if not is_record(name):  # the index is damaged
                index.stop_waiting(name)
            elif index.waits(name):
                key, kind = parse(name)
                adopt(folder, index, key, kind, folder.path_of(name), _later(index.last_used(key), written))


def take_in_last(folder: CacheFolder, index: Index, files: list[tuple[str, float]], most: int) -> int:
    """Adopt the last of ``files``, which are taken off the list, at most so many; returns how many. Where the budget
    has no room for their rows, what was used least recently goes. Raises sqlite3.Error."""
    most = min(most, step(index), len(files))
    portion = files[len(files) - most :]
    while portion:
        try:
            take_in(folder, index, portion)
            break
        except OverBudget as e:
            if not free(folder, index, e.short).bytes:
                _give_up(folder, index, e.short)
    del files[len(files) - most :]
    return most


def take_in_all(
    folder: CacheFolder,
    index: Index,
    progress: Progress | None = None,
    *,
    most: int | None = None,
    within: float = float("inf"),
) -> bool:
    """Adopt all that wait, or the newest ``most`` of them; False if ``within`` seconds were not enough. ``progress``
    may raise to stop. Raises sqlite3.Error."""
    if not index.any_waiting():
        return True
    files = index.all_waiting(by="name" if most is None else "written")
    done, total = 0, len(files) if most is None else min(most, len(files))
    until = time.monotonic() + within
    while done < total:
        if progress is not None:
            progress(done, total)
        if time.monotonic() > until:
            return False
        done += take_in_last(folder, index, files, min(_LARGE, total - done))
    if most is None:
        link_lost(folder, index)
    if progress is not None:
        progress(total, total)
    return True


def link_lost(folder: CacheFolder, index: Index) -> None:
    """Have leaves whose rows were merged into a full block hang on it: their own files do not say so. Raises
    sqlite3.Error, OSError."""
    lost = index.without_rows()
    most = step(index)
    for i in range(0, len(lost), most):
        with index.transaction(checked=False):  # it only gives back
            for key in lost[i : i + most]:
                link(folder, index, key)


def _later(*moments: object) -> float:
    return max((m for m in moments if isinstance(m, (int, float))), default=0.0)


def step(index: Index) -> int:
    """Records that one transaction may take in. Where nobody has a budget, what is there was within one."""
    query = "SELECT sum(bytes) FROM ledger WHERE name IN ('records', 'waiting')"
    return max(1, index.pages(int(index.execute(query).fetchone()[0] or 0)) // _PAGES)


def _give_up(folder: CacheFolder, index: Index, short: int) -> None:
    """Remove the oldest that wait, but none of a later version's. Files first: the ledger counts one that waits and is
    gone, not the reverse."""
    with index.transaction(checked=False):  # it only gives back
        before = index.charge()
        for name, _ in index.all_waiting(by="written")[: step(index)]:
            path = folder.path_of(name) if is_record(name) else ""
            if path and is_newer(path):  # it stays for a later version, and weighs all the same
                index.stop_waiting(name)
                index.add("inside", weight(path))
                continue
            if path:
                folder.remove(*parse(name))
            index.stop_waiting(name)
            if before - index.charge() >= short:
                break


class Adopter:
    """The thread that takes in what waits. ``busy`` says whether a request is running. It ends when nothing waits any
    more; what is left when the store is closed waits for the next opening."""

    def __init__(self, folder: CacheFolder, busy: Callable[[], bool], name: str = "mlxkv-adopter") -> None:
        self._folder, self._busy = folder, busy
        self.adopted = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Until nothing waits any more, or adopting has stopped; False on time-out (seconds)."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self, timeout: float = 10.0) -> bool:
        """Stop after the portion that is being taken in; False if the disk does not answer."""
        self._stop.set()
        return self.wait(timeout)

    def _run(self) -> None:
        try:
            index = Index(self._folder.path)
        except (sqlite3.Error, OSError) as e:
            log.warning("records that the index does not know yet are not taken in: %s", e)
            return
        try:
            self._work(index)
        except IndexReplaced as e:
            log.warning("records that the index does not know yet are not taken in: %s", e)
        except Exception as e:  # it costs misses, until the folder is opened again
            self._folder.suspect(e)
            log.warning("taking in records has stopped: %s", e)
        finally:
            index.close()

    def _work(self, index: Index) -> None:
        self._stop.wait(_BEGIN)
        files = index.all_waiting()
        log.info("%d records are not in the index yet; they are taken in behind", len(files))
        total, said, started = len(files), time.monotonic(), time.monotonic()
        while files and not self._stop.is_set():
            begun, spent = time.monotonic(), -time.thread_time()  # not what it waited for the disk or its turn
            try:
                self.adopted += take_in_last(self._folder, index, files, _SMALL)
            except sqlite3.OperationalError as e:
                if "locked" not in str(e):
                    raise
                self._stop.wait(_AGAIN)
                continue
            if begun > said + _SAY:
                said = begun
                log.info("%d of %d records were taken into the index", self.adopted, total)
            spent += time.thread_time()
            self._stop.wait(max(_PAUSE, spent * (_REST_BUSY if self._busy() else _REST)))
        if not files:
            link_lost(self._folder, index)
            log.info("%d records were taken into the index in %.0f s", total, time.monotonic() - started)
