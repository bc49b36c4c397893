"""The planner in MLX arrays: it agrees with the loop, reads nothing that nobody wrote, and gives the windows of one
forward over everything, however it was cut and whatever was taken back."""

from __future__ import annotations

import random

import mlx.core as mx
import numpy as np
import pytest

from mlxkv.cache.compress import arrays
from mlxkv.cache.compress.geometry import Geometry
from mlxkv.cache.compress.plan import PageScoped, RequestRing, plan
from tests.cache.compress.plans import C4, C4_PLAIN, C128, C128_PLAIN, array_plan

SMALL = [Geometry(2, True, 8), Geometry(4, False, 12), Geometry(8, True, 24), Geometry(8, False, 8)]
NAN = float("nan")


def random_batch(rng: random.Random) -> list[tuple[int, int]]:
    out = []
    for _ in range(rng.randint(1, 4)):
        seq = rng.randint(1, rng.choice([12, 150, 700]))
        out.append((seq, rng.randint(1, min(seq, rng.choice([1, 6, 11, 131, 300])))))
    return out


@pytest.mark.parametrize("geometry", [C4, C4_PLAIN, C128, C128_PLAIN, *SMALL], ids=str)
def test_random_batches(geometry):
    """375 of each geometry, 3,000 in all; a third of them by page."""
    rng = random.Random(str(geometry))
    for i in range(375):
        batch = random_batch(rng)
        if i % 3 == 0:
            tables = [rng.sample(range(40), 8) for _ in batch]
            slots = PageScoped(geometry.ring, geometry.ring * rng.choice([2, 8, 16]), tables)
            batch = [(min(seq, 8 * slots.page), min(extend, seq, 8 * slots.page)) for seq, extend in batch]
        else:
            slots = RequestRing(geometry.ring, rng.sample(range(9), len(batch)))
        expected = plan(geometry, batch, slots)
        width = max(extend for _, extend in batch) + rng.choice([0, 0, 3])
        got = array_plan(geometry, batch, slots, width, free=rng.randint(0, 2))
        assert set(got.entries) == set(expected.entries) and len(got.entries) == len(expected.entries)
        assert set(got.writes) == set(expected.writes) and len(got.writes) == len(expected.writes)


def test_slots_that_hold_nothing_do_nothing():
    ring = mx.full((2, C4.ring + 1, 3), 7.0)
    rows = mx.full((2, 5, 3), NAN)
    none = mx.array([9, 0], mx.int32), mx.array([0, 0], mx.int32)
    made = arrays.plan(C4, *none, 5)
    windows, there = arrays.gather(C4, made, ring, rows)
    assert not there.any() and not made.closes.any() and not windows.any()
    assert (arrays.write(made, ring, rows)[:, : C4.ring] == 7.0).all()


def test_a_forward_of_no_rows():
    made = arrays.plan(C4, mx.array([9]), mx.array([0]), 0)
    ring, rows = arrays.empty(C4, 1, 3), mx.zeros((1, 0, 3))
    windows, there = arrays.gather(C4, made, ring, rows)
    assert windows.shape == (1, 0, 8, 3) and there.shape == (1, 0, 8)
    assert arrays.write(made, ring, rows).shape == ring.shape


def test_shapes_depend_on_the_width_alone():
    """So a compiled step is traced once, wherever its sequences stand."""
    traced = []

    def step(prefix, extend, ring, rows):
        traced.append(1)
        made = arrays.plan(C4, prefix, extend, 6)
        return (*arrays.gather(C4, made, ring, rows), arrays.write(made, ring, rows))

    compiled = mx.compile(step)
    for a, b, e in [(0, 511, 6), (3, 514, 6), (1000, 2, 3), (7, 8, 0)]:
        out = compiled(mx.array([a, b]), mx.array([6, e]), mx.zeros((2, C4.ring + 1, 3)), mx.zeros((2, 6, 3)))
        assert [o.shape for o in out] == [(2, 2, 8, 3), (2, 2, 8), (2, C4.ring + 1, 3)]
    assert len(traced) == 1


def of_position(sequence: int, positions, d: int = 2) -> np.ndarray:
    """A row for each position that no other has."""
    return np.stack([np.asarray(positions) * 8 + sequence * 2 + i + 1 for i in range(d)], axis=-1).astype(np.float32)


def one_shot(geometry: Geometry, sequence: int, end: int) -> np.ndarray:
    """The window that closes at ``end``; zero before token 0."""
    positions = np.arange(end - geometry.window, end)
    return np.where(positions[:, None] >= 0, of_position(sequence, positions), 0)


class Run:
    """Sequences whose windows are gathered by ``arrays`` and compared with those of a single forward."""

    def __init__(self, geometry: Geometry, sequences: int) -> None:
        self.geometry = geometry
        self.lengths = [0] * sequences
        self.ring = mx.full((sequences, geometry.ring + 1, 2), NAN)  # nobody has written anything
        self.wrong = self.right = 0

    def forward(self, extends: list[int], width: int) -> None:
        rows = np.full((len(extends), width, 2), NAN, np.float32)  # past the real rows
        for s, (n, e) in enumerate(zip(self.lengths, extends, strict=True)):
            rows[s, :e] = of_position(s, range(n, n + e))
        made = arrays.plan(self.geometry, mx.array(self.lengths), mx.array(extends), width)
        windows, there = arrays.gather(self.geometry, made, self.ring, mx.array(rows))
        self.ring = arrays.write(made, self.ring, mx.array(rows))
        mx.eval(self.ring)
        closes, end = np.array(made.closes), np.array(made.end)
        for s, k in np.argwhere(closes):
            expected = one_shot(self.geometry, s, end[s, k])
            same = np.array_equal(np.array(windows[s, k]), expected)
            assert np.array_equal(np.array(there[s, k]), expected.any(axis=1))
            self.right, self.wrong = self.right + same, self.wrong + (not same)
        assert not np.array(windows)[~closes].any()

    def go(self, width: int, steps: int, rng: random.Random) -> None:
        for _ in range(3):
            extends = [rng.randint(0, 2 * self.geometry.window) for _ in self.lengths]
            self.forward(extends, max(1, *extends))
            self.lengths = [n + e for n, e in zip(self.lengths, extends, strict=True)]
        for _ in range(steps):
            extends = [rng.choice([0, width, width, width]) for _ in self.lengths]
            self.forward(extends, width)
            self.lengths = [n + (rng.randint(1, e) if e else 0) for n, e in zip(self.lengths, extends, strict=True)]


@pytest.mark.parametrize(
    ("geometry", "width"),
    [*[(g, d) for g in (C4, SMALL[0], SMALL[1]) for d in (1, 2, g.most_width - 1, g.most_width)],
     *[(C128, d) for d in (1, 6, 130)], (C4_PLAIN, 1), (C128_PLAIN, 1), (SMALL[3], 1)],
)  # fmt: skip
def test_windows_of_what_was_cut_and_taken_back(geometry, width):
    run = Run(geometry, 3)
    run.go(width, 40, random.Random(width))
    assert run.right > 5 and not run.wrong


@pytest.mark.parametrize("geometry", [C4, C128, SMALL[0], SMALL[1]])
def test_one_row_more_than_the_limit_reads_what_is_gone(geometry):
    run = Run(geometry, 3)
    run.go(geometry.most_width + 1, 40, random.Random(6))
    assert run.wrong


@pytest.mark.parametrize("geometry", [C4, C4_PLAIN, C128_PLAIN, SMALL[0]])
def test_a_plain_step_reads_the_same_rows_if_it_writes_first(geometry):
    size = geometry.ring
    rings = mx.full((2, size + 1, 2), NAN)
    for n in range(2 * size + 3):
        seq = mx.array([n + 1, 0], mx.int32)
        rows = mx.array(np.stack([of_position(0, [n]), np.full((1, 2), NAN, np.float32)]))
        made = arrays.plan(geometry, seq - mx.array([1, 0]), mx.array([1, 0]), 1)
        expected, there = arrays.gather(geometry, made, rings, rows)
        slot, closes, reads = arrays.decode(geometry, seq)
        assert slot[1] == size and not closes[1] and (reads[1] == size).all()
        rings[mx.arange(2), slot] = rows[:, 0]
        assert closes[0].item() == made.closes[0, 0].item() == ((n + 1) % geometry.ratio == 0)
        if closes[0].item():
            got = mx.where((reads[0] != size)[:, None], rings[0, reads[0]], 0)
            assert mx.array_equal(got, expected[0, 0]) and mx.array_equal(reads[0] != size, there[0, 0])
