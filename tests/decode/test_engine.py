"""The engine: order, streams, cancellation, limits, errors that stay with their request, and a clean end."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
import time

import pytest

import mlxkv
from mlxkv.decode import runtime as runtime_module
from mlxkv.decode.request import Delta, Finished, Progress, Request, SamplingParams, Started
from mlxkv.errors import DeviceError, EngineClosed, EngineError, PromptTooLong, QueueFull, RequestError
from tests import tiny


@pytest.fixture
def engine(tiny_model, tmp_path):
    with mlxkv.load(tiny_model("qwen3_5"), cache_dir=tmp_path / "cache", block_size=16, prefill_chunk=16) as engine:
        yield engine


def request(n=20, seed=0, **sampling):
    return Request(tokens=tiny.ids(n, seed), sampling=SamplingParams(**{"max_tokens": 8, **sampling}))


def test_events_come_in_order_and_join_to_the_text(engine):
    events = list(engine.submit(request(50)))
    assert isinstance(events[0], Started) and events[0].prompt_tokens == 50
    progress = [e.done for e in events if isinstance(e, Progress)]
    assert progress == sorted(progress) and progress[-1] == 49
    assert isinstance(events[-1], Finished)
    completion = events[-1].completion
    deltas = [e for e in events if isinstance(e, Delta)]
    assert "".join(d.text for d in deltas) == completion.text
    assert [t for d in deltas for t in d.token_ids] == completion.token_ids
    assert completion.finish_reason == "length" and len(completion.token_ids) == 8


def test_requests_are_answered_in_order(engine):
    done = []
    tickets = [engine.submit(request(30, seed=i, max_tokens=5)) for i in range(5)]
    threads = [threading.Thread(target=lambda i=i, t=t: (t.result(), done.append(i))) for i, t in enumerate(tickets)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == sorted(done)
    assert engine.health().ok and engine.health().active + engine.health().queued == 0


def test_cancelling_while_decoding_keeps_what_was_computed(engine):
    ticket = engine.submit(request(40, max_tokens=2000))
    seen = 0
    for event in ticket:
        if isinstance(event, Delta):
            seen += 1
            if seen == 5:
                ticket.cancel()
        if isinstance(event, Finished):
            completion = event.completion
    assert completion.finish_reason == "cancelled" and 5 <= len(completion.token_ids) < 2000
    longer = [*tiny.ids(40), *completion.token_ids, 3]
    again = mlxkv.generate(engine, longer, max_tokens=1)
    assert again.usage.cached_tokens == 40 + len(completion.token_ids) - 1


def test_cancelling_in_prefill_keeps_the_chunks_that_were_done(engine):
    ticket = engine.submit(request(2000))
    for event in ticket:
        if isinstance(event, Progress) and event.done >= 100:
            ticket.cancel()
    again = mlxkv.generate(engine, tiny.ids(2000), max_tokens=1)
    assert 100 <= again.usage.cached_tokens < 1999


def test_a_request_cancelled_in_the_queue_never_runs(engine):
    first, second = engine.submit(request(1000)), engine.submit(request())
    second.cancel()
    with pytest.raises(EngineError):
        second.result()
    assert first.result().finish_reason == "length"


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(engine):
    with pytest.raises(PromptTooLong, match=r"5000 tokens.*4096"):
        engine.submit(request(5000)).result()
    assert engine.submit(request()).result().finish_reason == "length"


def test_max_tokens_ends_at_the_context(tiny_model):
    with mlxkv.load(tiny_model("llama"), cache=False) as engine:
        assert len(mlxkv.generate(engine, tiny.ids(4090)).token_ids) == 6


def test_bad_requests_are_named_and_the_engine_lives(engine):
    with pytest.raises(RequestError, match="outside the vocabulary"):
        mlxkv.generate(engine, [5, 99999])
    with pytest.raises(RequestError, match="logit_bias names token 99999"):
        mlxkv.generate(engine, [5, 6], logit_bias={99999: 1.0})
    with pytest.raises(RequestError, match="max_tokens is 0"):
        mlxkv.generate(engine, [5, 6], max_tokens=0)
    with pytest.raises(RequestError, match="role is None"):
        mlxkv.generate(engine, [{"content": "hi"}])
    with pytest.raises(RequestError, match="empty"):
        mlxkv.generate(engine, [])
    assert engine.submit(request()).result().finish_reason == "length"


def test_a_full_queue_refuses(tiny_model):
    with mlxkv.load(tiny_model("llama"), cache=False, max_queue=1) as engine:
        first = engine.submit(request(3000, max_tokens=50))
        while engine.health().active == 0:
            time.sleep(0.001)
        engine.submit(request())
        with pytest.raises(QueueFull):
            engine.submit(request())
        first.cancel()


def test_closing_cancels_what_runs_and_refuses_what_waits(tiny_model, tmp_path):
    engine = mlxkv.load(tiny_model("qwen3_5"), cache_dir=tmp_path)
    running, waiting = engine.submit(request(20, max_tokens=100_000)), engine.submit(request())
    assert isinstance(running.next_event(), Started)
    engine.close()
    assert running.result().finish_reason == "cancelled"
    with pytest.raises(EngineClosed):
        waiting.result()
    with pytest.raises(EngineClosed):
        engine.submit(request())
    assert not engine.health().ok
    engine.close()


@pytest.fixture
def faulty(monkeypatch, tiny_model, tmp_path):
    """An engine whose device fails (at a barrier, as a GPU does) while ``faults`` is positive."""
    faults = [0]
    real = runtime_module.open_runtime

    def open_runtime(options):
        opened, info = real(options)

        def barrier():
            opened.barrier()
            if faults[0] > 0:
                faults[0] -= 1
                raise RuntimeError("[METAL] Command buffer execution failed")

        return dataclasses.replace(opened, barrier=barrier), info

    monkeypatch.setattr(runtime_module, "open_runtime", open_runtime)
    with mlxkv.load(tiny_model("qwen3_5"), cache_dir=tmp_path / "cache", block_size=16) as engine:
        yield engine, faults


def test_a_device_error_fails_its_request_and_stores_nothing(faulty, tmp_path):
    engine, faults = faulty
    faults[0] = 1
    with pytest.raises(EngineError, match="Command buffer"):
        engine.submit(request(50)).result()
    from mlxkv.cache.store import stats

    assert stats(tmp_path / "cache")["records"] == 0
    again = engine.submit(request(50)).result()
    assert again.usage.cached_tokens == 0 and again.finish_reason == "length"
    assert engine.health().ok


def test_a_second_device_error_within_a_minute_ends_the_engine(faulty):
    engine, faults = faulty
    faults[0] = 1
    with pytest.raises(EngineError):
        engine.submit(request(50)).result()
    faults[0] = 1
    with pytest.raises(DeviceError, match="second failure") as caught:
        engine.submit(request(50)).result()
    assert caught.value.exit_code == 70
    assert not engine.health().ok and "twice" in engine.health().reason
    with pytest.raises(EngineClosed):
        engine.submit(request())


def test_a_stream_that_is_closed_cancels_its_request(engine):
    stream = mlxkv.stream(engine, tiny.ids(20), max_tokens=100_000)
    next(stream)
    stream.close()
    assert engine.submit(request()).result().finish_reason == "length"


def test_many_engines_one_after_another(tiny_model, tmp_path):
    for _ in range(3):
        with mlxkv.load(tiny_model("llama"), cache_dir=tmp_path) as engine:
            engine.submit(request()).result()


@pytest.mark.parametrize("ending", ["engine.close()", "pass"])
def test_a_script_that_used_an_engine_ends_cleanly(ending, tiny_model, tmp_path):
    script = (
        "import mlxkv, sys\n"
        "engine = mlxkv.load(sys.argv[1], cache_dir=sys.argv[2])\n"
        "print(len(mlxkv.generate(engine, [5, 6, 7], max_tokens=3).token_ids))\n" + ending
    )
    command = [sys.executable, "-c", script, str(tiny_model("qwen3_5")), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr
