"""Plans as sets, rules of the past as mutants, and a replay that counts reads of rows which are no longer there."""

from __future__ import annotations

import random

import mlx.core as mx

from mlxkv.cache.compress import arrays
from mlxkv.cache.compress.geometry import Geometry
from mlxkv.cache.compress.plan import Entry, PageScoped, Plan, RequestRing, Slots, Write, plan

C4, C4_PLAIN = Geometry(4, True, 16), Geometry(4, True, 8)
C128, C128_PLAIN = Geometry(128, False, 256), Geometry(128, False, 128)


class CapFour(Geometry):
    """A mutant: at most four rows more than a window needs."""

    @property
    def write_pad(self) -> int:
        return min(self.ring - self.ratio, 4)


class NoPad(Geometry):
    """A mutant: rows that may be taken back are not thought of."""

    write_pad = 0  # pyright: ignore


class MorePad(Geometry):
    """A mutant: one row more is kept than the ring serves."""

    @property
    def write_pad(self) -> int:
        return super().write_pad + 1


def mutated(kind: type[Geometry], of: Geometry) -> Geometry:
    return kind(of.ratio, of.overlap, of.ring)


def own_rings(geometry: Geometry, requests: int = 1) -> RequestRing:
    return RequestRing(geometry.ring, range(requests))


def entries(found: Plan) -> list[tuple[int, int, int, int]]:
    return [(e.end, e.row, e.from_ring, e.request) for e in found.entries]


def written(found: Plan) -> list[int]:
    return [w.position for w in found.writes]


def array_plan(geometry: Geometry, batch, slots: Slots, width: int | None = None, free: int = 0) -> Plan:
    """What ``arrays`` plans for ``batch``, as the loop says it. ``free``: rows of the batch that hold nothing."""
    width = width or max(extend for _, extend in batch)
    seq = mx.array([seq for seq, _ in batch] + [0] * free, mx.int32)
    extend = mx.array([extend for _, extend in batch] + [0] * free, mx.int32)
    got = arrays.plan(geometry, seq - extend, extend, width, page=slots.page)
    place = got.slot
    if isinstance(slots, PageScoped):
        pages, rows = 1 + max(p for table in slots.tables for p in table), max(len(t) for t in slots.tables)
        table = mx.array([[*t, *[0] * (rows - len(t))] for t in slots.tables] + [[0] * rows] * free, mx.int32)
        place = arrays.paged_slots(geometry, got, table, slots.page, pages)
        dummy = pages * geometry.ring
    else:
        dummy = geometry.ring
    assert all(0 <= s <= dummy and (s < dummy) == w for s, w in zip(flat(place), flat(got.writes), strict=True))
    assert all(0 <= r < width for r in flat(got.row))
    assert not mx.any(got.closes[len(batch) :]) and not mx.any(got.writes[len(batch) :])
    found, base = Plan([], []), 0
    for r, (total, rows) in enumerate(batch):
        for closes, end, held in by_place(r, got.closes, got.end, got.from_ring):
            if closes:
                found.entries.append(Entry(end, base + end - 1 - (total - rows), held, r))
        for writes, row, position, s in by_place(r, got.writes, got.row, got.position, place):
            if writes:
                at = s if isinstance(slots, PageScoped) else slots.rings[r] * geometry.ring + s
                found.writes.append(Write(base + row, position, at))
        base += rows
    return found


def flat(a: mx.array) -> list:
    return a.reshape(-1).tolist()


def by_place(r: int, *arrays: mx.array):
    return zip(*(a[r].tolist() for a in arrays), strict=True)


class Replay:
    """Sequences whose rows are kept in the rings with these numbers. ``stale``: how many rows that entries read were
    not those of their position. ``wrong_ring``: a mutant, entries read the ring whose number is the place in the batch.
    """

    def __init__(self, geometry: Geometry, rings: list[int], wrong_ring: bool = False) -> None:
        self.geometry, self.slots = geometry, RequestRing(geometry.ring, rings)
        self.reads = RequestRing(geometry.ring, range(len(rings))) if wrong_ring else self.slots
        self.lengths = [0] * len(rings)
        self.held: dict[int, int] = {}
        self.stale = 0

    def forward(self, extends: list[int], kept: list[int], write_first: bool = False) -> None:
        batch = [(n + e, e) for n, e in zip(self.lengths, extends, strict=True)]
        made = plan(self.geometry, batch, self.slots)
        after = self.held | {w.slot: w.position for w in made.writes}
        before = after if write_first else self.held
        for e in made.entries:
            first = e.end - self.geometry.window
            old = range(max(first, 0), first + e.from_ring)
            self.stale += sum(before.get(self.reads.slot(e.request, p)) != p for p in old)
        self.held = after
        self.lengths = [n + k for n, k in zip(self.lengths, kept, strict=True)]


def replay(
    geometry: Geometry, width: int, steps: int, rng: random.Random, write_first: bool = False, wrong_ring: bool = False
) -> int:
    """Stale rows of two sequences that are prefilled in chunks, then verified ``width`` rows at a time, of which any
    number is kept. ``write_first``: verifications write before they read."""
    run = Replay(geometry, [2, 0], wrong_ring)
    for _ in range(3):
        extends = [rng.randint(1, 3 * geometry.window) for _ in range(2)]
        run.forward(extends, extends)
    for _ in range(steps):
        run.forward([width] * 2, [rng.randint(1, width) for _ in range(2)], write_first)
    return run.stale
