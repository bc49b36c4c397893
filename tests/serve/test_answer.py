"""The life of a request, with an engine that does what the test says: order, silence, time-outs, failures, leaving."""

from __future__ import annotations

import copy
import json
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import httpx
import pytest

from mlxkv.decode.request import Delta
from mlxkv.decode.text import plain
from mlxkv.errors import ConfigError, DeviceError, EngineError
from mlxkv.serve import Limits, answer, protocol
from mlxkv.serve.models import Models
from mlxkv.serve.registry import Entry, Registry
from tests.serve import chunks
from tests.serve.acting import Acting
from tests.serve.conftest import running
from tests.serve.pipeline.conftest import demo

BODY = {"model": "acting", "messages": [{"role": "user", "content": "hi"}]}
STREAM = BODY | {"stream": True}
CHAT = "/v1/chat/completions"


@contextmanager
def acting(words=None, **options):
    """An engine that a test acts for, and a client of its server."""
    engine = Acting(words)
    limits = replace(Limits(), **{"ping": "off"} | options.pop("limits", {}))
    with running(engine, limits=limits, **options) as server, httpx.Client(base_url=server.url, timeout=20) as http:
        yield engine, http


class Asking(threading.Thread):
    """A request on a thread of its own; ``answer`` waits for the end."""

    def __init__(self, http, body):
        super().__init__()
        self._ask = lambda: http.post(CHAT, json=body)
        self._found = None
        self.start()

    def run(self):
        self._found = self._ask()

    @property
    def answer(self):
        self.join(20)
        assert self._found is not None
        return self._found


def test_headers_and_the_role_come_before_anything_is_read():
    with acting() as (engine, http), http.stream("POST", CHAT, json=STREAM) as answer:
        lines = answer.iter_lines()
        assert answer.status_code == 200 and answer.headers["x-request-id"].startswith("chatcmpl-")
        first = json.loads(next(lines).removeprefix("data: "))
        assert first["id"] == answer.headers["x-request-id"]
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        ticket = engine.begin()
        engine.say(ticket, "abc")
        engine.finish(ticket)
        found = chunks.read("".join(f"{line}\n" for line in [f"data: {json.dumps(first)}", *lines]))
    assert found.choices[0].content == "abc"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("when", ["queued", "begun", "decoding"])
def test_a_client_that_leaves_cancels(stream, when):
    with acting() as (engine, http), posted(http, BODY | {"stream": stream}) as client:
        ticket = engine.ticket() if when == "queued" else engine.begin()
        if when == "decoding":
            engine.say(ticket, "abc")
        client.close()
        assert engine.cancelled()


@contextmanager
def posted(http, body):
    """A socket on which a request was sent."""
    content = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection((http.base_url.host, http.base_url.port), timeout=20) as client:
        client.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        yield client


def error_of(answer):
    """The error of an answer, whether it came instead of the headers or after them."""
    if answer.status_code != 200:
        return answer.json()["error"]
    error = chunks.read(answer.text).error
    assert error is not None
    return error


@pytest.mark.parametrize("stream", [True, False])
def test_a_time_out_ends_it_wherever_it_is(stream):
    with acting() as (engine, http):
        answer = http.post(CHAT, json=BODY | {"stream": stream, "timeout": 0.2})
        assert engine.cancelled()
        if stream:
            found = chunks.read(answer.text)
            assert found.error is not None and found.error["code"] == "request_timeout"
        else:
            assert answer.status_code == 504 and answer.json()["error"]["type"] == "timeout_error"
            assert answer.headers["x-should-retry"] == "false"  # it would only take as long again


def test_the_servers_time_out_bounds_the_requests_own():
    with acting(limits={"timeout_s": 0.2}) as (engine, http):
        assert http.post(CHAT, json=BODY | {"timeout": 1000}).status_code == 504
        assert http.post(CHAT, json=BODY).status_code == 504


def test_a_client_library_does_not_repeat_a_time_out():
    from openai import InternalServerError, OpenAI

    with acting() as (engine, http), OpenAI(base_url=f"{http.base_url}/v1", api_key="x", max_retries=3) as client:
        with pytest.raises(InternalServerError):
            client.chat.completions.create(**BODY, extra_body={"timeout": 0.1})
        assert len(engine.tickets) == 1


@pytest.mark.parametrize("style", ["comment", "chunk"])
def test_silence_is_filled(style):
    with acting(limits={"ping": style, "ping_s": 0.05}) as (engine, http):
        with http.stream("POST", CHAT, json=STREAM) as answer:
            text, pieces = "", answer.iter_text()
            while (chunks.blocks(text)[1] if style == "comment" else text.count('"delta":{}')) < 3:
                text += next(pieces)
            ticket = engine.begin()
            engine.say(ticket, "abc")
            engine.finish(ticket)
            found = chunks.read(text + "".join(pieces))
        assert found.choices[0].content == "abc"
        assert (found.pings >= 3) == (style == "comment")


def test_nobody_says_that_a_hung_engine_lives():
    with acting(limits={"ping": "comment", "ping_s": 0.05}) as (engine, http):
        asking = Asking(http, STREAM)
        ticket = engine.ticket()
        engine.reason = "a step hangs"
        time.sleep(0.3)
        engine.reason = None
        engine.finish(ticket)
        assert chunks.read(asking.answer.text).pings <= 2


@pytest.mark.parametrize("stream", [True, False])
def test_a_hung_engine_takes_nothing_new(stream):
    with acting() as (engine, http):
        engine.reason = "a step hangs"
        answer = http.post(CHAT, json=BODY | {"stream": stream})
        assert answer.status_code == 503 and answer.headers["retry-after"] and "hangs" in answer.text
        assert not engine.tickets


@pytest.mark.parametrize("stream", [True, False])
def test_a_full_queue(stream):
    with acting() as (engine, http):
        engine.full = 0
        answer = http.post(CHAT, json=BODY | {"stream": stream})
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) > 0
        assert answer.json()["error"]["code"] == "queue_full"


@pytest.mark.parametrize("stream", [True, False])
def test_an_error_in_the_middle(stream):
    with acting() as (engine, http):
        asking = Asking(http, STREAM | {"stream_options": {"include_usage": True}} if stream else BODY)
        ticket = engine.begin()
        engine.say(ticket, "abc")
        ticket.fail(EngineError("Something broke.", "Try again."))
        if stream:
            found = chunks.read(asking.answer.text, usage=True)
            assert found.choices[0].content == "abc"
            assert found.error is not None and found.error["message"] == "Something broke. Try again."
        else:
            assert asking.answer.status_code == 500
            assert asking.answer.json()["error"]["code"] == "generation_failed"


@pytest.mark.parametrize("stream", [True, False])
def test_what_was_not_foreseen_tells_nothing_of_the_inside(stream):
    with acting() as (engine, http):
        asking = Asking(http, BODY | {"stream": stream})
        engine.ticket().fail(ValueError("/secret/path"))
        assert error_of(asking.answer)["code"] == "internal_error" and "secret" not in asking.answer.text


def test_a_dead_device_is_reported():
    told = []
    with acting(on_device_error=told.append) as (engine, http):
        asking = Asking(http, STREAM)
        engine.ticket().fail(DeviceError("It is dead."))
        assert error_of(asking.answer)["code"] == "device_failed"
        assert told and isinstance(told[0], DeviceError)


@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_that_stops_says_so(stream):
    with acting() as (engine, http):
        asking = Asking(http, BODY | {"stream": stream})
        ticket = engine.begin()
        engine.say(ticket, "abc")
        engine.finish(ticket, "cancelled")
        assert "engine_closed" in asking.answer.text
        assert stream or asking.answer.status_code == 503


def test_choices_begin_once_the_first_ones_prompt_is_read():
    with acting() as (engine, http):
        asking = Asking(http, STREAM | {"n": 3, "seed": 2**64 - 2, "temperature": 1})
        first = engine.begin()
        time.sleep(0.05)
        assert len(engine.tickets) == 1
        engine.say(first, "a")
        others = [engine.begin(1), engine.begin(2)]
        engine.say(others[1], "c")
        engine.say(others[0], "b")
        for ticket in (others[1], first, others[0]):
            engine.finish(ticket, n=2)
        found = chunks.read(asking.answer.text, n=3)
        assert [said.content for said in found.choices] == ["a", "b", "c"]
        assert [t.request.sampling.seed for t in engine.tickets] == [2**64 - 2, 2**64 - 1, 0]


def test_choices_of_a_request_that_was_taken_wait_for_the_queue():
    with acting() as (engine, http):
        engine.full = 1
        asking = Asking(http, BODY | {"n": 2})
        first = engine.begin()
        engine.finish(first, n=2)
        time.sleep(0.15)
        engine.full = None
        engine.finish(engine.begin(1), "length", n=3)
        found = asking.answer.json()
        assert [choice["finish_reason"] for choice in found["choices"]] == ["stop", "length"]
        assert found["usage"]["prompt_tokens"] == 5 and found["usage"]["completion_tokens"] == 5


def test_the_failure_of_one_choice_ends_all():
    with acting() as (engine, http):
        asking = Asking(http, STREAM | {"n": 2})
        first = engine.begin()
        engine.say(first, "a")
        engine.begin(1).fail(EngineError("Something broke."))
        assert chunks.read(asking.answer.text, n=2).error is not None
        assert engine.cancelled(0)


TURN = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize(
    ("ending", "fields", "budget"),
    [
        ("<think>\n", {"reasoning_effort": "none"}, 0),  # the template thinks whatever it is told
        ("", {"enable_thinking": False}, 0),  # it says nothing, and the model may begin to think by itself
        ("<think>\n\n</think>\n\n", {"reasoning_effort": "none"}, None),  # nothing is left to do
        ("<think>\n", {}, None),
        ("<think>\n", {"reasoning_effort": "none", "thinking_budget": 3}, 3),
    ],
)
def test_thinking_that_is_switched_off_is_off_whatever_the_template_makes_of_it(ending, fields, budget):
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    words = TokenizerWrapper(copy.copy(plain(demo())))
    begin = "<|im_start|>assistant\n" + ending
    words._tokenizer.chat_template = TURN + "{% if add_generation_prompt %}" + begin + "{% endif %}"
    with acting(words) as (engine, http):
        asking = Asking(http, BODY | fields)
        ticket = engine.begin()
        engine.finish(ticket)
        assert asking.answer.status_code == 200
        assert ticket.request.reasoning_budget == budget


@pytest.mark.parametrize("fails", [False, True])
def test_headers_do_not_wait_for_a_model_that_loads(monkeypatch, fails):
    monkeypatch.setattr(answer, "PATIENCE", 0.1)
    engine, loaded = Acting(), threading.Event()

    def load(entry):
        assert loaded.wait(20)
        if fails:
            raise ConfigError("There is no room for it.")
        return engine

    with running(engine, limits=Limits(ping_s=0.05)) as server, httpx.Client(base_url=server.url, timeout=20) as http:
        server.offered.models = Models(Registry([Entry("late", "/models/late")]), load)
        with http.stream("POST", CHAT, json=STREAM | {"model": "late"}) as response:
            assert response.status_code == 200
            text, pieces = "", response.iter_text()
            while chunks.blocks(text)[1] < 2:  # it is said that somebody is there
                text += next(pieces)
            loaded.set()
            if not fails:
                ticket = engine.begin()
                engine.say(ticket, "abc")
                engine.finish(ticket)
            found = chunks.read(text + "".join(pieces))
        if fails:
            assert found.error is not None and found.error["code"] == "model_unavailable"
        else:
            assert found.choices[0].content == "abc" and found.error is None


def test_a_client_that_leaves_while_a_model_loads_is_forgotten():
    engine, loaded = Acting(), threading.Event()

    def load(entry):
        assert loaded.wait(20)
        return engine

    with running(engine) as server, httpx.Client(base_url=server.url, timeout=20) as http:
        server.offered.models = models = Models(Registry([Entry("late", "/models/late")]), load)
        with posted(http, BODY | {"model": "late"}) as client:
            _until(lambda: models.states()[0].waiting == 1)
            client.close()
            _until(lambda: models.states()[0].waiting == 0)
        loaded.set()
        _until(lambda: models.states()[0].state == "ready")
        assert models.states()[0].leases == 0 and not engine.tickets


def test_a_client_that_takes_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(protocol, "WRITE_S", 0.3)
    with acting() as (engine, http), posted(http, STREAM):
        ticket = engine.begin()
        ids = list(engine.tokenizer.encode("a", add_special_tokens=False))
        text = "a" * 1_000_000
        for _ in range(100):  # more than the system keeps for a socket
            if ticket.cancelled:
                break
            ticket.put(Delta(text, ids))
            time.sleep(0.05)
        assert engine.cancelled()


def test_leases_come_back_however_a_request_ends():
    engine = Acting()
    with running(engine) as server, httpx.Client(base_url=server.url, timeout=20) as http:
        for i, (stream, error) in enumerate(
            [(True, None), (False, None), (True, EngineError("x")), (False, OSError())]
        ):
            asking = Asking(http, BODY | {"stream": stream, "model": engine.info.name})
            ticket = engine.begin(i)
            engine.finish(ticket) if error is None else ticket.fail(error)
            assert asking.answer.status_code in (200, 500)
        with posted(http, BODY):
            engine.begin(4)
        assert engine.cancelled(4)
        http.post(CHAT, json=BODY | {"temperature": 9999})
        http.post(CHAT, json=BODY | {"messages": [{"role": "user", "content": "word " * 5000}]})
        _until(lambda: server.offered.models.states()[0].leases == 0)


def _until(so, seconds=10):
    end = time.monotonic() + seconds
    while not so():
        assert time.monotonic() < end
        time.sleep(0.01)
