"""The prefixes of one key space as a tree that a person can look at: what is stored, and where a request could go on.

An entry that begins with another's tokens comes below it, whatever its rows hang on. Entries of which one leads to the
next are one *stretch*. This module does not own: what an entry hangs on for its rows (``catalogue``).
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from .index import Entry, Index
from .keys import common, unpack

#: entries of the index that are looked at, most recently used first
MOST = 4000
#: tokens of a stretch that are kept to be shown
PREVIEW = 64
#: tokens that stretches must have in common to be shown as one that branches
COMMON = 8


@dataclass
class Found:
    """An entry, and bytes of its records by tier and kind. used: seconds since 1970, None for one that only RAM has."""

    entry: Entry
    ssd: Mapping[str, int] = field(default_factory=dict)
    ram: Mapping[str, int] = field(default_factory=dict)
    used: float | None = None

    @property
    def kinds(self) -> set[str]:
        return {*self.ssd, *self.ram}


@dataclass
class Stretch:
    """Tokens [start, end) that lead to one another, and the entries that end in it, in order; none where entries only
    have these tokens in common. ids: the first of its tokens, packed, PREVIEW of them or more if there are."""

    start: int
    end: int
    ids: bytes
    found: list[Found] = field(default_factory=list)
    below: list[Stretch] = field(default_factory=list)

    def token_ids(self, most: int) -> list[int]:
        """The first tokens of the stretch, at most so many."""
        return unpack(self.ids[: 4 * most])


def on_disk(path: Path, root: bytes, most: int = MOST) -> list[Found]:
    """The entries of a key space that were used last, most recent first. None where there is no index that can be read.
    Any thread."""
    with suppress(sqlite3.Error, OSError):
        index = Index(path, create=False)
        try:
            return _read(index, root, most)
        finally:
            index.close()
    return []


def _read(index: Index, root: bytes, most: int) -> list[Found]:
    rows = index.execute(
        "SELECT e.key, e.root, e.parent, e.start, e.end, e.row_start, e.base, e.tokens, e.used,"
        " (SELECT group_concat(r.kind || ':' || r.bytes) FROM records r WHERE r.key = e.key)"
        " FROM entries e WHERE e.root = ? ORDER BY e.used DESC LIMIT ?",
        (root, most),
    )
    out = []
    for *fields, used, records in rows:
        pairs = [str(pair).split(":") for pair in (records or "").split(",") if pair]
        sizes: dict[str, int] = {kind: int(size) for kind, size in pairs}
        entry = Entry(*fields, kinds=frozenset(sizes))
        if entry.sound:
            out.append(Found(entry, sizes, used=float(used)))
    return out


def tree(disk: Iterable[Found], ram: Iterable[tuple[Entry, dict[str, int]]], root: bytes) -> list[Stretch]:
    """The stretches that begin a prompt, those used last first. ``disk``: what ``on_disk`` found; ``ram``: what
    ``Ram.recent`` did. Entries whose parents are not among them are left out."""
    found = {f.entry.key: f for f in disk}
    for entry, sizes in ram:
        if entry.key in found:
            found[entry.key].ram = sizes
        else:
            found[entry.key] = Found(entry, ram=sizes)
    children: dict[bytes, list[Found]] = {}
    for f in found.values():
        children.setdefault(f.entry.parent, []).append(f)
    below = {key: _nested(group) for key, group in children.items()}

    def under(f: Found) -> list[Found]:
        # what shares its block and begins with it, and, where it fills the block, what comes after that
        nested = below[f.entry.parent][1].get(f.entry.key, [])
        return [*nested, *below.get(f.entry.key, ([], {}))[0]]

    def stretch(first: Found, start: int) -> tuple[Stretch, list[Found]]:
        """As far as one entry leads to one other, and what comes then."""
        made = [first]
        while len(following := under(made[-1])) == 1:
            made += following
        ids = b""
        for f in made:
            if len(ids) < 4 * PREVIEW:
                ids += f.entry.tokens[4 * (start - f.entry.start) + len(ids) :]
        return Stretch(start, made[-1].entry.end, ids, made), following

    def stretches(found: list[Found], start: int) -> list[Stretch]:
        made = [stretch(f, start) for f in found]
        todo.extend(made)
        return _gathered([s for s, _ in made])

    todo: list[tuple[Stretch, list[Found]]] = []
    top = stretches(below.get(root, ([], {}))[0], 0)
    while todo:  # not by recursion: a conversation may be long
        made, following = todo.pop()
        made.below = stretches(following, made.end)
    return _by_use(top)


def _nested(group: list[Found]) -> tuple[list[Found], dict[bytes, list[Found]]]:
    """Of entries that hang on the same block: those that begin with no other one's tokens, and what is right below
    each."""
    top: list[Found] = []
    below: dict[bytes, list[Found]] = {}
    path: list[Found] = []
    for f in sorted(group, key=lambda f: f.entry.tokens):
        while path and not f.entry.tokens.startswith(path[-1].entry.tokens):
            path.pop()
        (below.setdefault(path[-1].entry.key, []) if path else top).append(f)
        path.append(f)
    return top, below


def _gathered(stretches: list[Stretch]) -> list[Stretch]:
    """Those that begin with the same tokens come below what they have in common."""
    out: list[list[Stretch]] = []
    shared: list[int] = []  # of each group but those of one, tokens
    for s in sorted(stretches, key=lambda s: s.ids):
        same = common(out[-1][-1].ids, s.ids) if out else 0
        if same >= COMMON and same < min(s.end - s.start, out[-1][-1].end - s.start):
            out[-1].append(s)
            shared[-1] = min(shared[-1], same)
        else:
            out.append([s])
            shared.append(len(s.ids) // 4)
    made = []
    for group, n in zip(out, shared, strict=True):
        if len(group) == 1:
            made += group
            continue
        start, ids = group[0].start, group[0].ids[: 4 * n]
        for s in group:
            s.start, s.ids = start + n, s.ids[4 * n :]
        made.append(Stretch(start, start + n, ids, below=_gathered(group)))
    return made


def _by_use(stretches: list[Stretch]) -> list[Stretch]:
    """What was used last comes first, at every level."""
    levels = [stretches]
    while any(levels[-1]):
        levels.append([s for above in levels[-1] for s in above.below])
    used: dict[int, float] = {}
    for level in reversed(levels):
        for s in level:
            used[id(s)] = max([f.used or 0.0 for f in s.found] + [used[id(b)] for b in s.below], default=0.0)
            s.below.sort(key=lambda b: used[id(b)], reverse=True)
    return sorted(stretches, key=lambda s: used[id(s)], reverse=True)


@dataclass(frozen=True)
class Account:
    """What a cache folder holds: bytes of all its files, the smallest budget of those who have it open, entries of each
    key space, and (model, entries, records, record bytes) of each model."""

    bytes: int = 0
    budget: int | None = None
    entries: Mapping[bytes, int] = field(default_factory=dict)
    models: tuple[tuple[str, int, int, int], ...] = ()


def account(path: Path) -> Account:
    """Of the index's own books: no folder is listed. Zeros where there is no index that can be read. Reads the whole
    index, which may take seconds. Any thread."""
    with suppress(sqlite3.Error, OSError):
        index = Index(path, create=False)
        try:
            (size,) = index.execute("SELECT coalesce(sum(bytes), 0) FROM ledger").fetchone()
            entries = dict(index.execute("SELECT root, count(*) FROM entries GROUP BY root").fetchall())
            return Account(size, index.budget(), entries, tuple(index.totals()))
        finally:
            index.close()
    return Account()


class Accounts:
    """The accounts of folders, of the moment or a little older: one is made again once a hundred times as long as it
    took has gone by. Any thread."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[float, Account]] = {}

    def of(self, path: Path) -> Account:
        until, found = self._known.get(path, (0.0, Account()))
        started = time.monotonic()
        if started >= until:
            found = account(path)
            took = time.monotonic() - started
            self._known[path] = (started + took + 100 * took, found)
        return found
