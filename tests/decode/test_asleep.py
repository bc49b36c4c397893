"""Sequences that do without drafts, since those before them had no use for any: alone, in company of those that draft,
and in and out of batches, each says what it says by itself, and what is stored of it is what a plain engine stores."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mlxkv.decode import depth
from mlxkv.decode.seats import Seats
from tests import architectures
from tests.decode.kept import compare, kept
from tests.decode.many import ask, drive, load, schedule, wrong_with


@pytest.fixture
def slept(monkeypatch):
    """Drafting is taken to be far from paying, whatever this machine says. Who slept, and who did not."""
    monkeypatch.setattr(depth, "FAR", ((-1.0, float("inf")),))
    found: list[bool] = []
    place = Seats.place

    def placed(self: Seats, sequence: Any, *rest: Any) -> None:
        place(self, sequence, *rest)
        if self.speculation is not None:
            rows = [row for group in self.groups for row in group.rows.values()]
            found.extend(row.asleep for row in rows if row.sequence is sequence)

    monkeypatch.setattr(Seats, "place", placed)
    return found


def requests(rng: random.Random, n: int) -> list[Any]:
    prompts = [[rng.randrange(3, architectures.VOCAB) for _ in range(rng.randint(2, 40))] for _ in range(n)]
    return [ask(prompt, max_tokens=rng.randint(1, 40)) for prompt in prompts]


@pytest.mark.parametrize("stored", [False, True], ids=["nothing stored", "stored"])
@pytest.mark.parametrize("compiled", ["off", "on"])
def test_who_sleeps_says_what_it_says_alone(model, alone, slept, tmp_path, stored, compiled):
    rng = random.Random(3)
    with load(model, tmp_path / "many" if stored else None, draft="mtp", compile=compiled, max_rows=4) as engine:
        engine.warm_up()  # times are known: from now on sequences may sleep
        slept.clear()
        asked = requests(rng, 24)
        for request in asked[:6]:  # one after the other
            assert engine.submit(request).result().token_ids == alone(request).token_ids
        plan = schedule(rng, asked[6:])
        for planned, got in zip(plan, drive(engine, plan), strict=True):
            assert not wrong_with(planned, got, alone(planned.request))
        status = engine.status()
        assert not status.active and status.reserved_rows == 0
        assert engine.inspect(lambda loop: loop.check_integrity()) is None
    assert len(slept) == 24 and 0 < sum(slept) < 24
    if stored:
        with load(model, tmp_path / "one", draft="off", max_rows=4) as plain:
            for request in asked:
                plain.submit(request).result()
        compared = compare(kept(tmp_path / "many"), kept(tmp_path / "one"))
        assert not compared.wrong and compared.both > 0.5 * compared.either > 5


def test_nobody_sleeps_where_the_user_fixed_the_depth(model, slept):
    with load(model, None, draft="mtp", draft_depth=2) as engine:
        for request in requests(random.Random(4), 4):
            engine.submit(request).result()
        assert engine.status().cycles
    assert slept == [False] * 4
