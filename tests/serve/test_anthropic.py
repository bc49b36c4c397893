"""``/v1/messages`` on a real server: the ``anthropic`` client, the wire, and every refusal in Anthropic's form."""

from __future__ import annotations

import json

import anthropic
import httpx
import pytest

from tests.serve.conftest import MAX_BODY

USER = {"role": "user", "content": "Tell me about the sea."}
BODY = {"model": "llama", "messages": [USER], "max_tokens": 12}
TOOL = {"name": "look", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture
def claude(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


def events(text):
    """Names and data of a stream of server-sent events, comments left out."""
    blocks = [b for b in text.split("\n\n") if b and not b.startswith(":")]
    found = [block.split("\n") for block in blocks]
    assert all(len(lines) == 2 and lines[0].startswith("event: ") for lines in found)
    made = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in found]
    assert all(name == data["type"] for name, data in made)
    return made


def refused(answer, status=400, kind="invalid_request_error"):
    assert answer.status_code == status, answer.text
    assert len(answer.content) < 4096
    body = answer.json()
    assert body.keys() == {"type", "error", "request_id"} and body["type"] == "error"
    assert body["error"]["type"] == kind and body["error"]["message"]
    return body["error"]


def test_a_message(claude):
    found = claude.messages.create(**BODY, system=[{"type": "text", "text": "Be brief."}])
    assert found.id.startswith("msg_") and found.type == "message" and found.role == "assistant"
    assert found.model == "llama" and found._request_id == found.id
    (block,) = found.content
    assert block.type == "text" and block.text
    assert found.stop_reason == "max_tokens" and found.stop_sequence is None
    assert found.usage.output_tokens == 12
    again = claude.messages.create(**BODY, system="Be brief.")
    assert again.content == found.content
    assert again.usage.input_tokens == 1
    assert again.usage.cache_read_input_tokens == found.usage.input_tokens + found.usage.cache_read_input_tokens - 1
    assert again.model_extra["mlxkv"]["cache"]["source"] == "ram"


def test_the_stream_says_the_same_in_the_right_order(http, claude):
    whole = claude.messages.create(**BODY)
    answer = http.post("/v1/messages", json=BODY | {"stream": True})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    found = events(answer.text)
    names = [name for name, _ in found]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"}
    start, end = found[0][1]["message"], found[-2][1]
    assert start["id"] == answer.headers["x-request-id"] and start["content"] == [] and start["stop_reason"] is None
    assert start["usage"]["input_tokens"] == 1 and start["usage"]["output_tokens"] == 0
    assert end["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert end["usage"] == start["usage"] | {"output_tokens": 12}
    assert end["mlxkv"]["timings"]["ttft_s"] > 0
    with claude.messages.stream(**BODY) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        final = stream.get_final_message()
    assert final.content[0].text == whole.content[0].text and final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_fields_that_choose_tokens_are_honoured(claude):
    def said(**more):
        return claude.messages.create(**BODY | more).content[0].text

    greedy = said()
    hot = {"temperature": 2, "seed": 1}
    assert said(extra_body=hot) == said(extra_body=hot) != said(extra_body=hot | {"seed": 2})
    assert said(extra_body=hot | {"top_k": 1}) == said(extra_body=hot | {"top_p": 0}) == greedy
    stop = greedy[3:5]
    found = claude.messages.create(**BODY, stop_sequences=["nowhere", stop])
    assert found.stop_reason == "stop_sequence" and found.stop_sequence == stop
    assert found.content[0].text == greedy[: greedy.index(stop)]


def test_the_answer_goes_on_from_its_beginning(claude):
    whole = claude.messages.create(**BODY).content[0].text
    start = whole[: len(whole) // 2].rstrip()
    begun = [USER, {"role": "assistant", "content": start}]
    # of its own salt, since an answer that is remembered stands as the ids that were sampled, which may be fewer
    found = claude.messages.create(**BODY | {"messages": begun, "max_tokens": 4}, extra_body={"cache_salt": "begun"})
    count = claude.messages.count_tokens(model="llama", messages=begun).input_tokens
    assert count == found.usage.input_tokens + found.usage.cache_read_input_tokens
    assert count > claude.messages.count_tokens(model="llama", messages=[USER]).input_tokens
    closed = claude.messages.count_tokens(model="llama", messages=[*begun, USER]).input_tokens
    assert closed > count + 2  # the answer is closed there, and here it is not


def test_tokens_are_counted_also_where_there_is_no_room(claude, http):
    few, many = (
        claude.messages.count_tokens(model="llama", messages=[{"role": "user", "content": "word " * n}]).input_tokens
        for n in (10, 5000)
    )
    assert few < 60 and many > 5000
    more = claude.messages.count_tokens(model="llama", messages=[USER], system="Be brief.").input_tokens
    assert more > claude.messages.count_tokens(model="llama", messages=[USER]).input_tokens
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.count_tokens(model="claude", messages=[USER])
    refused(http.post("/v1/messages/count_tokens", json={"model": "llama"}))


def test_what_asks_for_nothing_is_taken(claude):
    found = claude.messages.create(
        **BODY,
        metadata={"user_id": "me"},
        service_tier="auto",
        cache_control={"type": "ephemeral"},
        thinking={"type": "disabled"},
        output_config={"effort": "max"},
        tool_choice={"type": "auto"},
        extra_body={
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "diagnostics": {"previous_message_id": None},
            "mcp_servers": [],
            "container": None,
        },
        extra_headers={"anthropic-beta": "claude-code-20250219"},
    )
    assert found.usage.output_tokens == 12 and found.diagnostics is None
    asked = claude.messages.create(**BODY, extra_body={"diagnostics": {"previous_message_id": "msg_1"}})
    assert asked.diagnostics.cache_miss_reason.type == "unavailable"


def test_a_prompt_is_remembered_without_an_answer(claude):
    ahead = BODY | {"messages": [USER | {"content": "This will be asked later. " * 20}]}
    warmed = claude.messages.create(**ahead | {"max_tokens": 0})
    assert warmed.content == [] and warmed.stop_reason == "max_tokens" and warmed.usage.output_tokens == 0
    assert warmed.usage.input_tokens > 100
    asked = claude.messages.create(**ahead)
    assert asked.usage.input_tokens == 1 and asked.content[0].text


def test_models_are_listed_for_both_apis(claude, http):
    (model,) = claude.models.list()
    assert model.id == model.display_name == "llama" and model.type == "model" and model.created_at.year > 2000
    assert claude.models.retrieve("llama") == model
    listed = http.get("/v1/models").json()
    assert listed["object"] == "list" and listed["has_more"] is False and listed["first_id"] == "llama"


def test_a_salt_shares_nothing(claude):
    def cached(salt):
        found = claude.messages.create(**BODY | {"messages": [USER | {"content": "salty"}]}, extra_body=salt)
        return found.usage.cache_read_input_tokens

    assert cached({"cache_salt": "n1"}) == 0
    assert cached({"cache_salt": "n1"}) > 0
    assert cached({"cache_salt": "n2"}) == 0


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"model": None}, "model"),
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [3]}, "messages[0]"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 2**70}, "max_tokens"),
        ({"system": 3}, "system"),
        ({"system": [3]}, "system[0]"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"timeout": 0}, "timeout"),
        ({"metadata": {"name": "x"}}, "metadata.name"),
        ({"cache_control": {"type": "for ever"}}, "cache_control.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 12}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "disabled", "budget_tokens": 3}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "tools[0].input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [TOOL | {"input_examples": "x"}]}, "tools[0].input_examples"),
        ({"tools": [TOOL | {"strict": "yes"}]}, "tools[0].strict"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "auto", "name": "look"}}, "tool_choice.name"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "odd"}}}}, "output_config.format"),
        ({"output_format": {"type": "json_schema", "schema": {"pattern": "("}}}, "output_format"),
        ({"output_config": {"effort": "none"}}, "output_config.effort"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0]"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"speed": "fast"}, "speed"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"n": 2}, "n"),
        ({"temprature": 1}, "temprature"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ],
)
def test_a_field_that_is_wrong_is_named(http, change, param):
    body = {key: value for key, value in (BODY | change).items() if value is not None or key not in change}
    error = refused(http.post("/v1/messages", json=body))
    assert error.get("param") == param and param in error["message"]


def test_other_refusals_have_the_form_too(http, claude):
    with pytest.raises(anthropic.NotFoundError) as caught:
        claude.messages.create(**BODY | {"model": "claude-opus"})
    assert caught.value.type == "not_found_error"
    for stream in (True, False):
        long = BODY | {"messages": [USER | {"content": "word " * 5000}], "stream": stream}
        error = refused(http.post("/v1/messages", json=long))
        assert error["details"] == {"error_code": "context_length_exceeded"} and "4096" in error["message"]
    refused(http.post("/v1/messages", content=b"{", headers={"content-type": "application/json"}))
    refused(http.post("/v1/messages"))
    refused(http.get("/v1/messages"), 405)
    refused(http.get("/v1/messages/nothing"), 404, "not_found_error")
    for version in ("2023-01-01", "latest"):
        old = http.post("/v1/messages", json=BODY, headers={"anthropic-version": version})
        assert refused(old)["param"] == "anthropic-version"
    large = httpx.Request("POST", f"{http.base_url}/v1/messages", content=b"x" * (MAX_BODY + 1))
    refused(http.send(large), 413, "request_too_large")


def test_thinking_is_not_for_an_answer_that_has_begun(http):
    begun = [USER, {"role": "assistant", "content": "The"}]
    more = {"messages": begun, "thinking": {"type": "enabled", "budget_tokens": 4}}
    assert refused(http.post("/v1/messages", json=BODY | more))["param"] == "thinking"


def test_a_request_that_takes_too_long_ends_with_an_error(http, claude, server):
    long = BODY | {"max_tokens": 3500, "timeout": 0.3}
    refused(http.post("/v1/messages", json=long), 504, "timeout_error")
    name, data = events(http.post("/v1/messages", json=long | {"stream": True}).text)[-1]
    assert name == "error" and data["error"]["type"] == "timeout_error" and data["request_id"].startswith("msg_")
    with pytest.raises(anthropic.APIStatusError, match="not answered"):
        list(claude.messages.create(**BODY | {"max_tokens": 3500}, stream=True, extra_body={"timeout": 0.3}))
    assert server.idle()
