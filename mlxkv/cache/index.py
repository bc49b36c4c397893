"""The index: a SQLite hint of which entries and records exist. The files are the truth; this can be rebuilt from them.

One ``Index`` belongs to one thread; several processes may have the same file open (WAL). It also holds the ledger of
the folder: what its files weigh (``ledger``), what is reserved or promised (``holds``). A transaction that would charge
more than the smallest budget among those who have the folder open does not commit. How that is used: ``ledger.py``.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .keys import common, digest
from .tables import LOOK_UPS, SUFFIX, TABLES, VERSION, WAITING_ROOM

FILE = "index.sqlite"
PAGE = 8192  # a block's 256 ids fit into a page, twice
_FRAME = PAGE + 24  # a page in the WAL
#: room for small files that are written without asking: the lock, marks, the memo of weight digests
MISC_ROOM = 64 << 10
_NEIGHBOURS = 8
#: seconds a call waits for another's transaction or checkpoint, unless ``wait_at_most`` says otherwise
_PATIENCE = 10.0
_PAUSE = 0.02
#: pages that one entry or record changes at most, on the average of a transaction: a leaf of each tree, some splits
PAGES_A_ROW = 12


class OverBudget(sqlite3.OperationalError):
    """The folder would hold ``short`` bytes more than its budget."""

    def __init__(self, short: int) -> None:
        super().__init__(f"{short:,} bytes over the budget of the cache folder")
        self.short = short


class IndexReplaced(sqlite3.OperationalError):
    """The file is no longer the one that was opened: the folder, or the index in it, was removed or replaced."""


def wal_room(budget: int | None) -> int:
    """Bytes of the budget that are kept for the WAL, which is cut before it has more than a quarter of them."""
    return min(max((budget or 0) // 64, 2 << 20), 32 << 20)


def shm_room(wal: int) -> int:
    """The WAL's shared-memory file: 32 KiB for each 4,062 frames begun."""
    return (1 + wal // _FRAME // 4062) * (32 << 10)


@dataclass(frozen=True)
class Entry:
    """A block or leaf: tokens [start, end) after ``parent``; its rows cover [row_start, end), ``base`` has the rest.

    A leaf whose rows were merged into a full block has none of its own: ``row_start == end``, ``base`` is that block.
    """

    key: bytes
    root: bytes
    parent: bytes
    start: int
    end: int
    row_start: int
    base: bytes | None
    tokens: bytes
    kinds: frozenset[str]

    @property
    def sound(self) -> bool:
        """Whether its fields agree with its key and each other: a damaged row is as good as none."""
        fields = (self.key, self.root, self.parent, self.tokens, self.base or b"")
        return (
            all(isinstance(f, bytes) for f in fields)
            and all(isinstance(n, int) for n in (self.start, self.row_start, self.end))
            and 0 <= self.start <= self.row_start <= self.end
            and len(self.tokens) == 4 * (self.end - self.start) > 0
            and (self.base is None) == (self.row_start == self.start)
            and digest(self.root, self.parent, self.tokens) == self.key
        )


class _Connection(sqlite3.Connection):
    """SQLite quotes damaged names in what it says of them, and Python cannot decode that: it is damage all the same."""

    def execute(self, *args: Any) -> sqlite3.Cursor:
        try:
            return super().execute(*args)
        except UnicodeDecodeError as e:
            error = sqlite3.DatabaseError("the index is damaged: names in it are not text")
            error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise error from e


class Index:
    """``create`` makes folder entries as needed; without it a missing file raises sqlite3.OperationalError."""

    def __init__(self, folder: Path, *, create: bool = True) -> None:
        path = folder / FILE
        if create:
            path.touch(mode=0o600, exist_ok=True)
            self._db = sqlite3.connect(path, timeout=_PATIENCE, isolation_level=None, factory=_Connection)
            if not self._db.execute("PRAGMA page_count").fetchone()[0]:  # else SQLite writes a page for nothing
                self._db.execute(f"PRAGMA page_size={PAGE}")
                self._db.execute("PRAGMA auto_vacuum=INCREMENTAL")
            if (mode := self._db.execute("PRAGMA journal_mode=WAL").fetchone()[0]) != "wal":
                raise sqlite3.OperationalError(f"SQLite can only use journal mode {mode} here, not WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute("PRAGMA checkpoint_fullfsync=ON")
            self._db.execute("PRAGMA cache_spill=OFF")  # what a transaction changes reaches the WAL once
            self._db.execute("PRAGMA temp_store=MEMORY")
            self._db.execute("PRAGMA recursive_triggers=ON")  # REPLACE keeps the ledger, too
            self._create()
        else:
            self._db = self._read_only(f"{path.resolve().as_uri()}?mode=ro", os.access(folder, os.W_OK))
        self._path = path
        self._patience = _PATIENCE
        self._file = _identity(path)

    @staticmethod
    def connect(uri: str) -> sqlite3.Connection:
        """A connection to a file that is there, as SQLite's URI says."""
        return sqlite3.connect(uri, uri=True, timeout=_PATIENCE, factory=_Connection)

    @classmethod
    def _read_only(cls, uri: str, may_log: bool) -> sqlite3.Connection:
        """Where SQLite may not make its log (a folder that is only read), it is told that nobody writes."""
        db = cls.connect(uri)
        if not may_log:
            try:
                db.execute("PRAGMA user_version")
            except sqlite3.OperationalError:
                db.close()
                db = cls.connect(f"{uri}&immutable=1")
        return db

    def _create(self) -> None:
        def version() -> int:
            return self._db.execute("PRAGMA user_version").fetchone()[0]

        if version() == VERSION:
            return
        self._db.execute("BEGIN IMMEDIATE")
        try:
            if version() != VERSION:  # else another process was first
                if version() or self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                    raise sqlite3.DatabaseError(f"the index has version {version()}, not {VERSION}")
                for statement in (*TABLES, *LOOK_UPS, f"PRAGMA user_version={VERSION}"):
                    self._db.execute(statement)
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def close(self) -> None:
        self._db.close()

    def wait_at_most(self, seconds: float) -> None:
        """How long a call may wait for another process's or thread's transaction."""
        self._patience = seconds
        self._db.execute(f"PRAGMA busy_timeout={int(seconds * 1000)}")

    def execute(self, sql: str, values: Iterable[object] = ()) -> sqlite3.Cursor:
        """For the modules that keep other accounts here: ``ledger``, ``eviction``."""
        return self._db.execute(sql, tuple(values))

    @contextmanager
    def transaction(self, *, checked: bool = True) -> Iterator[None]:
        """Everything or nothing; if ``checked``, nothing where the folder would hold more than its budget afterwards.
        May change about ``pages()`` pages. Raises OverBudget, IndexReplaced, sqlite3.Error."""
        self._begin()
        try:
            before = self.charge() if checked else 0
            yield
            if checked and (budget := self.budget()) is not None and (after := self.charge()) > max(before, budget):
                raise OverBudget(after - budget)
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _begin(self) -> None:
        until = time.monotonic() + self._patience
        while True:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                if _identity(self._path) != self._file:
                    raise IndexReplaced(f"{self._path} was removed or replaced while it was in use")
                if _size(f"{self._path}-wal") <= wal_room(self.budget()) // 4:
                    return
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("ROLLBACK")
            self.checkpoint()
            if _size(f"{self._path}-wal"):  # another process is at it, or reads
                if time.monotonic() > until:
                    raise sqlite3.OperationalError("the index's log cannot be cut: another program is reading in it")
                time.sleep(_PAUSE)

    def replaced(self) -> bool:
        """Whether the file is no longer the one that was opened."""
        try:
            return _identity(self._path) != self._file
        except OSError:
            return False  # that cannot be told now

    def checkpoint(self) -> None:
        """Bring the WAL into the file and cut it to nothing, unless somebody reads in it."""
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    def shrink(self) -> None:
        """Give pages that nothing uses back to the disk, if they are many."""
        free = self._db.execute("PRAGMA freelist_count").fetchone()[0]
        if free > 64 and free * 4 > self._db.execute("PRAGMA page_count").fetchone()[0]:
            with self.transaction():
                self._db.execute(f"PRAGMA incremental_vacuum({self.pages() // 8})").fetchall()
            self.checkpoint()

    # the ledger

    def pages(self, budget: int | None = None) -> int:
        """How many pages a transaction may change so that the WAL keeps within its room; ``budget`` where nobody who
        has the folder open has one."""
        held = self.budget()
        return wal_room(budget if held is None else held) * 3 // 4 // _FRAME

    def budget(self) -> int | None:
        """The smallest budget of those who have the folder open, bytes; None: nobody has one."""
        (found,) = self._db.execute("SELECT min(budget) FROM holds").fetchone()
        if found is not None and not isinstance(found, int):
            raise damaged("a budget in its ledger is no number")
        return found

    def charge(self) -> int:
        """What the budget has to cover, bytes: all files, what is reserved, and room for the index to work."""
        query = "SELECT count(*), min(bytes), sum(bytes), (SELECT coalesce(sum(bytes), 0) FROM holds) FROM ledger"
        names, least, files, held = self._db.execute(query).fetchone()
        if names != 4 or not all(isinstance(n, int) for n in (files, held)) or least < 0 or held < 0:
            raise damaged("its ledger makes no sense")
        pages = self._db.execute("PRAGMA page_count").fetchone()[0]
        wal = wal_room(self.budget())
        return files + held + max(PAGE * pages, _size(self._path)) + wal + shm_room(wal) + MISC_ROOM

    def writing(self) -> list[str]:
        """What the names of temporaries begin with whose bytes are reserved."""
        return [begin for (begin,) in self._db.execute("SELECT DISTINCT temporaries FROM holds")]

    def count(self, name: str, size: int) -> None:
        """Set one account of the ledger. Within a transaction."""
        self._db.execute("INSERT OR REPLACE INTO ledger VALUES (?, ?)", (name, size))

    def add(self, name: str, size: int) -> None:
        """Change one account of the ledger. Within a transaction."""
        self._db.execute("UPDATE ledger SET bytes = bytes + ? WHERE name = ?", (size, name))

    # reading

    _ENTRY = (
        "SELECT e.key, e.root, e.parent, e.start, e.end, e.row_start, e.base, e.tokens,"
        " (SELECT group_concat(kind) FROM records r WHERE r.key = e.key) FROM entries e WHERE "
    )

    @staticmethod
    def _sound(row: tuple | None) -> list[Entry]:
        """The row as an entry, if it is a sound one."""
        if row is None:
            return []
        entry = Entry(*row[:8], kinds=frozenset((row[8] or "").split(",")) - {""})
        return [entry] if entry.sound else []

    def entry(self, key: bytes) -> Entry | None:
        return next(iter(self._sound(self._db.execute(self._ENTRY + "e.key = ?", (key,)).fetchone())), None)

    def children(self, parent: bytes, tokens: bytes) -> list[Entry]:
        """Entries that hang on ``parent`` and are a prefix of ``tokens``, and those that share most with it; longest
        first. How many others hang on ``parent`` costs next to nothing: they are sorted, and neighbours share most."""
        out: list[Entry] = []
        after = self._ENTRY + "e.parent = ? AND e.tokens > ? ORDER BY e.tokens LIMIT ?"
        for row in self._db.execute(after, (parent, tokens, _NEIGHBOURS)):
            out += self._sound(row)
        before = self._ENTRY + "e.parent = ? AND e.tokens < ? ORDER BY e.tokens DESC LIMIT 1"
        below, neighbours = tokens + b"\0", 0
        while (row := self._db.execute(before, (parent, below)).fetchone()) is not None:
            found = row[7] if isinstance(row[7], bytes) else b""
            shared = common(found, tokens)
            out += self._sound(row)
            if not shared:  # nor do those before it; that there is one says that something else goes on from here
                break
            if 4 * shared == len(found):  # a prefix: the next one is shorter
                below = tokens[: 4 * (shared - 1)] + b"\0"
            elif neighbours < _NEIGHBOURS:
                below, neighbours = found, neighbours + 1
            else:  # of the others here, only prefixes are of use
                below = tokens[: 4 * shared] + b"\0"
        return sorted(out, key=lambda e: e.end, reverse=True)

    def longer(self, parent: bytes, tokens: bytes) -> list[Entry]:
        """Full blocks that hang on ``parent`` and begin with ``tokens``, at most 8; those with all their rows in one
        place first."""
        found = self._db.execute(
            self._ENTRY + "e.parent = ? AND e.tokens > ? AND e.tokens < ? AND e.row_start < e.end"
            " AND e.end - e.start = (SELECT block FROM roots o WHERE o.root = e.root)"
            " ORDER BY e.base IS NOT NULL LIMIT 8",
            (parent, tokens, tokens + b"\xff" * 8),
        ).fetchall()
        return [e for row in found for e in self._sound(row) if e.tokens.startswith(tokens)]

    def roots(self) -> list[tuple[bytes, str, bytes, str, bytes, int]]:
        """(root, model, fingerprint, compute, layout, block) of every key space."""
        return self._db.execute("SELECT root, model, fingerprint, compute, layout, block FROM roots").fetchall()

    def answer(self, digest: bytes) -> tuple[bytes, int, int | None] | None:
        """(key of the leaf at its end, position of its first token, id of a last token that was not processed)."""
        return self._db.execute("SELECT key, start, last FROM answers WHERE digest = ?", (digest,)).fetchone()

    def used(self) -> float:
        """The moment for what is used now: the clock's, in seconds, but always later than any before, so that the order
        holds where the clock goes back."""
        last = self._db.execute("SELECT max(used) FROM entries").fetchone()[0]
        return max(time.time(), last + 1e-6) if isinstance(last, float) else time.time()

    def last_used(self, key: bytes) -> float | None:
        """When an entry was used last, seconds; None: there is none."""
        row = self._db.execute("SELECT used FROM entries WHERE key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    def names(self) -> dict[tuple[bytes, str], int]:
        return {(key, kind): size for key, kind, size in self._db.execute("SELECT key, kind, bytes FROM records")}

    def file_names(self, begin: str = "") -> set[str]:
        """The names of the files that should be there, or in one subfolder of ``records/``; those that wait among
        them."""
        low = bytes.fromhex(begin)
        high = bytes((low[0] + 1,)) if low and low[0] < 255 else b"\xff" * 64
        # one long text a folder: a third of the time of a row for each of 100,000 names
        name = f"hex(key) || '.' || kind || '{SUFFIX}'"
        query = f"SELECT lower(group_concat({name}, char(10))) FROM records WHERE key >= ? AND key < ?"
        (names,) = self._db.execute(query, (low, high)).fetchone()
        out = set(names.split("\n")) if names else set()
        query = "SELECT group_concat(name, char(10)) FROM waiting WHERE name >= ? AND name < ?"
        (names,) = self._db.execute(query, (begin, f"{begin}g")).fetchone()
        return out.union(names.split("\n")) if names else out

    # files that wait to be taken in

    def waiting(self) -> int:
        """How many records are known by name, size and age alone."""
        return self._db.execute("SELECT count(*) FROM waiting").fetchone()[0]

    def any_waiting(self) -> bool:
        return self._db.execute("SELECT EXISTS (SELECT 1 FROM waiting)").fetchone()[0] != 0

    def all_waiting(self, *, by: str = "name") -> list[tuple[str, float]]:
        """(name, when it was written) of all that wait, in the order of their names, or oldest first (``written``)."""
        return self._db.execute(f"SELECT name, written FROM waiting ORDER BY {by}").fetchall()

    def waiting_of(self, key: bytes) -> list[tuple[str, float]]:
        """What waits of one entry."""
        name = key.hex()
        query = "SELECT name, written FROM waiting WHERE name >= ? AND name < ?"
        return self._db.execute(query, (f"{name}.", f"{name}/")).fetchall()

    def waits(self, name: str) -> bool:
        return self._db.execute("SELECT EXISTS (SELECT 1 FROM waiting WHERE name = ?)", (name,)).fetchone()[0] != 0

    def let_wait(self, files: Iterable[tuple[str, int, float]]) -> None:
        """Note (name, bytes, when it was written) of files that have no row. Within a transaction."""
        for name, size, written in files:
            stem, _, kind = name.removesuffix(SUFFIX).partition(".")
            if self._db.execute(
                "SELECT 1 FROM records WHERE key = ? AND kind = ?", (bytes.fromhex(stem), kind)
            ).fetchone():
                continue  # entered meanwhile
            self._db.execute("INSERT OR IGNORE INTO waiting VALUES (?, ?, ?)", (name, size, written))

    def stop_waiting(self, name: str) -> bool:
        """Forget a file that waits; False if it did not. Within a transaction."""
        return self._db.execute("DELETE FROM waiting WHERE name = ?", (name,)).rowcount > 0

    def recount(self, *, inside: int, outside: int) -> None:
        """Set all accounts of the ledger: from the rows, and to what was counted elsewhere. Within a transaction."""
        (records,) = self._db.execute("SELECT coalesce(sum(bytes), 0) FROM records").fetchone()
        query = f"SELECT coalesce(sum(bytes + {WAITING_ROOM}), 0) FROM waiting"
        (waiting,) = self._db.execute(query).fetchone()
        for name, size in (("records", records), ("waiting", waiting), ("inside", inside), ("outside", outside)):
            self.count(name, size)

    def records_of(self, key: bytes) -> list[tuple[str, int]]:
        """(kind, bytes) of an entry's records."""
        return self._db.execute("SELECT kind, bytes FROM records WHERE key = ?", (key,)).fetchall()

    def totals(self) -> list[tuple[str, int, int, int]]:
        """(model, entries, records, record bytes) a model name."""
        return self._db.execute(
            "SELECT coalesce(o.model, ''), count(DISTINCT e.key), count(r.kind), coalesce(sum(r.bytes), 0)"
            " FROM entries e LEFT JOIN records r ON r.key = e.key LEFT JOIN roots o ON o.root = e.root"
            " GROUP BY 1 ORDER BY 1"
        ).fetchall()

    # writing

    def add_root(self, root: bytes, model: str, fingerprint: bytes, compute: str, layout: bytes, block: int) -> None:
        model = model.encode("utf-8", "replace").decode()  # a path may hold what UTF-8 cannot
        self._db.execute(
            "INSERT OR REPLACE INTO roots VALUES (?, ?, ?, ?, ?, ?)",
            (root, model, fingerprint, compute, layout, block),
        )

    def add_entry(self, entry: Entry, sizes: dict[str, int], used: float | None = None) -> None:
        """Insert or complete an entry. A new rows or window record also brings its own row_start and base."""
        rows = ", row_start = excluded.row_start, base = excluded.base" if sizes.keys() & {"rows", "window"} else ""
        self._db.execute(
            "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET"
            " root = excluded.root, parent = excluded.parent, start = excluded.start, end = excluded.end,"
            f" tokens = excluded.tokens, used = excluded.used{rows}",
            (entry.key, entry.root, entry.parent, entry.start, entry.end, entry.row_start, entry.base, entry.tokens,
             self.used() if used is None else used),
        )  # fmt: skip
        for kind, size in sizes.items():
            self._db.execute(
                "INSERT INTO records VALUES (?, ?, ?) ON CONFLICT (key, kind) DO UPDATE SET bytes = excluded.bytes",
                (entry.key, kind, size),
            )

    def merged(self, key: bytes, into: bytes) -> None:
        """The rows of a leaf are to be found in a full block. Within a transaction."""
        self._db.execute("UPDATE entries SET row_start = end, base = ? WHERE key = ?", (into, key))

    def without_rows(self) -> list[bytes]:
        """Entries that have a state, but not the rows and windows that others of their key space have."""
        found = self._db.execute(
            "SELECT e.key FROM entries e JOIN records s ON s.key = e.key AND s.kind = 'state' WHERE e.row_start < e.end"
            " AND (NOT EXISTS (SELECT 1 FROM records r WHERE r.key = e.key AND r.kind = 'rows')"
            " OR (NOT EXISTS (SELECT 1 FROM records r WHERE r.key = e.key AND r.kind = 'window') AND e.root IN"
            " (SELECT DISTINCT w.root FROM records r JOIN entries w ON w.key = r.key WHERE r.kind = 'window')))"
        )
        return [key for (key,) in found]

    def add_answer(self, digest: bytes, key: bytes, start: int, last: int | None) -> None:
        self._db.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?)", (digest, key, start, last))

    def drop_record(self, key: bytes, kind: str) -> None:
        """Forget a record; an entry without records is forgotten too, with the answers that end at it."""
        self._db.execute("DELETE FROM records WHERE key = ? AND kind = ?", (key, kind))
        gone = self._db.execute(
            "DELETE FROM entries WHERE key = ? AND NOT EXISTS (SELECT 1 FROM records r WHERE r.key = entries.key)",
            (key,),
        )
        if gone.rowcount:
            self._db.execute("DELETE FROM answers WHERE key = ?", (key,))

    def touch(self, keys: Iterable[bytes]) -> None:
        """Note that entries were used now."""
        with self.transaction():
            now = self.used()
            self._db.executemany("UPDATE entries SET used = ? WHERE key = ?", [(now, key) for key in keys])

    def freeze(self, on: bool = True) -> None:
        """While it is on, whatever would write through this connection raises sqlite3.OperationalError."""
        self._db.execute(f"PRAGMA query_only={int(on)}")


def damaged(why: str) -> sqlite3.DatabaseError:
    """An error as SQLite raises it for a file that is no longer sound."""
    error = sqlite3.DatabaseError(why)
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        info = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return info.st_dev, info.st_ino


def _size(path: str | Path) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
