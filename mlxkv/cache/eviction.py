"""Eviction: what is given up when space is short. The least recently used first, the outermost first.

The unit is one entry's state, or its rows and windows together. A state holds up nothing. Rows hold up the entry's own
state, the entries whose parent it is, and the deltas whose base it is; they go once nothing is left that hangs on them.
A chain counts as used when its last entry was: what an entry hangs on is never older than the entry itself.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
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

    def give(amount: int, roots: Sequence[bytes] | None = None) -> Evicted:
        def told(size: int) -> None:
            if progress is not None:
                progress(min(done.bytes + size, need), need)

        gone = give_up(folder, index, choose(index, amount, pinned=pinned, roots=roots), progress=told)
        return Evicted(
            done.records + sum(records for _, records, _ in gone), done.bytes + sum(size for *_, size in gone)
        )

    for over in _over(index, most, incoming) if most is not None and need > 0 else ():
        done = give(min(need, over.excess), over.roots)
    if done.bytes < need:
        done = give(need - done.bytes)
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


def choose(
    index: Index,
    need: float,
    *,
    before: float = float("-inf"),
    pinned: Collection[bytes] = (),
    roots: Sequence[bytes] | None = None,
) -> list[Unit]:
    """What goes to be rid of ``need`` bytes, and all that was last used before ``before`` (seconds since the epoch),
    in the order in which it may go. Only of the key spaces ``roots``, where they are given. Changes nothing."""
    out: list[Unit] = []
    with contextlib.closing(_Order(index, pinned, roots).units()) as units:
        for unit in units:
            if need <= 0 and unit.used >= before:
                break
            out.append(unit)
            need -= unit.bytes
    return out


@dataclass
class _Order:
    """The order in which things go, from the index as it is now: it must not be changed meanwhile."""

    index: Index
    pinned: Collection[bytes]
    roots: Sequence[bytes] | None = None
    _left: dict[bytes, int] = field(default_factory=dict)
    _ready: list[tuple[float, int, Unit]] = field(default_factory=list)
    _number: Iterator[int] = field(default_factory=itertools.count)

    def units(self) -> Generator[Unit, None, None]:
        """The least recently used first; nothing is left hanging on what is gone."""
        with contextlib.closing(self._stream()) as stream:
            upcoming = next(stream, None)
            while upcoming is not None or self._ready:
                if upcoming is not None and (not self._ready or upcoming.used < self._ready[0][0]):
                    unit, upcoming = upcoming, next(stream, None)
                else:
                    unit = heapq.heappop(self._ready)[2]
                yield unit
                if unit.state:
                    self._let_go(unit.key, unit.used)
                    continue
                row = self.index.execute("SELECT parent, base FROM entries WHERE key = ?", (unit.key,)).fetchone()
                for key in {*row} - {None} if row else ():
                    self._let_go(key, unit.used)

    def _stream(self) -> Generator[Unit, None, None]:
        """What could go as things are."""
        where = "" if self.roots is None else f"WHERE e.root IN ({','.join('?' * len(self.roots))})"
        rows = self.index.execute(_OLDEST.format(where=where), self.roots or ())
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


def give_up(
    folder: CacheFolder,
    index: Index,
    units: Sequence[Unit],
    *,
    step: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[tuple[Unit, int, int]]:
    """Remove units in their order; returns (unit, its records, their bytes) of each that went. Files go first, then
    their rows: a row without a file is a miss, a file without a row would not be counted. What has been used, or has
    something new hanging on it, since it was chosen, stays. ``step``: units in one transaction at most. ``progress`` is
    told the bytes between transactions, and may raise to stop. Raises sqlite3.Error, OSError."""
    gone: list[tuple[Unit, int, int]] = []
    most = max(1, index.pages() // (2 * PAGES_A_ROW))
    step = most if step is None else min(step, most)
    size = 0
    for i in range(0, len(units), step):
        with index.transaction():
            for unit in units[i : i + step]:
                if index.last_used(unit.key) is None:  # its state was all that it had, and went before
                    gone.append((unit, 0, 0))
                    continue
                if not _still(index, unit):
                    continue
                mine = [r for r in index.records_of(unit.key) or [("", 0)] if (r[0] == "state") == unit.state]
                for kind, _ in mine:
                    if kind:
                        folder.remove(unit.key, kind)
                    index.drop_record(unit.key, kind)
                weight = sum(bytes_ for _, bytes_ in mine)
                gone.append((unit, sum(bool(kind) for kind, _ in mine), weight))
                size += weight
        if progress is not None:
            progress(size)
    return gone


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
