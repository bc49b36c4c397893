"""A request whose time is up ends with an error wherever it is, also while the loop hangs; and what status says of all
of them."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest

import mlxkv
from mlxkv.decode.request import Delta, Finished, Progress, Request, SamplingParams, Started
from mlxkv.decode.ticket import Ticket
from mlxkv.errors import EngineError, QueueFull, RequestCancelled, RequestError, RequestTimeout
from tests import tiny
from tests.decode.faulty import MARK, Trap, raising
from tests.decode.many import settled


def ask(tokens, seconds=None, max_tokens=8, **more):
    deadline = None if seconds is None else time.monotonic() + seconds
    more = {"sampling": SamplingParams(max_tokens=max_tokens)} | more
    return Request(tokens=tokens, deadline=deadline, **more)


def until(holds, seconds=20.0):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture(scope="module")
def engine(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    with mlxkv.load(tiny_model("qwen3_5"), cache_dir=folder, block_size=16, max_rows=1, prefill_chunk=16) as engine:
        yield engine


def test_an_answer_that_takes_too_long_ends(engine):
    seen = []
    with pytest.raises(RequestTimeout, match="timed out") as caught:
        for event in engine.submit(ask(tiny.ids(40), 0.3, 3000)):
            seen.append(event)
    assert any(isinstance(e, Delta) for e in seen) and not any(isinstance(e, Finished) for e in seen)
    assert "while it was answered" in str(caught.value) and caught.value.status == 504
    assert not settled(engine)
    # its prompt was kept
    tokens = [t for e in seen if isinstance(e, Delta) for t in e.token_ids]
    again = engine.submit(ask([*tiny.ids(40), *tokens], None, 1)).result()
    assert again.usage.cached_tokens >= 39


def test_a_prompt_that_takes_too_long_ends_and_its_chunks_are_kept(engine):
    with pytest.raises(RequestTimeout, match="before its answer began"):
        for event in engine.submit(ask(tiny.ids(4000, 5), 0.4, 50)):
            assert not isinstance(event, Delta)
    assert not settled(engine)
    again = engine.submit(ask(tiny.ids(4000, 5), None, 1))
    started = again.next_event()
    again.cancel()
    assert isinstance(started, Started) and started.cached_tokens > 0
    again.result()


def test_who_waits_too_long_is_told_and_the_others_go_on(engine):
    first = engine.submit(ask(tiny.ids(30), None, 3000))
    assert isinstance(first.next_event(), Started)
    waiting = engine.submit(ask(tiny.ids(20), 0.1))
    with pytest.raises(RequestTimeout, match="before its answer began"):
        waiting.result()
    with pytest.raises(StopIteration):
        waiting.next_event()
    assert engine.health().ok
    until(lambda: engine.health().queued == 0)
    first.cancel()
    assert first.result().finish_reason == "cancelled" and not settled(engine)


def test_who_is_done_in_time_notices_nothing(engine):
    plain = engine.submit(ask(tiny.ids(20), None, 5, use_cache=False)).result()
    assert engine.submit(ask(tiny.ids(20), 60, 5, use_cache=False)).result().token_ids == plain.token_ids
    for never in (1e300, 1e18):
        assert engine.submit(dataclasses.replace(ask(tiny.ids(20)), deadline=never)).result().token_ids
    with pytest.raises(RequestError, match="deadline"):
        dataclasses.replace(ask([1]), deadline=float("nan"))


def test_who_cancels_first_is_not_told_of_a_deadline():
    ticket = Ticket(ask([1], 0.0))
    ticket.cancel()
    ticket.fail(RequestCancelled("It was cancelled."))
    with pytest.raises(RequestCancelled):
        ticket.next_event()
    other = Ticket(ask([1], 0.0))
    other.fail(EngineError("Something else went wrong."))
    with pytest.raises(EngineError, match="Something else"):
        other.next_event()


def test_while_a_step_hangs_others_are_told_in_time(tiny_model, tmp_path):
    free = threading.Event()

    def hang(logits, marked):
        assert free.wait(60)
        return logits

    say_mark = SamplingParams(max_tokens=20, logit_bias={MARK: 100.0})
    with Trap(hang).engine(tiny_model("llama"), tmp_path, watchdog_s=0.2, max_queue=2) as engine:
        try:
            hung = engine.submit(ask(tiny.ids(20), None, sampling=say_mark))
            until(lambda: not engine.health().ok)
            assert "step of the engine" in engine.health().reason
            waiting = [engine.submit(ask(tiny.ids(20, n), 0.2)) for n in range(2)]
            assert [row.state for row in engine.status().rows] == ["decoding", "waiting", "waiting"]
            with pytest.raises(QueueFull):
                engine.submit(ask(tiny.ids(20)))
            for ticket in waiting:
                with pytest.raises(RequestTimeout):
                    ticket.result()
            # their places are others' now, whom the same happens to
            with pytest.raises(RequestTimeout):
                engine.submit(ask(tiny.ids(20), 0.1)).result()
            late = engine.submit(ask(tiny.ids(20), None, 3))
        finally:
            free.set()
        assert len(hung.result().token_ids) == 20
        assert len(late.result().token_ids) == 3
        until(lambda: engine.health().ok)
        assert not settled(engine) and engine.status().rows == ()


def test_one_that_hangs_itself_is_told_in_time_and_leaves_when_it_can(tiny_model, tmp_path):
    free = threading.Event()

    def hang(logits, marked):
        assert free.wait(60)
        return logits

    say_mark = SamplingParams(max_tokens=2000, logit_bias={MARK: 100.0})
    with Trap(hang).engine(tiny_model("llama"), tmp_path) as engine:
        try:
            with pytest.raises(RequestTimeout, match="while it was answered"):
                engine.submit(ask(tiny.ids(20), 1.0, sampling=say_mark)).result()
            assert [row.state for row in engine.status().rows] == ["leaving"]
        finally:
            free.set()
        until(lambda: not engine.status().rows)
        assert not settled(engine)
        assert len(engine.submit(ask(tiny.ids(20), 60, 3)).result().token_ids) == 3


@pytest.mark.parametrize("error", [ValueError("it failed"), RuntimeError("it failed")])
def test_a_step_that_raises_leaves_no_rows_and_the_next_is_answered(tiny_model, tmp_path, error):
    say_mark = SamplingParams(max_tokens=20, logit_bias={MARK: 100.0})
    with Trap(raising(error)).engine(tiny_model("llama"), tmp_path) as engine:
        with pytest.raises(EngineError, match="it failed"):
            engine.submit(ask(tiny.ids(20), 60, sampling=say_mark)).result()
        assert engine.health().ok and engine.status().rows == ()
        assert len(engine.submit(ask(tiny.ids(20), 60, 3)).result().token_ids) == 3
        assert not settled(engine)


def test_status_has_a_row_for_each_request(engine):
    first = engine.submit(ask(tiny.ids(30, 7), None, 3000, name="chatcmpl-1"))
    second = engine.submit(ask(tiny.ids(20), None, 5))
    done = [e for e in (first.next_event() for _ in range(20)) if isinstance(e, Progress)][-1].done
    one, two = engine.status().rows
    assert (one.id, one.state, one.prompt_tokens, one.done_tokens) == ("chatcmpl-1", "decoding", 30, 30)
    assert done == 29 and one.generated_tokens > 0 and one.age_s > 0
    assert one.context_left is not None and 0 < one.context_left < 4096 - 30
    assert (two.state, two.prompt_tokens, two.generated_tokens, two.context_left) == ("waiting", None, 0, None)
    assert two.id.startswith("request-")
    first.cancel()
    first.result()
    assert second.result().finish_reason == "length"
    assert engine.status().rows == ()
    again = engine.submit(ask(tiny.ids(30, 7), None, 3000))
    while not isinstance(again.next_event(), Delta):
        pass
    (row,) = engine.status().rows
    assert row.cached_tokens == 29 and row.state == "decoding"
    again.cancel()
    again.result()
    assert engine.status().rows == ()
