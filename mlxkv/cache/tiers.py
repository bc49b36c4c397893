"""The tiers as one: what RAM and disk hold together, and how a request's records are handed to both.

``Ssd`` is the folder's side of it, as RAM is the other; ``View`` answers what the planner asks. ``Handover`` belongs to
one request: it keeps each record in RAM, gives the writer what is to become durable now, and leaves the tip (the state
at n−1) to be written behind.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from .connectors import Local
from .folder import CacheFolder
from .index import Entry, Index
from .keeper import Chain, without_state
from .keys import KeySpace, pack
from .planner import Plan
from .ram import Draft, Ram
from .record import Reader
from .writer import Writer

T = TypeVar("T")
_ROWS = frozenset(("rows", "window"))


class Ssd(Local):
    """The records of a folder, by what its index says. ``index`` is another one once the folder was opened again."""

    source = "ssd"

    def __init__(self, folder: CacheFolder, index: Index) -> None:
        self.folder, self.index = folder, index

    def entry(self, key: bytes) -> Entry | None:
        return self.index.entry(key)

    def children(self, parent: bytes, tokens: bytes) -> list[Entry]:
        return self.index.children(parent, tokens)

    def open(self, key: bytes, kind: str) -> Reader:
        return Reader.open(self.folder.file(key, kind))


class View:
    """Entries of the disk and of RAM, read as one. ``kinds`` are the record kinds of the layout.

    An index that cannot be read leaves what RAM holds; ``error`` is what went wrong then.
    """

    def __init__(self, ram: Ram, ssd: Ssd, kinds: tuple[str, ...]) -> None:
        self.ram, self.ssd = ram, ssd
        self._rows = _ROWS & set(kinds)
        self.error: sqlite3.Error | None = None

    @property
    def tiers(self) -> tuple[Local, ...]:
        """Where a record is looked for, fastest first."""
        return self.ram, self.ssd

    @property
    def index(self) -> Index:
        return self.ssd.index

    def entry(self, key: bytes) -> Entry | None:
        held = self.ram.entry(key)  # first: what leaves RAM after the writer has stored it is on disk by then
        return self._merge(self._read(lambda: self.ssd.entry(key)), held)

    def children(self, parent: bytes, tokens: bytes) -> list[Entry]:
        held = {e.key: e for e in self.ram.children(parent, tokens)}
        disk = {e.key: e for e in self._read(lambda: self.ssd.children(parent, tokens)) or []}
        merged = (self._merge(disk.get(key), held.get(key) or self.ram.entry(key)) for key in {**held, **disk})
        return sorted((e for e in merged if e is not None), key=lambda e: e.end, reverse=True)

    def answer(self, digest: bytes) -> tuple[bytes, int, int | None] | None:
        return self.ram.answer(digest) or self._read(lambda: self.index.answer(digest))

    def _read(self, ask: Callable[[], T]) -> T | None:
        try:
            return ask()
        except sqlite3.Error as e:
            self.error = e
            return None

    def _merge(self, disk: Entry | None, held: Entry | None) -> Entry | None:
        """One entry of both. Rows are cut differently where they were stored twice, or merged meanwhile: one of the two
        cuts counts, the one in RAM unless the one on disk has more."""
        if disk is None or held is None:
            return disk or held
        more = disk.kinds >= self._rows and disk.row_start < held.row_start
        if (held.kinds >= self._rows and not more) or (held.row_start, held.base) == (disk.row_start, disk.base):
            whole, other = held, disk
        else:
            whole, other = disk, held
        same = (other.row_start, other.base) == (whole.row_start, whole.base)
        return replace(whole, kinds=whole.kinds | (other.kinds if same else other.kinds - _ROWS))


@dataclass
class Handover:
    """Takes the groups of one request. ``tokens`` is the sequence's own list; ``roles`` says what the boundaries of the
    prompt are (position -> role), ``turn`` where the last message before the newest user message ends."""

    ram: Ram
    writer: Writer
    space: KeySpace
    plan: Plan
    tokens: list[int]
    roles: dict[int, str]
    turn: int
    #: the request is over, or was given up
    done: bool = False
    #: the writer refused a group: what followed it is kept in RAM, as far as that goes
    ram_only: bool = False
    _keys: list[bytes] = field(default_factory=list)

    def submit(self, group: list[Draft], final: bool) -> bool:
        """Hand over a group; ``final``: it is the request's last. False if nobody took it."""
        tips: list[Draft] = []
        self._keys += [d.meta.key for d in group]
        if self.ram.budget:  # without RAM there is no place to wait in
            tips = [replace(d, bodies={"state": d.bodies["state"]}, answer=None) for d in group if _is_tip(d)]
            for tip in tips:
                tip.needs = (*tip.needs, tip.meta.key)
            group = [without_state(d) if _is_tip(d) else d for d in group]
            group = [d for d in group if d.bodies or d.answer is not None]
        chain = self._chain() if final or tips else None
        kept = self._to_writer(group, chain if final else None)
        for tip in tips:
            if kept and chain is not None:
                self.writer.hold(tip, chain)
            self.ram.put(tip)
        if final:
            self.done = True
            pieces = [p.entry.key for p in self.plan.pieces]
            self.ram.touch([*reversed(self._keys), *reversed(pieces)])
        return kept or self.ram.budget > 0

    def _to_writer(self, group: list[Draft], chain: Chain | None) -> bool:
        """Pinned before the writer sees them: they are in RAM until they are on disk. Deepest first, so that what
        others hang on is the last to leave RAM."""
        for draft in reversed(group):
            self.ram.put(draft, pin=not self.ram_only)
        if self.ram_only:
            return False
        if not self.writer.submit(group, chain):
            self.ram.unpin([d.meta.key for d in group])
            self.ram_only = True  # on disk, what follows would hang on nothing
        return not self.ram_only

    def _chain(self) -> Chain:
        return Chain(self.space, pack(self.tokens), self.plan.position, dict(self.roles), self.turn)

    def drop(self) -> None:
        self.done = True


def _is_tip(draft: Draft) -> bool:
    return draft.meta.role == "tip" and "state" in draft.bodies
