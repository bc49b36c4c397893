"""Windows in rings: what is verified and taken back leaves what single steps leave in mlx-lm's own cache."""

from __future__ import annotations

import random

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache

from mlxkv import numerics
from mlxkv.cache import ring
from mlxkv.cache.kinds import members_of
from mlxkv.cache.member import PositionError
from mlxkv.cache.ring import Cycle, Ring, RingKVCache, with_rings
from tests.cache.batch.schedules import apart

HEADS, QUERIES, DIM = 2, 4, 8


def tolerance() -> float:
    """Bits where they are promised; else other sums of a few numbers."""
    return 0.0 if ring.in_order() else 2e-6


def rows(seed: int, n: int) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys and values of ``n`` tokens."""
    a = mx.random.normal((3, 1, QUERIES, n, DIM), key=mx.random.key(seed))
    return a[0], a[1][:, :HEADS], a[2][:, :HEADS]


def attend(cache, q, k, v, window):
    """As a model does: the mask first, then the rows. [1, heads, n, width]"""
    mask = create_attention_mask(mx.zeros((1, q.shape[2], 4)), cache, window_size=window)
    keys, values = cache.update_and_fetch(k, v)
    return scaled_dot_product_attention(q, keys, values, cache, 0.3, mask)


class Pair:
    """A ring, and mlx-lm's own cache that is only ever given chunks and single tokens."""

    def __init__(self, size: int, keep: int, spare: int, window: int | None) -> None:
        self.own, self.theirs, self.window = RingKVCache(size, keep, spare), RotatingKVCache(size, keep), window
        (self.member,) = members_of([self.own])
        self.worst = 0.0

    def plain(self, seed: int, n: int) -> None:
        q, k, v = rows(seed, n)
        mine = attend(self.own, q, k, v, self.window)
        assert apart(mine, attend(self.theirs, q, k, v, self.window)) <= tolerance()
        mx.eval(self.member.live())
        self.check()

    def cycle(self, seed: int, width: int, kept: int, given_up: bool = False) -> None:
        q, k, v = rows(seed, width)
        if given_up:  # built, and never was
            held = self.member.hold()
            self.member.expect(width)
            attend(self.own, *rows(seed + 1, width), self.window)
            self.member.commit(1, width)
            self.member.put_back(held)
        self.member.expect(width)
        out = attend(self.own, q, k, v, self.window)
        mx.eval(out, self.member.live())
        self.member.commit(kept, width)
        mx.eval(self.member.live())
        for j in range(kept):
            theirs = attend(self.theirs, *(a[:, :, j : j + 1] for a in (q, k, v)), self.window)
            difference = apart(out[:, :, j : j + 1], theirs)
            assert difference <= tolerance(), (j, difference)
            self.worst = max(self.worst, difference)
        self.check()

    def check(self) -> None:
        """The same state: numbers, shapes, and all that was written."""
        (*mine, _, _, _, index), (*theirs, _, _, _, at) = self.own.state, self.theirs.state
        assert (index, self.own.offset, self.own.size()) == (at, self.theirs.offset, self.theirs.size())
        for a, b in zip(mine[:2], theirs[:2], strict=True):
            n = min(self.own.offset, b.shape[2])
            assert a.shape == b.shape and mx.array_equal(a[:, :, :n], b[:, :, :n]).item()


@st.composite
def pairs(draw):
    size = draw(st.integers(1, 13))
    keep, spare = draw(st.integers(0, size - 1)), draw(st.integers(1, 9))
    window = draw(st.none() | st.just(size) | st.integers(1, size))
    moves = st.one_of(
        st.tuples(st.just("chunk"), st.integers(2, 2 * size + 3)),
        st.just(("step", 1)),
        st.integers(1, spare + 1).flatmap(lambda d: st.tuples(st.just(d), st.integers(1, d), st.booleans())),
    )
    return (size, keep, spare, window), draw(st.lists(moves, min_size=4, max_size=14))


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(pairs())
def test_any_run_of_cycles_steps_and_chunks_is_that_of_single_steps(case):
    numbers, moves = case
    pair = Pair(*numbers)
    for seed, move in enumerate(moves):
        if isinstance(move[0], str):
            pair.plain(2 * seed, move[1])
        else:
            width, kept, given_up = move
            pair.cycle(2 * seed, width, kept, given_up)


@pytest.mark.parametrize("keep", [0, 2])
def test_every_width_and_every_number_kept_around_the_wrap(keep):
    size, spare = 7, 8
    for width in range(2, spare + 2):
        for start in (3, size - 1, size):
            pair = Pair(size, keep, spare, None)
            pair.plain(1, start)
            for kept in (1, width // 2 + 1, width):
                pair.cycle(kept + 2, width, kept)


def test_in_place_values_are_the_same_and_nothing_is_copied(monkeypatch):
    """Where no bits are promised attention reads the buffer as it is, and the buffer stays where it is."""
    monkeypatch.setattr(ring, "in_order", lambda: False)
    monkeypatch.setattr(f"{__name__}.tolerance", lambda: 2e-6)
    pair = Pair(9, 2, 5, None)
    pair.plain(1, 14)
    for seed in range(12):
        pair.cycle(3 * seed, 1 + seed % 6, 1 + seed % (1 + seed % 6))
    large = RingKVCache(64, 0, 8)
    (member,) = members_of([large])
    attend(large, *rows(1, 80), None)
    for seed, width in enumerate((9, 1, 9, 5, 1)):
        before = addresses(member)
        member.expect(width)
        out = attend(large, *rows(seed, width), 64)
        mx.eval(out, member.live())
        member.commit(max(1, width - 2), width)
        mx.eval(member.live())
        del out
        assert seed == 0 or addresses(member) == before  # the first one gives the buffers their spare rows


def addresses(member) -> list[int]:
    return [np.array(a, copy=False).ctypes.data for a in (member.cache.keys, member.cache.values)]


# planners


def random_cycle(r: random.Random, ring_: Ring, width: int, window: int | None) -> Cycle:
    position = r.choice([r.randrange(ring_.size), r.randrange(4 * ring_.size)])
    index = position if position < ring_.size else r.randint(ring_.keep, ring_.size)
    return Cycle(ring_, position, index, width, window)


def test_both_planners_plan_the_same():
    """1,200 random cycles: what is written where, what each query sees, in which order, and what is moved."""
    r, found = random.Random(5), 0
    for _ in range(100):
        size, spare = r.randint(1, 15), r.randint(1, 9)
        numbers = Ring(size, r.randrange(size), spare)
        width, window = r.randint(2, spare + 1), r.choice([None, size, r.randint(1, size)])
        cycles = [random_cycle(r, numbers, width, window) for _ in range(12)]
        position, index = (mx.array([getattr(c, n) for c in cycles], mx.int32) for n in ("position", "index"))
        kept = [r.randint(0, width) for _ in cycles]
        home = ring.homes(numbers, index, width).tolist()
        write = ring.writes(numbers, position, index, width).tolist()
        seen = np.array(ring.seen(numbers, position, index, width, window))
        order = ring.order(numbers, index, width).tolist()
        to = ring.targets(numbers, position, index, width, mx.array(kept, mx.int32)).tolist()
        for i, cycle in enumerate(cycles):
            assert home[i] == cycle.homes and write[i] == cycle.writes
            assert [set(np.flatnonzero(row).tolist()) for row in seen[i]] == cycle.seen()
            assert sorted(order[i]) == list(range(size + width - 1))
            visible = set().union(*cycle.seen())
            assert [c for c in order[i] if c in visible] == [c for c in cycle.order() if c in visible]
            check_moves(cycle, kept[i], to[i])
            if cycle.straight:
                assert (
                    seen[i][:, :size].tolist()
                    == np.array(ring.seen(numbers, position[i : i + 1], index[i : i + 1], width, window, spare=False))[
                        0
                    ].tolist()
                )
            found += 1
    assert found == 1200


def check_moves(cycle: Cycle, kept: int, to: list[int]) -> None:
    """What stands in the window afterwards: of all rows just those that single steps would have left of the kept ones,
    and the root, which free slots write too."""
    assert len(set(to)) == len(to) and all(0 <= c < cycle.ring.size + cycle.ring.spare for c in to)
    stands = dict(zip(cycle.writes, range(cycle.width), strict=False))
    stands |= dict(zip(to, range(1, cycle.width), strict=True))
    stands = {column: row for column, row in stands.items() if column < cycle.ring.size}
    if cycle.straight:  # drafts that are not kept stand where nothing was: the next rows overwrite them
        assert stands == dict(zip(cycle.homes, range(cycle.width), strict=True))
    else:
        assert stands == dict(zip(cycle.homes[: max(kept, 1)], range(max(kept, 1)), strict=True))


def test_what_a_query_sees_is_what_a_single_step_reads():
    """Against mlx-lm's class itself: its buffer holds positions, its mask says which of them."""
    r = random.Random(8)
    for _ in range(40):
        size = r.randint(2, 9)
        keep, window = r.randrange(size), r.choice([None, r.randint(1, size)])
        numbers, width = Ring(size, keep, 8), r.randint(2, 9)
        cache = RotatingKVCache(size, keep)
        for n in (r.randint(1, 2 * size), 1, 1):
            put(cache, n)
        cycle = Cycle(numbers, cache.offset, cache._idx, width, window)
        at = {c: p for c, p in enumerate(held(cache))} | dict(
            zip(cycle.writes, range(cache.offset, cache.offset + width), strict=True)
        )
        for columns in cycle.seen():
            mask = cache.make_mask(1, window_size=window)
            put(cache, 1)
            positions = held(cache)
            chosen = positions if mask is None else [p for p, m in zip(positions, mask.tolist(), strict=True) if m]
            assert {at[c] for c in columns} == set(chosen)


def put(cache: RotatingKVCache, n: int) -> None:
    """``n`` rows that hold their positions."""
    new = mx.arange(cache.offset, cache.offset + n).astype(mx.float32).reshape(1, 1, n, 1)
    mx.eval(cache.update_and_fetch(new, new))


def held(cache: RotatingKVCache) -> list[int]:
    return [int(p) for p in cache.keys_and_values()[0][0, 0, :, 0].tolist()]


# the contract of a cache


def test_what_does_not_follow_is_refused():
    cache = RingKVCache(6, 0, 3)
    (member,) = members_of([cache])
    q, k, v = rows(1, 9)
    attend(cache, q, k, v, None)
    with pytest.raises(PositionError, match="no such forward"):
        member.commit(1, 2)
    member.commit(1, 1)  # a plain step
    member.expect(3)
    with pytest.raises(PositionError, match="3 rows was announced, not one of 2"):
        attend(cache, *rows(2, 2), None)
    attend(cache, *rows(2, 3), None)
    assert member.position == 12
    for call in (lambda: member.expect(2), lambda: attend(cache, *rows(3, 1), None)):
        with pytest.raises(PositionError, match="not known how many"):
            call()
    with pytest.raises(PositionError, match="which of its rows are kept"):
        member.rows(10, 11)
    for kept, width in ((0, 3), (4, 3), (2, 2)):
        with pytest.raises(PositionError, match=f"{kept} of {width} rows are to be kept; the last forward had 3"):
            member.commit(kept, width)
    assert not cache.is_trimmable()
    member.commit(2, 3)
    assert (member.position, member.rows(8, 11)["keys"].shape[2]) == (11, 3)
    with pytest.raises(ValueError, match="0 spare rows"):
        RingKVCache(6, 0, 0)


def test_only_windows_get_rings():
    caches = [KVCache(), CacheList(RotatingKVCache(5, keep=1), CacheList(KVCache(), RotatingKVCache(9)))]
    ringed = with_rings(caches, 4)
    kinds = [type(m.cache) for m in members_of(ringed)]
    assert kinds == [KVCache, RingKVCache, KVCache, RingKVCache]
    for a, b in zip(members_of(caches), members_of(ringed), strict=True):
        assert (a.path, a.kind, a.record, a.params(), a.window(), a.keep()) == (
            b.path, b.kind, b.record, b.params(), b.window(), b.keep()
        )  # fmt: skip
    assert [m.most_drafts() for m in members_of(ringed)] == [None, 4, None, 4]
    assert [m.most_drafts() for m in members_of(with_rings(caches, 0))] == [None, 0, None, 0]


def test_the_mode_of_the_suite_promises_bits():
    """Or the tests above would compare with a tolerance without anybody noticing."""
    if mx.default_device().type == mx.DeviceType.cpu:
        assert ring.in_order() == (numerics.mode() == "exact")
