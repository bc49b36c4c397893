"""Which entries a forward makes and which rows its ring keeps, as a loop over tokens. Plain Python, no MLX.

This is the rule; ``arrays`` does the same with MLX operations, and tests hold the two together. Source:
``reference/state-handoff.md`` A.3-A.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .geometry import Geometry


class Slots(Protocol):
    """Where rows stand. ``page``: tokens of a page where they are kept by page, else None."""

    page: int | None

    def slot(self, request: int, position: int) -> int: ...


@dataclass(frozen=True)
class RequestRing:
    """One ring a sequence; ``rings[request]`` is its number."""

    ring: int
    rings: Sequence[int]
    page = None

    def slot(self, request: int, position: int) -> int:
        return self.rings[request] * self.ring + position % self.ring


@dataclass(frozen=True)
class PageScoped:
    """One ring a page of ``page`` tokens: ``tables[request]`` are a sequence's pages."""

    ring: int
    page: int
    tables: Sequence[Sequence[int]]

    def __post_init__(self) -> None:
        if self.page % self.ring:
            raise ValueError(f"a page of {self.page} tokens is no multiple of a ring of {self.ring} rows")

    def slot(self, request: int, position: int) -> int:
        page, offset = divmod(position, self.page)
        return self.tables[request][page] * self.ring + offset % self.ring


@dataclass(frozen=True, order=True)
class Entry:
    """One entry that is made. ``end``: one past its last token; ``row``: the row of the forward that closes it;
    ``from_ring``: rows of its window, the first ones, that come from the ring; the rest are the forward's rows up to
    ``row``. Of the first window with overlap the rows before token 0 are counted, and masked."""

    end: int
    row: int
    from_ring: int
    request: int


@dataclass(frozen=True, order=True)
class Write:
    row: int
    position: int
    slot: int


@dataclass(frozen=True)
class Plan:
    entries: list[Entry]
    writes: list[Write]


def plan(geometry: Geometry, batch: Sequence[tuple[int, int]], slots: Slots, rows: int | None = None) -> Plan:
    """Of a prefill or a verification. ``batch``: (tokens with this forward, its rows) of each sequence, whose rows
    follow one another; ``rows``: of the forward if it is padded. Raises ValueError for what is no batch."""
    entries, writes, base = [], [], 0
    for request, (seq, extend) in enumerate(batch):
        if not 0 < extend <= seq:
            raise ValueError(f"{extend} rows of a sequence of {seq} tokens")
        first = first_write(geometry, seq)
        for j in range(extend):
            p = seq - extend + j
            if (p + 1) % geometry.ratio == 0:
                entries.append(Entry(p + 1, base + j, geometry.window - min(j + 1, geometry.window), request))
            if p >= first or ends_page(geometry, p, slots.page):
                writes.append(Write(base + j, p, slots.slot(request, p)))
        base += extend
    if rows is not None and base > rows:
        raise ValueError(f"{base} rows in a forward of {rows}")
    return Plan(entries, writes)


def first_write(geometry: Geometry, seq: int) -> int:
    """The first position that is written by a forward which ends after ``seq`` tokens: what the next entry needs, and
    as many of the newest rows as may be taken back."""
    last = geometry.entries(seq) * geometry.ratio
    return min(last - (geometry.ratio if geometry.overlap else 0), seq - geometry.write_pad)


def ends_page(geometry: Geometry, position: int, page: int | None) -> bool:
    """Where rows are kept by page, each page ends with the rows that the next page's first entry overlaps."""
    return geometry.overlap and page is not None and position % page >= page - geometry.ratio


@dataclass(frozen=True)
class Step:
    """A plain step of one sequence: its row goes to ``slot`` first, then an entry is made of the ring rows ``reads``
    (None for tokens before the first), or none."""

    slot: int
    reads: list[int | None] | None


def plan_step(geometry: Geometry, seq: int, slots: Slots, request: int = 0) -> Step:
    """``seq``: tokens with this one. It may write first: one row replaces none that its own window reads."""
    slot = slots.slot(request, seq - 1)
    if seq % geometry.ratio:
        return Step(slot, None)
    window = range(seq - geometry.window, seq)
    return Step(slot, [slots.slot(request, p) if p >= 0 else None for p in window])


def read_pages(geometry: Geometry, slots: Slots, request: int, end: int) -> tuple[int, int]:
    """Where the two halves of the window that closes at ``end`` stand, in units of ``ratio`` rows."""
    ratio = geometry.ratio
    return slots.slot(request, max(end - 1 - ratio, 0)) // ratio, slots.slot(request, end - 1) // ratio
