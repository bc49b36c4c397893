"""A warm-up times cycles on a thread of its own: the engine knows what they cost, made none, and answers as before."""

from __future__ import annotations

import contextlib
import random
import threading
from typing import Any

import mlx.core as mx
import pytest

import mlxkv
from mlxkv.decode import rehearsal
from mlxkv.decode.drafters import Round
from mlxkv.decode.request import Delta
from mlxkv.decode.threads import leave_device
from mlxkv.errors import EngineClosed, EngineError
from mlxkv.models.rope import Angles
from tests import architectures, tiny
from tests.decode.many import ask, changed, load, settled
from tests.decode.scripted import Scripted, drafted_by, pattern


def costs(engine: Any) -> dict[int, tuple[float, float]]:
    """Depth -> seconds of a plain step of two rows, and of a cycle."""
    return engine.inspect(
        lambda loop: {k: loop.seats.speculation.depth.seconds(2, k) for k in loop.seats.speculation.depth.rungs}
    )


def rehearsals() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "mlxkv-rehearsal"]


@pytest.mark.parametrize("compiled", ["off", "on"])
@pytest.mark.parametrize("stored", [False, True], ids=["nothing stored", "stored"])
def test_cycles_are_timed_elsewhere(model, alone, tmp_path, compiled, stored):
    with load(model, tmp_path / "c" if stored else None, draft="mtp", compile=compiled, max_rows=4) as engine:
        engine.warm_up()
        assert not rehearsals() and not settled(engine)
        status = engine.status()
        assert (status.cycles, status.drafted) == (0, 0) and status.memory["snapshots"] == 0
        for plain, cycle in costs(engine).values():
            assert 0 < plain < cycle
        assert engine.inspect(lambda loop: loop.check_integrity()) is None
        if stored:
            assert status.store is not None and status.store.written_records == 0
        asked = [ask(tiny.ids(n, seed=n), max_tokens=24) for n in (1, 11, 30, 12)]
        for request in asked[:2]:
            assert engine.submit(request).result().token_ids == alone(request).token_ids
        for request, ticket in [(request, engine.submit(request)) for request in asked[2:]]:
            assert ticket.result().token_ids == alone(request).token_ids


@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_other_drafters_are_timed_too(tiny_model, drafter):
    other: dict[str, Any] = {"draft_model": tiny_model("llama")} if drafter == "model" else {}
    with mlxkv.load(tiny_model("qwen3_5"), cache=False, draft=drafter, **other) as engine:
        cold = mlxkv.generate(engine, tiny.ids(20), max_tokens=8)
        engine.warm_up()
        assert not settled(engine) and engine.inspect(lambda loop: loop.check_integrity()) is None
        if drafter == "model":  # a look-up finds something where a text repeats itself
            assert all(0 < plain < cycle for plain, cycle in costs(engine).values())
        assert mlxkv.generate(engine, tiny.ids(20), max_tokens=8).token_ids == cold.token_ids


class Failing(Scripted):
    def propose(self, round: Round, k: int) -> mx.array | None:
        raise ArithmeticError("no drafts today")


def test_one_that_fails_is_told_and_the_engine_goes_on(model, alone):
    drafter = Failing(pattern("all", random.Random(0)), architectures.VOCAB)
    with changed(drafted_by(drafter)), load(model, None, draft="mtp") as engine:
        with pytest.raises(EngineError, match="no drafts today"):
            engine.warm_up()
        assert not rehearsals() and not settled(engine)
        assert engine.inspect(lambda loop: loop.check_integrity()) is None
        request = ask(tiny.ids(5), max_tokens=1)  # no drafts for one token
        assert engine.submit(request).result().token_ids == alone(request).token_ids


def test_one_is_given_up_where_the_engine_is_closed(model, alone):
    with load(model, None, draft="mtp") as engine:
        requests = [[ask(tiny.ids(5), max_tokens=500) for _ in range(2)]]
        with pytest.raises(EngineClosed, match="warmed up"):
            engine.inspect(
                lambda loop: rehearsal.rehearse(loop, requests, lambda: len(rehearsals()) > 0, contextlib.nullcontext)
            )
        assert not rehearsals() and not settled(engine)
        assert engine.inspect(lambda loop: loop.check_integrity()) is None
        request = ask(tiny.ids(9), max_tokens=12)
        assert engine.submit(request).result().token_ids == alone(request).token_ids


def test_nobody_waits_for_one(model, alone):
    """Not who decodes already; and one for which there is no memory is left."""
    requests = [[ask(tiny.ids(5), max_tokens=9) for _ in range(2)]]

    def rehearse(loop: Any) -> None:
        rehearsal.rehearse(loop, requests, lambda: False, contextlib.nullcontext)

    with load(model, None, draft="mtp") as engine:
        long = engine.submit(ask(tiny.ids(9), max_tokens=200, logit_bias={tiny.EOS: -100.0}))
        next(event for event in long if isinstance(event, Delta))
        engine.inspect(rehearse)
        assert engine.inspect(lambda loop: loop.seats.speculation.depth.seconds(2, 1)) == (0.0, 0.0)
        long.cancel()
        for _ in long:
            pass
        assert not settled(engine)

        def crowded(loop: Any) -> None:
            memory = loop.rt.memory
            memory.charge("caches", "somebody", memory.limit)
            rehearse(loop)
            memory.release("somebody")

        engine.inspect(crowded)
        assert not settled(engine) and engine.inspect(lambda loop: loop.check_integrity()) is None
        request = ask(tiny.ids(9), max_tokens=12)
        assert engine.submit(request).result().token_ids == alone(request).token_ids


def test_angles_that_another_thread_built_and_left_are_built_again():
    angles = Angles(8, 10000.0, 1.0)
    right = [mx.array(a.tolist()) for a in angles.at(5, 2)]

    def elsewhere() -> None:
        angles.at(7, 1)
        angles.at(5, 2)  # and nobody evaluates it
        leave_device()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert all(mx.array_equal(a, b).item() for a, b in zip(angles.at(5, 2), right, strict=True))
