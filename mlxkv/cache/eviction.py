"""Eviction: what is given up when space is short. The least recently used first, the outermost first.

The unit is one entry's state, or its rows and windows together. A state holds up nothing. Rows hold up the entry's own
state, the entries whose parent it is, and the deltas whose base it is; they go once nothing is left that hangs on them.
A chain counts as used when its last entry was: what an entry hangs on is never older than the entry itself.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import dataclass, field

from .folder import CacheFolder
from .index import PAGES_A_ROW, Index

Progress = Callable[[int, int], None]

#: entries that could lose something, least recently used first: (…, what hangs on it, its records)
_OLDEST = """
SELECT key, used, held, state, rest FROM (
  SELECT e.key, e.used,
    EXISTS (SELECT 1 FROM entries c WHERE c.parent = e.key) OR EXISTS (SELECT 1 FROM entries c WHERE c.base = e.key)
      AS held,
    (SELECT r.bytes FROM records r WHERE r.key = e.key AND r.kind = 'state') AS state,
    (SELECT coalesce(sum(r.bytes), 0) FROM records r WHERE r.key = e.key AND r.kind <> 'state') AS rest
  FROM entries e {where} ORDER BY e.used)
WHERE state IS NOT NULL OR NOT held
"""


@dataclass(frozen=True)
class Evicted:
    """How many records went, and their bytes."""

    records: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Unit:
    """An entry's state, or the rest of it."""

    key: bytes
    state: bool
    bytes: int
    used: float


def evict(
    folder: CacheFolder,
    index: Index,
    target_bytes: int,
    *,
    pinned: Collection[bytes] = (),
    progress: Progress | None = None,
) -> Evicted:
    """Evict until everything in the folder weighs at most ``target_bytes``, or nothing is left that may go.

    Safe while other processes use the folder: to them a file that went is a miss. ``pinned``: keys that must stay, and
    with them what they hang on. ``progress`` is told (bytes done, of how many) now and then. Raises sqlite3.Error.
    """
    return free(folder, index, folder.size() - target_bytes, pinned=pinned, progress=progress)


def free(
    folder: CacheFolder,
    index: Index,
    need: int,
    *,
    pinned: Collection[bytes] = (),
    most: int | None = None,
    incoming: tuple[bytes, int] = (b"", 0),
    progress: Progress | None = None,
) -> Evicted:
    """Evict records of ``need`` bytes or more. A model with more than ``most`` bytes gives first, if others have any
    (``incoming``: a root, and the bytes that it is about to store)."""
    done = Evicted()
    for root in _over(index, most, incoming) if most is not None and need > 0 else ():
        done = _apply(
            folder, index, _Choice(index, pinned, root.roots).take(min(need, root.excess)), done, need, progress
        )
    if done.bytes < need:
        done = _apply(folder, index, _Choice(index, pinned).take(need - done.bytes), done, need, progress)
    if done.bytes < need:  # rows of an index that was damaged: files that no look-up can find
        done = _stray(folder, index, done)
    return done


@dataclass(frozen=True)
class _Over:
    roots: tuple[bytes, ...]
    excess: int


def _over(index: Index, most: int, incoming: tuple[bytes, int]) -> list[_Over]:
    """Models that have more than ``most``, while others have something."""
    if index.execute("SELECT count(DISTINCT fingerprint) FROM roots").fetchone()[0] < 2:
        return []
    bytes_of: dict[bytes, int] = {}
    roots: dict[bytes, list[bytes]] = {}
    for root, fingerprint, size in index.execute(
        "SELECT o.root, o.fingerprint, (SELECT coalesce(sum(r.bytes), 0) FROM entries e JOIN records r ON r.key = e.key"
        " WHERE e.root = o.root) FROM roots o"
    ):
        roots.setdefault(fingerprint, []).append(root)
        bytes_of[fingerprint] = bytes_of.get(fingerprint, 0) + size + (incoming[1] if root == incoming[0] else 0)
    if sum(size > 0 for size in bytes_of.values()) < 2:
        return []
    return [_Over(tuple(roots[f]), size - most) for f, size in bytes_of.items() if size > most]


@dataclass
class _Choice:
    """Chooses what goes, from the index as it is now, without changing it."""

    index: Index
    pinned: Collection[bytes]
    roots: tuple[bytes, ...] = ()
    _left: dict[bytes, int] = field(default_factory=dict)
    _ready: list[tuple[float, int, Unit]] = field(default_factory=list)
    _number: Iterator[int] = field(default_factory=itertools.count)

    def take(self, need: int) -> list[Unit]:
        """In an order in which nothing is left hanging on what is gone."""
        out: list[Unit] = []
        with contextlib.closing(self._stream()) as stream:
            upcoming = next(stream, None)
            while need > 0 and (upcoming is not None or self._ready):
                if upcoming is not None and (not self._ready or upcoming.used < self._ready[0][0]):
                    unit, upcoming = upcoming, next(stream, None)
                else:
                    unit = heapq.heappop(self._ready)[2]
                out.append(unit)
                need -= unit.bytes
                if unit.state:
                    self._let_go(unit.key, unit.used)
                    continue
                row = self.index.execute("SELECT parent, base FROM entries WHERE key = ?", (unit.key,)).fetchone()
                for key in {*row} - {None} if row else ():
                    self._let_go(key, unit.used)
        return out

    def _stream(self) -> Generator[Unit, None, None]:
        where = f"WHERE e.root IN ({','.join('?' * len(self.roots))})" if self.roots else ""
        rows = self.index.execute(_OLDEST.format(where=where), self.roots)
        for key, used, _, state, rest in rows:
            if key not in self.pinned:
                yield Unit(key, True, state, used) if state is not None else Unit(key, False, rest, used)

    def _let_go(self, key: bytes, used: float) -> None:
        """One thing less hangs on an entry."""
        if key not in self._left:
            (hanging,) = self.index.execute(
                "SELECT (SELECT count(*) FROM entries WHERE parent = ?1)"
                " + (SELECT count(*) FROM entries WHERE base = ?1)"
                " + (SELECT count(*) FROM records WHERE key = ?1 AND kind = 'state')",
                (key,),
            ).fetchone()
            self._left[key] = hanging
        self._left[key] -= 1
        if self._left[key] == 0 and key not in self.pinned:
            row = self.index.execute(
                "SELECT e.used, (SELECT coalesce(sum(r.bytes), 0) FROM records r WHERE r.key = e.key AND"
                " r.kind <> 'state') FROM entries e WHERE e.key = ?",
                (key,),
            ).fetchone()
            if row is not None:
                unit = Unit(key, False, row[1], max(row[0], used))
                heapq.heappush(self._ready, (unit.used, next(self._number), unit))


def _apply(
    folder: CacheFolder, index: Index, units: list[Unit], done: Evicted, need: int, progress: Progress | None
) -> Evicted:
    """Files go first, then their rows: a row without a file is a miss, a file without a row would not be counted. What
    has been used, or has something new hanging on it, since it was chosen, stays."""
    records, size = done.records, done.bytes
    step = max(1, index.pages() // (2 * PAGES_A_ROW))
    for i in range(0, len(units), step):
        with index.transaction():
            for unit in units[i : i + step]:
                if not _still(index, unit):
                    continue
                for kind, weight in index.records_of(unit.key) or [("", 0)]:
                    if (kind == "state") == unit.state:
                        if kind:
                            folder.remove(unit.key, kind)
                        index.drop_record(unit.key, kind)
                        records, size = records + bool(kind), size + weight
        if progress is not None:
            progress(min(size, need), need)
    return Evicted(records, size)


def _still(index: Index, unit: Unit) -> bool:
    """Whether nothing hangs on a unit and it was not used since it was chosen."""
    row = index.execute(
        "SELECT used <= ?2 AND (?3 OR NOT (EXISTS (SELECT 1 FROM entries WHERE parent = ?1)"
        " OR EXISTS (SELECT 1 FROM entries WHERE base = ?1)"
        " OR EXISTS (SELECT 1 FROM records WHERE key = ?1 AND kind = 'state'))) FROM entries WHERE key = ?1",
        (unit.key, unit.used, unit.state),
    ).fetchone()
    return row is not None and bool(row[0])


def _stray(folder: CacheFolder, index: Index, done: Evicted) -> Evicted:
    found = (
        "SELECT key, kind, bytes FROM records r WHERE NOT EXISTS (SELECT 1 FROM entries e WHERE e.key = r.key) LIMIT ?"
    )
    step = max(1, index.pages() // PAGES_A_ROW)
    while rows := index.execute(found, (step,)).fetchall():
        with index.transaction():
            for key, kind, size in rows:
                folder.remove(key, kind)
                index.drop_record(key, kind)
                done = Evicted(done.records + 1, done.bytes + size)
    return done
