"""The decoding step of a batch: plain and compiled alike, no second cache, tracking always part of it."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlxkv.cache.batch import BatchError
from mlxkv.decode import step as step_module
from mlxkv.decode.traced import Race
from mlxkv.decode.tracking import Track
from tests import tiny
from tests.cache.batch.schedules import Schedule, apart, tolerance
from tests.decode.house import House, Small


@pytest.fixture(scope="module")
def small():
    return Small()


def test_a_captured_state_is_the_row_s_and_nothing_else_of_the_pool_changes():
    house = House(tiny.build("lfm2", num_hidden_layers=2)[0])
    for _ in range(3):
        house.run()
        [t.feed([t.token]) for t in house.twins]
    before = [mx.array(a) for a in house.pool.arrays]
    logits = house.run({1: (0, house.batch.positions[1] + 1)})
    assert house.compare(logits) <= tolerance()
    want = [a for m in house.twins[1].state.members or () if m.record == "state" for a in m.arrays().values()]
    assert len(want) == len(before) > 0
    for pooled, old, state in zip(house.pool.arrays, before, want, strict=True):
        assert apart(pooled[0:1], state) <= tolerance()
        assert mx.array_equal(pooled[1], old[1]).item()


def test_compiled_steps_are_plain_ones_traced_once_a_shape(small):
    house = House(small, compile="on")
    house.steps.admit(house.batch, house.pool)
    assert house.steps.traces == 1 and house.batch.positions == [5, 11]
    for i in range(4):
        assert house.compare(house.run({0: (1, house.batch.positions[0] + 1)} if i == 2 else None)) <= tolerance()
    state = [a for m in house.batch.row(0).members if m.record == "state" for a in m.arrays().values()]
    house.run()  # the captured state is of the step before
    assert house.steps.traces == 1
    assert not any(apart(p[1:2], s) == 0 for p, s in zip(house.pool.arrays, state, strict=True))
    house.batch, house.twins = house.full(2, 64)  # another batch of the same shape
    assert house.compare(house.run()) <= tolerance() and house.steps.traces == 1
    house.batch.resize(3, 96, {0: 2, 1: 0})
    house.batch.resize(2, 96, {2: 0, 0: 1})
    assert house.compare(house.run()) <= tolerance() and house.steps.traces == 2


def test_rows_that_come_go_and_are_taken_back_of_a_compiled_batch(small):
    made = Schedule(small, small.make_cache, 9, capacity=64, longest=20, compile="on")
    for move in ("join", "step", "join", "step", "step", "leave", "step", "join", "step", "take", "step", "step"):
        getattr(made, move)()
    assert made.run(0) <= tolerance() and made.steps.traces == 1


def test_the_least_recently_used_function_is_dropped(small, monkeypatch):
    monkeypatch.setattr(step_module, "MOST", 2)
    house = House(small, slots=1, compile="on")
    for capacity, traces in ((64, 1), (32, 2), (64, 2), (96, 3), (64, 3), (32, 4)):
        batch, _ = house.full(1, capacity)
        house.steps.admit(batch, house.pool)
        house.steps.admit(batch, house.pool)
        assert house.steps.traces == traces


@pytest.mark.parametrize("compile", ["off", "on"])
def test_a_step_holds_no_second_cache(small, compile):
    house = House(small, slots=2, capacity=16384, compile=compile)
    sizes = []
    for i in range(6):
        held = house.batch.hold() if i % 2 else None  # as the loop does, and lets go of it before it submits
        logits = house.steps.run(house.batch, house.ids(), Track.of(2, house.pool.dummy), house.pool)
        del held
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(logits, house.batch.live(), house.pool.arrays)
        sizes.append(mx.get_peak_memory() - before)
    # scores and weights of attention [2, 1, 1, 16384] where all columns are read, but no copy of keys or values
    assert house.batch.nbytes == 2 * 2 * 16384 * 32 * 4 + 2 * 32 * 4
    assert max(sizes[2:]) < house.batch.nbytes / 4


def test_a_step_that_was_held_is_copied_not_lost(small):
    house = House(small)
    held = house.batch.hold()
    first = house.run()
    house.batch.put_back(held)
    again = house.run()
    assert mx.array_equal(first, again).item() and house.batch.positions == [6, 12]


def test_a_row_without_a_column_is_refused_before_anything_is_built(small):
    house = House(small, capacity=12)
    house.run()
    with pytest.raises(BatchError, match="fill all 12"):
        house.run()
    assert house.batch.positions == [6, 12]


class Counting:
    """A model whose logits depend on how often it was called: a trace cannot know."""

    def __init__(self, model, ask: bool) -> None:
        self.model, self.calls, self.ask = model, 0, ask
        self.make_cache = model.make_cache

    def __call__(self, tokens, cache):
        self.calls += 1
        logits = self.model(tokens, cache)
        return logits + (logits.sum().item() * 0 if self.ask else self.calls)


@pytest.mark.parametrize("ask", [False, True])
def test_what_a_trace_would_change_is_not_compiled(small, ask):
    """In ``exact``; a model that looks at its values cannot be traced in either mode."""
    if tolerance() and not ask:
        pytest.skip("only bits are compared")
    house = House(Counting(small, ask), compile="on")
    house.steps.admit(house.batch, house.pool)
    first, second = house.run()[0, 0].item(), house.run()[0, 0].item()
    assert house.batch.positions == [7, 13]
    assert ask or second != first
    calls = house.model.calls
    house.run()
    assert house.model.calls == calls + 1  # the model itself, not a trace of it


def test_auto_on_a_cpu_compiles_nothing(small):
    house = House(small, compile="auto")
    house.steps.admit(house.batch, house.pool)
    house.run()
    assert house.steps.traces == (0 if mx.default_device().type == mx.DeviceType.cpu else 1)


@pytest.mark.parametrize(("plain", "compiled", "wins"), [(10, 8, True), (10, 9.9, False), (8, 10, False)])
def test_the_faster_kind_stays(plain, compiled, wins):
    race, now, kinds = Race(), 0.0, []
    for i in range(200):
        kind = race.next(now)
        kinds.append(kind)
        now += (compiled if kind else plain) + (50 if i % 8 == 0 else 0)  # the first after a change waits
        if i % 13 == 5:
            race.interrupt()  # a chunk of a prompt came between
            now += 1000
        if race.winner is not None:
            break
    assert race.winner is wins and len(kinds) < 60 and set(kinds) == {False, True}
    assert race.next(now) is wins
