"""Rows of a batch as a recorder sees them: what it stores of them is what it stores of a solo run, bit for bit."""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import numpy as np
import pytest

from mlxkv.cache.batch import Batch
from mlxkv.cache.planner import Plan
from mlxkv.cache.state import SequenceState
from mlxkv.cache.store import PrefixStore
from mlxkv.decode.pool import Pool
from mlxkv.decode.step import Steps
from mlxkv.decode.tracking import Track
from tests import headed, tiny
from tests.cache.stores import recached, records
from tests.cache.test_kinds import CACHES
from tests.probe import BLOCK, runtime

LENGTHS = (13, 22)
STEPS = 3 * BLOCK + 3


def begin(rt, store, n: int):
    """A recorded sequence that has read ``n`` tokens, and its next token."""
    tokens = tiny.ids(n, seed=n)
    state = SequenceState.new(rt.make_cache())
    recorder = store.recorder(state, tokens, Plan(), rt.barrier)
    for a, b in ((0, n // 2), (n // 2, n - 1), (n - 1, n)):
        logits = rt.model(mx.array(tokens[a:b])[None], cache=state.caches)
        state.advance(b - a)
        mx.eval(logits, state.live())
        recorder.flush()
        if b == n // 2:
            recorder.boundary()
            state.settle()
            mx.eval(state.live())
    return recorder, state, int(logits[0, -1].argmax())


def finish(recorder) -> None:
    del recorder.tokens[recorder.state.position :]
    recorder.boundary((len(recorder.tokens) - STEPS, "an answer", None), role="answer")
    recorder.commit(everything=True)


def alone(rt, store) -> None:
    for n in LENGTHS:
        recorder, state, token = begin(rt, store, n)
        for step in range(STEPS):
            recorder.tokens.append(token)
            logits = rt.model(mx.array([[token]]), cache=state.caches)
            state.advance(1)
            mx.eval(logits, state.live())
            token = int(logits[0, -1].argmax())
            if step % 5 == 4:
                recorder.flush()
        finish(recorder)


def together(rt, store) -> None:
    batch = Batch(rt.make_cache, rt.layout, 3, 64)
    steps, pool = Steps(rt.model, compile="off"), Pool.of(rt.layout, 2)
    recorders, ids = {}, [0, 0, 0]
    for slot, n in zip((2, 0), LENGTHS, strict=True):
        recorders[slot], state, ids[slot] = begin(rt, store, n)
        batch.join(slot, state)
        recorders[slot].state = batch.row(slot)
    for step in range(STEPS):
        for slot, recorder in recorders.items():
            recorder.tokens.append(ids[slot])
        held = batch.hold()
        logits = steps.run(batch, mx.array(ids, mx.int32), Track.of(batch.slots, pool.dummy), pool)
        if step == 7:  # built, and never was
            batch.put_back(held)
            logits = steps.run(batch, mx.array(ids, mx.int32), Track.of(batch.slots, pool.dummy), pool)
        del held
        mx.eval(logits, batch.live(), pool.arrays)
        for slot in recorders:
            ids[slot] = int(logits[slot].argmax())
        if step % 5 == 4:
            for recorder in recorders.values():
                recorder.flush()
        if step == 12:
            batch.resize(2, 80, {2: 0, 0: 1})
            recorders, ids = {0: recorders[2], 1: recorders[0]}, [ids[2], ids[0]]
    for slot, recorder in recorders.items():
        assert recorder.state is batch.row(slot)
        finish(recorder)


def contents(folder) -> dict[str, dict[str, np.ndarray]]:
    return {
        path.name: {name: np.array(a.view(mx.uint8)) for name, a in mx.load(str(path)).items()}  # type: ignore[union-attr]
        for path in records(folder)
    }


def check(rt, folder) -> None:
    """``rt`` has a store in ``folder``/alone; another one is opened beside it."""
    other = PrefixStore(folder / "together", rt.store.identity, rt.layout, block=BLOCK)
    alone(rt, rt.store)
    together(dataclasses.replace(rt, store=other), other)
    for store in (rt.store, other):
        assert store.writer.flush(20)
        store.close()
    a, b = contents(folder / "alone"), contents(folder / "together")
    assert len(a) >= 2 * STEPS // BLOCK and a.keys() == b.keys()
    for name, arrays in a.items():
        assert arrays.keys() == b[name].keys()
        assert all(np.array_equal(arrays[k], b[name][k]) for k in arrays), name


@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "qwen3_5", "baichuan_m1"])
def test_records_of_rows_are_those_of_solo_runs(tiny_model, tmp_path, arch):
    check(runtime(tiny_model(arch), tmp_path / "alone"), tmp_path)


@pytest.mark.parametrize("name", ["quantised beside plain rows", "concatenated"])
def test_records_of_other_classes(tiny_model, tmp_path, name):
    plain = runtime(tiny_model("llama"), tmp_path / "plain")
    assert plain.store is not None
    plain.store.close()
    check(recached(plain, tmp_path / "alone", CACHES[name]), tmp_path)


def test_records_of_a_head_that_catches_up_row_by_row(tmp_path):
    rt = runtime(headed.make(tmp_path / "m"), tmp_path / "alone")
    assert rt.layout is not None and "head" in rt.layout.describe()
    check(rt, tmp_path)
