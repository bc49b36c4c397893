"""Boundary tracking: plans against the reference's vectors and each other, and what the pool's slots hold afterwards.

What a wrong step does to a pool is not seen by counting: a state is written over, or never written. So these tests
compare the contents of slots; mutants, the mistakes of other runtimes, must show in them.
"""

from __future__ import annotations

import random

import mlx.core as mx
import numpy as np
import pytest

from mlxkv.cache.policy import LADDER_GAP, ladder
from mlxkv.decode.tracking import (
    Marks,
    Track,
    Windows,
    crossing,
    crossings,
    next_rung,
    plan,
    plan_arrays,
    scatter,
)

BATCHES = 3000


def ints(values):
    return mx.array(values, mx.int32)


# which row of a step stands at a mark (state-handoff §B.3)

CROSSINGS = [
    *[(256, *v) for v in [(250, 3, None), (250, 6, 5), (255, 1, 0), (255, 4, 0), (256, 4, None), (254, 2, 1)]],
    *[(256, *v) for v in [(511, 2, 0), (0, 4, None)]],
    *[(4, *v) for v in [(3, 1, 0), (3, 6, 4), (4, 4, 3), (2, 8, 5)]],
]


@pytest.mark.parametrize(("every", "before", "accepted", "row"), CROSSINGS)
def test_a_crossing_is_the_references(every, before, accepted, row):
    marks = Marks(every, doubling=False)
    assert crossing(before, accepted, marks) == row
    mask, rows = crossings(ints([before]), ints([accepted]), marks)
    assert (mask.tolist(), rows.tolist()) == ([row is not None], [row or 0])


def test_plain_steps_cross_at_each_interval_or_at_rungs():
    assert [n for n in range(1, 41) if crossing(n - 1, 1, Marks(16, doubling=False)) == 0] == [16, 32]
    assert [n for n in range(1, 100) if crossing(n - 1, 1, Marks(6)) == 0] == [6, 12, 24, 48, 96]
    assert [n for n in range(1, 100) if crossing(n - 1, 1, Marks(0)) == 0] == []


@pytest.mark.parametrize("doubling", [True, False])
def test_crossings_agree(doubling):
    rng = random.Random(3)
    for first in (0, 1, 3, 4, 64, 256, 4096):
        marks = Marks(first, doubling)
        before = [rng.choice([rng.randrange(40), rng.randrange(1, 2**20), 4096 * 2**17 - 3]) for _ in range(BATCHES)]
        accepted = [rng.randrange(1, 17) for _ in before]
        mask, rows = (a.tolist() for a in crossings(ints(before), ints(accepted), marks))
        want = [crossing(b, n, marks) for b, n in zip(before, accepted, strict=True)]
        assert [row if there else None for there, row in zip(mask, rows, strict=True)] == want
        assert all(w is None or w < n for w, n in zip(want, accepted, strict=True))


def test_the_next_rung_is_one_of_the_ladder():
    for first in (8, 256, 4096):
        for position in [*range(0, 70), *range(8100, 8300), 70000]:
            rung = next_rung(position, first)
            assert rung > position
            assert ladder(first, 10 * rung)[: ladder(first, 10 * rung).index(rung) + 1][-2:] == [
                r for r in (rung // 2 if rung > first else 0, rung) if r
            ]
            assert rung == first or rung // 2 <= position
    assert next_rung(100, 0) == 0
    # where the prompt ended there is a state already: no rung near it
    assert next_rung(8000, 4096, LADDER_GAP) == 16384
    assert next_rung(8192 - LADDER_GAP, 4096, LADDER_GAP) == 8192


# windows of input rows (§B.5)

WINDOWS = [
    # track, prefix, row starts and total, rows; windows, masked rows
    ([128], [0], [0, 150], 1, [[125, 126, 127]], []),
    ([150], [0], [0, 150], 1, [[125, 126, 127]], []),
    ([320], [256], [0, 90], 1, [[61, 62, 63]], []),
    ([192, 128], [0, 64], [0, 200, 290], 2, [[189, 190, 191], [261, 262, 263]], []),
    ([192, 0], [0, 0], [0, 200, 230], 2, [[189, 190, 191], [197, 198, 199]], [1]),
    ([63], [0], [0, 63], 1, [[0, 0, 0]], [0]),
    ([64, 64], [0, 0], [0, 64, 130], 4, [[61, 62, 63], [125, 126, 127], [0, 0, 0], [0, 0, 0]], [2, 3]),
    ([15734], [0], [0, 15734], 1, [[15677, 15678, 15679]], []),
    ([], [], [0], 4, [[0, 0, 0]] * 4, [0, 1, 2, 3]),
]


def padded(values, n):
    return ints([*values[:n], *[0] * (n - len(values))])


@pytest.mark.parametrize(("track", "prefix", "edges", "rows", "windows", "masked"), WINDOWS)
def test_windows_are_the_references(track, prefix, edges, rows, windows, masked):
    widths = np.diff(edges).tolist()
    mask = [row not in masked for row in range(rows)]
    assert Windows().plan(track, prefix, widths, rows) == (windows, mask)
    live = mx.array(len(track))
    out = Windows().plan_arrays(padded(track, rows), padded(prefix, rows), padded(widths, rows), live)
    assert [a.tolist() for a in out] == [windows, mask]


def test_windows_of_a_verify_step_overlap():
    """§H.3: the window before was (1, 2, 3), the step's rows are 4 to 7: after each of them the last three."""
    packed = np.array([1, 2, 3, 4, 5, 6, 7])
    windows = Windows(chunk=1, carried=3)
    for accepted, want in ((1, [2, 3, 4]), (2, [3, 4, 5]), (3, [4, 5, 6]), (4, [5, 6, 7])):
        rows, mask = windows.plan([10 + accepted], [10], [7], 1)
        assert packed[rows[0]].tolist() == want and mask == [True]
    # without them a window of a narrow step begins in its neighbour's rows; a row beyond the step's is none of its own
    assert Windows(chunk=1).plan([7, 12], [5, 10], [2, 2], 2)[1] == [False, False]
    assert windows.plan([15], [10], [7], 1)[1] == [False]


def test_window_plans_agree():
    rng = random.Random(4)
    for _ in range(BATCHES):
        windows = Windows(rng.choice([1, 4, 64]), rng.choice([1, 3]), rng.choice([0, 3]))
        rows = rng.choice([1, 4, 8])
        live = rng.randint(0, rows)
        prefix = [rng.choice([0, rng.randrange(500)]) for _ in range(live)]
        widths = [rng.choice([0, 1, 5, rng.randrange(300)]) for _ in range(live)]
        tracked = [p + rng.choice([-5, 0, rng.randint(0, w), w + 70]) for p, w in zip(prefix, widths, strict=True)]
        want, mask = windows.plan(tracked, prefix, widths, rows)
        stale = [rng.randrange(400) for _ in range(rows - live)]  # what stands behind the live rows is not looked at
        got = windows.plan_arrays(ints(tracked + stale), ints(prefix + stale), ints(widths + stale), mx.array(live))
        mx.eval(got)
        assert [a.tolist() for a in got] == [want, mask]
        starts = np.cumsum([0, *widths])
        total = max(int(starts[-1]), 1)
        for row, (window, there) in enumerate(zip(want, mask, strict=True)):
            assert all(0 <= w < total for w in window)
            if there:  # inside its own rows, one after the other
                assert starts[row] <= window[0] and window[-1] < starts[row + 1]
                assert window == list(range(window[0], window[0] + windows.width))


# who captures, and into which slot


def test_plans_agree():
    rng = random.Random(5)
    seen = set()
    for _ in range(BATCHES):
        rows, lanes, dummy = rng.choice([(1, 1, 1), (4, 2, 3), (8, 2, 6), (8, 4, 9), (16, 2, 4)])
        free = rng.sample(range(dummy), rng.randint(0, dummy))
        positions = [rng.choice([0, rng.randrange(6), rng.randrange(9000)]) for _ in range(rows)]
        wanted = [rng.choice([0, 4, p, p + 1]) for p in positions]
        captures = plan(positions, wanted, free, lanes)
        want = Track.of(rows, dummy, captures, lanes)
        given = [*free[:lanes], *[dummy] * (lanes - len(free))]
        got = plan_arrays(ints(positions), ints(wanted), ints(given), mx.array(len(free)), dummy, lanes).arrays()
        mx.eval(got)
        for a, b in zip(got, want.arrays(), strict=True):
            assert a.dtype == b.dtype and a.tolist() == b.tolist()
        hits = [r for r in range(rows) if positions[r] == wanted[r] > 0]
        assert list(captures) == hits[: min(lanes, len(free))]
        assert [slot for slot, _ in captures.values()] == free[: len(captures)]
        seen.add((len(hits) > len(captures), len(captures)))
    assert {(False, 0), (True, 0), (False, 1), (True, 2), (False, 2), (True, 1)} <= seen


def test_array_plans_are_traced_once():
    """Who captures, who does not, how many rows are live and where windows lie are all values."""
    traces = []

    def fn(positions, wanted, free, count, tracked, prefix, widths, live):
        traces.append(1)
        return plan_arrays(positions, wanted, free, count, 3).arrays(), Windows().plan_arrays(
            tracked, prefix, widths, live
        )

    step = mx.compile(fn)
    for positions, free, tracked, live in (([5, 6], [2, 0], [64, 130], 2), ([7, 8], [3, 3], [0, 0], 0)):
        given = ints(positions), ints([5, 6]), ints(free), mx.array(len([f for f in free if f < 3]))
        track, (windows, mask) = step(*given, ints(tracked), ints([0, 0]), ints([64, 150]), mx.array(live))
        want = Track.of(2, 3, plan(positions, [5, 6], [f for f in free if f < 3]))
        assert [a.tolist() for a in track] == [a.tolist() for a in want.arrays()]
        host = Windows().plan(tracked[:live], [0, 0][:live], [64, 150][:live], 2)
        assert (windows.tolist(), mask.tolist()) == host
    assert len(traces) == 1


def test_a_track_is_of_full_length_and_in_range():
    track = Track.of(4, 9, {2: (7, 4096)})
    assert [a.tolist() for a in track.arrays()] == [
        [False, False, True, False],
        [9, 9, 7, 9],
        [0, 0, 4096, 0],
        [2, 0],
        [7, 9],
    ]
    assert [a.dtype for a in track.arrays()] == [mx.bool_, *[mx.int32] * 4]
    nobody = Track.of(4, 9)
    assert [a.shape for a in nobody.arrays()] == [a.shape for a in track.arrays()]
    assert nobody.slot.tolist() == [9] * 4 and nobody.into.tolist() == [9, 9]


@pytest.mark.parametrize(
    "captures",
    [{4: (0, 1)}, {-1: (0, 1)}, {0: (9, 1)}, {0: (-1, 1)}, {0: (3, 1), 1: (3, 2)}, {r: (r, 1) for r in range(3)}],
)
def test_a_track_that_mlx_would_take_for_another_is_refused(captures):
    with pytest.raises(ValueError):
        Track.of(4, 9, captures)


# what slots hold after steps


def test_one_trace_whether_anybody_tracks_or_not():
    traces = []

    def fn(pool, state, track):
        traces.append(1)
        return scatter(pool, state, Track.bind(track))

    step = mx.compile(fn)
    pool = [mx.full((5, 2, 3), -1.0), mx.full((5, 4), -1.0, mx.bfloat16)]
    state = [
        mx.broadcast_to(mx.arange(3.0)[:, None, None], (3, 2, 3)),
        mx.broadcast_to(mx.arange(3.0)[:, None], (3, 4)),
    ]
    state[1] = state[1].astype(mx.bfloat16)
    inert = step(pool, state, Track.of(3, 4).arrays())
    tracked = step(pool, state, Track.of(3, 4, {1: (2, 7), 2: (0, 9)}).arrays())
    assert len(traces) == 1
    for old, first, second in zip(pool, inert, tracked, strict=True):
        assert first.dtype == second.dtype == old.dtype
        assert (old == -1).all().item()  # what the caller still holds is as it was
        assert (first[:4] == -1).all().item()
        assert [second[slot].max().item() for slot in range(4)] == [2, -1, 1, -1]
        assert [second[slot].min().item() for slot in range(4)] == [2, -1, 1, -1]


@pytest.mark.parametrize("compiled", [True, False])
def test_a_step_writes_into_the_pool_in_place(compiled):
    """16 MB of pool, 256 KB a row: no second pool is made as long as nobody holds the old one."""
    fn = lambda pool, state, track: scatter(pool, state, Track.bind(track))  # noqa: E731
    step = mx.compile(fn) if compiled else fn
    pool, state = [mx.zeros((65, 1 << 16))], [mx.ones((8, 1 << 16))]
    mx.eval(pool, state)
    for captures in ({}, {3: (5, 1)}, {1: (6, 2), 2: (7, 2)}):
        track = Track.of(8, 64, captures).arrays()
        mx.eval(track)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        pool = step(pool, state, track)
        mx.eval(pool)
        assert mx.get_peak_memory() - before < 2 << 20
    assert [int(s) for s in np.flatnonzero(np.array(pool[0].sum(axis=1)))][:3] == [5, 6, 7]
    held = pool[0][:]
    mx.reset_peak_memory()
    mx.eval(step(pool, state, track))
    assert mx.get_peak_memory() - before >= held.nbytes  # the measure does see a copy


def test_what_the_dummy_holds_is_nobodys():
    """NaN in the dummy row and in rows that do not capture: no slot ever shows it, and gathered snapshots are clean."""
    rng = random.Random(6)
    pool = [mx.zeros((6, 4))]
    want = [0.0] * 5
    for n in range(1, 60):
        pool = [mx.concatenate([pool[0][:5], mx.full((1, 4), float("nan"))])]
        rows = rng.sample(range(4), rng.randint(0, 2))
        slots = rng.sample(range(5), len(rows))
        captures = {row: (slot, n) for row, slot in zip(rows, slots, strict=True)}
        state = mx.concatenate([mx.full((1, 4), float(10 * n + r) if r in rows else float("nan")) for r in range(4)])
        pool = scatter(pool, [state], Track.of(4, 5, captures))
        for row, slot in zip(rows, slots, strict=True):
            want[slot] = float(10 * n + row)
        assert pool[0][:5].tolist() == [[w] * 4 for w in want]


# the table of §B.5, with the two mistakes as doubles: a batch of 3, then one of 1, then one without fields

CAPACITY, SLOTS, LANES = 4, 22, 4


class Fresh:
    """How mlxkv does it: from lists, each step."""

    def __call__(self, captures):
        return Track.of(CAPACITY, SLOTS, captures, LANES).arrays()


class Staging:
    """Buffers kept from step to step, as other runtimes have them. ``clears`` off is their mistake."""

    def __init__(self, clears):
        self.clears = clears
        self.buffers = [np.array(a) for a in Track.of(CAPACITY, SLOTS, None, LANES).arrays()]

    def __call__(self, captures):
        live = max(captures or {}, default=-1) + 1
        for mine, new in zip(self.buffers, Fresh()(captures), strict=True):
            mine[: None if self.clears else live] = np.array(new)[: None if self.clears else live]
        return [mx.array(a) for a in self.buffers]


def scatters(pool, state, track):
    return scatter(pool, state, Track.bind(track))


class OnlyWithMetadata:
    """A step that asks in Python, while it is traced, whether there is anything to scatter."""

    def __init__(self):
        self.present = False
        self.compiled = mx.compile(lambda *a: scatters(*a) if self.present else a[0])

    def __call__(self, pool, state, track):
        self.present = bool(track[0].any().item())
        return self.compiled(pool, state, track)


def slots_after(make_track, step):
    """Contents of slots 11, 12, 13, 21 and of all others together, after a warm-up and after each of the three batches;
    and the mask and slots of the second and third."""
    pool = [mx.full((SLOTS + 1, 3), -1.0)]
    pool = step(pool, [mx.full((CAPACITY, 3), 99.0)], make_track(None))
    out, fields = [], []
    for batch, captures in enumerate(({0: (11, 64), 1: (12, 64), 2: (13, 64)}, {0: (21, 64)}, None), start=1):
        track = make_track(captures)
        # rows beyond the batch run along: what they hold is padding
        state = mx.array([[100.0 * batch + row] * 3 for row in range(CAPACITY)])
        pool = step(pool, [state], track)
        held = np.array(pool[0][:SLOTS])
        assert (held == held[:, :1]).all()
        rest = set(np.delete(held[:, 0], [11, 12, 13, 21]).tolist())
        out.append([*held[[11, 12, 13, 21], 0].tolist(), rest])
        fields.append(([bool(m) for m in track[0].tolist()], track[1].tolist()))
    return out, fields[1:]


RIGHT = [
    [100, 101, 102, -1, {-1}],
    [100, 101, 102, 200, {-1}],
    [100, 101, 102, 200, {-1}],
]


@pytest.mark.parametrize("make_track", [Fresh(), Staging(clears=True)])
@pytest.mark.parametrize("compiled", [True, False])
def test_slots_keep_what_their_batch_left(make_track, compiled):
    slots, fields = slots_after(make_track, mx.compile(scatters) if compiled else scatters)
    assert slots == RIGHT
    n = SLOTS
    assert fields == [([True, False, False, False], [21, n, n, n]), ([False] * 4, [n, n, n, n])]


def test_a_tail_that_is_not_cleared_shows_in_the_slots():
    slots, fields = slots_after(Staging(clears=False), mx.compile(scatters))
    assert slots != RIGHT
    # 12 and 13 are written over with padding rows, then 21 by a batch that tracks nothing
    assert slots == [RIGHT[0], [100, 201, 202, 200, {-1}], [100, 301, 302, 300, {-1}]]
    assert fields[0] == ([True, True, True, False], [21, 12, 13, SLOTS])


def test_a_scatter_that_depends_on_metadata_shows_in_the_slots():
    """The warm-up had none, so the graph has no scatter for ever."""
    slots, _ = slots_after(Fresh(), OnlyWithMetadata())
    assert slots != RIGHT
    assert slots == [[-1, -1, -1, -1, {-1}]] * 3
