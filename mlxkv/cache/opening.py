"""Opening the index: brought in step with the files, or built again from them where it is damaged, gone or outdated."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

from .adoption import AT_ONCE, Progress, link_lost, take_in_all
from .folder import NONSENSE, CacheFolder, FolderRefused, Weighed, adopt, is_record, link, parse
from .index import FILE, MISC_ROOM, PAGE, Index, OverBudget, damaged, shm_room, wal_room
from .lock import FolderLock, LockRefused
from .record import Reader, RecordError, is_newer
from .tables import LOOK_UPS, SUFFIX, TABLES, VERSION, WAITING_ROOM
from .tensors import ROW_KINDS

log = logging.getLogger("mlxkv.cache")

#: if more files than this are new to an index, and most are, it is built again
_MANY = 2000
#: pages of an empty index; bytes of it for a file that waits
_BEGUN, _WAITS = 24, 256
#: rows of one statement
_ROWS = 200
#: seconds to wait until nobody else has the folder open, where the index must be built again
_WAIT = 2.0
_SUFFIXES = ("", "-wal", "-shm", "-journal")  # of the index's files
#: what a full disk, a read-only volume or too little memory makes SQLite say: that proves nothing about the index
_NO_DAMAGE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_NOMEM)


def open_index(
    folder: CacheFolder,
    lock: FolderLock | None = None,
    *,
    budget: Callable[[int], int] | None = None,
    progress: Progress | None = None,
    at_once: int = AT_ONCE,
) -> Index:
    """The folder's index, in step with its files: files that it does not know are noted, and the newest ``at_once`` of
    them adopted (for the others: ``adoption``); rows without a file are dropped. A damaged index is set aside and built
    again if nobody else has the folder open, within ``budget(n)`` bytes, where n is what all files weigh. ``lock``: the
    caller's; without one it is locked meanwhile. Raises FolderRefused, sqlite3.Error if even that fails, OSError."""
    if lock is None:
        try:
            lock = FolderLock(folder.path)
        except LockRefused as e:
            raise FolderRefused(f"The cache folder {folder.path} cannot be used: {e}.") from e
        try:
            return open_index(folder, lock, budget=budget, progress=progress, at_once=at_once)
        finally:
            lock.close()
    try:
        if os.path.lexists(folder.suspicion):
            raise sqlite3.DatabaseError("an earlier run found it damaged")
        if any((folder.path / (FILE + suffix)).is_symlink() for suffix in _SUFFIXES):
            raise sqlite3.DatabaseError("it is a symbolic link")  # SQLite would write into whatever it leads to
        if not (folder.path / FILE).exists() and _begun(folder):
            raise sqlite3.DatabaseError("it is gone")
        return _in_step(folder, lock, at_once)
    except sqlite3.DatabaseError as e:
        if isinstance(e, sqlite3.OperationalError) and "locked" in str(e):
            raise  # busy, not damaged
        if getattr(e, "sqlite_errorcode", 0) & 0xFF in _NO_DAMAGE and not _other_format(folder.path / FILE):
            raise
        if not lock.try_alone(_WAIT):
            raise FolderRefused(
                f"The index of {folder.path} must be built again ({e}), but other processes have the folder open. "
                "End them, then start again."
            ) from e
    folder.suspicion.unlink(missing_ok=True)
    for suffix in _SUFFIXES:
        path = folder.path / (FILE + suffix)
        with contextlib.suppress(FileNotFoundError):
            small = path.lstat().st_size * 4 <= folder.quarantine_limit
            folder.set_aside(path, "quarantine" if small else "delete")
    _build(folder, budget, progress, at_once)
    _say_unseen(folder)
    return Index(folder.path)


def _say_unseen(folder: CacheFolder) -> None:
    if folder.unseen:
        first, error = next(iter(folder.unseen.items()))
        log.warning(
            "%d of the folders in %s cannot be listed, %s for one (%s): nothing is given up of what is in them",
            len(folder.unseen),
            folder.records,
            first,
            error.strerror or error,
        )


def _other_format(path: Path) -> bool:
    """Whether the header names a version of the file format that SQLite would only read, or not even that."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return any(version not in (1, 2) for version in file.read(20)[18:])
    return False


def _begun(folder: CacheFolder) -> bool:
    """Whether there are records at all."""
    return any(True for _ in folder.scan())


def _in_step(folder: CacheFolder, lock: FolderLock, at_once: int) -> Index:
    index = Index(folder.path)
    try:
        left = 0
        if lock.alone:  # whoever held something is gone, and what they were writing with them
            with index.transaction(checked=False):
                left = index.execute("DELETE FROM holds").rowcount
        _reconcile(folder, index, lock.alone, left > 0, at_once)
        _say_unseen(folder)
        return index
    except NONSENSE as e:  # a flipped bit may turn a number into text
        index.close()
        raise damaged(f"what it says makes no sense: {e}") from e
    except BaseException:
        index.close()
        raise


def _reconcile(folder: CacheFolder, index: Index, alone: bool, unclean: bool, at_once: int) -> None:
    """Compare the names of files with the rows, and count what else is there. Raises sqlite3.DatabaseError if the index
    lacks most of the records: then it is built again. Sizes are compared too where nobody else writes and the last one
    may not have ended well (``unclean``)."""
    gone: set[str] = set()
    orphans: set[str] = set()
    inside = known = 0
    for part in folder.parts(index.file_names):
        known += len(part.known)
        inside += part.foreign
        if part.names != part.known:
            gone |= part.known - part.names
            orphans |= part.names - part.known
    if alone and len(orphans) > max(_MANY, known):
        raise sqlite3.DatabaseError("it lacks most of the records")
    if alone and (unclean or gone or orphans):
        _written_again(folder, index)
    step = max(1, index.pages() // 24)
    names = sorted(gone)
    for i in range(0, len(names), step):
        with contextlib.suppress(OverBudget), index.transaction(checked=not alone):
            for name in names[i : i + step]:
                try:
                    key, kind = parse(name)
                except ValueError:  # of a damaged row
                    index.stop_waiting(name)
                    continue
                if folder.lacks(key, kind):
                    index.drop_record(key, kind)
                    index.stop_waiting(name)
                    _read_again(folder, index, key)
    with index.transaction(checked=False):
        index.recount(inside=inside, outside=folder.outside(index.writing()))
    if orphans:
        _note(folder, index, orphans)
        take_in_all(folder, index, most=at_once)
    if orphans or gone:
        link_lost(folder, index)


def _note(folder: CacheFolder, index: Index, names: set[str]) -> None:
    """Have these files wait to be taken in: from now on they count."""
    weighed = folder.weigh(names)
    files = list(zip(weighed.names, weighed.bytes, weighed.written, strict=True))
    step = max(1, index.pages() // 3)
    for i in range(0, len(files), step):
        with index.transaction(checked=False):  # they are there, whatever they weigh
            index.let_wait(files[i : i + step])


def _written_again(folder: CacheFolder, index: Index) -> None:
    """Enter whole records of another size than the index has as their files say: its line of what was written since was
    lost with the power. What is damaged is left for a restore to find. What waits counts as it is now."""
    todo = []
    for (key, kind), size in index.names().items():
        with contextlib.suppress(OSError, RecordError, AttributeError):  # a damaged row may hold anything
            path = folder.path_of(f"{key.hex()}.{kind}{SUFFIX}")
            if os.lstat(path).st_size != size:
                Reader.open(path).close()
                todo.append((key, kind, path))
    waiting = {name: size for name, size in index.execute("SELECT name, bytes FROM waiting") if is_record(name)}
    now = folder.weigh(waiting)
    changed = [(size, name) for name, size in zip(now.names, now.bytes, strict=True) if size != waiting[name]]
    step = max(1, index.pages() // 24)
    for i in range(0, len(changed), step):
        with index.transaction(checked=False):
            for change in changed[i : i + step]:
                index.execute("UPDATE waiting SET bytes = ? WHERE name = ?", change)
    for i in range(0, len(todo), step):
        with index.transaction(checked=False):
            for key, kind, path in todo[i : i + step]:
                adopt(folder, index, key, kind, path, index.last_used(key))


def _read_again(folder: CacheFolder, index: Index, base: bytes) -> None:
    """Enter as their files say what hangs on a base that is gone: it may have been stored again without one, and power
    failed before that was in the index."""
    for key, used in index.execute("SELECT key, used FROM entries WHERE base = ?", (base,)).fetchall():
        for kind in ROW_KINDS:
            if folder.holds(key, kind):
                adopt(folder, index, key, kind, folder.file(key, kind), used)


def _build(folder: CacheFolder, budget: Callable[[int], int] | None, progress: Progress | None, at_once: int) -> None:
    """A new index of all records, under a temporary name until it is whole: the newest have rows, the others wait.
    Where the budget has no room for it, the records that were written first go."""
    inside, names = 0, []
    for part in folder.parts(lambda begin: set()):
        inside += part.foreign
        names += part.names
    files, outside = folder.weigh(names), folder.outside()
    oldest = sorted(range(len(files.names)), key=files.written.__getitem__)
    if budget is not None:
        beside = inside + outside
        _make_place(folder, files, oldest, beside, budget(beside + sum(files.bytes)))
    temporary = folder.temporary(FILE)
    temporary.unlink(missing_ok=True)
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        index = _Bulk(temporary)
        try:
            index.fill(files)
            index.recount(inside=inside, outside=outside)
            newest = oldest[::-1][:at_once]
            for done, i in enumerate(newest):
                if progress is not None and done % 256 == 0:
                    progress(done, len(newest))
                name = files.names[i]
                adopt(folder, index, *parse(name), folder.path_of(name), files.written[i])
            if progress is not None:
                progress(len(newest), len(newest))
            for key in index.without_rows():
                link(folder, index, key)
            index.finish()
        finally:
            index.close()
        os.replace(temporary, folder.path / FILE)
    finally:
        temporary.unlink(missing_ok=True)


def _make_place(folder: CacheFolder, files: Weighed, oldest: list[int], beside: int, budget: int) -> None:
    """Remove the oldest records, but none of a later version's, until the others, what lies ``beside`` them (bytes),
    and an index of them fit. ``oldest``: places in ``files``, the first to go first; shortened with them."""
    row, wal = WAITING_ROOM + _WAITS, wal_room(budget)
    total = beside + _BEGUN * PAGE + wal + shm_room(wal) + MISC_ROOM + sum(files.bytes) + row * len(oldest)
    gone = set()
    for i in oldest:
        if total <= budget:
            break
        if is_newer(folder.path_of(files.names[i])):
            continue
        with contextlib.suppress(OSError):
            os.unlink(folder.path_of(files.names[i]))
        total -= files.bytes[i] + row
        gone.add(i)
    if gone:
        files.keep(sorted(i for i in oldest if i not in gone))
        oldest[:] = sorted(range(len(files.names)), key=files.written.__getitem__)


class _Bulk(Index):
    """A new index that nobody sees yet: one transaction, no journal."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db = sqlite3.connect(path, isolation_level=None)
        for pragma in (f"page_size={PAGE}", "auto_vacuum=INCREMENTAL", "journal_mode=OFF", "synchronous=OFF"):
            self._db.execute(f"PRAGMA {pragma}")
        self._db.execute("PRAGMA temp_store=MEMORY")
        self._db.execute("BEGIN")
        for statement in TABLES:
            self._db.execute(statement)

    def fill(self, files: Weighed) -> None:
        """Have all files wait, then make the look-up trees and what keeps the ledger."""
        for i in range(0, len(files.names), _ROWS):
            columns = (files.names[i : i + _ROWS], files.bytes[i : i + _ROWS], files.written[i : i + _ROWS])
            rows = ",".join(["(?, ?, ?)"] * len(columns[0]))
            values = [value for row in zip(*columns, strict=True) for value in row]
            self._db.execute(f"INSERT INTO waiting VALUES {rows}", values)  # half the time of a row at a time
        for statement in LOOK_UPS:
            self._db.execute(statement)

    def finish(self) -> None:
        for statement in (f"PRAGMA user_version={VERSION}", "COMMIT"):
            self._db.execute(statement)
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
