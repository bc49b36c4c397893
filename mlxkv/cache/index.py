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

FILE = "index.sqlite"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS roots (
  root BLOB PRIMARY KEY, model TEXT, fingerprint BLOB, compute TEXT, layout BLOB) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS entries (
  key BLOB PRIMARY KEY, root BLOB NOT NULL, parent BLOB NOT NULL, start INTEGER NOT NULL, end INTEGER NOT NULL,
  row_start INTEGER NOT NULL, base BLOB, tokens BLOB NOT NULL, used REAL NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS entries_parent ON entries (parent);
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


class Index:
    """``create`` makes folder entries as needed; without it a missing file raises sqlite3.OperationalError."""

    def __init__(self, folder: Path, *, create: bool = True) -> None:
        path = folder / FILE
        if create:
            path.touch(mode=0o600, exist_ok=True)
            self._db = sqlite3.connect(path, timeout=10.0, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute("PRAGMA checkpoint_fullfsync=ON")
            self._db.executescript(_SCHEMA)
        else:
            self._db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=10.0)

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    # reading

    _ENTRY = (
        "SELECT e.key, e.root, e.parent, e.start, e.end, e.row_start, e.base, e.tokens,"
        " (SELECT group_concat(kind) FROM records r WHERE r.key = e.key) FROM entries e WHERE "
    )

    @staticmethod
    def _entry(row: tuple) -> Entry:
        return Entry(*row[:8], kinds=frozenset((row[8] or "").split(",")) - {""})

    def entry(self, key: bytes) -> Entry | None:
        row = self._db.execute(self._ENTRY + "e.key = ?", (key,)).fetchone()
        return None if row is None else self._entry(row)

    def children(self, parent: bytes) -> list[Entry]:
        """Entries that hang on ``parent``, longest first."""
        rows = self._db.execute(self._ENTRY + "e.parent = ? ORDER BY e.end DESC", (parent,))
        return [self._entry(row) for row in rows]

    def roots(self) -> list[tuple[bytes, str, bytes, str, bytes]]:
        """(root, model, fingerprint, compute, layout) of every key space."""
        return self._db.execute("SELECT root, model, fingerprint, compute, layout FROM roots").fetchall()

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

    def add_root(self, root: bytes, model: str, fingerprint: bytes, compute: str, layout: bytes) -> None:
        self._db.execute(
            "INSERT OR IGNORE INTO roots VALUES (?, ?, ?, ?, ?)", (root, model, fingerprint, compute, layout)
        )

    def add_entry(self, entry: Entry, sizes: dict[str, int], used: float | None = None) -> None:
        """Insert or complete an entry. A new rows or window record also brings its own row_start and base."""
        self._db.execute(
            "INSERT OR IGNORE INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
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
        self._db.executemany("UPDATE entries SET used = ? WHERE key = ?", [(now, key) for key in keys])
