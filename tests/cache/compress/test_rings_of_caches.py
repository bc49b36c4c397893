"""The rings of a cache of compressed attention, attacked: rows that nobody needs are NaN, rows are taken back up to the
limit and beyond it, rows are asked for that were never there. Entries are the very windows that they are made of."""

from __future__ import annotations

import random

import mlx.core as mx
import numpy as np
import pytest

from mlxkv.cache.compress import arrays
from mlxkv.cache.compressed import CompressedCache, Pending, PositionRing
from mlxkv.cache.kinds import members_of
from mlxkv.cache.member import PositionError
from mlxkv.cache.state import SequenceState

D, WINDOW = 2, 8
NAN = float("nan")
#: ratio, overlap, drafts that are to be taken back
SHAPES = [(4, True, 8), (4, True, 1), (8, False, 3), (128, False, 8), (2, True, 5), (4, True, 0), (8, False, 0)]


def rows_of(name: str, a: int, b: int) -> np.ndarray:
    """[b − a, D]: a row for each position and name that no other has."""
    at = np.arange(a, b)[:, None] * 4 * D + ["raw", "kv", "index"].index(name) * D + np.arange(D) + 1
    return at.astype(np.float32)


def whole(windows: mx.array, first: mx.array, there: mx.array) -> mx.array:
    """An entry is its window."""
    assert windows.shape[:2] == first.shape == there.shape[:2]
    return windows.reshape(1, windows.shape[1], -1)


class Walk:
    """A cache that is fed rows of its positions and compared with what each position's answer must be."""

    def __init__(self, ratio: int, overlap: bool, spare: int, poison: bool = True) -> None:
        self.ratio, self.group = ratio, ratio * (2 if overlap else 1)
        self.cache = CompressedCache(
            window=WINDOW, ratio=ratio, overlap=overlap, head_dim=self.group * D, index_dim=self.group * D, spare=spare
        )
        self.state = SequenceState.new([self.cache])
        self.poison = poison
        self.wrong: set[str] = set()

    @property
    def rings(self) -> list[PositionRing]:
        return [self.cache.latents, *(part.pending for part in self.cache.parts.values())]

    def forward(self, n: int) -> None:
        p = self.state.position
        # as wide as an entry, of which the first numbers tell
        raw = mx.array(np.tile(rows_of("raw", p, p + n), self.group)[None])
        seen = self.cache.update_window(raw)
        rows, index, mask = np.array(seen.rows)[0, :, :D], np.array(seen.index)[0], np.array(seen.mask)[0]
        for q in range(n):
            expected = rows_of("raw", max(0, p + q - WINDOW + 1), p + q + 1)
            if not np.array_equal(rows[index[q]][mask[q]], expected) or np.isnan(rows[index[q]]).any():
                self.wrong.add("raw")
        for name in ("kv", "index"):
            entries = np.array(self.cache.compress(name, mx.array(rows_of(name, p, p + n)[None]), whole))[0]
            if not np.array_equal(entries, self.expected(name, p + n)):
                self.wrong.add(name)
        self.state.advance(n)
        mx.eval(self.state.live())
        self.spoil(p, n)

    def expected(self, name: str, position: int) -> np.ndarray:
        """All entries there are then."""
        ends = range(self.ratio, position + 1, self.ratio)
        rows = np.concatenate([np.zeros((self.group, D), np.float32), rows_of(name, 0, position)])
        return np.stack([rows[e : e + self.group].reshape(-1) for e in ends]) if ends else np.zeros((0, self.group * D))

    def spoil(self, p: int, n: int) -> None:
        """Whatever is kept after a forward over [p, p + n), what is not needed from there on is NaN."""
        if not self.poison:
            return
        for ring in self.rings:
            needed = {i % ring.size for i in range(ring.need(p + 1), p + n) if i >= ring.low}
            assert ring.rows is not None
            keep = mx.array([i in needed for i in range(ring.size + 1)])
            ring.rows = mx.where(keep[None, :, None], ring.rows, NAN)

    def cycle(self, width: int, kept: int) -> None:
        self.state.expect(width)
        self.forward(width)
        self.state.commit(kept, width)

    def resumed(self) -> Walk:
        """Another one that took over what a store keeps of this one, where it stands."""
        other, p = Walk.__new__(Walk), self.state.position
        other.__dict__.update(self.__dict__)
        other.cache = self.cache.with_spare(self.cache.spare)
        other.state = SequenceState.new([other.cache])
        for a, b in zip(self.state.members or [], other.state.members or [], strict=True):
            window = a.window()
            held = a.arrays() if a.record == "state" else a.rows(0 if window is None else max(0, p - window), p)
            b.resume({name: mx.contiguous(array) for name, array in held.items()}, p)
        other.state.position = p
        other.state._check()
        return other


def widths(walk: Walk) -> int:
    """Rows of one verification at most."""
    return 1 + min(m.most_drafts() or 0 for m in walk.state.members or () if m.most_drafts() is not None)


@pytest.mark.parametrize(("ratio", "overlap", "spare"), SHAPES)
def test_what_nobody_needs_is_never_read(ratio, overlap, spare):
    rng, walk = random.Random(f"{ratio} {spare}"), Walk(ratio, overlap, spare)
    most = widths(walk)
    assert most == spare + 1
    for n in (rng.randint(1, 5), rng.randint(1, 3 * ratio), 1, rng.randint(1, ratio)):
        walk.forward(n)
    for i in range(30):
        width = rng.choice([1, most, rng.randint(1, most)])
        walk.cycle(width, rng.choice([1, width, rng.randint(1, width)]))
        if i % 10 == 5:
            walk.forward(rng.randint(1, 3 * ratio))  # a chunk, as of another message
    assert not walk.wrong


@pytest.mark.parametrize(("ratio", "overlap", "spare"), [(4, True, 8), (2, True, 5), (8, False, 0)])
def test_what_a_store_keeps_is_enough_at_every_position(ratio, overlap, spare):
    for p in range(1, 2 * ratio + WINDOW + 1):
        walk = Walk(ratio, overlap, spare, poison=False)
        walk.forward(p)
        walk = walk.resumed()
        walk.poison = True
        walk.spoil(p - 1, 1)
        for kept in (1, widths(walk), 1):
            walk.cycle(widths(walk), kept)
        walk.forward(2 * ratio + 1)
        assert not walk.wrong, p


def test_where_no_row_is_pending():
    """At a multiple of a ratio without overlap nothing is kept for later entries."""
    walk = Walk(128, False, 2, poison=False)
    walk.forward(256)
    walk = walk.resumed()
    walk.cycle(3, 1)
    walk.forward(200)
    assert not walk.wrong


class Bold(Pending):
    """A mutant: goes back however much was written over."""

    def can_stand(self, position: int) -> bool:
        return True


class Hasty(Bold):
    """A mutant: writes before it reads."""

    def update(self, new: mx.array):
        g, before, start, count = self.geometry, self.held(new), self.offset, new.shape[1]
        windows, first, there = super().update(new)
        plan = arrays.plan(g, mx.array([start]), mx.array([count]), count, entries=windows.shape[1])
        return arrays.gather(g, plan, arrays.write(plan, before, new), new)[0], first, there


def unchecked(ratio: int, overlap: bool, spare: int, kind: type[Pending]) -> Walk:
    walk = Walk(ratio, overlap, spare, poison=False)
    walk.cache.latents = type("Latents", (type(walk.cache.latents),), {"can_stand": lambda *_: True})(WINDOW, 200)
    walk.state = SequenceState.new([walk.cache])
    walk.forward(3 * walk.group + 1)
    for part in walk.cache.parts.values():
        part.pending.__class__ = kind
    return walk


def wrong_at(walk: Walk, width: int, seed: int) -> set[str]:
    rng = random.Random(seed)
    for _ in range(25):
        walk.forward(width)  # not ``expect``: it would refuse
        walk.state.commit(rng.choice([1, 1, rng.randint(1, width)]), width)
    return walk.wrong


@pytest.mark.parametrize(("ratio", "overlap", "spare"), [(4, True, 8), (8, False, 3), (2, True, 5), (128, False, 2)])
def test_one_row_more_than_the_limit_is_wrong(ratio, overlap, spare):
    """The ring's own limit, which rounding up may have raised above what was asked for."""
    limit = Walk(ratio, overlap, spare).cache.parts["kv"].geometry.most_width
    assert limit >= spare + 1
    assert not wrong_at(unchecked(ratio, overlap, spare, Bold), limit, 1)
    assert any(wrong_at(unchecked(ratio, overlap, spare, Bold), limit + 1, seed) == {"kv", "index"} for seed in (1, 2))


@pytest.mark.parametrize(("ratio", "overlap", "spare"), [(4, True, 8), (8, False, 3), (2, True, 5)])
def test_the_limit_is_one_less_if_writes_come_first(ratio, overlap, spare):
    limit = Walk(ratio, overlap, spare).cache.parts["kv"].geometry.most_width
    assert not wrong_at(unchecked(ratio, overlap, spare, Hasty), limit - 1, 1)
    assert any(wrong_at(unchecked(ratio, overlap, spare, Hasty), limit, seed) for seed in (1, 2))


@pytest.mark.parametrize("spare", [1, 8])
def test_a_cache_refuses_what_it_cannot_take_back(spare):
    walk = Walk(4, True, spare)
    walk.forward(30)
    with pytest.raises(PositionError, match=f"takes back {spare} drafts at most, not {spare + 1}"):
        walk.state.expect(spare + 2)
    walk.forward(spare + 12)
    with pytest.raises(PositionError, match="cannot go back"):
        walk.state.commit(1, spare + 12)


@pytest.mark.parametrize(("ratio", "overlap", "spare"), SHAPES)
def test_it_goes_back_as_far_as_it_says(ratio, overlap, spare):
    """Of a long chunk only some of the rows that a ring has room for are written."""
    for n in range(2 * ratio + 9, 2 * ratio + 12):
        walk = Walk(ratio, overlap, spare, poison=False)
        walk.forward(n)
        # the window's own rows are not looked at: it is the rings that say how far
        most = min(m.rewindable() for m in walk.state.members or () if m.record == "state")
        assert most < n - ratio
        for ring in walk.rings[1:]:
            with pytest.raises(PositionError, match="cannot go back"):
                ring.back(most + 1)
            ring.back(most)
        walk.cache.latents.offset = walk.state.position = n - most
        walk.forward(3 * ratio)
        assert not walk.wrong - {"raw"}


def test_rows_that_were_never_there_are_not_given():
    """After a resume a ring holds what the store kept, and no more: rows before that are zeros."""
    walk = Walk(4, True, 8, poison=False)
    walk.forward(40)
    walk = walk.resumed()
    for n in (1, 60):  # the second one is longer than the rings, so that its own rows can still be asked for
        walk.forward(n)
        for member in members_of([walk.cache]):
            if member.record != "window":
                continue
            first = 40 - WINDOW + 1
            rows = np.array(member.rows(first, 41)["latents"])[0, 0, :, :D]
            assert np.array_equal(rows, rows_of("raw", first, 41))
            with pytest.raises(PositionError):
                member.rows(first - 1, 41)


def test_rows_that_were_taken_back_are_not_given():
    """A draft that was not kept has replaced an older row."""
    walk = Walk(4, True, 3, poison=False)
    walk.forward(30)
    walk.cycle(4, 1)
    for n in (1, 40):
        walk.forward(n)
        (member,) = (m for m in members_of([walk.cache]) if m.record == "window")
        low = 34 - WINDOW - 3
        assert np.array_equal(np.array(member.rows(low, 32)["latents"])[0, 0, :, :D], rows_of("raw", low, 32))
        with pytest.raises(PositionError):
            member.rows(low - 1, 32)
