"""``/v1/responses`` and ``/v1/completions`` over HTTP, with an engine that says what the test wants: thoughts, calls,
silence, failures."""

from __future__ import annotations

import itertools
import json
import threading
from contextlib import contextmanager

import httpx
import pytest
from openai import OpenAI

from mlxkv.decode.preparing import prepare
from mlxkv.errors import EngineError
from mlxkv.serve import Limits
from tests.serve import chunks
from tests.serve.acting import Acting
from tests.serve.conftest import running
from tests.serve.pipeline.conftest import demo
from tests.serve.test_responses_output import check

BODY = {"model": "acting", "input": "hi"}
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ANSWER = f"<think>\nhm\n</think>\n\nLet me look.\n{CALL}\n{CALL}"


class Demo(Acting):
    """Writes calls and thoughts as the demo model does. text: what it answers to every request; None: it breaks after a
    word. pause: seconds before the end."""

    def __init__(self):
        super().__init__()
        self.tokenizer = demo()
        self.text, self.pause = "", 0.0

    def prepare(self, request, fits=True):
        return prepare(request, self.tokenizer, set(), 10**6, 4096)

    def act(self, stop):
        for i in itertools.count():
            while len(self.tickets) <= i:
                if stop.wait(0.005):
                    return
            ticket = self.begin(i)
            self.say(ticket, "Well," if self.text is None else self.text)
            stop.wait(self.pause)
            if self.text is None:
                ticket.fail(EngineError("The step broke.", "Try again."))
            else:
                self.finish(ticket)


@contextmanager
def served(**limits):
    engine, stop = Demo(), threading.Event()
    actor = threading.Thread(target=engine.act, args=(stop,))
    actor.start()
    try:
        with (
            running(engine, limits=Limits(**limits)) as server,
            httpx.Client(base_url=server.url, timeout=20) as http,
        ):
            yield engine, http
    finally:
        stop.set()
        actor.join(10)


@pytest.fixture(scope="module")
def demo_server():
    with served() as found:
        yield found


@pytest.fixture
def acting(demo_server):
    """(engine, http) for a text that the engine answers; ``engine.asked()`` are this test's requests."""
    engine, http = demo_server
    before = len(engine.tickets)
    engine.asked = lambda: [ticket.request for ticket in engine.tickets[before:]]

    def with_text(text):
        engine.text = text
        return engine, http

    return with_text


def streamed(http, **body):
    """The events on the wire, checked, and the last response object."""
    answer = http.post("/v1/responses", json=BODY | {"stream": True} | body)
    assert answer.status_code == 200
    events = [json.loads(block.partition("data: ")[2]) for block in answer.text.split("\n\n") if block]
    check(events, events[-1]["response"])
    return events, events[-1]["response"]


def test_thoughts_and_calls_and_what_follows(acting):
    engine, http = acting(ANSWER)
    whole = http.post("/v1/responses", json=BODY | {"tools": [WEATHER]}).json()
    _, last = streamed(http, tools=[WEATHER], include=["reasoning.encrypted_content"])
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [item["type"] for item in last["output"]] == [item["type"] for item in whole["output"]] == kinds
    assert last["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert last["output"][1]["content"][0]["text"] == whole["output"][1]["content"][0]["text"] == "Let me look."
    calls = last["output"][2:]
    assert all(call["name"] == "get_weather" and json.loads(call["arguments"]) == {"city": "Oslo"} for call in calls)
    assert len({call["call_id"] for call in calls}) == 2 and last["tools"] == [WEATHER]
    assert last["usage"]["output_tokens_details"]["reasoning_tokens"] > 0

    outputs = [{"type": "function_call_output", "call_id": c["call_id"], "output": "4 degrees"} for c in calls]
    streamed(http, input=outputs, previous_response_id=last["id"], tools=[WEATHER])
    streamed(http, input=[{"role": "user", "content": "hi"}, *last["output"], *outputs], tools=[WEATHER])
    kept, sent = (request.messages for request in engine.asked()[2:])
    assert kept == sent
    assert [message["role"] for message in kept] == ["user", "assistant", "tool", "tool"]
    assert kept[1]["reasoning_content"] == "hm" and kept[1]["content"] == "Let me look."
    assert [call["id"] for call in kept[1]["tool_calls"]] == [call["call_id"] for call in calls]


def test_a_summary_is_the_reasoning_itself(acting):
    _, http = acting(ANSWER)
    _, last = streamed(http, reasoning={"summary": "auto"}, tools=[WEATHER])
    assert last["output"][0]["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert last["reasoning"]["summary"] == "auto"


def test_thinking_is_switched_on_and_off_and_bounded(acting):
    engine, http = acting("x")
    for effort in ("none", "high"):
        streamed(http, reasoning={"effort": effort}, thinking_budget=5)
    off, on = engine.asked()
    assert off.template_kwargs["enable_thinking"] is False and on.template_kwargs["enable_thinking"] is True
    assert on.template_kwargs["reasoning_effort"] == "high" and on.reasoning_budget == 5


def test_a_failure_in_the_middle(acting):
    _, http = acting(None)
    answer = http.post("/v1/responses", json=BODY)
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "generation_failed"
    events, last = streamed(http)
    assert events[-1]["type"] == "response.failed" and "The step broke." in last["error"]["message"]
    assert last["output"][0]["content"][0]["text"] == "Well,"
    assert http.get(f"/v1/responses/{last['id']}").status_code == 404
    with OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
        seen = list(client.responses.create(**BODY, stream=True))
    assert seen[-1].type == "response.failed" and seen[-1].response.error.code == "server_error"


@pytest.mark.parametrize("usage", [True, False])
def test_streams_of_completions_keep_to_the_schema(acting, usage):
    body = {"model": "acting", "prompt": ["a", "b"], "stream": True}
    body |= {"stream_options": {"include_usage": True}} if usage else {}
    _, http = acting(ANSWER)
    answer = http.post("/v1/completions", json=body)
    found = chunks.read(answer.text, n=2, usage=usage, kind=chunks.TEXT)
    assert [choice.content for choice in found.choices] == [ANSWER] * 2  # raw text is not taken apart
    acting(None)
    answer = http.post("/v1/completions", json=body)
    assert chunks.read(answer.text, n=2, usage=usage, kind=chunks.TEXT).error["code"] == "generation_failed"


def test_silence_is_filled_with_events_that_say_nothing():
    with served(ping="chunk", ping_s=0.05) as (engine, http):
        engine.text, engine.pause = "Hello.", 0.3
        events, last = streamed(http)
        assert [event["type"] for event in events].count("response.in_progress") > 2
        assert last["output"][0]["content"][0]["text"] == "Hello."
        answer = http.post("/v1/completions", json={"model": "acting", "prompt": "hi", "stream": True})
        assert answer.text.count('"text":""') > 2  # the end has one
        assert chunks.read(answer.text, kind=chunks.TEXT).choices[0].content == "Hello."
