"""When entries are made and what is written: tables of reference/state-handoff.md A.3-A.7, of both planners."""

from __future__ import annotations

import random

import pytest

from mlxkv.cache.compress.geometry import Geometry
from mlxkv.cache.compress.plan import PageScoped, RequestRing, plan, plan_step, read_pages
from tests.cache.compress.plans import (
    C4,
    C4_PLAIN,
    C128,
    C128_PLAIN,
    CapFour,
    MorePad,
    NoPad,
    Replay,
    array_plan,
    entries,
    mutated,
    own_rings,
    replay,
    written,
)

both = pytest.mark.parametrize("planner", [plan, array_plan], ids=["loop", "arrays"])


def span(*ends: int) -> list[int]:
    """Positions from each first to each last one."""
    return [p for a, b in zip(ends[::2], ends[1::2], strict=True) for p in range(a, b + 1)]


# slots


@pytest.mark.parametrize(
    ("table", "found"),
    [
        (range(4), {0: 0, 15: 15, 16: 0, 255: 15, 256: 16, 271: 31, 272: 16, 513: 33}),
        ([7, 2], {0: 112, 17: 113, 255: 127, 256: 32, 260: 36}),
    ],
)
def test_slots_by_page(table, found):
    slots = PageScoped(16, 256, [table])
    assert {p: slots.slot(0, p) for p in found} == found


def test_slots_by_sequence():
    slots = RequestRing(256, [3])
    assert [slots.slot(0, p) for p in (0, 127, 128, 255, 256, 511, 640)] == [768, 895, 896, 1023, 768, 1023, 896]


@pytest.mark.parametrize(("last", "pages"), [(3, (8, 8)), (7, (8, 9)), (11, (9, 10)), (15, (10, 11)), (19, (11, 8))])
def test_where_the_halves_of_a_window_stand(last, pages):
    assert read_pages(C4, RequestRing(16, [2]), 0, last + 1) == pages


def test_a_window_is_read_from_its_own_ring():
    """The ring's number, not the place in the batch."""
    assert read_pages(C128, RequestRing(256, [3, 0]), 0, 256) == (6, 7)
    assert read_pages(C128, RequestRing(256, [3, 0]), 1, 256) == (0, 1)
    assert replay(C128, 6, 100, random.Random(1)) == 0
    assert replay(C128, 6, 100, random.Random(1), wrong_ring=True) > 0


# what is written


HOLES = [
    (C4, 512, 4, [], [], []),
    (C4, 515, 5, [], [515], [515]),
    (C4, 516, 6, [], [], []),
    (C4, 512, 10, [], span(512, 515), span(512, 515)),
    (C4, 513, 10, [], span(513, 515), span(513, 515)),
    (C128, 600, 130, [], span(600, 639), span(600, 639)),
    (C128, 640, 6, [], [], []),
    (C4, 512, 11, [512], span(512, 515), None),
    (C4, 512, 15, span(512, 516), None, None),
    (C128, 1024, 131, [1024], None, None),
]


def holes(planner, geometry, prefix, width):
    found = planner(geometry, [(prefix + width, width)], own_rings(geometry))
    return sorted(set(range(prefix, prefix + width)) - set(written(found)))


@both
@pytest.mark.parametrize(("geometry", "prefix", "width", "now", "cap_four", "no_pad"), HOLES)
def test_rows_that_a_verification_leaves_out(planner, geometry, prefix, width, now, cap_four, no_pad):
    assert holes(planner, geometry, prefix, width) == now
    if cap_four is not None:
        assert holes(planner, mutated(CapFour, geometry), prefix, width) == cap_four
    if no_pad is not None:
        assert holes(planner, mutated(NoPad, geometry), prefix, width) == no_pad


@both
@pytest.mark.parametrize("geometry", [C4, C128, Geometry(4, True, 12), Geometry(8, False, 16)])
def test_up_to_the_limit_all_rows_of_a_verification_are_kept(planner, geometry):
    most = geometry.most_width
    for prefix in (512, 513, 514, 515):
        for width in {1, 2, 3, 4, 5, most - 1, most}:
            assert not holes(planner, geometry, prefix, width)
    assert holes(planner, geometry, 512, most + geometry.ratio + 1)  # which is why more is refused


@both
@pytest.mark.parametrize(
    ("seq", "c4", "c128"),
    [
        (512, span(252, 255, 508, 511), []),
        (600, span(252, 255, 508, 511, 596, 599), span(512, 599)),
        (777, span(252, 255, 508, 511, 764, 767, 772, 776), span(768, 776)),
    ],
)
def test_a_plain_prefill(planner, seq, c4, c128):
    slots = PageScoped(8, 256, [range(4)])
    assert written(planner(C4_PLAIN, [(seq, seq)], slots)) == c4
    assert written(planner(C128_PLAIN, [(seq, seq)], own_rings(C128_PLAIN))) == c128


@both
@pytest.mark.parametrize(
    ("geometry", "batch", "made", "kept"),
    [
        (C4, [(12, 7)], [(8, 2, 5, 0), (12, 6, 1, 0)], span(5, 11)),
        (C4, [(9, 1), (16, 6)], [(12, 2, 6, 1), (16, 6, 2, 1)], span(8, 8, 10, 15)),
        (C4_PLAIN, [(8, 8)], [(4, 3, 4, 0), (8, 7, 0, 0)], span(4, 7)),
        (C4, [(522, 10)], [(516, 3, 4, 0), (520, 7, 0, 0)], span(512, 521)),
        (C4, [(517, 4), (5, 5), (130, 1)], [(516, 2, 5, 0), (4, 7, 4, 1)], span(513, 516, 0, 4, 129, 129)),
        (C128_PLAIN, [(300, 300)], [(128, 127, 0, 0), (256, 255, 0, 0)], span(256, 299)),
        (C128, [(260, 6)], [(256, 1, 126, 0)], span(254, 259)),
        (C128, [(730, 130)], [(640, 39, 88, 0)], span(600, 729)),
    ],
)
def test_entries(planner, geometry, batch, made, kept):
    found = planner(geometry, batch, own_rings(geometry, len(batch)))
    assert entries(found) == made and written(found) == kept
    rows = [seq - extend + j for seq, extend in batch for j in range(extend)]
    assert all(rows[w.row] == w.position for w in found.writes)


@pytest.mark.parametrize("batch", [[(4, 5)], [(4, 0)], [(4, -1)]])
def test_what_is_no_batch_is_refused(batch):
    with pytest.raises(ValueError, match=str(batch[0][1])):
        plan(C4, batch, own_rings(C4))


def test_a_padded_forward_holds_its_batch():
    assert written(plan(C4, [(8, 4), (6, 2)], own_rings(C4, 2), rows=8)) == span(4, 7, 4, 5)
    with pytest.raises(ValueError, match="6 rows in a forward of 5"):
        plan(C4, [(8, 4), (6, 2)], own_rings(C4, 2), rows=5)


# no slot twice


def twice(geometry: Geometry, seq: int, extend: int, slots) -> bool:
    places = [w.slot for w in plan(geometry, [(seq, extend)], slots).writes]
    return len(places) != len(set(places))


class PagesOfOneRing(RequestRing):
    """A mutant: rows are kept by sequence, and page ends are written all the same."""

    page = 256  # pyright: ignore


def test_no_slot_is_written_twice():
    extends = [1, 2, 5, 9, 10]
    for geometry in (C4, C128, C4_PLAIN):
        for seq in range(1, 1400, 7):
            assert not any(twice(geometry, seq, e, own_rings(geometry)) for e in (*extends, seq) if e <= seq)
    for seq in range(1, 1400, 11):
        assert not twice(C4, seq, seq, PageScoped(16, 256, [range(6)]))
    assert sum(twice(C4, seq, seq, PagesOfOneRing(16, [0])) for seq in range(1, 1400)) == 1086


# plain steps


@pytest.mark.parametrize("geometry", [C4_PLAIN, C4, C128_PLAIN])
def test_plain_steps_read_what_was_written(geometry):
    slots, held = RequestRing(geometry.ring, [1]), {}
    for seq in range(1, 3 * geometry.ring + 2):
        step = plan_step(geometry, seq, slots)
        held[step.slot] = seq - 1
        window = range(seq - geometry.window, seq)
        expected = None if seq % geometry.ratio else [None if p < 0 else p for p in window]
        assert (step.reads and [held.get(s) if s is not None else None for s in step.reads]) == expected


# many verifications


@pytest.mark.parametrize(
    ("geometry", "width", "fresh"),
    [
        *[(C4, d, True) for d in (1, 4, 5, 6, 9, 10)],
        *[(C4, d, False) for d in (11, 15)],
        *[(C128, d, True) for d in (1, 5, 6, 129, 130)],
        (C128, 131, False),
        (C4_PLAIN, 1, True),
        (C128_PLAIN, 1, True),
    ],
)
def test_rows_that_are_read_are_those_of_their_position(geometry, width, fresh):
    assert (replay(geometry, width, 100, random.Random(width)) == 0) == fresh


@pytest.mark.parametrize("rule", [CapFour, NoPad])
@pytest.mark.parametrize(("geometry", "width"), [(C4, 5), (C4, 6), (C4, 10), (C128, 5), (C128, 129)])
def test_old_rules_read_stale_rows(rule, geometry, width):
    assert replay(mutated(rule, geometry), width, 200, random.Random(3)) > 0


@pytest.mark.parametrize(
    ("geometry", "prefix", "needed", "by"), [(C4, 514, 508, 524), (C128, 638, 512, 768)], ids=["c4", "c128"]
)
def test_a_larger_pad_is_no_cure(geometry, prefix, needed, by):
    """Nothing is left out then, but what is written replaces what is needed when only one row is kept."""
    more, width = mutated(MorePad, geometry), geometry.most_width + 1
    assert not holes(plan, more, 512, width)
    for rule, wide, stale in [(more, width, 1), (geometry, width - 1, 0)]:
        run = Replay(rule, [0])
        run.forward([prefix], [prefix])
        run.forward([wide], [1])
        assert run.held[by % geometry.ring] == (by if stale else needed)
        run.forward([wide], [1])
        assert run.stale == stale


@pytest.mark.parametrize(("geometry", "most"), [(C4, 9), (C128, 129)])
def test_reading_comes_before_writing(geometry, most):
    assert replay(geometry, most, 400, random.Random(5), write_first=True) == 0
    assert replay(geometry, most + 1, 400, random.Random(5), write_first=True) > 0
