"""``/v1/messages`` with an engine that does what the test says: waiting for a turn, silence, failures, leaving."""

from __future__ import annotations

import json

import anthropic
import pytest

from mlxkv.errors import EngineError
from tests.serve.test_answer import acting
from tests.serve.test_anthropic import events

BODY = {"model": "acting", "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("style", ["comment", "chunk"])
def test_until_its_turn_a_stream_has_comments_and_then_what_pings_are_there(style):
    limits = {"ping": style, "ping_s": 0.05}
    with acting(limits=limits) as (engine, http):
        with http.stream("POST", "/v1/messages", json=BODY | {"stream": True}) as answer:
            assert answer.status_code == 200
            pieces = answer.iter_text()
            waiting = next(pieces) + next(pieces)
            assert waiting.replace(": ping\n\n", "") == ""
            ticket = engine.begin()
            said, enough = "", 3 if style == "chunk" else 1  # the one after message_start always comes
            while said.count("event: ping") < enough or (style == "comment" and ": ping\n\n" not in said):
                said += next(pieces)
            engine.say(ticket, "abc")
            engine.finish(ticket)
            found = events(said + "".join(pieces))
        names = [name for name, _ in found if name != "ping"]
        assert names[0] == "message_start" and names[-1] == "message_stop"
        text = "".join(d["delta"]["text"] for name, d in found if name == "content_block_delta")
        assert text == "abc"


def test_a_failure_is_the_last_event_and_raises_in_the_client():
    with acting() as (engine, http), anthropic.Anthropic(base_url=str(http.base_url), api_key="x") as client:
        seen = []
        with client.messages.create(**BODY, stream=True) as stream, pytest.raises(anthropic.APIStatusError) as caught:
            ticket = engine.begin()
            for event in stream:
                seen.append(event.type)
                if event.type == "message_start":
                    engine.say(ticket, "a")
                    ticket.fail(EngineError("The step broke.", "Try again."))
        assert seen == ["message_start", "content_block_start", "content_block_delta"]
        assert "The step broke." in str(caught.value) and len(engine.tickets) == 1


def test_a_failure_before_the_turn_has_no_message_before_it():
    with acting() as (engine, http), http.stream("POST", "/v1/messages", json=BODY | {"stream": True}) as answer:
        engine.ticket().fail(EngineError("The step broke.", "Try again."))
        ((name, data),) = events("".join(answer.iter_text()))
    assert name == "error" and data["error"]["type"] == "api_error"
    assert data["error"]["details"] == {"error_code": "generation_failed"}
    assert data["request_id"] == answer.headers["x-request-id"]


def test_a_full_queue_says_when_to_come_again():
    with acting() as (engine, http):
        engine.full = 0
        answer = http.post("/v1/messages", json=BODY)
    assert answer.status_code == 429 and answer.headers["retry-after"]
    assert json.loads(answer.text)["error"]["type"] == "rate_limit_error"


def test_a_client_that_leaves_cancels():
    with acting() as (engine, http):
        with http.stream("POST", "/v1/messages", json=BODY | {"stream": True}) as answer:
            engine.begin()
            next(answer.iter_text())
        assert engine.cancelled()


def test_what_the_models_template_would_leave_out_is_named_by_its_place():
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "42"}
    said = [*BODY["messages"], {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    with acting() as (engine, http):
        engine.tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        answer = http.post("/v1/messages", json=BODY | {"system": "Be brief.", "messages": said})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "messages[1]"
    assert error["message"].startswith("messages[1]: ") and "calls of tools" in error["message"]
