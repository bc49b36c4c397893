"""Many at once when a call of a turn raises: who ended has been told so, everybody ends, and the books are empty."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from mlxkv.cache.batch import Batch
from mlxkv.decode.batched import Batched
from mlxkv.decode.group import Group
from mlxkv.decode.grouping import Divide, Grouping
from mlxkv.decode.loop import Loop
from mlxkv.decode.memory import Memory
from mlxkv.decode.prefill import Prefill
from mlxkv.decode.request import Finished
from mlxkv.decode.seats import Seats
from mlxkv.decode.sequence import Sequence
from mlxkv.decode.solo import MemoryFull
from mlxkv.errors import EngineError, MlxkvError, QueueFull
from tests import tiny
from tests.decode.many import Alone, Crowd, Planned, ask, changed, drive, load, settled, wrong_with

#: where a turn fails
PLACES = [
    (Group, "_submit"),
    (Group, "_close"),
    (Batch, "join"),
    (Batch, "resize"),
    (Batch, "leave"),
    (Batched, "forward"),
    (Sequence, "finish"),
    (Sequence, "accept"),
    (Seats, "regroup"),
    (Memory, "room"),
    (Memory, "charge"),
    (Memory, "release"),
    (Memory, "measure"),
]


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("qwen3_5")


@pytest.fixture(scope="module")
def alone(model):
    made = Alone(model)
    yield made
    made.close()


@contextmanager
def failing(owner: Any, name: str, at: int, error: BaseException) -> Iterator[list[int]]:
    """Inside, the ``at``-th call raises ``error``. The list grows with each call."""
    real, calls = getattr(owner, name), []

    def call(*args: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == at:
            raise error
        return real(*args, **more)

    with mock.patch.object(owner, name, call):
        yield calls


def company(salt: int) -> list[Planned]:
    """Some end while others join and go on."""
    longer = [Planned(ask(tiny.ids(9 + n, salt + n), 24)) for n in range(2)]
    short = [Planned(ask(tiny.ids(5, salt + 10 + n), 1 + n), (0, 2 * n)) for n in range(4)]
    return [*longer, *short, Planned(ask(tiny.ids(14, salt + 20), 9), (1, 6))]


def right(alone, plan, outcomes, *, may_fail=False):
    for number, (planned, got) in enumerate(zip(plan, outcomes, strict=True)):
        if may_fail and got.error is not None:
            assert isinstance(got.error, MlxkvError) and not any(isinstance(e, Finished) for e in got.events)
            assert got.tokens == alone(planned.request).token_ids[: len(got.tokens)]
        else:
            assert wrong_with(planned, got, alone(planned.request)) == [], number


def test_whatever_call_fails_everybody_ends(model, alone, tmp_path):
    with load(model, tmp_path, max_rows=5) as engine:
        for number, (owner, name) in enumerate(PLACES):
            at = 1 + number % 3
            plan = company(0)
            with failing(owner, name, at, ValueError(f"{name} failed")) as calls:
                outcomes = drive(engine, plan)
            assert len(calls) >= at, name
            right(alone, plan, outcomes, may_fail=True)
            assert engine.health().ok and not settled(engine), name
            engine.inspect(lambda loop: loop.check_integrity())
        right(alone, company(0), drive(engine, company(0)))


def test_who_ends_in_a_step_that_fails_has_ended(model, alone, tmp_path):
    """The last token of one is read in the step whose submission then fails."""
    short, long = ask(tiny.ids(6, 1), 4), ask(tiny.ids(7, 2), 40)
    with load(model, tmp_path) as engine:
        real, left = Group._close, []

        def close(group, ended):
            real(group, ended)
            left.extend(ended)

        def submit(group, logits):
            if left and group.rows and not raised:
                raised.append(1)
                raise RuntimeError("no step any more")
            return really(group, logits)

        raised: list[int] = []
        really = Group._submit
        with mock.patch.object(Group, "_close", close), mock.patch.object(Group, "_submit", submit):
            outcomes = drive(engine, [Planned(long), Planned(short)])
        assert raised and isinstance(outcomes[0].error, EngineError)
        assert wrong_with(Planned(short), outcomes[1], alone(short)) == []
        assert not settled(engine)


def test_a_group_that_fails_while_somebody_joins_does_not_go_on(model, alone, tmp_path):
    """A row that had ended, but whose end could not be stored, would process its last token twice."""
    place, keep, joining, raised = Seats.place, Sequence.keep, [], []

    def placing(seats, *args):
        joining.append(1)
        if seats.rows == 2 and not raised:  # the token in flight is the last one of the first
            ends = next(seats.sequences())
            ends.limit = len(ends.sampled) + 1
        try:
            place(seats, *args)
        finally:
            joining.clear()

    def keeping(sequence, *args):
        if joining and not raised:
            raised.append(sequence)
            raise ValueError("it cannot be stored")
        keep(sequence, *args)

    with (
        mock.patch.object(Seats, "place", placing),
        mock.patch.object(Sequence, "keep", keeping),
        load(model, tmp_path) as engine,
    ):
        first, second = ask(tiny.ids(6, 1), 60), ask(tiny.ids(7, 2), 60)
        plan = [Planned(first), Planned(second), Planned(ask(tiny.ids(8, 3), 10), (0, 2))]
        outcomes = drive(engine, plan)
        right(alone, plan, outcomes, may_fail=True)
        assert raised and all(o.error is not None for o in outcomes)
        again = [Planned(ask([*(p.request.tokens or ()), *alone(p.request).token_ids, 5], 4)) for p in plan]
        right(alone, again, drive(engine, again))
        assert not settled(engine)


def test_a_panic_is_one_requests_own(model, alone, tmp_path):
    """What is written in Rust raises no Exception when it panics; twice in a minute does not end the engine either."""

    class Panic(BaseException):
        pass

    plan = company(0)
    with load(model, tmp_path) as engine:
        for error in (Panic("byte index is not a character"), RuntimeError("its own"), RuntimeError("again")):
            with failing(Sequence, "accept", 7, error):
                outcomes = drive(engine, plan)
            assert sum(o.error is not None for o in outcomes) == 1
            right(alone, plan, outcomes, may_fail=True)
        with failing(Sequence, "_prompt", 2, Panic("a tokenizer")):
            outcomes = drive(engine, plan)
        assert sum(o.error is not None for o in outcomes) == 1
        assert engine.health().ok and not settled(engine)


def test_a_row_that_cannot_grow_leaves_the_others(model, alone, tmp_path):
    long, short = ask(tiny.ids(250, 1), 12), ask(tiny.ids(200, 2), 30)

    def full(seats, group, slots, need):
        if need > 256:
            raise MemoryFull("no room", "")
        return real(seats, group, slots, need)

    real = Seats._resize
    with (
        mock.patch("mlxkv.decode.seats.OPEN_END", 2),
        mock.patch.object(Seats, "_resize", full),
        load(model, tmp_path, prefill_chunk=256) as engine,
    ):
        outcomes = drive(engine, [Planned(short), Planned(long)])
        assert isinstance(outcomes[1].error, MemoryFull) and len(outcomes[1].tokens) > 4
        assert wrong_with(Planned(short), outcomes[0], alone(short)) == []
        assert not settled(engine)


def test_the_second_failure_of_the_device_leaves_empty_books(model, tmp_path):
    at_once = [Planned(each.request) for each in company(0)]  # later it takes none any more
    with load(model, tmp_path) as engine:
        for _ in range(2):
            with failing(Group, "_submit", 9, RuntimeError("the device")):
                outcomes = drive(engine, at_once)
            assert all(o.ended for o in outcomes)
        assert not engine.health().ok and engine.health().active == 0 and not settled(engine)


def test_who_was_taken_but_not_looked_at_counts_for_max_queue(model, tmp_path):
    """While others decode the loop looks at one new request a turn."""
    with load(model, tmp_path, max_queue=4, max_rows=1) as engine:
        crowd = Crowd(engine)
        running = crowd.submit(0, ask(tiny.ids(5, 1), 4000))
        crowd.until(lambda: crowd.reached(0, 2))

        def two(loop):  # before a turn, which then looks at one
            return [engine.submit(ask(tiny.ids(5, 2), 2)) for _ in range(2)]

        waiting = engine.inspect(two) + engine.inspect(two)
        with pytest.raises(QueueFull):
            engine.inspect(two)
        running.cancel()
        assert [len(t.result().token_ids) for t in waiting] == [2] * 4


def test_an_idle_engine_keeps_nobodys_state(model, tmp_path):
    before = [o for o in gc.get_objects() if isinstance(o, (Sequence, Group, Batch))]
    with load(model, tmp_path) as engine:
        drive(engine, company(0))
        assert not settled(engine)

        def alive(loop):
            gc.collect()
            known = {id(o) for o in before}  # of other engines, which are still there
            return [o for o in gc.get_objects() if isinstance(o, (Sequence, Group, Batch)) and id(o) not in known]

        assert engine.inspect(alive) == []


def test_on_a_gpu_a_failed_chunk_may_be_a_steps_failure(model, alone, tmp_path):
    """Its errors surface later than the command that caused them: whoever had a state then has failed."""
    plan = [*company(0)[:2], Planned(ask(tiny.ids(30, 30), 4), (0, 4)), Planned(ask(tiny.ids(9, 31), 4), (2, 0))]
    with changed(lambda rt: dataclasses.replace(rt, device="gpu")), load(model, tmp_path) as engine:
        real, chunks = Prefill.chunk, []

        def chunk(prefill, most):
            chunks.append(len(prefill.sequence.prompt.tokens))
            if chunks.count(30) == 1:
                chunks.append(30)
                raise RuntimeError("the device")
            return real(prefill, most)

        with mock.patch.object(Prefill, "chunk", chunk):
            outcomes = drive(engine, plan)
        assert all(isinstance(o.error, EngineError) for o in outcomes[:3])
        right(alone, plan, outcomes, may_fail=True)
        assert engine.health().ok and not settled(engine)
        right(alone, plan, drive(engine, plan))


def test_a_change_without_room_is_not_tried_at_each_step(model, alone, tmp_path):
    tried = []

    def full(seats, group, decision):
        tried.append(group)
        raise MemoryFull("no room", "")

    plan = [Planned(ask(tiny.ids(9, 1), 60)), Planned(ask(tiny.ids(12, 2), 60)), Planned(ask(tiny.ids(12, 3), 60))]
    with (
        mock.patch.object(Grouping, "regroup", lambda self, groups: Divide(groups[0].name, ()) if groups else None),
        mock.patch.object(Seats, "_divide", full),
        load(model, tmp_path) as engine,
    ):
        right(alone, plan, drive(engine, plan))
        assert 0 < len(tried) < 20  # of more than 60 steps


def test_closing_ends_everybody_whatever_fails(model, tmp_path):
    for owner, name in ((Seats, "remove"), (Group, "settle"), (Loop, "close"), (Sequence, "keep")):
        with load(model, tmp_path) as engine:
            crowd = Crowd(engine)
            for n in range(3):
                crowd.submit(n, ask(tiny.ids(5 + n, n), 2000))
            crowd.until(lambda crowd=crowd: all(crowd.reached(n, 3) for n in range(3)))
            with failing(owner, name, 1, RuntimeError("not now")):
                engine.close()
            outcomes = crowd.finish()
            assert all(o.error is None or isinstance(o.error, EngineError) for o in outcomes.values())
            assert not settled(engine, 2.0), name
