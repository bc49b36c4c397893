"""The catalogue: what is stored in a cache folder, what hangs on what, and what may be removed first. No MLX.

An entry *hangs on* its parent (the full block before it) and on its base (what has the rows before its own, or, for a
leaf that was merged, all of them). An entry on which nothing hangs is a *tip*.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import MlxkvError
from .adoption import Progress, take_in_all
from .folder import CacheFolder, FolderRefused
from .index import FILE, Index
from .lock import FolderLock, LockRefused
from .opening import open_index
from .tables import VERSION
from .tensors import RECORD_KINDS


class CacheError(MlxkvError):
    """A cache folder that cannot be looked at, or a key that names no entry or several."""

    exit_code = 2
    status = 400
    type = "invalid_request_error"
    code = "cache_error"


@dataclass(frozen=True)
class Item:
    """A row of the index without its tokens. ``sizes``: record kind -> bytes. ``used``: seconds since the epoch."""

    key: bytes
    root: bytes
    parent: bytes
    base: bytes | None
    start: int
    end: int
    row_start: int
    used: float
    sizes: dict[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.sizes.values())

    @property
    def merged(self) -> bool:
        """A leaf whose rows are in a full block, its base."""
        return self.row_start == self.end

    @property
    def hangs_on(self) -> tuple[bytes, ...]:
        return (self.parent, self.base) if self.base else (self.parent,)


@dataclass(frozen=True)
class Root:
    """A key space: one model's weights under one compute identity, layout and block size."""

    key: bytes
    model: str
    fingerprint: bytes
    compute: str
    layout: bytes
    block: int


class Catalogue(Index):
    """The index, with the questions that people ask of it."""

    def items(self) -> list[Item]:
        """Every entry; a damaged row is passed over."""
        rows = self._db.execute(
            "SELECT e.key, e.root, e.parent, e.base, e.start, e.end, e.row_start, e.used,"
            " group_concat(r.kind || ':' || r.bytes) FROM entries e LEFT JOIN records r ON r.key = e.key GROUP BY e.key"
        )
        out = []
        for *fields, records in rows:
            key, root, parent, base, start, end, row_start, used = fields
            sound = (
                all(isinstance(f, bytes) for f in (key, root, parent, base or b""))
                and all(isinstance(n, int) for n in (start, end, row_start))
                and isinstance(used, (int, float))
            )
            if sound:
                pairs = [pair.split(":") for pair in (records or "").split(",") if pair]
                out.append(Item(*fields, sizes={kind: int(size) for kind, size in pairs}))
        return out

    def version(self) -> int:
        """Of the tables; 0 before they are made."""
        return self._db.execute("PRAGMA user_version").fetchone()[0]

    def check(self) -> None:
        """Raises sqlite3.DatabaseError if the file is damaged."""
        if (found := self._db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(found)

    def spaces(self) -> dict[bytes, Root]:
        return {row[0]: Root(row[0], row[1] or "", *row[2:]) for row in self.roots()}

    def beginning_with(self, prefix: str, limit: int) -> list[bytes]:
        """Keys whose hex form begins with ``prefix``, at most ``limit`` of them."""
        low, high = bytes.fromhex(prefix.ljust(64, "0")), bytes.fromhex(prefix.ljust(64, "f"))
        found = self._db.execute("SELECT key FROM entries WHERE key BETWEEN ? AND ? LIMIT ?", (low, high, limit))
        return [key for (key,) in found]

    def answers_at(self, key: bytes) -> list[int]:
        """Where the answers begin (token position) that end with this entry."""
        found = self._db.execute("SELECT start FROM answers WHERE key = ? ORDER BY start", (key,))
        return [start for (start,) in found]

    def grown(self, item: Item) -> bool:
        """Whether anything hangs on an entry."""
        # an entry and its base have the same parent, for which there is an index
        found = "SELECT 1 FROM entries WHERE parent = ? OR (parent = ? AND base = ?) LIMIT 1"
        return self._db.execute(found, (item.key, item.parent, item.key)).fetchone() is not None

    def settle(self) -> None:
        """Give back what the file no longer needs, bring what was written into it, and cut the log, as far as other
        processes let it."""
        self.shrink()
        self.checkpoint()

    def forget_leftovers(self) -> None:
        """Drop answers and key spaces of which no entry is left."""
        self._db.execute("DELETE FROM answers WHERE key NOT IN (SELECT key FROM entries)")
        self._db.execute("DELETE FROM roots WHERE root NOT IN (SELECT root FROM entries)")


@contextmanager
def look(path: Path) -> Iterator[Catalogue | None]:
    """The catalogue of a folder, opened for reading alone; None where nothing has been stored yet. Raises CacheError,
    also for what SQLite raises while it is used."""
    index = None
    try:
        if holds_something(path):
            index = Catalogue(path, create=False)
            version = index.version()
            if version == 0 and not any(CacheFolder(path).scan()):
                index.close()
                index = None  # another process is just creating it
            elif version != VERSION:
                raise sqlite3.DatabaseError(f"it has version {version}, not {VERSION}")
        yield index
    except sqlite3.Error as error:
        raise _unreadable(path, error) from error
    finally:
        if index is not None:
            index.close()


@contextmanager
def take(path: Path, progress: Progress | None = None) -> Iterator[Catalogue | None]:
    """The catalogue of a folder, in step with its files and opened for writing; None where nothing has been stored yet.
    ``progress`` is told (records done, of how many) while the index is built again.

    Raises CacheError, also for what SQLite and the file system raise while it is used.
    """
    index = lock = None
    try:
        if holds_something(path):
            folder = CacheFolder(path)
            folder.prepare(allow_unprotected=True)
            lock = FolderLock(path)
            open_index(folder, lock, progress=progress).close()  # as a run opens it: what is damaged is built again
            lock.share()
            index = Catalogue(path)
        yield index
    except (FolderRefused, LockRefused) as error:
        raise CacheError(str(error)) from error
    except sqlite3.Error as error:
        raise _unreadable(path, error) from error
    except BrokenPipeError:
        raise  # stdout, not the folder
    except OSError as error:
        raise CacheError(f"The cache folder {path} cannot be changed: {error}.", "Check whose it is.") from error
    finally:
        if index is not None:
            index.close()
        if lock is not None:
            lock.close()


def complete(path: Path, progress: Callable[[], AbstractContextManager[Progress]]) -> None:
    """Take into the index what a store that was opened here left waiting, with ``progress()`` if there is any. Where
    that cannot be done, the index stays as it is; whoever looks at it says what is wrong with it. May raise what
    ``progress`` raises to stop."""
    waits = False
    with suppress(CacheError), look(path) as index:
        waits = index is not None and index.any_waiting()
    if not waits:
        return
    with suppress(LockRefused, OSError, sqlite3.Error):
        lock = FolderLock(path)
        try:
            lock.share()
            writing = Index(path)
            try:
                with progress() as tell:
                    take_in_all(CacheFolder(path), writing, tell)
            finally:
                writing.close()
        finally:
            lock.close()


def holds_something(path: Path) -> bool:
    """Whether a store has been here. Raises CacheError."""
    try:
        with os.scandir(path) as found:
            names = {item.name for item in found}
        return FILE in names or ("records" in names and any(CacheFolder(path).scan()))
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        raise CacheError(f"{path} is a file, not a cache folder.", "Choose a folder with --cache-dir.") from None
    except OSError as error:
        raise CacheError(
            f"The cache folder {path} cannot be read: {error.strerror}.", "Check whose it is and its mode."
        ) from None


def _unreadable(path: Path, why: object) -> CacheError:
    return CacheError(
        f"The index of {path} cannot be used: {why}.",
        "If it is damaged, or of another version, the next run builds it again from the records; so do: mlxkv cache "
        "upgrade, mlxkv cache verify --repair",
    )


def find(path: Path, index: Catalogue | None, wanted: str) -> bytes:
    """The key that is, or alone begins with, ``wanted`` (hex). Raises CacheError."""
    prefix = wanted.lower().strip()
    if not re.fullmatch(r"[0-9a-f]{1,64}", prefix):
        raise CacheError(f"{wanted!r} is no key.", "A key is up to 64 hex digits; see: mlxkv cache ls")
    if index is None:
        raise CacheError(f"Nothing is stored in {path} yet, so there is no entry {wanted!r}.", "See: mlxkv cache dir")
    found = index.beginning_with(prefix, 5)
    if not found:
        raise CacheError(f"No entry's key begins with {wanted!r}.", "See them with: mlxkv cache ls --all")
    if len(found) > 1:
        some = ", ".join(key.hex()[:16] for key in found[:4]) + (", …" if len(found) > 4 else "")
        raise CacheError(f"The keys of several entries begin with {wanted!r}: {some}", "Give more digits.")
    return found[0]


class Forest:
    """All entries of a folder and what hangs on what, as it was when it was read."""

    def __init__(self, items: Iterable[Item]) -> None:
        self.items = {item.key: item for item in items}
        self._hanging: dict[bytes, list[Item]] = {}
        self._kinds: dict[bytes, set[str]] = {}
        for item in self.items.values():
            for key in item.hangs_on:
                self._hanging.setdefault(key, []).append(item)
            self._kinds.setdefault(item.root, {"rows"}).update(item.sizes)

    def hanging(self, key: bytes) -> list[Item]:
        """What hangs directly on an entry."""
        return self._hanging.get(key, [])

    def tips(self) -> list[Item]:
        return [item for item in self.items.values() if not self.hanging(item.key)]

    def is_end(self, item: Item) -> bool:
        """Whether nothing that was stored goes on from here: leaves that were merged into a block do not."""
        return not item.merged and all(other.merged for other in self.hanging(item.key))

    def ends(self) -> list[Item]:
        """The ends of conversations, as far as they are stored."""
        return [item for item in self.items.values() if self.is_end(item)]

    def kinds(self, root: bytes) -> tuple[str, ...]:
        """The record kinds that entries of this key space have, and so the kinds that their layout calls for."""
        return tuple(kind for kind in RECORD_KINDS if kind in self._kinds.get(root, ()))

    def chain(self, item: Item) -> tuple[list[Item], str | None]:
        """The entries whose rows a restore at the end of ``item`` reads, first tokens first, and, where a link of the
        chain is missing, which one (in words; the list begins behind it)."""
        need = [kind for kind in self.kinds(item.root) if kind != "state"]
        out: list[Item] = []
        seen: set[bytes] = set()
        at, upto = item, item.end
        while at.key not in seen:
            seen.add(at.key)
            if at.row_start < upto:
                if lacking := [kind for kind in need if kind not in at.sizes]:
                    return out[::-1], f"the {' and '.join(lacking)} of {_short(at.key)} are gone"
                out.append(at)
                upto = at.row_start
            if at.base is not None and upto > at.start:
                before = self.items.get(at.base)
                if before is None or (before.parent, before.start) != (at.parent, at.start) or before.end < upto:
                    return out[::-1], f"{_short(at.base)}, which has the rows before {upto:,}, is gone"
            elif at.parent == item.root:
                return out[::-1], None if at.start == 0 == at.row_start else f"nothing is stored before {at.start:,}"
            else:
                before = self.items.get(at.parent)
                if before is None or before.end != at.start:
                    return out[::-1], f"{_short(at.parent)}, which has the tokens before {at.start:,}, is gone"
            at = before
        return out[::-1], "the index is damaged"

    def stands(self, item: Item) -> tuple[str | None, str]:
        """Whether a restore could stand at the end of ``item``: a reason of ``lookup.REASONS`` why not (None if it
        could), and the details in words. Says nothing of damage, which only reading the records shows."""
        _, missing = self.chain(item)
        if missing:
            return "evicted", missing
        if "state" in self.kinds(item.root) and "state" not in item.sizes:
            return "no_state", "this layout calls for a state record, which is not here"
        return None, ""

    def above(self, keys: Collection[bytes]) -> list[Item]:
        """These entries and all that hang on them, in the order in which they may be removed."""
        todo, found = [self.items[key] for key in keys], {}
        while todo:
            item = todo.pop()
            if item.key not in found:
                found[item.key] = item
                todo += self.hanging(item.key)
        return removal_order(found.values())


def removal_order(items: Iterable[Item]) -> list[Item]:
    """Children before parents, and within a block what hangs on others before those."""
    known = {item.key: item for item in items}

    def depth(item: Item) -> int:
        """How many others of the same block an entry hangs on."""
        steps, seen = 0, {item.key}
        while item.base in known and item.base not in seen:
            item = known[item.base]
            seen.add(item.key)
            steps += 1
        return steps

    return sorted(known.values(), key=lambda item: (-item.start, -depth(item), item.used))


def _short(key: bytes) -> str:
    return key.hex()[:12]
