"""The journal of imports: which legacy files were imported and as what, and what the user has vouched for.

One small SQLite file, ``imports.sqlite``, in the cache folder. It is a note, never a proof: whether entries are there
is asked of the store. Where it is gone or damaged it begins anew; then files are imported once more, which finds their
entries there, and consent is asked for again. Its bytes count against the folder's budget: room is reserved in the
ledger before it grows. Belongs to the thread of its ledger.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..index import OverBudget
from ..ledger import Ledger
from ..tensors import RECORD_KINDS
from .header import HostileFile, Signature

FILE = "imports.sqlite"
VERSION = 1  # of the tables, and of what is refused: a journal of another version begins anew
PAGE = 4096
#: refusals that are remembered, the newest
REFUSALS = 10_000
_PATIENCE = 10.0
#: times to try to make room
_TRIES = 4
_KEY = 32

_TABLES = (
    "CREATE TABLE sources (id INTEGER PRIMARY KEY, path TEXT NOT NULL UNIQUE)",
    # records: 33 bytes each, the entry's key and the kinds of its records as bits in the order of RECORD_KINDS
    "CREATE TABLE imports ("
    " id INTEGER PRIMARY KEY AUTOINCREMENT, root BLOB NOT NULL, records BLOB NOT NULL, at REAL NOT NULL)",
    "CREATE TABLE files ("
    " source INTEGER NOT NULL, name TEXT NOT NULL, root BLOB NOT NULL, size INTEGER NOT NULL,"
    " mtime_ns INTEGER NOT NULL,"
    " inode INTEGER NOT NULL, digest BLOB NOT NULL, import INTEGER NOT NULL, PRIMARY KEY (source, name, root))"
    " WITHOUT ROWID",
    "CREATE INDEX files_import ON files (import)",
    "CREATE TABLE refusals ("
    " id INTEGER PRIMARY KEY, source INTEGER NOT NULL, name TEXT NOT NULL, root BLOB NOT NULL, size INTEGER NOT NULL,"
    " mtime_ns INTEGER NOT NULL, inode INTEGER NOT NULL, code TEXT NOT NULL, UNIQUE (source, name, root))",
    "CREATE TABLE consents ("
    " source INTEGER NOT NULL, fingerprint BLOB NOT NULL, at REAL NOT NULL, PRIMARY KEY (source, fingerprint))"
    " WITHOUT ROWID",
    "CREATE TABLE trusted ("
    " source INTEGER NOT NULL, name TEXT NOT NULL, digest BLOB NOT NULL, prompt BLOB NOT NULL, at REAL NOT NULL,"
    " PRIMARY KEY (source, name, prompt)) WITHOUT ROWID",
)


class NoRoom(Exception):
    """The journal may not grow: the folder's budget has no room, whatever is given up. ``short``: bytes."""

    def __init__(self, short: int) -> None:
        super().__init__(f"{short:,} bytes over the budget of the cache folder")
        self.short = short


@dataclass(frozen=True)
class FileDigest:
    """A file as it is: XXH3 (128 bits) of its whole content, and its signature, which was the same before and after."""

    signature: Signature
    digest: bytes


def read_digest(path: Path) -> FileDigest:
    """Raises Refused."""
    with HostileFile.open(path, ordered=False) as file:
        return FileDigest(file.signature, bytes.fromhex(file.digest()))


@dataclass(frozen=True)
class Imported:
    """What the journal says of a file. ``records``: key -> kinds of records that were durable when it was written, of
    all that was imported together with it; one object for all of these files, not to be changed."""

    size: int
    mtime_ns: int
    inode: int
    digest: bytes
    records: dict[bytes, frozenset[str]]

    def same(self, signature: Signature) -> bool:
        """Whether nothing about the file, short of its content, says that it is another one."""
        return (self.size, self.mtime_ns, self.inode) == (signature.size, signature.mtime, signature.inode)


class Journal:
    """``ledger`` is that of the store that takes the imports; None: to look only, and where there is no journal it is
    as if there were an empty one. Raises sqlite3.Error, OSError where it can be neither read nor begun anew."""

    def __init__(self, folder: Path, ledger: Ledger | None) -> None:
        self.path = folder / FILE
        self._ledger = ledger
        self._db = self._open()
        self._last: tuple[int, dict[bytes, frozenset[str]]] = (0, {})

    @property
    def writable(self) -> bool:
        """Whether anything can be noted: not if it was opened to look only."""
        return self._ledger is not None

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # consent

    def give_consent(self, source: Path, fingerprint: bytes) -> None:
        """The user has said that the files of ``source`` were made by the weights of ``fingerprint``, in the dtype in
        which they run now. Raises NoRoom, sqlite3.Error."""
        if self.consent(source, fingerprint):
            return
        with self._writing(0, 2):
            values = (self._source(source), fingerprint, time.time())
            self._db.execute("INSERT OR REPLACE INTO consents VALUES (?, ?, ?)", values)

    def consent(self, source: Path, fingerprint: bytes) -> bool:
        """Whether that was ever said."""
        query = "SELECT 1 FROM consents WHERE source = (SELECT id FROM sources WHERE path = ?) AND fingerprint = ?"
        return self._db.execute(query, (_name(source), fingerprint)).fetchone() is not None

    def trust(self, source: Path, name: str, digest: bytes, prompt: bytes) -> None:
        """The user has said that this file was made from a prompt that nothing proves. ``prompt``: SHA-256 of the ids
        as little-endian u32. Raises NoRoom, sqlite3.Error."""
        with self._writing(len(name), 2):
            values = (self._source(source), name, digest, prompt, time.time())
            self._db.execute("INSERT OR REPLACE INTO trusted VALUES (?, ?, ?, ?, ?)", values)

    def trusted(self, source: Path, name: str, digest: bytes, prompt: bytes) -> bool:
        """Whether that was ever said of a file with this content."""
        query = (
            "SELECT 1 FROM trusted WHERE source = (SELECT id FROM sources WHERE path = ?)"
            " AND name = ? AND digest = ? AND prompt = ?"
        )
        return self._db.execute(query, (_name(source), name, digest, prompt)).fetchone() is not None

    # files

    def imported(self, source: Path, name: str, root: bytes) -> Imported | None:
        """What was imported of a file into the key space ``root``."""
        query = (
            "SELECT f.size, f.mtime_ns, f.inode, f.digest, f.import FROM files f"
            " WHERE f.source = (SELECT id FROM sources WHERE path = ?) AND f.name = ? AND f.root = ?"
        )
        row = self._db.execute(query, (_name(source), name, root)).fetchone()
        return None if row is None else Imported(*row[:4], records=self._records(row[4]))

    def _records(self, number: int) -> dict[bytes, frozenset[str]]:
        """Of one import; files of the same get the same object."""
        if self._last[0] != number:
            row = self._db.execute("SELECT records FROM imports WHERE id = ?", (number,)).fetchone()
            self._last = number, _unpack(row[0] if row is not None else b"")
        return self._last[1]

    def note(
        self,
        source: Path,
        root: bytes,
        files: Mapping[str, FileDigest],
        records: Mapping[bytes, frozenset[str]],
    ) -> None:
        """Files of which everything useful is durable now, as ``records``. Raises NoRoom, sqlite3.Error."""
        with self._writing((_KEY + 1) * len(records) + sum(160 + len(name) for name in files), 2 * len(files) + 4):
            where = self._source(source)
            before = {i for name in files for i in self._imports(where, name, root)}
            values = (root, _pack(records), time.time())
            added = self._db.execute("INSERT INTO imports (root, records, at) VALUES (?, ?, ?)", values).lastrowid
            for name, file in files.items():
                s = file.signature
                self._db.execute(
                    "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    (where, name, root, s.size, s.mtime, s.inode, file.digest, added),
                )
                self._db.execute("DELETE FROM refusals WHERE source = ? AND name = ? AND root = ?", (where, name, root))
            self._tidy(before)

    def touch(self, source: Path, name: str, root: bytes, signature: Signature) -> None:
        """The same content under another signature: it was copied, or touched. Raises NoRoom, sqlite3.Error."""
        with self._writing(0, 2):
            self._db.execute(
                "UPDATE files SET size = ?, mtime_ns = ?, inode = ? WHERE source = ? AND name = ? AND root = ?",
                (signature.size, signature.mtime, signature.inode, self._source(source), name, root),
            )

    def digested(self, source: Path, name: str, root: bytes, digest: bytes) -> None:
        """The content of a file that was noted without. Raises NoRoom, sqlite3.Error."""
        with self._writing(len(digest), 2):
            self._db.execute(
                "UPDATE files SET digest = ? WHERE source = ? AND name = ? AND root = ?",
                (digest, self._source(source), name, root),
            )

    def forget(self, source: Path, names: Iterable[str]) -> None:
        """These files are gone. Raises NoRoom, sqlite3.Error."""
        names = list(names)
        with self._writing(0, 4 * len(names)):
            where = self._source(source)
            before = {i for name in names for i in self._imports(where, name)}
            for table in ("files", "refusals"):
                self._db.executemany(
                    f"DELETE FROM {table} WHERE source = ? AND name = ?", [(where, name) for name in names]
                )
            self._tidy(before)

    def names(self, source: Path) -> list[str]:
        """The files of ``source`` that were imported, in order."""
        query = "SELECT DISTINCT name FROM files WHERE source = (SELECT id FROM sources WHERE path = ?) ORDER BY name"
        return [name for (name,) in self._db.execute(query, (_name(source),))]

    def refuse(self, source: Path, name: str, root: bytes, signature: Signature, code: str) -> None:
        """A file that was refused only after much of it had been read. The newest of these are remembered. Raises
        NoRoom, sqlite3.Error."""
        with self._writing(160 + len(name), 6):
            s = signature
            self._db.execute(
                "INSERT OR REPLACE INTO refusals (source, name, root, size, mtime_ns, inode, code)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (self._source(source), name, root, s.size, s.mtime, s.inode, code),
            )
            self._db.execute("DELETE FROM refusals WHERE id <= (SELECT max(id) FROM refusals) - ?", (REFUSALS,))

    def refusal(self, source: Path, name: str, root: bytes, signature: Signature) -> str | None:
        """The code with which a file that still has this signature was refused."""
        query = (
            "SELECT code FROM refusals WHERE source = (SELECT id FROM sources WHERE path = ?) AND name = ? AND root = ?"
            " AND size = ? AND mtime_ns = ? AND inode = ?"
        )
        s = signature
        row = self._db.execute(query, (_name(source), name, root, s.size, s.mtime, s.inode)).fetchone()
        return None if row is None else row[0]

    # the file

    def _open(self) -> sqlite3.Connection:
        if self._ledger is None:
            return self._look()
        if self.path.is_symlink():  # SQLite would write into whatever it leads to
            self.path.unlink()
        try:
            return self._begun()
        except sqlite3.OperationalError as e:
            if getattr(e, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise
        except sqlite3.DatabaseError:
            pass
        for suffix in ("", "-journal"):
            Path(f"{self.path}{suffix}").unlink(missing_ok=True)
        return self._begun()

    def _begun(self) -> sqlite3.Connection:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
        db = sqlite3.connect(self.path, timeout=_PATIENCE, isolation_level=None)
        try:
            if not db.execute("PRAGMA page_count").fetchone()[0]:
                db.execute(f"PRAGMA page_size={PAGE}")
            db.execute("PRAGMA journal_mode=DELETE")
            db.execute("PRAGMA temp_store=MEMORY")
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, VERSION):
                raise sqlite3.DatabaseError(f"the journal of imports has version {version}, not {VERSION}")
            if not version:
                self._db = db
                with self._writing(3 * PAGE * len(_TABLES), 1):
                    if not db.execute("PRAGMA user_version").fetchone()[0]:  # else another process was first
                        for statement in (*_TABLES, f"PRAGMA user_version={VERSION}"):
                            db.execute(statement)
            if (found := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                raise sqlite3.DatabaseError(found)
            return db
        except BaseException:
            db.close()
            raise

    def _look(self) -> sqlite3.Connection:
        """The file opened for reading; an empty one in memory where that cannot be."""
        if self.path.is_file() and not self.path.is_symlink():
            db = sqlite3.connect(f"{self.path.resolve().as_uri()}?mode=ro", uri=True, timeout=_PATIENCE)
            try:
                sound = db.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok"
                if sound and db.execute("PRAGMA user_version").fetchone()[0] == VERSION:
                    return db
            except sqlite3.DatabaseError:
                pass
            db.close()
        db = sqlite3.connect(":memory:", isolation_level=None)
        for statement in _TABLES:
            db.execute(statement)
        return db

    def _source(self, source: Path) -> int:
        name = _name(source)
        self._db.execute("INSERT OR IGNORE INTO sources (path) VALUES (?)", (name,))
        return self._db.execute("SELECT id FROM sources WHERE path = ?", (name,)).fetchone()[0]

    def _imports(self, source: int, name: str, root: bytes | None = None) -> list[int]:
        """The imports that a file belongs to."""
        query = "SELECT import FROM files WHERE source = ? AND name = ? AND (root = ? OR ? IS NULL)"
        return [i for (i,) in self._db.execute(query, (source, name, root, root))]

    def _tidy(self, imports: Iterable[int]) -> None:
        """Within a transaction: forget those of these imports that no file is left of."""
        query = "DELETE FROM imports WHERE id = ?1 AND NOT EXISTS (SELECT 1 FROM files WHERE import = ?1)"
        self._db.executemany(query, [(i,) for i in imports])

    @contextmanager
    def _writing(self, size: int, pages: int) -> Iterator[None]:
        """A transaction that adds at most ``size`` bytes of rows and changes about ``pages`` pages that are there. What
        the file and SQLite's own rollback journal may grow by is reserved before, and counted afterwards. Raises
        NoRoom."""
        assert self._ledger is not None, "opened to look only"
        grow = 3 * (size // PAGE + 1) + 8  # pages are a third full at least, and each tree has its own last one
        have = self._db.execute("PRAGMA page_count").fetchone()[0]
        # SQLite's own journal holds what pages were before, each with 8 bytes, behind a sector
        before = 4096 + (min(pages + 8, have) + 1) * (PAGE + 8)
        with _room(self._ledger, PAGE * grow + before):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                have = self._db.execute("PRAGMA page_count").fetchone()[0]
                self._db.execute(f"PRAGMA max_page_count={have + grow}")  # what was reserved is enough, or nothing is
                yield
                self._db.execute("COMMIT")
            except BaseException as e:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                if getattr(e, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL:
                    raise NoRoom(PAGE * grow) from e
                raise


@contextmanager
def _room(ledger: Ledger, size: int) -> Iterator[None]:
    """Reserve ``size`` bytes for files beside the records while the body runs; then what is there is counted."""
    for tried in range(_TRIES):
        try:
            hold = ledger.reserve(size, (), [])
            break
        except OverBudget as e:
            if tried == _TRIES - 1 or (not ledger.reclaim() and not ledger.make_room(e.short).bytes):
                raise NoRoom(e.short) from e
    else:
        raise AssertionError
    try:
        yield
    finally:
        with ledger.index.transaction(checked=False):
            ledger.count()
            ledger.release(hold)


def _name(source: Path) -> str:
    """A source by where it really is, as text that SQLite takes."""
    return os.fsencode(os.path.realpath(source)).decode("utf-8", "backslashreplace")


def _pack(records: Mapping[bytes, frozenset[str]]) -> bytes:
    return b"".join(
        key + bytes([sum(1 << i for i, kind in enumerate(RECORD_KINDS) if kind in kinds)])
        for key, kinds in records.items()
    )


def _unpack(data: bytes) -> dict[bytes, frozenset[str]]:
    step = _KEY + 1
    return {
        data[i : i + _KEY]: frozenset(kind for b, kind in enumerate(RECORD_KINDS) if data[i + _KEY] >> b & 1)
        for i in range(0, len(data) - len(data) % step, step)
    }
