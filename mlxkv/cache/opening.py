"""Opening the index: brought in step with the files, or built again from them where it is damaged, gone or outdated."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

from .folder import CacheFolder, FolderRefused, adopt, parse, weight
from .index import FILE, LOOK_UPS, PAGE, TABLES, VERSION, Index, OverBudget
from .lock import FolderLock, LockRefused
from .record import Reader, RecordError, is_newer
from .tensors import ROW_KINDS

#: told (records done, of how many) while the index is built again
Progress = Callable[[int, int], None]

#: an index takes in so many files one by one; if more are new, and most are, it is built again
_MANY = 2000
#: a page of the index holds at least this part of what it could
_PACKED = 0.5
#: seconds to wait until nobody else has the folder open, where the index must be built again
_WAIT = 2.0
_SUFFIXES = ("", "-wal", "-shm", "-journal")  # of the index's files
#: what a full disk, a read-only volume or too little memory makes SQLite say: that proves nothing about the index
_NO_DAMAGE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_NOMEM)


def open_index(
    folder: CacheFolder,
    lock: FolderLock | None = None,
    *,
    budget: Callable[[], int] | None = None,
    progress: Progress | None = None,
) -> Index:
    """The folder's index, in step with its files: orphans are adopted, rows without a file dropped. A damaged index is
    set aside and built again, within ``budget()`` bytes, if nobody else has the folder open. ``lock``: the caller's;
    without one it is locked meanwhile. Raises FolderRefused, sqlite3.Error if even that fails, OSError."""
    if lock is None:
        try:
            lock = FolderLock(folder.path)
        except LockRefused as e:
            raise FolderRefused(f"The cache folder {folder.path} cannot be used: {e}.") from e
        try:
            return open_index(folder, lock, budget=budget, progress=progress)
        finally:
            lock.close()
    try:
        if os.path.lexists(folder.suspicion):
            raise sqlite3.DatabaseError("an earlier run found it damaged")
        if any((folder.path / (FILE + suffix)).is_symlink() for suffix in _SUFFIXES):
            raise sqlite3.DatabaseError("it is a symbolic link")  # SQLite would write into whatever it leads to
        if not (folder.path / FILE).exists() and _begun(folder):
            raise sqlite3.DatabaseError("it is gone")
        return _in_step(folder, lock, trust=False)
    except sqlite3.DatabaseError as e:
        if isinstance(e, sqlite3.OperationalError) and "locked" in str(e):
            raise  # busy, not damaged
        if getattr(e, "sqlite_errorcode", 0) & 0xFF in _NO_DAMAGE:
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
    _build(folder, budget() if budget is not None else None, progress)
    return _in_step(folder, lock, trust=True)


def _begun(folder: CacheFolder) -> bool:
    """Whether there are records at all."""
    return any(True for _ in folder.scan())


def _in_step(folder: CacheFolder, lock: FolderLock, *, trust: bool) -> Index:
    index = Index(folder.path)
    try:
        left = 0
        if lock.alone:  # whoever held something is gone, and what they were writing with them
            with index.transaction(checked=False):
                left = index.execute("DELETE FROM holds").rowcount
        _reconcile(folder, index, lock.alone, trust, left > 0)
        return index
    except BaseException:
        index.close()
        raise


def _reconcile(folder: CacheFolder, index: Index, alone: bool, trust: bool, unclean: bool) -> None:
    """Compare the names of files with the rows, and count what else is there. Raises sqlite3.DatabaseError if an index
    that is not to be trusted lacks most of the records: then it is built again. Sizes are compared too where nobody
    else writes and the last one may not have ended well (``unclean``)."""
    known = index.file_names()
    files, inside = folder.listing(known)
    gone, orphans = known - files, files - known
    if alone and not trust and len(orphans) > max(_MANY, len(known)):
        raise sqlite3.DatabaseError("it lacks most of the records")
    if alone and (unclean or gone or orphans):
        orphans |= _written_again(folder, index, known & files)
    step = max(1, index.pages() // 24)
    for names, enter in ((sorted(gone), False), (sorted(orphans), True)):
        for i in range(0, len(names), step):
            with contextlib.suppress(OverBudget), index.transaction(checked=not alone):
                for name in names[i : i + step]:
                    key, kind = parse(name)
                    if enter:
                        adopt(folder, index, key, kind, folder.file(key, kind), index.last_used(key))
                    elif not folder.holds(key, kind):
                        index.drop_record(key, kind)
                        _read_again(folder, index, key)
    for key, kind in map(parse, orphans):  # what could not be taken in weighs all the same
        if kind not in dict(index.records_of(key)):
            inside += weight(folder.file(key, kind))
    with index.transaction(checked=False):
        (records,) = index.execute("SELECT coalesce(sum(bytes), 0) FROM records").fetchone()
        index.count("records", records)
        index.count("inside", inside)
        index.count("outside", folder.outside(index.writing()))


def _written_again(folder: CacheFolder, index: Index, names: set[str]) -> set[str]:
    """Whole records of another size than the index has: its line of what was written since was lost with the power,
    and what the file says counts. What is damaged is left for a restore to find."""
    sizes, out = index.names(), set()
    for name in names:
        with contextlib.suppress(OSError, RecordError):
            path = folder.file(*parse(name))
            if os.lstat(path).st_size != sizes.get(parse(name)):
                Reader.open(path).close()
                out.add(name)
    return out


def _read_again(folder: CacheFolder, index: Index, base: bytes) -> None:
    """Enter as their files say what hangs on a base that is gone: it may have been stored again without one, and power
    failed before that was in the index."""
    for key, used in index.execute("SELECT key, used FROM entries WHERE base = ?", (base,)).fetchall():
        for kind in ROW_KINDS:
            if folder.holds(key, kind):
                adopt(folder, index, key, kind, folder.file(key, kind), used)


def _build(folder: CacheFolder, budget: int | None, progress: Progress | None) -> None:
    """A new index from all records, under a temporary name until it is whole. Where the budget has no room for it, the
    records that were written first go."""
    sizes = _weigh(folder)
    if budget is not None:
        _make_place(folder, sizes, budget)
    temporary = folder.temporary(FILE)
    temporary.unlink(missing_ok=True)
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        index = _Bulk(temporary)
        try:
            for done, name in enumerate(sorted(sizes)):
                if progress is not None and done % 256 == 0:
                    progress(done, len(sizes))
                key, kind = parse(name)
                adopt(folder, index, key, kind, folder.file(key, kind), used=sizes[name][1])
            if progress is not None:
                progress(len(sizes), len(sizes))
            index.finish()
        finally:
            index.close()
        os.replace(temporary, folder.path / FILE)
    finally:
        temporary.unlink(missing_ok=True)


def _weigh(folder: CacheFolder) -> dict[str, tuple[int, float]]:
    """Name -> (bytes, when it was written) of every record."""
    out = {}
    for name in folder.listing()[0]:
        with contextlib.suppress(OSError):
            info = os.lstat(folder.file(*parse(name)))
            out[name] = (info.st_size, info.st_mtime)
    return out


def _make_place(folder: CacheFolder, sizes: dict[str, tuple[int, float]], budget: int) -> None:
    """Remove the oldest records, but none of a later version's, until the others and an index of them fit."""
    # an index row with 256 ids, twice, in pages that are half full
    row = int((2 * 1024 + 512) / _PACKED)
    total = folder.size() + 16 * PAGE + row * len(sizes)
    for name in sorted(sizes, key=lambda n: sizes[n][1]):
        if total <= budget:
            break
        if is_newer(folder.file(*parse(name))):
            continue
        with contextlib.suppress(OSError):
            folder.file(*parse(name)).unlink()
        total -= sizes.pop(name)[0] + row


class _Bulk(Index):
    """A new index that nobody sees yet: one transaction, no journal, look-up trees at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db = sqlite3.connect(path, isolation_level=None)
        for pragma in (f"page_size={PAGE}", "auto_vacuum=INCREMENTAL", "journal_mode=OFF", "synchronous=OFF"):
            self._db.execute(f"PRAGMA {pragma}")
        self._db.execute("PRAGMA temp_store=MEMORY")
        self._db.execute("BEGIN")
        for statement in TABLES:
            self._db.execute(statement)

    def finish(self) -> None:
        for statement in (*LOOK_UPS, f"PRAGMA user_version={VERSION}", "COMMIT"):
            self._db.execute(statement)
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
