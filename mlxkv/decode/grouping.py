"""Which rows decode together. Plain Python, no MLX.

A group is a rectangle: slots × columns, each column a token of each slot. What counts is the rectangle that is
computed: slots come in sizes of their own, so that few shapes are met, and columns are rounded up to a granule. A row
needs its own length, rounded up in the same way, whoever is beside it. A group is *full enough* while its rectangle is
at most ``BOUND`` times what its rows need (DESIGN §6).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

#: the rectangle of a group is at most so many times what its rows need
BOUND = 1.5
#: groups are put together only where the union is this full, so that they are not taken apart soon
CLOSE = 1.25
#: steps that a group must have made since it last changed before it is made smaller, or one with another, without need
REST = 32
#: columns are computed in multiples of this many
GRANULE = 64
#: a row counts as at least so long: a step of another group, which reads all weights again, costs more than the
#: attention to so many columns
SHORT = 512


def bucket(n: int) -> int:
    """Slots of a group of ``n`` rows: 1, 2, 3, 4, 6, 8, 12, 16 and so on, powers of two and what lies halfway."""
    power = 1 << max(0, (n - 1).bit_length())
    return power * 3 // 4 if power >= 4 and n <= power * 3 // 4 else power


def rounded(length: int) -> int:
    """Columns that a row of ``length`` tokens counts for: the next multiple of ``GRANULE``, at least ``SHORT``."""
    return max(SHORT, -(-length // GRANULE) * GRANULE)


@dataclass(frozen=True)
class Row:
    """A sequence that decodes. ``key``: anything hashable. ``length``: the tokens in its state."""

    key: Any
    length: int


@dataclass(frozen=True)
class Group:
    """Rows that decode together, and the ``slots`` they have. ``rested``: steps since rows or slots last changed."""

    name: Any
    slots: int
    rows: tuple[Row, ...]
    rested: int = 0


@dataclass(frozen=True)
class Resize:
    """Give ``group`` so many ``slots``; its rows stay."""

    group: Any
    slots: int


@dataclass(frozen=True)
class Divide:
    """Make a group of each of ``parts``, keys of rows, with ``bucket`` slots. The largest part is first: ``group`` may
    become that one."""

    group: Any
    parts: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Unite:
    """Move the rows of ``other`` into ``group``, which is to have ``slots`` then."""

    group: Any
    other: Any
    slots: int


class Grouping:
    """Decides who decodes with whom. It keeps nothing: groups are shown to it as they are.

    most: rows of one group. columns: the columns computed for a longest row of so many tokens; what is right for the
    buffers that the groups have. together: False where rows cannot share a batch; each has a group of its own then."""

    def __init__(self, most: int, *, columns: Callable[[int], int] = rounded, together: bool = True) -> None:
        self.most = most if together else 1
        self.columns = columns

    def waste(self, slots: int, lengths: Sequence[int]) -> float:
        """The rectangle of ``slots`` and the longest of ``lengths``, tokens, over what these rows need; at least 1."""
        return slots * self.columns(max(lengths)) / sum(self.columns(length) for length in lengths)

    def place(self, row: Row, groups: Sequence[Group]) -> Resize | None:
        """Where a row that is ready joins: the group, and the slots it has then (more than now, or the same). None: it
        starts a group of its own. It is the group whose rectangle grows least, of those that stay full enough."""
        best: tuple[int, int, Resize] | None = None
        for group in groups:
            if not group.rows or len(group.rows) >= self.most:
                continue
            lengths = [r.length for r in group.rows]
            slots = group.slots if len(lengths) < group.slots else bucket(len(lengths) + 1)
            if self.waste(slots, [*lengths, row.length]) > BOUND:
                continue
            grown = slots * self.columns(max(*lengths, row.length)) - group.slots * self.columns(max(lengths))
            found = (grown, -len(lengths), Resize(group.name, slots))
            if best is None or found[:2] < best[:2]:
                best = found
        return best[2] if best is not None else None

    def regroup(self, groups: Sequence[Group]) -> Resize | Divide | Unite | None:
        """The one change that is due, the most pressing first; None mostly. Groups without rows are not looked at: they
        end with their last row. To be asked before a step, until there is none."""
        groups = [group for group in groups if group.rows]
        for group in groups:
            if self.waste(group.slots, [row.length for row in group.rows]) > BOUND:
                return self._repair(group)
        if (united := self._unite(groups)) is not None:
            return united
        for group in groups:
            if group.rested >= REST and (slots := bucket(len(group.rows))) < group.slots:
                return Resize(group.name, slots)
        return None

    def parts(self, rows: Sequence[Row]) -> tuple[tuple[Row, ...], ...]:
        """``rows`` in groups that are full enough: the fewest, and of those the ones with the smallest rectangles. Rows
        of a group are neighbours in length, the longest first."""
        ordered = sorted(rows, key=lambda row: -row.length)
        # best[n]: groups and cells of the first n rows, and where the last of their groups begins
        best: list[tuple[int, int, int]] = [(0, 0, 0)]
        for end in range(1, len(ordered) + 1):
            ways = []
            for start in range(max(0, end - self.most), end):
                slots, lengths = bucket(end - start), [row.length for row in ordered[start:end]]
                if slots == 1 or self.waste(slots, lengths) <= BOUND:
                    groups, cells, _ = best[start]
                    ways.append((groups + 1, cells + slots * self.columns(lengths[0]), start))
            best.append(min(ways))
        found: list[tuple[Row, ...]] = []
        end = len(ordered)
        while end:
            start = best[end][2]
            found.append(tuple(ordered[start:end]))
            end = start
        return tuple(reversed(found))

    def _repair(self, group: Group) -> Resize | Divide:
        slots = bucket(len(group.rows))
        if slots < group.slots and self.waste(slots, [row.length for row in group.rows]) <= BOUND:
            return Resize(group.name, slots)
        parts = sorted(self.parts(group.rows), key=lambda part: -len(part))
        return Divide(group.name, tuple(tuple(row.key for row in part) for part in parts))

    def _unite(self, groups: Sequence[Group]) -> Unite | None:
        """Two groups that have rested and together are full enough by far: one step then does for both."""
        calm = sorted((g for g in groups if g.rested >= REST), key=lambda g: -len(g.rows))
        for i, group in enumerate(calm):
            for other in calm[i + 1 :]:
                n = len(group.rows) + len(other.rows)
                if n > self.most:
                    continue
                lengths = [row.length for row in (*group.rows, *other.rows)]
                slots = max(group.slots, bucket(n))
                if self.waste(slots, lengths) > CLOSE:
                    slots = bucket(n)
                if self.waste(slots, lengths) <= max(CLOSE, self.waste(bucket(n), [1] * n)):
                    return Unite(group.name, other.name, slots)
        return None
