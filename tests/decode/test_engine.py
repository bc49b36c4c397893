"""The engine: order, streams, cancellation, limits, errors that stay with their request, and a clean end."""

from __future__ import annotations

import dataclasses
import os
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
from tests.decode.many import Crowd, settled


@pytest.fixture
def engine(tiny_model, tmp_path):
    with mlxkv.load(tiny_model("qwen3_5"), cache_dir=tmp_path / "cache", block_size=16, prefill_chunk=16) as engine:
        yield engine


def request(n=20, seed=0, **sampling):
    return Request(tokens=tiny.ids(n, seed), sampling=SamplingParams(**{"max_tokens": 8, **sampling}))


def test_the_ledger_is_there_before_the_first_request(engine):
    status = engine.status()
    assert status.memory["weights"] > 0 and status.active == 0


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


def test_requests_that_are_alike_are_answered_in_order(engine):
    crowd = Crowd(engine)
    for number in range(5):
        crowd.submit(number, request(30, seed=number, max_tokens=5))
    ends = [seen.at[-1] for seen in crowd.finish().values()]  # in the order in which the engine said them
    assert ends == sorted(ends)
    assert engine.health().ok and not settled(engine)


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


def test_requests_that_no_tokenizer_takes_are_refused(engine):
    with pytest.raises(RequestError, match="surrogate"):
        engine.submit(Request(prompt="a\ud800b")).result()
    said = {"role": "assistant", "content": "b", "token_ids": [2**40]}
    with pytest.raises(RequestError, match="token_ids"):
        mlxkv.generate(engine, [{"role": "user", "content": "a"}, said, {"role": "user", "content": "c"}])
    assert engine.health().ok


def test_a_request_is_what_it_was_when_it_was_made(engine):
    messages = [{"role": "user", "content": "hello"}]
    alone = mlxkv.generate(engine, messages, max_tokens=2)
    first = engine.submit(request(1000))
    waiting = engine.submit(Request(messages=messages, sampling=SamplingParams(max_tokens=2)))
    messages[0]["content"] = "something else"
    messages.append({"role": "assistant", "content": "more"})
    first.cancel()
    assert waiting.result().token_ids == alone.token_ids


def test_threads_that_share_a_ticket_all_see_its_end(engine):
    ticket = engine.submit(request())
    counts = []
    threads = [threading.Thread(target=lambda: counts.append(len(list(ticket))), daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(counts) == 3
    with pytest.raises(RuntimeError, match="taken already"):
        ticket.result()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_is_refused_and_does_not_wait(engine):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            engine.submit(request())
        except EngineClosed:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert engine.submit(request()).result().finish_reason == "length"


def test_a_full_queue_refuses(tiny_model):
    with mlxkv.load(tiny_model("llama"), cache=False, max_queue=1, max_rows=1) as engine:
        first = engine.submit(request(3000, max_tokens=50))
        while engine.health().active == 0:
            time.sleep(0.001)
        engine.submit(request())
        with pytest.raises(QueueFull):
            engine.submit(request())
        first.cancel()


def test_closing_cancels_what_runs_and_refuses_what_waits(tiny_model, tmp_path):
    engine = mlxkv.load(tiny_model("qwen3_5"), cache_dir=tmp_path, max_rows=1)
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


def test_an_error_that_a_caller_keeps_does_not_keep_the_state(faulty):
    engine, faults = faulty
    faults[0] = 1
    with pytest.raises(EngineError) as caught:
        engine.submit(request(50)).result()
    assert caught.value.__cause__ is not None
    frame = caught.value.__cause__.__traceback__
    frames = []
    while frame is not None:
        frames.append(frame.tb_frame)
        frame = frame.tb_next
    assert len(frames) > 3
    assert not any("state" in f.f_locals for f in frames)


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


@pytest.mark.parametrize("moment", ["before the thread runs", "while the model loads"])
def test_ctrl_c_while_loading_ends_cleanly(moment, tiny_model):
    script = (
        "import _thread, signal, sys, threading, time, mlxkv\n"
        "from mlxkv.decode import runtime\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # the suite may run where it is ignored
        "real = runtime.open_runtime\n"
        "def interrupted(options):\n"
        "    _thread.interrupt_main()\n"
        "    return real(options)\n"
        "runtime.open_runtime = interrupted\n"
    )
    if moment == "before the thread runs":  # Thread.start() waits for the thread to say that it runs
        script += (
            "bootstrap = threading.Thread._bootstrap\n"
            "def late(self):\n"
            "    if self.name == 'mlxkv-engine':\n"
            "        time.sleep(0.2)\n"
            "        _thread.interrupt_main()\n"
            "    bootstrap(self)\n"
            "threading.Thread._bootstrap = late\n"
            "runtime.open_runtime = real\n"
        )
    script += "try:\n    mlxkv.load(sys.argv[1], cache=False)\nexcept KeyboardInterrupt:\n    print('stopped')\n"
    command = [sys.executable, "-c", script, str(tiny_model("llama"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "stopped\n"), done.stderr


def test_a_warm_up_makes_cycles_too(tiny_model):
    with mlxkv.load(tiny_model("llama"), cache=False, draft="ngram", draft_depth=3) as engine:
        cold = mlxkv.generate(engine, tiny.ids(20), max_tokens=8)
        verified = engine.inspect(lambda loop: loop.seats.speculation.counts.cycles)
        engine.warm_up()
        counts = engine.inspect(lambda loop: loop.seats.speculation.counts)
        assert counts.cycles - verified >= 4 and not settled(engine)
        assert mlxkv.generate(engine, tiny.ids(20), max_tokens=8).token_ids == cold.token_ids


def test_a_warm_up_leaves_nothing(tiny_model, tmp_path):
    from mlxkv.cache.store import stats

    with mlxkv.load(tiny_model("qwen3_5"), cache_dir=tmp_path / "cache", block_size=16) as engine:
        cold = mlxkv.generate(engine, tiny.ids(20), max_tokens=8, use_cache=False)
    with mlxkv.load(tiny_model("qwen3_5"), cache_dir=tmp_path / "cache", block_size=16) as engine:
        engine.warm_up()
        assert engine.status().steps > 0 and not settled(engine)
        asked = mlxkv.generate(engine, [0] * 32, max_tokens=1)
        assert (asked.usage.cached_tokens, asked.cache.miss_reason) == (0, "empty")
        assert mlxkv.generate(engine, tiny.ids(20), max_tokens=8).token_ids == cold.token_ids
    assert stats(tmp_path / "cache")["records"] > 0
