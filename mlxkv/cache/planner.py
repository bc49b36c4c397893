"""The planner: which records bring a sequence as far as possible. Read-only; the store executes what it says.

A look-up walks the full blocks, then looks for the deepest *resume point* on the way: a place where every member of the
layout can stand. Rows alone are not one if the layout has recurrent members, nor where the windowed rows are missing
that are needed there: those that nobody needs any more may never have been stored (an import has the last ones only).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

from .index import Entry
from .keys import KeySpace, common, pack
from .layout import Layout


class Entries(Protocol):
    """Where entries are looked up: the index, or a view of several tiers."""

    def entry(self, key: bytes) -> Entry | None: ...

    def children(self, parent: bytes, tokens: bytes) -> list[Entry]: ...


@dataclass(frozen=True)
class Piece:
    """One record of rows or windows: the rows [start, end) of the entry ``key``."""

    entry: Entry
    start: int
    end: int


@dataclass
class Plan:
    """Stand at ``position`` by reading ``pieces`` (in order, they cover [0, position)) and the state of ``state``.

    ``parent`` is the key that the block of ``position`` hangs on; ``base`` the longest stored leaf of that block that
    ends at or before it, for later deltas. ``reason`` says why it is not more.
    """

    position: int = 0
    pieces: list[Piece] = field(default_factory=list)
    state: Entry | None = None
    parent: bytes = b""
    base: Entry | None = None
    reason: str | None = "empty"


class Planner:
    def __init__(self, index: Entries, space: KeySpace, layout: Layout) -> None:
        self.index, self.space, self.layout = index, space, layout

    def plan(self, tokens: list[int], limit: int, bad: Collection[tuple[bytes, str]] = ()) -> Plan:
        """The best plan for ``tokens`` that covers at most ``limit`` of them, without the (key, kind) in ``bad``."""
        block, packed = self.space.block, pack(tokens)

        def span(a: int, b: int) -> bytes:
            return packed[4 * a : 4 * b]

        chain: list[Entry] = []
        parent = self.space.root
        while (len(chain) + 1) * block <= limit:
            a = len(chain) * block
            key = self.space.key_packed(parent, span(a, a + block))
            entry = self.index.entry(key)
            if entry is None or entry.tokens != span(a, a + block) or entry.start != a:
                break
            if self._pieces(entry, bad) is None:
                break
            chain.append(entry)
            parent = key

        reach = len(chain) * block  # how far rows reach, resume point or not
        diverges: int | None = None  # where stored tokens go on differently, as late as possible
        best: Plan | None = None
        for depth in range(len(chain), -1, -1):
            start = depth * block
            fits: list[Entry] = []  # complete leaves that are a prefix of the prompt, longest first
            partial: tuple[int, Entry] | None = None
            hangs_on = chain[depth - 1].key if depth else self.space.root
            for entry in self.index.children(hangs_on, span(start, start + block)):
                if entry.root != self.space.root or entry.start != start:
                    continue
                end = min(entry.end, len(tokens))
                shared = start + common(entry.tokens, span(start, end))
                if shared < end:
                    diverges = max(diverges or 0, shared)
                usable = min(shared, limit)
                if usable <= start or self._pieces(entry, bad) is None:
                    continue
                reach = max(reach, usable)
                if partial is None or usable > partial[0]:
                    partial = (usable, entry)
                if shared == entry.end <= limit:
                    fits.append(entry)
            standing = next((e for e in fits if self._stands(e, chain[:depth], bad)), None)
            if self.layout.growing_only and partial is not None:
                best = self._to(partial[1], chain[:depth], partial[0], fits, bad)
            elif standing is not None:
                best = self._to(standing, chain[:depth], standing.end, fits, bad)
            elif depth and self._stands(chain[depth - 1], chain[: depth - 1], bad):
                best = self._to(chain[depth - 1], chain[: depth - 1], start, [], bad)
            if best is not None:
                break
        plan = best or Plan(parent=self.space.root)
        plan.reason = self._reason(plan.position, limit, reach, diverges)
        return plan

    def _reason(self, position: int, limit: int, reach: int, diverges: int | None) -> str | None:
        if position >= limit:
            return None
        if reach >= limit:
            return "no_state"  # every token is stored, only a state to resume from is not
        if diverges is not None and diverges >= max(position, reach):  # nothing stored goes further along the prompt
            return "different_tokens"
        return "no_state" if reach > position else "empty"

    def _stands(self, entry: Entry, chain: list[Entry], bad: Collection[tuple[bytes, str]]) -> bool:
        """Every member can stand at the end of this entry, which hangs on ``chain``."""
        if self.layout.needs_state and ("state" not in entry.kinds or (entry.key, "state") in bad):
            return False
        if self._pieces(entry, bad) is None:
            return False
        spans = {s for m in self.layout.members if m.record == "window" for s in m.needs(entry.end)}
        return all(self._windowed(entry, chain, a, b, bad) for a, b in spans)

    def _windowed(self, entry: Entry, chain: list[Entry], a: int, b: int, bad: Collection[tuple[bytes, str]]) -> bool:
        """The windowed rows [a, b) are there."""
        for i in range(a // self.space.block, (b - 1) // self.space.block + 1):
            for piece in self._pieces(chain[i] if i < len(chain) else entry, bad) or []:
                there = "window" in piece.entry.kinds and (piece.entry.key, "window") not in bad
                if piece.start < b and a < piece.end and not there:
                    return False
        return True

    def _pieces(
        self, entry: Entry, bad: Collection[tuple[bytes, str]], need: Collection[str] = ("rows",)
    ) -> list[Piece] | None:
        """The records that hold the rows of [entry.start, entry.end), each of the kinds in ``need``; None if one is
        missing."""
        out: list[Piece] = []
        at = entry
        for _ in range(self.space.block):
            if any(k not in at.kinds or (at.key, k) in bad for k in need):
                return None
            out.append(Piece(at, at.row_start, at.end))
            if at.base is None:
                return out[::-1] if at.row_start == at.start else None
            base = self.index.entry(at.base)
            if base is None or base.parent != at.parent or base.end != at.row_start:
                return None
            if not at.tokens.startswith(base.tokens):
                return None
            at = base
        return None

    def complete(self, key: bytes, kinds: Collection[str] = ("rows",)) -> bool:
        """Whether an entry is stored with all rows that it needs (and windowed rows, if ``kinds`` says so), where its
        parent ends. Elsewhere no plan would find it, so it has to be written again."""
        entry = self.index.entry(key)
        if entry is None or self._pieces(entry, (), kinds) is None:
            return False
        if entry.parent == self.space.root:
            return entry.start == 0
        parent = self.index.entry(entry.parent)
        return parent is None or parent.end == entry.start

    def _to(
        self, entry: Entry, chain: list[Entry], position: int, leaves: list[Entry], bad: Collection[tuple[bytes, str]]
    ) -> Plan:
        full = entry.end % self.space.block == 0 and position == entry.end
        pieces = [p for e in [*chain, entry] for p in self._pieces(e, bad) or []]
        return Plan(
            position=position,
            pieces=[p for p in pieces if p.start < position],
            state=entry if self.layout.needs_state else None,
            parent=entry.key if full else entry.parent,
            base=None if full else next((e for e in leaves if e.end <= position), None),
        )
