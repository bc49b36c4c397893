"""One memory for weights, live caches and the RAM tier: RAM gives way to what runs, and has it back afterwards."""

from __future__ import annotations

import time

import pytest

import mlxkv
from mlxkv.decode import generation, needs, seats
from mlxkv.decode.memory import live_bytes, weigh
from mlxkv.decode.request import Request, SamplingParams
from mlxkv.decode.solo import MemoryFull
from mlxkv.errors import ConfigError
from mlxkv.models import load
from tests import headed, tiny
from tests.cache.stores import prompt
from tests.decode.equal import overlap
from tests.decode.many import Alone, Crowd, Planned, ask, settled, wrong_with
from tests.decode.many import load as load_engine
from tests.probe import Probe, equal, run, runtime

RAM = 1 << 26
ROWS = 256  # what a short prompt has room for


def watched(rt, tokens, max_tokens=1):
    """A run, and what RAM was allowed at each of its events."""
    seen = []
    request = Request(tokens=list(tokens), sampling=SamplingParams(max_tokens=max_tokens))
    made = Probe(rt, request, lambda event: seen.append(rt.store.ram.budget), lambda: False, time.monotonic())
    made.completion = made.run()
    return made, seen


@pytest.mark.parametrize("arch", ["qwen3_5", "gemma3_text"])
def test_caches_take_what_is_said(tiny_model, tmp_path, arch):
    """The sum over the layout is what the buffers of a running request weigh, windows at most."""
    rt = runtime(tiny_model(arch), tmp_path / "c")
    made, _ = watched(rt, prompt())
    weight = sum(a.nbytes for a in made.state.live())
    assert 0 < weight <= live_bytes(rt.layout, ROWS)
    if arch == "qwen3_5":
        assert weight == live_bytes(rt.layout, ROWS)
    rt.store.close()


def test_ram_lends_what_a_request_needs_and_has_it_back(tiny_model, tmp_path):
    model = tiny_model("qwen3_5")
    rt = runtime(model, tmp_path / "a", ram_budget=RAM)
    weights, caches = weigh(rt.model), live_bytes(rt.layout, ROWS)
    assert weights == rt.memory.weights > 0 and rt.store.ram.budget == RAM  # of this machine's memory
    rt.store.close()
    rt = runtime(model, tmp_path / "b", ram_budget=RAM, memory_limit=weights + RAM)
    assert rt.store.ram.budget == RAM
    _, seen = watched(rt, prompt(), max_tokens=3)
    assert set(seen[:-1]) == {RAM - caches} and rt.store.ram.budget == RAM
    rt.store.close()


def test_where_there_is_no_room_ram_is_empty_and_answers_are_the_same(tiny_model, tmp_path):
    model, asked = tiny_model("qwen3_5"), prompt()
    rt = runtime(model, tmp_path / "a")
    cold = run(rt, asked, use_cache=False)[0]
    weights, caches = rt.memory.weights, live_bytes(rt.layout, ROWS)
    rt.store.close()
    rt = runtime(model, tmp_path / "b", ram_budget=RAM, memory_limit=weights + caches)
    for turn in range(3):
        made, seen = watched(rt, asked)
        assert set(seen[:-1]) == {0} and rt.store.ram.budget == caches
        assert equal(made.logits, cold)
        assert rt.store.writer.flush(10)
        if turn:
            assert made.completion.cache.source == "ssd"
            assert made.completion.usage.cached_tokens == len(asked) - 1
    rt.store.close()
    # with half a cache's room left over, RAM keeps what fits there
    rt = runtime(model, tmp_path / "c", ram_budget=RAM, memory_limit=weights + caches * 3 // 2)
    for seed in range(6):
        watched(rt, prompt(seed=seed))
        assert rt.store.writer.flush(10) and rt.store.ram.nbytes <= rt.store.ram.budget == caches * 3 // 2
    _, seen = watched(rt, asked)
    assert set(seen[:-1]) == {caches // 2}
    rt.store.close()


def test_a_cache_that_grows_takes_more(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(generation, "OPEN_END", 16)
    rt = runtime(tiny_model("qwen3_5"), tmp_path / "a")
    limit = rt.memory.weights + RAM
    rt.store.close()
    rt = runtime(tiny_model("qwen3_5"), tmp_path / "b", ram_budget=RAM, memory_limit=limit)
    made, seen = watched(rt, tiny.ids(30), max_tokens=300)
    assert len(made.completion.token_ids) == 300
    assert list(dict.fromkeys(seen)) == [*(RAM - live_bytes(rt.layout, n * ROWS) for n in (1, 2)), RAM]
    assert sum(a.nbytes for a in made.state.live()) == live_bytes(rt.layout, 2 * ROWS)
    rt.store.close()


def test_a_head_is_part_of_the_weights(tmp_path):
    rt = runtime(folder := headed.make(tmp_path / "model"), tmp_path / "c")
    loaded = load(folder)
    assert rt.memory.weights == weigh(loaded.model, loaded.head) > weigh(loaded.model)
    assert weigh(loaded.model, loaded.model) == weigh(loaded.model)
    rt.store.close()


def test_a_limit_that_cannot_work_is_refused_at_start(tiny_model):
    with pytest.raises(ConfigError, match="memory limit"):
        mlxkv.load(tiny_model("llama"), memory_limit=0)
    rt = runtime(tiny_model("llama"), None)
    least = rt.memory.weights + live_bytes(rt.layout, ROWS)
    runtime(tiny_model("llama"), None, memory_limit=least)
    with pytest.raises(ConfigError) as e:
        runtime(tiny_model("llama"), None, memory_limit=least - 1)
    for number in (least - 1, rt.memory.weights, least - rt.memory.weights):
        assert f"{number:,}" in e.value.message
    assert "--memory-limit" in e.value.cure


def test_who_outgrows_the_room_of_a_batch_fails_alone(tiny_model, monkeypatch):
    """Its neighbours needed no more columns: they go on, and get what they get alone."""
    for module in (seats, needs):
        monkeypatch.setattr(module, "OPEN_END", 16)
    alone = Alone(tiny_model("llama"))
    asked = [ask(tiny.ids(200), 120), ask(tiny.ids(20, seed=1), 100), ask(tiny.ids(30, seed=2), 90)]
    with load_engine(tiny_model("llama"), None) as engine:
        crowd = Crowd(engine)
        for number, request in enumerate(asked):
            crowd.submit(number, request)
        crowd.until(lambda: all(crowd.reached(number, 3) for number in range(3)))

        def fill(loop):
            assert [group.batch is not None and len(group.rows) for group in loop.groups] == [3]
            loop.memory.limit = loop.memory.weights + loop.memory.reserved

        engine.inspect(fill)
        outcomes = crowd.finish()
        error = outcomes[0].error
        assert isinstance(error, MemoryFull) and "257 tokens" in error.message
        assert len(outcomes[0].tokens) == 57  # the last of them would have been the 257th that is read
        for number in (1, 2):
            assert wrong_with(Planned(asked[number]), outcomes[number], alone(asked[number])) == []
        assert engine.health().ok and not settled(engine)
    alone.close()


def test_who_will_decode_alone_waits_for_room_for_the_answer_too(tiny_model, monkeypatch):
    """Rows of some models take turns: then no batch is there that would have had the room."""
    monkeypatch.setattr(seats, "obstacle", lambda *_: "rows of this model take turns")
    asked = [ask(tiny.ids(200, seed=n), 100) for n in range(3)]
    with load_engine(tiny_model("llama"), None) as engine:
        first = Crowd(engine)
        for number in range(2):  # after these it is known
            first.submit(number, ask(tiny.ids(20, seed=number), 30))
        first.finish()
        assert engine.status().turns == "rows of this model take turns"

        def two(loop):
            memory = loop.memory
            memory.limit = memory.weights + 2 * memory.sequence_bytes(512, 12) + memory.sequence_bytes(256, 12)

        engine.inspect(two)
        crowd = Crowd(engine)
        for number, request in enumerate(asked):
            crowd.submit(number, request)
        outcomes = crowd.finish()
        assert [outcome.error for outcome in outcomes.values()] == [None] * 3
        assert all(len(outcome.tokens) == 100 for outcome in outcomes.values())
        assert overlap([outcomes[0], outcomes[1]]) == 2
        assert not settled(engine)
