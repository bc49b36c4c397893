"""The index: a SQLite hint of which entries and records exist. The files are the truth; this can be rebuilt from them.

One ``Index`` belongs to one thread; several processes may have the same file open (WAL).
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .keys import common, digest

FILE = "index.sqlite"
VERSION = 2  # of the tables; an index of another version is built again from the files
_NEIGHBOURS = 8

_SCHEMA = """
CREATE TABLE IF NOT EXISTS roots (
  root BLOB PRIMARY KEY, model TEXT, fingerprint BLOB, compute TEXT, layout BLOB, block INTEGER) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS entries (
  key BLOB PRIMARY KEY, root BLOB NOT NULL, parent BLOB NOT NULL, start INTEGER NOT NULL, end INTEGER NOT NULL,
  row_start INTEGER NOT NULL, base BLOB, tokens BLOB NOT NULL, used REAL NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS entries_prefix ON entries (parent, tokens);
CREATE TABLE IF NOT EXISTS records (
  key BLOB NOT NULL, kind TEXT NOT NULL, bytes INTEGER NOT NULL, PRIMARY KEY (key, kind)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS answers (
  digest BLOB PRIMARY KEY, key BLOB NOT NULL, start INTEGER NOT NULL, last INTEGER) WITHOUT ROWID;
"""


@dataclass(frozen=True)
class Entry:
    """A block or leaf: tokens [start, end) after ``parent``; its rows cover [row_start, end), ``base`` has the rest."""

    key: bytes
    root: bytes
    parent: bytes
    start: int
    end: int
    row_start: int
    base: bytes | None
    tokens: bytes
    kinds: frozenset[str]


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
            self._db = sqlite3.connect(path, timeout=10.0, isolation_level=None, factory=_Connection)
            self._db.execute("PRAGMA page_size=8192")  # a block's 256 ids fit into a page, twice
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute("PRAGMA checkpoint_fullfsync=ON")
            self._create()
        else:
            self._db = sqlite3.connect(
                f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=10.0, factory=_Connection
            )

    def _create(self) -> None:
        def version() -> int:
            return self._db.execute("PRAGMA user_version").fetchone()[0]

        if version() == VERSION:
            return
        with self.transaction():
            if version() == VERSION:
                return  # another process was first
            if version() or self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise sqlite3.DatabaseError(f"the index has version {version()}, not {VERSION}")
            for statement in filter(str.strip, _SCHEMA.split(";")):
                self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version={VERSION}")

    def close(self) -> None:
        self._db.close()

    def wait_at_most(self, seconds: float) -> None:
        """How long a call may wait for another process's or thread's transaction."""
        self._db.execute(f"PRAGMA busy_timeout={int(seconds * 1000)}")

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    # reading

    _ENTRY = (
        "SELECT e.key, e.root, e.parent, e.start, e.end, e.row_start, e.base, e.tokens,"
        " (SELECT group_concat(kind) FROM records r WHERE r.key = e.key) FROM entries e WHERE "
    )

    @staticmethod
    def _sound(row: tuple | None) -> list[Entry]:
        """The row as an entry, if its fields agree with its key and each other: a damaged row is as good as none."""
        if row is None:
            return []
        entry = Entry(*row[:8], kinds=frozenset((row[8] or "").split(",")) - {""})
        fields = (entry.key, entry.root, entry.parent, entry.tokens, entry.base or b"")
        sound = (
            all(isinstance(f, bytes) for f in fields)
            and all(isinstance(n, int) for n in (entry.start, entry.row_start, entry.end))
            and 0 <= entry.start <= entry.row_start <= entry.end
            and len(entry.tokens) == 4 * (entry.end - entry.start) > 0
            and (entry.base is None) == (entry.row_start == entry.start)
            and digest(entry.root, entry.parent, entry.tokens) == entry.key
        )
        return [entry] if sound else []

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
            if not shared:
                break
            out += self._sound(row)
            if 4 * shared == len(found):  # a prefix: the next one is shorter
                below = tokens[: 4 * (shared - 1)] + b"\0"
            elif neighbours < _NEIGHBOURS:
                below, neighbours = found, neighbours + 1
            else:  # of the others here, only prefixes are of use
                below = tokens[: 4 * shared] + b"\0"
        return sorted(out, key=lambda e: e.end, reverse=True)

    def roots(self) -> list[tuple[bytes, str, bytes, str, bytes, int]]:
        """(root, model, fingerprint, compute, layout, block) of every key space."""
        return self._db.execute("SELECT root, model, fingerprint, compute, layout, block FROM roots").fetchall()

    def answer(self, digest: bytes) -> tuple[bytes, int, int | None] | None:
        """(key of the leaf at its end, position of its first token, id of a last token that was not processed)."""
        return self._db.execute("SELECT key, start, last FROM answers WHERE digest = ?", (digest,)).fetchone()

    def names(self) -> dict[tuple[bytes, str], int]:
        return {(key, kind): size for key, kind, size in self._db.execute("SELECT key, kind, bytes FROM records")}

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
        self._db.execute(
            "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET"
            " root = excluded.root, parent = excluded.parent, start = excluded.start, end = excluded.end,"
            " tokens = excluded.tokens",
            (entry.key, entry.root, entry.parent, entry.start, entry.end, entry.row_start, entry.base, entry.tokens,
             time.time() if used is None else used),
        )  # fmt: skip
        if sizes.keys() & {"rows", "window"}:
            self._db.execute(
                "UPDATE entries SET row_start = ?, base = ? WHERE key = ?", (entry.row_start, entry.base, entry.key)
            )
        for kind, size in sizes.items():
            self._db.execute("INSERT OR REPLACE INTO records VALUES (?, ?, ?)", (entry.key, kind, size))

    def add_answer(self, digest: bytes, key: bytes, start: int, last: int | None) -> None:
        self._db.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?)", (digest, key, start, last))

    def drop_record(self, key: bytes, kind: str) -> None:
        """Forget a record; an entry without records is forgotten too."""
        self._db.execute("DELETE FROM records WHERE key = ? AND kind = ?", (key, kind))
        self._db.execute(
            "DELETE FROM entries WHERE key = ? AND NOT EXISTS (SELECT 1 FROM records r WHERE r.key = entries.key)",
            (key,),
        )

    def touch(self, keys: Iterable[bytes]) -> None:
        now = time.time()
        with self.transaction():
            self._db.executemany("UPDATE entries SET used = ? WHERE key = ?", [(now, key) for key in keys])
