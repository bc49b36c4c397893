"""``/v1/responses`` with the ``openai`` client: items in and out, conversations, streams, refusals."""

from __future__ import annotations

import json
import math

import pytest
from openai import BadRequestError, NotFoundError

from tests.serve.test_responses_output import check

MODEL = {"model": "llama", "max_output_tokens": 6}


def ask(client, input="Tell me about the sea.", **options):
    return client.responses.create(input=input, **(MODEL | options))


def chat(client, messages, **options):
    """What the chat API answers to the same conversation."""
    found = client.chat.completions.create(model="llama", messages=messages, max_tokens=6, **options)
    return found.choices[0].message.content


def streamed(http, **body):
    """The events of a stream as they come on the wire."""
    answer = http.post("/v1/responses", json=MODEL | {"stream": True} | body)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    blocks = answer.text.split("\n\n")
    assert blocks.pop() == ""
    made = []
    for block in blocks:
        name, data = block.split("\n")
        made.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {made[-1]['type']}"
    return made


def test_a_response_says_what_chat_says(client):
    found = ask(client, instructions="Be brief.", metadata={"a": "b"}, user="me", temperature=0)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me about the sea."}]
    assert found.output_text == chat(client, messages)
    assert found.object == "response" and found.id.startswith("resp_") and found.model == "llama"
    assert found.status == "incomplete" and found.incomplete_details.reason == "max_output_tokens"
    assert found.metadata == {"a": "b"} and found.user == "me" and found.instructions == "Be brief."
    assert found.usage.output_tokens == 6 and found.usage.total_tokens == found.usage.input_tokens + 6
    again = ask(client, instructions="Be brief.")
    assert again.usage.input_tokens_details.cached_tokens == again.usage.input_tokens - 1
    assert again.model_extra["mlxkv"]["cache"]["source"] == "ram"


def test_a_stream_says_the_same(client, http):
    whole = ask(client, include=["message.output_text.logprobs"], top_logprobs=2)
    events = streamed(http, input="Tell me about the sea.", include=["message.output_text.logprobs"], top_logprobs=2)
    check(events, events[-1]["response"])
    assert events[-1]["type"] == "response.incomplete"
    last = events[-1]["response"]
    for item, other in zip(last["output"], whole.to_dict()["output"], strict=True):
        assert item | {"id": ""} == other | {"id": ""}
    (part,) = last["output"][0]["content"]
    assert len(part["logprobs"]) == 6 and all(len(p["top_logprobs"]) == 2 for p in part["logprobs"])
    assert bytes(b for p in part["logprobs"] for b in p["bytes"]).decode("utf-8", "replace") == part["text"]
    with client.responses.stream(input="Tell me about the sea.", **MODEL) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == whole.output_text


def answered(response):
    return {"role": "assistant", "content": response.output_text}


def test_a_conversation_goes_on_from_a_response(client):
    first = ask(client, "one", instructions="Only now.")
    second = ask(client, "two", previous_response_id=first.id)
    messages = [{"role": "user", "content": "one"}, answered(first)]
    messages.append({"role": "user", "content": "two"})
    assert second.output_text == chat(client, messages)  # the first's instructions are its own
    assert second.previous_response_id == first.id
    assert ask(client, [], previous_response_id=second.id).output_text == chat(client, [*messages, answered(second)])
    third = ask(client, "three", previous_response_id=second.id)
    messages += [answered(second), {"role": "user", "content": "three"}]
    assert third.output_text == chat(client, messages)
    assert third.usage.input_tokens_details.cached_tokens > second.usage.input_tokens
    other = ask(client, "four", previous_response_id=first.id)
    assert other.output_text == chat(client, [*messages[:2], {"role": "user", "content": "four"}])


def test_the_output_sent_back_is_the_same_conversation(client):
    first = ask(client, "one")
    history = [{"role": "user", "content": "one"}, *first.output, {"role": "user", "content": "two"}]
    sent = ask(client, history, store=False)
    kept = ask(client, "two", previous_response_id=first.id)
    referred = ask(client, [history[0], {"type": "item_reference", "id": first.output[0].id}, history[-1]])
    assert sent.output_text == kept.output_text == referred.output_text
    assert sent.usage.input_tokens == kept.usage.input_tokens == referred.usage.input_tokens


def test_kept_responses_are_found_and_forgotten(client):
    found = ask(client, "keep this")
    assert client.responses.retrieve(found.id).to_dict() == found.to_dict()
    client.responses.delete(found.id)
    for forgotten in (found.id, ask(client, "not this", store=False).id, "resp_x"):
        with pytest.raises(NotFoundError) as caught:
            client.responses.retrieve(forgotten)
        assert caught.value.param == "response_id"
        with pytest.raises(NotFoundError) as caught:
            ask(client, "more", previous_response_id=forgotten)
        assert caught.value.param == "previous_response_id"
    with pytest.raises(NotFoundError):
        client.responses.delete(found.id)


def test_what_a_stream_made_is_kept(client, http):
    made = streamed(http, input="one")[-1]["response"]
    assert client.responses.retrieve(made["id"]).to_dict() == made
    assert streamed(http, input="two", previous_response_id=made["id"])[-1]["type"] == "response.incomplete"


def test_calls_and_what_they_gave(client):
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
    items = [{"role": "user", "content": "hi"}, call, {"type": "function_call_output", "call_id": "c1", "output": "42"}]
    said = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [said]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    assert ask(client, items).output_text == chat(client, messages)


def test_input_tokens_are_those_that_are_read(client):
    first = ask(client, "one", instructions="Be brief.")
    counted = client.responses.input_tokens.count(model="llama", input="one", instructions="Be brief.")
    assert counted.input_tokens == first.usage.input_tokens
    more = {"model": "llama", "input": "two", "previous_response_id": first.id}
    assert client.responses.input_tokens.count(**more).input_tokens == ask(client, **more).usage.input_tokens


def test_a_schema_holds(client):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    found = ask(client, text={"format": form}, max_output_tokens=40)
    assert json.loads(found.output_text)["a"] in (1, 2) and found.status == "completed"
    assert found.text.format.type == "json_schema"


USER = {"role": "user", "content": "hi"}


def nested(depth):
    made = {}
    for _ in range(depth):
        made = {"a": made}
    return made


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["hi"]}, "input[0]"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [USER, {"role": "user"}]}, "input[1].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "y": 1}]}]},
            "input[0].content[0].y",
        ),
        ({"input": [USER | {"colour": "red"}]}, "input[0].colour"),
        ({"input": [USER, {"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[1].call_id"),
        ({"input": [USER, {"type": "function_call", "call_id": "c", "name": "f"}]}, "input[1].arguments"),
        ({"input": [USER, {"type": "item_reference", "id": "msg_x"}]}, "input[1].id"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input[0].encrypted_content"),
        ({"input": [{"type": "reasoning", "summary": [{"text": "x"}]}]}, "input[0].summary[0]"),
        ({"input": "word " * 5000}, "input"),
        ({"instructions": 5}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 2**63}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"messages": [USER]}, "messages"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"reasoning": {"effort": "utmost"}}, "reasoning.effort"),
        ({"thinking_budget": -1}, "thinking_budget"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": 5}]}, "tools[0].parameters"),
        ({"tools": [{"type": "function", "name": "f", "colour": "red"}]}, "tools[0].colour"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"stream_options": {"include_usage": True}, "stream": True}, "stream_options.include_usage"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"temperature": 200}, "temperature"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"max_ouput_tokens": 3}, "max_ouput_tokens"),
        ({"user": "\ud800"}, "user"),
        ({"metadata": {"a": "\ud800"}}, "metadata.a"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"a": math.nan}}]}, "tools[0].parameters.a"),
        ({"tools": [{"type": "function", "name": "f", "parameters": nested(600)}]}, "tools"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": nested(600)}}}, "text"),
    ],
)
def test_refusals_name_their_field(http, change, param):
    body = {"model": "llama", "input": "hi", "max_output_tokens": 1} | change
    body = {name: value for name, value in body.items() if value is not None}
    content = json.dumps(body)
    answer = http.post("/v1/responses", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and len(answer.content) < 4096, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and error["message"], answer.text


def test_what_asks_for_nothing_is_taken(client):
    found = ask(
        client,
        background=False,
        truncation="disabled",
        service_tier="auto",
        parallel_tool_calls=True,
        tools=[],
        tool_choice="auto",
        text={"format": {"type": "text"}},
        include=["reasoning.encrypted_content"],
        reasoning={"effort": "low", "summary": "auto"},
        prompt_cache_key="x",
        extra_body={"top_k": 1, "conversation": None},
    )
    assert found.output_text


def test_a_refused_stream_has_a_status(client):
    with pytest.raises(BadRequestError) as caught:
        ask(client, "word " * 5000, stream=True)
    assert caught.value.code == "context_length_exceeded" and "4096" in caught.value.message
