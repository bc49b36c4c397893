"""Compressed attention in a batch: rows at positions of their own, whatever each keeps of its drafts."""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
import pytest

from mlxkv.cache.batch import Batch, BatchError
from mlxkv.cache.layout import probe
from mlxkv.decode.step import Steps
from tests import tiny
from tests.cache.batch.compressing import Compressing
from tests.cache.batch.schedules import Schedule, Twin, apart, tolerance

DRAFTS = 5


def scheduled(seed: int, spare: int = 0, **options) -> Schedule:
    model = Compressing()
    return Schedule(model, lambda: model.make_cache(spare), seed, drafts=spare, **options)


@pytest.mark.parametrize("seed", range(2))
def test_each_row_is_as_it_is_alone(seed):
    schedule = scheduled(seed)
    assert schedule.run(30) <= tolerance(), schedule.moves
    assert {"step", "join", "leave", "take", "resize"} <= set(schedule.moves)


@pytest.mark.parametrize("spare", [1, DRAFTS])
def test_drafts_that_each_row_keeps_in_part(spare):
    schedule = scheduled(10 + spare, spare)
    assert schedule.run(40) <= tolerance(), schedule.moves
    assert schedule.moves["cycle"] > 5


def test_wide_steps_over_short_rings():
    """More tokens at once than a group has: several entries close in one step, of each row another number."""
    schedule = scheduled(4, 11, capacity=64)
    assert schedule.run(30) <= tolerance(), schedule.moves
    assert schedule.moves["cycle"] > 5


class Unread(list):
    """Positions that nobody may ask for."""

    def __getitem__(self, key):
        raise AssertionError("a step asked the host where its rows stand")

    def __iter__(self):
        raise AssertionError("a step asked the host where its rows stand")


@pytest.mark.parametrize("width", [1, DRAFTS + 1])
def test_a_step_knows_where_its_rows_stand_from_its_argument_alone(width):
    """So that a trace of it, in which all else is frozen, serves every position."""
    schedule = scheduled(8, DRAFTS)
    schedule.join()
    schedule.join()
    batch, ids = schedule.batch, [[twin.token, *tiny.ids(width - 1, 3)] for _, twin in sorted(schedule.twins.items())]
    where, true = batch.where(width), batch._place.positions
    batch._place.positions = Unread(true)
    logits, _ = batch._call(schedule.model, mx.array(ids, mx.int32), where, None)
    batch._place.positions = true
    for slot, twin in schedule.twins.items():
        for i in range(width):
            assert apart(logits[slot, i], twin.feed([ids[slot][i]])) <= tolerance()


def test_what_nobody_wrote_is_never_read():
    """Dummy columns, entries that are not there yet and rings of a free slot are full of NaN."""
    schedule = scheduled(6, DRAFTS)
    schedule.join()
    batch = schedule.batch
    (slot,) = schedule.twins
    poison = [mx.array(a) for a in batch.arrays()]
    for a in poison:
        a[1 - slot] = float("nan")
        a[:, :, -1] = float("nan")
    batch.bind(poison)
    schedule.step()
    schedule.cycle()
    schedule.join()
    for _ in range(3):
        schedule.step()
        schedule.cycle()
    assert schedule.run(0) <= tolerance()


def test_more_drafts_than_can_be_taken_back_are_refused():
    model = Compressing()
    make = partial(model.make_cache, 2)
    batch = Batch(make, probe(model, make), 2, 48, spare=2)
    twin = Twin.start(model, make, tiny.ids(11), 11, False)
    batch.join(0, twin.copy(make))
    before, held = [mx.array(a) for a in batch.arrays()], batch.hold()
    with pytest.raises(BatchError, match="2 spare rows cannot take 3 drafts back"):
        Steps(model, compile="off").verify(batch, mx.zeros((2, 4), mx.int32))
    batch.put_back(held)
    assert all(mx.array_equal(a, b).item() for a, b in zip(before, batch.arrays(), strict=True))


def test_one_more_draft_than_the_rings_serve_gives_other_logits():
    """The check is right: past it, rows that are still seen are written over."""
    model = Compressing()
    make = partial(model.make_cache, DRAFTS)
    batch, steps = Batch(make, probe(model, make), 1, 96, spare=DRAFTS), Steps(model, compile="off")
    forms: list[Any] = list(batch._leaves)
    twin, worst = Twin.start(model, make, tiny.ids(17), 17, False), 0.0
    batch.join(0, twin.copy(make))
    for i in range(12):
        ids = [twin.token, *tiny.ids(DRAFTS + 1, i)]
        for form in forms:
            form.spare += 1  # bypassed
        logits = steps.verify(batch, mx.array([ids], mx.int32))
        for form in forms:
            form.spare -= 1
        steps.commit(batch, [1])
        mx.eval(logits, batch.live())
        worst = max(worst, apart(logits[0, 0], twin.feed(ids[:1])))
    assert worst > tolerance()
