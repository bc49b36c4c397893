"""Verify steps and their commits, plain and compiled alike: no second cache, tracking always part of the commit."""

from __future__ import annotations

import gc
import weakref

import mlx.core as mx
import pytest

from mlxkv.cache.batch import BatchError
from mlxkv.decode import step as step_module
from mlxkv.decode.batched import Batched
from mlxkv.decode.tracking import Marks, Track, crossing
from tests import tiny
from tests.cache.batch.schedules import apart, tolerance
from tests.decode.house import House, Small, recurrent


@pytest.fixture(scope="module")
def small():
    return Small()


@pytest.fixture(scope="module")
def compiled(small):
    """Shared: each trace builds kernels."""
    house = House(small, compile="on")
    house.steps.admit(house.batch, house.pool, [3])
    return house


def test_compiled_cycles_are_plain_ones_traced_once_a_width(compiled):
    house, steps = compiled, compiled.steps
    assert steps.traces == 3 and steps.knows(2, 64, [3]) and not steps.knows(2, 64, [4])
    assert house.batch.positions == [5, 11] and house.batch.verified is None
    for seed, kept in enumerate(([3, 1], [2, 3], [3, 3], [1, 1])):
        assert house.cycle(3, kept, seed=seed) <= tolerance()
        assert house.compare(house.run()) <= tolerance()
    gone = weakref.ref(house.batch)
    house.batch, house.twins = house.full(2, 64)  # another batch of the same shape
    gc.collect()
    assert gone() is None  # a trace is of shapes
    assert house.cycle(3, [3, 2]) <= tolerance()
    assert steps.traces == 3


def test_what_is_tracked_is_the_state_at_exactly_its_position(compiled):
    """Also in the trace of cycles in which nobody tracked, and the lanes are still afterwards."""
    house = compiled
    house.batch, house.twins = house.full(2, 64)
    assert house.cycle(3, [2, 2]) <= tolerance()
    before = house.batch.positions[1]
    row = crossing(before, 3, Marks(5, doubling=False))
    assert before == 13 and row == 1
    assert house.cycle(3, [1, 3], {1: (0, before + row + 1)}, seed=1) <= tolerance()
    kept = mx.array(house.pool.arrays[0][:2])
    house.cycle(3, [3, 3], seed=2)
    assert mx.array_equal(house.pool.arrays[0][:2], kept).item()
    assert house.steps.traces == 3


@pytest.mark.parametrize("compile", ["off", "on"])
def test_a_track_of_a_larger_batch_does_not_stay_armed(small, compile):
    house = House(small, slots=3, capacity=32, compile=compile)
    at = [p + 2 for p in house.batch.positions]
    house.cycle(3, [3, 3, 3], {1: (0, at[1]), 2: (1, at[2])})
    kept = mx.array(house.pool.arrays[0][:2])
    house.batch.resize(1, 32, {0: 0})
    house.twins = house.twins[:1]
    assert house.cycle(3, [2]) <= tolerance()
    assert mx.array_equal(house.pool.arrays[0][:2], kept).item()


def test_nobody_reads_the_dummy_of_the_pool(compiled):
    house = compiled
    house.batch, house.twins = house.full(2, 64)
    house.pool.arrays = [mx.full(a.shape, float("nan"), a.dtype) for a in house.pool.arrays]
    assert house.cycle(3, [3, 2], {0: (1, house.batch.positions[0] + 2)}) <= tolerance()
    assert mx.isfinite(house.pool.arrays[0][1]).all().item()
    house.pool.arrays = [mx.zeros_like(a) for a in house.pool.arrays]


def test_functions_of_cycles_are_dropped_too(small, monkeypatch):
    monkeypatch.setattr(step_module, "MOST", 3)
    house = House(small, slots=1, compile="on")
    for widths, traces in (([2], 3), ([2], 3), ([3], 5), ([2], 7)):
        house.steps.admit(house.batch, house.pool, widths)
        assert house.steps.traces == traces
    assert len(house.steps._shapes) == len([k for k in house.steps._outlines if k[3] == "verify"]) + 2 == 3


def test_a_width_that_is_only_tried_is_not_traced(small):
    """Its commits neither; from the third time on both are, and all give what single steps do."""
    house = House(small, slots=2, compile="on")
    house.steps.rare, traces = 2, []
    for i in range(4):
        assert house.cycle(2, [1, 2], seed=i) <= tolerance()
        traces.append(house.steps.traces)
    assert traces == [0, 0, 2, 2]
    house.steps.admit(house.batch, house.pool, [3])  # a row that is to be verified at this width always
    before = house.steps.traces
    assert house.cycle(3, [2, 3], seed=9) <= tolerance() and house.steps.traces == before


def test_a_model_that_cannot_be_traced_verifies_plainly(small):
    class Asking(Small):
        def __call__(self, tokens, cache):
            logits = super().__call__(tokens, cache)
            return logits + logits.sum().item() * 0

    house = House(Asking(), compile="on")
    house.steps.admit(house.batch, house.pool, [2])
    assert house.cycle(2, [1, 2]) <= tolerance()


@pytest.mark.parametrize("compile", ["off", "on"])
def test_cycles_hold_no_second_cache(small, compile):
    house = House(small, slots=2, capacity=16384, compile=compile)
    sizes = []

    def peak(*arrays) -> None:
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(*arrays, house.batch.live(), house.pool.arrays)
        sizes.append(mx.get_peak_memory() - before)

    for i in range(4):
        peak(house.steps.verify(house.batch, mx.array(house.drafted(3, i), mx.int32), house.pool))
        house.steps.commit(house.batch, [2, 3], Track.of(2, house.pool.dummy), house.pool)
        peak()
    # scores and weights of attention [2, 1, 3, 16384] where all columns are read, but no copy of keys or values
    assert house.batch.nbytes == 2 * 2 * 16384 * 32 * 4 + 2 * 32 * 4
    assert max(sizes[2:]) < house.batch.nbytes / 4


# the executor


def test_a_rung_inside_an_accepted_run_waits_in_the_pool(small):
    house = House(small)
    run = Batched(house.batch, house.steps, house.pool)
    ids = house.drafted(5)
    mx.eval(run.verify(mx.array(ids, mx.int32)), run.live())
    run.commit([4, 2], {0: 7, 1: 12})
    mx.eval(run.live())
    assert [run.position(s) for s in (0, 1)] == [9, 13]
    assert run.due(0, False) and run.due(1, False) and house.pool.count()["captured"] == 2
    for slot, n in ((0, 2), (1, 1)):
        for token in ids[slot][:n]:
            house.twins[slot].feed([token])
        into, position = run._captures[slot]
        assert position == house.twins[slot].state.position
        assert apart(house.pool.arrays[0][into : into + 1], recurrent(house.twins[slot].state)[0]) <= tolerance()
    # who waits has its slot, and takes no other
    run.verify(mx.array(house.drafted(2), mx.int32))
    run.commit([2, 2], {0: 10, 1: 15})
    assert house.pool.count()["captured"] == 2 and run._captures[0][1] == 7
    run.leave(0)
    run.leave(1)
    assert house.pool.used == 0


def test_states_that_are_not_passed_are_refused(small):
    house = House(small)
    run = Batched(house.batch, house.steps, house.pool)
    with pytest.raises(BatchError, match="No verify step"):
        run.commit([1, 1], {})
    run.verify(mx.array(house.drafted(3), mx.int32))
    for kept, wanted in (([2, 2], {0: 5}), ([2, 2], {0: 8}), ([2, 4], {}), ([2, 0], {})):
        with pytest.raises(BatchError):
            run.commit(kept, wanted)
    assert house.pool.used == 0
    run.commit([2, 2], {0: 7})
    assert house.pool.used == 1 and not run.due(0, False)  # it stands there: the state is its own


def test_what_is_put_back_was_never_verified(small):
    house = House(small)
    run = Batched(house.batch, house.steps, house.pool)
    for commits in (False, True):
        held = run.hold()
        run.verify(mx.array(house.drafted(4, 9), mx.int32))
        if commits:
            run.commit([3, 4], {0: 6})
            assert house.pool.used == 1
        run.put_back(held)
        del held
        assert house.batch.positions == [5, 11] and house.pool.used == 0
    assert house.compare(house.run()) <= tolerance()


def test_a_commit_that_fails_leaves_no_slot_of_the_pool(small, monkeypatch):
    house = House(small)
    run = Batched(house.batch, house.steps, house.pool)
    run.verify(mx.array(house.drafted(3), mx.int32))

    def failing(*args):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(house.steps, "_commit", failing)
    with pytest.raises(RuntimeError, match="gone"):
        run.commit([3, 3], {0: 6})
    assert house.pool.used == 0
    for slot in (0, 1):
        run.leave(slot)
    house.pool.check_integrity()


def test_a_model_without_recurrent_layers_has_nothing_to_replay():
    house = House(tiny.build("llama")[0])
    ids = house.drafted(4)
    logits = house.steps.verify(house.batch, mx.array(ids, mx.int32), house.pool)
    mx.eval(logits, house.batch.live())
    before = [id(a) for a in house.batch.arrays()]
    house.steps.commit(house.batch, [2, 4], None, house.pool)
    assert [id(a) for a in house.batch.arrays()] == before and house.batch.positions == [7, 15]
    for slot, twin in enumerate(house.twins):
        for i in range([2, 4][slot]):
            assert apart(logits[slot, i], twin.feed([ids[slot][i]])) <= tolerance()
    assert house.compare(house.run()) <= tolerance()
