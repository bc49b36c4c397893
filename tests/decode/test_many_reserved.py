"""What is reserved is what is allocated, as the arrays' own shapes say, at every look at random runs."""

from __future__ import annotations

import random

import pytest

from mlxkv.decode import grouping
from mlxkv.decode.request import Request
from tests import tiny
from tests.decode.many import Alone, Planned, ask, drive, load, schedule, settled, wrong_with
from tests.decode.stories import Stories


class Looks:
    """Compares what the engine says it has reserved with the arrays there are, on its own thread, between two turns."""

    def __init__(self, engine, exact):
        self.engine, self.exact = engine, exact
        self.looks = self.most_rows = 0
        self.together = 0  # the most rows in one batch
        self.wrong = []

    def __call__(self):
        self.engine.inspect(self.look)

    def look(self, loop):
        status, found = loop.status(), allocated(loop)
        self.looks += 1
        self.most_rows = max(self.most_rows, found.rows)
        self.together = max([self.together, *found.batches])
        if status.reserved_rows != found.rows:
            self.wrong.append(f"{status.reserved_rows} rows reserved, {found.rows} there")
        if status.reserved_bytes != found.nbytes if self.exact else status.reserved_bytes < found.nbytes:
            self.wrong.append(f"{status.reserved_bytes} bytes reserved, {found.nbytes} there")
        loop.pool.check_integrity()


class allocated:
    """What the arrays of a loop's sequences, batches and snapshots say: ``rows`` of growing buffers, bytes of all
    arrays, and of each batch how many of its slots are taken. Caches that no token has reached yet have no arrays: they
    count as what they are going to be."""

    def __init__(self, loop):
        self.rows = 0
        self.nbytes = loop.pool.nbytes + loop.memory.ledger()["queue"]
        self.batches = []
        states = [(sequence, prefill.state) for sequence, prefill in loop.prefills.items()]
        for group in loop.groups:
            if (batch := group.batch) is not None:
                self.nbytes += batch.nbytes
                self.rows += batch.slots * batch.capacity
                self.batches.append(sum(position > 0 for position in batch.positions))
            else:
                states += [(row.sequence, group.executor.state) for row in group.rows.values()]
        for _, state in states:
            if state.position:
                arrays = state.live()
                self.nbytes += sum(a.nbytes for a in arrays)
                self.rows += max((a.shape[2] for a in arrays if a.ndim == 4 and a.shape[0] == 1), default=0)
        for sequence in [*loop.restoring, *(s for s, state in states if not state.position)]:
            self.nbytes += loop.memory.held_by(sequence)
            self.rows += loop.allotted(sequence)


@pytest.mark.parametrize("arch", ["llama", "qwen3_5", "gemma3_text"])
def test_reserved_is_allocated(tiny_model, tmp_path, arch):
    rng, alone = random.Random(f"{arch} 2"), Alone(tiny_model(arch))
    asked: list[Request] = Stories(rng, alone).take(10)
    plan = schedule(rng, asked, cancelled=0.2)
    with load(tiny_model(arch), tmp_path) as engine:
        looks = Looks(engine, exact=arch != "gemma3_text")  # a window's buffer grows until it is full
        outcomes = drive(engine, plan, looks)
        assert not looks.wrong, "\n".join(looks.wrong[:5])
        assert looks.looks > 50 and looks.most_rows and looks.together >= 2
        assert not settled(engine)
    for planned, outcome in zip(plan, outcomes, strict=True):
        assert wrong_with(planned, outcome, alone(planned.request), 2e-6) == []
    alone.close()


@pytest.mark.parametrize("arch", tiny.ARCHS)
def test_rows_stand_in_one_batch(tiny_model, arch):
    """None of these architectures has its rows take turns."""
    with load(tiny_model(arch), None) as engine:
        seen: list[list[int]] = []
        plan = [Planned(ask(tiny.ids(20 + n, seed=n), 40)) for n in range(4)]
        drive(engine, plan, lambda: engine.inspect(lambda loop: seen.append(allocated(loop).batches)))
        assert max(sum(batches) for batches in seen) == 4


def test_a_row_that_leaves_a_batch_takes_its_own_room_only(tiny_model, monkeypatch):
    """The batch had columns for a longer row; what goes on by itself has room for its own answer."""
    monkeypatch.setattr(grouping, "SHORT", 64)
    asked = [ask(tiny.ids(500, seed=n), max_tokens) for n, max_tokens in enumerate((200, 80, 80))]
    asked.append(ask(tiny.ids(20, seed=3), 140))
    alone, capacities = Alone(tiny_model("qwen3_5")), set()
    with load(tiny_model("qwen3_5"), None, prefill_chunk=512) as engine:
        looks, events = Looks(engine, exact=True), iter(range(10**6))

        def look():
            if next(events) % 8:  # each look takes a turn of the loop
                return
            looks()
            capacities.add(frozenset(c for _, c in engine.status().groups))

        # the short one comes when the long ones are together: beside one of them it would be too short
        plan = [
            Planned(asked[0]),
            *(Planned(each, after) for each, after in zip(asked[1:], [(0, 2), (0, 2), (2, 2)], strict=True)),
        ]
        outcomes = drive(engine, plan, look)
        assert not looks.wrong, "\n".join(looks.wrong[:5])
        assert looks.together == 4 and {0, 1024} in capacities  # all in one rectangle, later one by itself
        for request, outcome in zip(asked, outcomes, strict=True):
            assert wrong_with(Planned(request), outcome, alone(request)) == []
        assert not settled(engine)
    alone.close()
