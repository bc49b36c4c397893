"""What the fields of a chat request do, whole and streamed: every stream keeps to the schema and says what the whole
answer says."""

from __future__ import annotations

import json

import pytest

from mlxkv.decode.request import Request, SamplingParams
from tests.serve import chunks
from tests.serve.test_refusals import refused

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Tell me about the sea."}]
BODY = {"model": "llama", "messages": MESSAGES, "max_tokens": 8}
FUNCTION = {"type": "function", "function": {"name": "f"}}


def ask(http, **fields):
    answer = http.post(CHAT, json=BODY | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(http, *, usage=False, **fields):
    """The stream, which keeps to the schema."""
    options = {"stream_options": {"include_usage": True}} if usage else {}
    answer = http.post(CHAT, json=BODY | fields | {"stream": True} | options)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    return chunks.read(answer.text, n=fields.get("n", 1), usage=usage)


def text(found, choice=0):
    return found["choices"][choice]["message"]["content"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stop": ["e", "zzz"], "max_tokens": 60},
        {"n": 3, "temperature": 1.5, "seed": 4},
        {"logprobs": True, "top_logprobs": 3, "temperature": 1.5, "seed": 1},
        {"n": 2, "logprobs": True},
        {"structured_outputs": {"regex": "[a-z]{3}🌊[a-z]{2}"}, "max_tokens": 40, "logprobs": True},
        {"structured_outputs": {"choice": ["yes", "no"]}, "n": 2},
        {"max_tokens": 1},
        {"messages": [*MESSAGES, {"role": "assistant", "content": "The sea"}], "continue_final_message": True},
    ],
    ids=lambda fields: ",".join(fields),
)
@pytest.mark.parametrize("usage", [True, False])
def test_a_stream_says_what_the_whole_answer_says(http, fields, usage):
    whole, streamed = ask(http, **fields), stream(http, usage=usage, **fields)
    assert len(whole["choices"]) == len(streamed.choices) == fields.get("n", 1)
    for choice, said in zip(whole["choices"], streamed.choices, strict=True):
        assert choice["message"] == said.message
        assert choice["finish_reason"] == said.finish
        assert (choice["logprobs"] or {"content": []})["content"] == said.logprobs
    if usage:
        counts = ("prompt_tokens", "completion_tokens", "total_tokens", "completion_tokens_details")
        assert [whole["usage"][name] for name in counts] == [streamed.usage[name] for name in counts]
        assert streamed.usage["prompt_tokens_details"]["cached_tokens"] == whole["usage"]["prompt_tokens"] - 1


def test_choices_share_their_prompt_and_have_seeds_of_their_own(http):
    fields = {"temperature": 1.5, "messages": [{"role": "user", "content": "Four words on choices. " * 9}]}
    found = ask(http, n=3, seed=7, **fields)
    reports = found["mlxkv"]["choices"]
    assert reports[0]["cache"] == found["mlxkv"]["cache"]
    assert [report["cache"]["miss_reason"] for report in reports[1:]] == [None, None]  # all but the last token
    assert found["usage"]["completion_tokens"] == 24
    assert len({text(found, i) for i in range(3)}) == 3
    for i in range(3):
        assert text(ask(http, seed=7 + i, **fields)) == text(found, i)


def test_logprobs_are_the_engines_own(server, http):
    found = ask(http, logprobs=True, top_logprobs=2)["choices"][0]
    sampling = SamplingParams(max_tokens=8, logprobs=True, top_logprobs=2)
    said = server.engine.submit(Request(messages=MESSAGES, sampling=sampling)).result()
    assert said.logprobs is not None
    content = found["logprobs"]["content"]
    assert [token["logprob"] for token in content] == pytest.approx([t.logprob for t in said.logprobs])
    assert bytes(byte for token in content for byte in token["bytes"]).decode("utf-8", "replace") == said.text
    for token in content:  # greedy: the sampled token is the likeliest
        assert token["top_logprobs"][0] == {name: token[name] for name in ("token", "logprob", "bytes")}
        assert len(token["top_logprobs"]) == 2
    assert "logprobs" not in str(ask(http)["choices"][0]["message"]) and ask(http)["choices"][0]["logprobs"] is None


def test_tokens_that_are_no_whole_character_have_bytes(http):
    found = ask(http, structured_outputs={"choice": ["🌊"]}, logprobs=True)
    assert text(found) == "🌊"
    content = found["choices"][0]["logprobs"]["content"]
    raw = [token["bytes"] for token in content]
    assert len(raw) > 1 and bytes(sum(raw, [])) == "🌊".encode()


@pytest.mark.parametrize(
    ("fields", "matches"),
    [
        ({"structured_outputs": {"choice": ['yes "q"\\\n', "no"]}}, lambda said: said in ('yes "q"\\\n', "no")),
        ({"guided_choice": ["x"]}, lambda said: said == "x"),
        ({"guided_regex": "[ab]{4}"}, lambda said: len(said) == 4 and set(said) <= set("ab")),
        ({"guided_grammar": 'start: "a" "b"'}, lambda said: said == "ab"),
        ({"guided_json": {"enum": [1, 2]}}, lambda said: json.loads(said) in (1, 2)),
        ({"guided_json": '{"enum": [1, 2]}'}, lambda said: json.loads(said) in (1, 2)),
        ({"structured_outputs": {"json": {"const": "c"}}}, lambda said: json.loads(said) == "c"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["d"]}}}},
            lambda said: json.loads(said) == "d",
        ),
        ({"response_format": {"type": "text"}}, lambda said: len(said) > 1),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_structured_answers(http, fields, matches):
    found = ask(http, max_tokens=60, **fields)
    assert matches(text(found)), text(found)


def test_an_answer_goes_on_from_its_prefix(server, http):
    """The prefix is part of the prompt, and a longer one costs no more than its own tokens."""
    begun = [*MESSAGES, {"role": "assistant", "content": "The sea is"}]
    found = ask(http, messages=begun, continue_final_message=True)
    same = ask(http, messages=begun, add_generation_prompt=False)
    assert text(found) == text(same)
    request = Request(messages=begun, sampling=SamplingParams(max_tokens=8), continue_final=True)
    assert text(found) == server.engine.submit(request).result().text
    assert found["usage"]["prompt_tokens"] < ask(http, messages=begun)["usage"]["prompt_tokens"]


def test_progress_is_told_where_it_is_asked_for(http):
    fields = {"stream": True, "stream_options": {"include_progress": True, "include_usage": True}}
    body = BODY | fields | {"messages": [{"role": "user", "content": "a way to go " * 60}]}
    found = chunks.read(http.post(CHAT, json=body).text, usage=True)
    assert [each["done"] for each in found.progress] == sorted(each["done"] for each in found.progress)
    assert len(found.progress) > 2
    assert found.progress[-1]["done"] == found.progress[-1]["total"] - 1 == found.usage["prompt_tokens"] - 1


def test_budgets_and_switches_of_thinking_do_no_harm_to_a_model_that_does_not_think(http):
    plain = text(ask(http))
    for fields in (
        {"reasoning_effort": "none"},
        {"reasoning_effort": "high"},
        {"thinking_budget": 3},
        {"reasoning": {"effort": "low", "exclude": True}},
        {"enable_thinking": False, "chat_template_kwargs": {"anything": 1}},
        {"reasoning": {"enabled": True, "max_tokens": 5}},
    ):
        assert text(ask(http, **fields)) == plain


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": "json"}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "nope"}}}},
            "response_format",
        ),
        ({"structured_outputs": {"xml": "x"}}, "structured_outputs.xml"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice[1]"),
        ({"structured_outputs": {"grammar": "nonsense"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "3"}, "guided_json"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f", "colour": 1}}]}, "tools[0].function.colour"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools[1].function.name"),
        ({"tools": [FUNCTION]}, "tools"),  # this model has no way to call
        ({"tools": [FUNCTION], "tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": FUNCTION | {"function": {"name": "g"}}}, "tool_choice.function.name"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function"}}, "tool_choice"),
        (
            {
                "tools": [FUNCTION],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
            },
            "tool_choice.allowed_tools.tools",
        ),
        ({"stop": ["x"] * 17}, "stop"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": -1}, "timeout"),
        ({"thinking_budget": -1}, "thinking_budget"),
        ({"reasoning": {"max_tokens": -1}}, "reasoning.max_tokens"),
        ({"reasoning": {"depth": 1}}, "reasoning.depth"),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning_effort"),
        ({"enable_thinking": True, "reasoning_effort": "none"}, "reasoning_effort"),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            "chat_template_kwargs.enable_thinking",
        ),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs.thinking"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            "chat_template_kwargs.reasoning_effort",
        ),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"stream_options": {"include_progress": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"continuous": True}}, "stream_options.continuous"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"store": True}, "store"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"verbosity": "low"}, "verbosity"),
        ({"echo": True}, "echo"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused(http, fields, param):
    streamed = fields | {"stream": True} if "stream_options" not in fields else fields
    for body in (fields, streamed):  # before the headers of a stream too
        assert refused(http.post(CHAT, json=BODY | body))["param"] == param


def test_tools_that_may_not_be_called_do_no_harm(http):
    assert text(ask(http, tools=[FUNCTION], tool_choice="none")) == text(ask(http))
