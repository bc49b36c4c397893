"""The planner: which records bring a sequence as far as possible. Read-only; the store executes what it says.

A look-up walks the full blocks, then looks for the deepest *resume point* on the way: a place where every member of the
layout can stand. Rows alone are not one if the layout has recurrent members. Rows of growing members are wanted of
everything before it; those of windowed members only where a window reaches.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
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
    """Rows [start, end) out of the rows, or windows, that the record of ``entry`` holds."""

    entry: Entry
    start: int
    end: int


@dataclass
class Plan:
    """Stand at ``position`` by reading ``pieces`` (in order, they cover [0, position)) and the state of ``state``.

    ``parent`` is the key that the block of ``position`` hangs on; ``base`` the entry of that block that has its rows
    before ``position``, for later deltas: what was restored is never stored again. ``reason`` says why it is not more.
    ``reach`` is how far rows go, whether or not anything can stand there.
    ``legacy`` are entries that were just taken from legacy folders; ``unasked``: these are still to be asked for more.
    """

    position: int = 0
    pieces: list[Piece] = field(default_factory=list)
    state: Entry | None = None
    parent: bytes = b""
    base: Entry | None = None
    reason: str | None = "empty"
    legacy: frozenset[bytes] = frozenset()
    unasked: bool = False
    reach: int = 0


class Planner:
    def __init__(self, index: Entries, space: KeySpace, layout: Layout) -> None:
        self.index, self.space, self.layout = index, space, layout

    def plan(self, tokens: list[int], limit: int, bad: Collection[tuple[bytes, str]] = ()) -> Plan:
        """The best plan for ``tokens`` that covers at most ``limit`` of them, without the (key, kind) in ``bad``."""
        block, packed = self.space.block, pack(tokens)

        def span(a: int, b: int) -> bytes:
            return packed[4 * a : 4 * b]

        chain: list[Entry] = []
        before: list[list[Piece]] = []  # of each entry of the chain
        parent = self.space.root
        while (len(chain) + 1) * block <= limit:
            a = len(chain) * block
            key = self.space.key_packed(parent, span(a, a + block))
            entry = self.index.entry(key)
            if entry is None or entry.tokens != span(a, a + block) or entry.start != a:
                break
            if (pieces := self._pieces(entry, bad)) is None:
                break
            chain.append(entry)
            before.append(pieces)
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
                if 0 < shared < end:  # from the first token on, it is another prompt's
                    diverges = max(diverges or 0, shared)
                usable = min(shared, limit)
                if usable <= start or self._pieces(entry, bad) is None:
                    continue
                reach = max(reach, usable)
                if partial is None or usable > partial[0]:
                    partial = (usable, entry)
                if shared == entry.end <= limit:
                    fits.append(entry)
            standing = next((e for e in fits if self._stands(e, before[:depth], bad)), None)
            if self.layout.growing_only and partial is not None:
                best = self._to(partial[1], before[:depth], partial[0], bad)
            elif standing is not None:
                best = self._to(standing, before[:depth], standing.end, bad)
            elif depth and self._stands(chain[depth - 1], before[: depth - 1], bad):
                best = self._to(chain[depth - 1], before[: depth - 1], start, bad)
            if best is not None:
                break
        plan = best or Plan(parent=self.space.root)
        plan.reach = reach
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

    def _stands(self, entry: Entry, before: list[list[Piece]], bad: Collection[tuple[bytes, str]]) -> bool:
        """Every member can stand at the end of this entry, which hangs on blocks with the pieces ``before``."""
        if self.layout.needs_state and ("state" not in entry.kinds or (entry.key, "state") in bad):
            return False
        pieces = self._pieces(entry, bad)
        return pieces is not None and all(
            _has_window(p, bad)
            for a, b in self._windows(entry.end)
            for p in _overlapping([*before, pieces], a, b, self.space.block)
        )

    def _windows(self, position: int) -> set[tuple[int, int]]:
        """The spans that windowed members read to stand at ``position``."""
        return {span for m in self.layout.members if m.record == "window" for span in m.needs(position)}

    def _pieces(self, entry: Entry, bad: Collection[tuple[bytes, str]]) -> list[Piece] | None:
        """The records that hold the rows of [entry.start, entry.end); None if one is missing. They may lack windows.

        A base may have more rows than are wanted of it, and a leaf none of its own (``row_start == end``): they are in
        the full block that it became part of.
        """
        out: list[Piece] = []
        at, upto = entry, entry.end
        for _ in range(2 * self.space.block):
            if at.row_start < upto:
                if "rows" not in at.kinds or (at.key, "rows") in bad:
                    return None
                out.append(Piece(at, at.row_start, upto))
                upto = at.row_start
            if upto == at.start:
                return out[::-1]
            base = self.index.entry(at.base) if at.base is not None else None
            if base is None or (base.parent, base.start) != (at.parent, at.start) or base.end < upto:
                return None
            if not base.tokens.startswith(entry.tokens[: 4 * (upto - entry.start)]):
                return None
            at = base
        return None

    def pieces(self, entry: Entry) -> list[Piece] | None:
        """The records that hold the rows of an entry, first tokens first; None if one is missing."""
        return self._pieces(entry, ())

    def complete(self, key: bytes) -> bool:
        """Whether an entry is stored with all rows that it needs, where its parent ends. Elsewhere no plan would find
        it, so it has to be written again. Windows are another matter: ``whole``."""
        entry = self.index.entry(key)
        return entry is not None and self._pieces(entry, ()) is not None and self._placed(entry)

    def whole(self, key: bytes) -> bool:
        """Whether an entry is complete, and its windows are there too: what was imported may have them only near the
        places where it can be resumed."""
        entry = self.index.entry(key)
        pieces = self._pieces(entry, ()) if entry is not None else None
        if entry is None or pieces is None or not self._placed(entry):
            return False
        return "window" not in self.layout.row_kinds or all(_has_window(p, ()) for p in pieces)

    def _placed(self, entry: Entry) -> bool:
        if entry.parent == self.space.root:
            return entry.start == 0
        parent = self.index.entry(entry.parent)
        return parent is None or parent.end == entry.start

    def _to(self, entry: Entry, before: list[list[Piece]], position: int, bad: Collection[tuple[bytes, str]]) -> Plan:
        full = entry.end % self.space.block == 0 and position == entry.end
        pieces = [p for of_one in [*before, self._pieces(entry, bad) or []] for p in of_one]
        pieces = [replace(p, end=min(p.end, position)) for p in pieces if p.start < position]
        return Plan(
            position=position,
            pieces=pieces,
            state=entry if self.layout.needs_state else None,
            parent=entry.key if full else entry.parent,
            base=None if full else pieces[-1].entry,
        )


def _has_window(piece: Piece, bad: Collection[tuple[bytes, str]]) -> bool:
    return "window" in piece.entry.kinds and (piece.entry.key, "window") not in bad


def _overlapping(blocks: list[list[Piece]], a: int, b: int, block: int) -> list[Piece]:
    """The pieces that hold some of [a, b), of blocks of so many tokens."""
    return [p for pieces in blocks[a // block : (b - 1) // block + 1] for p in pieces if p.start < b and a < p.end]
