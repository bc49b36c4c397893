"""Tools, structured answers and thinking through a real server, with a model that knows them all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from mlxkv.decode.engine import Engine

from .conftest import running
from .pipeline.conftest import DEMO, function

WEATHER = function("get_weather", city={"type": "string"}, days={"type": "integer", "maximum": 9})
NOW = function("now")
ASK = [{"role": "user", "content": "What is the weather in Lisbon for 3 days?"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
CITY["additionalProperties"] = False


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    with (
        Engine(DEMO, cache_dir=tmp_path_factory.mktemp("demo")) as engine,
        running(engine) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


def asked(client: OpenAI, messages: Any = ASK, **fields: Any) -> Any:
    fields = {"model": "mlxkv-demo", "max_tokens": 200, "temperature": 0, "tools": [WEATHER, NOW], **fields}
    return client.chat.completions.create(messages=messages, **fields)


def calls(choice: Any) -> list[tuple[str, Any]]:
    return [(each.function.name, json.loads(each.function.arguments)) for each in choice.message.tool_calls or []]


def test_a_call_goes_out_and_its_result_comes_back(client: OpenAI) -> None:
    choice = asked(client).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    ((name, arguments),) = calls(choice)
    assert name == "get_weather" and arguments["city"] == "Lisbon"
    call = choice.message.tool_calls[0]
    history = [*ASK, choice.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "Rain, 12 C."}]
    answer = asked(client, history).choices[0]
    assert answer.finish_reason == "stop" and answer.message.content and not answer.message.tool_calls


def test_a_stream_says_the_same_as_a_whole_answer(client: OpenAI) -> None:
    for fields in ({}, {"tool_choice": "required"}, {"tools": [], "extra_body": {"enable_thinking": True}}):
        whole = asked(client, **fields).choices[0]
        text, thought, made, finish = "", "", {}, None
        for chunk in asked(client, stream=True, **fields):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                thought += getattr(choice.delta, "reasoning_content", None) or ""
                for call in choice.delta.tool_calls or []:
                    name, arguments = made.get(call.index, ("", ""))
                    made[call.index] = (name + (call.function.name or ""), arguments + (call.function.arguments or ""))
                finish = choice.finish_reason or finish
        assert text == (whole.message.content or "")
        assert thought == (getattr(whole.message, "reasoning_content", None) or "")
        assert [(name, json.loads(arguments)) for name, arguments in made.values()] == calls(whole)
        assert finish == whole.finish_reason


def test_choices_of_tools(client: OpenAI) -> None:
    hello = [{"role": "user", "content": "Hello"}]
    assert calls(asked(client, hello).choices[0]) == []
    required = asked(client, hello, tool_choice="required").choices[0]
    assert calls(required) and required.finish_reason == "tool_calls"
    named = asked(client, tool_choice={"type": "function", "function": {"name": "now"}}, parallel_tool_calls=False)
    assert calls(named.choices[0]) == [("now", {})]
    none = asked(client, tool_choice="none").choices[0]
    assert calls(none) == [] and none.message.content and none.finish_reason == "stop"


def test_strict_arguments_are_those_of_the_schema(client: OpenAI) -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    ((_, arguments),) = calls(asked(client, tools=[strict]).choices[0])
    assert arguments.keys() == {"city", "days"} and type(arguments["days"]) is int and arguments["days"] <= 9


def test_a_structured_answer_or_a_call(client: OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    for tools in ([], [NOW]):
        choice = asked(client, response_format=form, tools=tools).choices[0]
        assert calls(choice) == [("now", {})] if choice.message.tool_calls else json.loads(choice.message.content)
    thinking = asked(client, response_format=form, tools=[], extra_body={"enable_thinking": True}).choices[0].message
    assert thinking.reasoning_content and json.loads(thinking.content)["city"] in ("Rome", "Oslo")


def test_thinking_on_and_off(client: OpenAI) -> None:
    sums = [{"role": "user", "content": "What is 3 + 4?"}]
    on = asked(client, sums, tools=[], extra_body={"enable_thinking": True}).choices[0].message
    assert on.reasoning_content and "<" not in on.content and "7" in on.content
    off = asked(client, sums, tools=[], extra_body={"enable_thinking": False}).choices[0].message
    assert getattr(off, "reasoning_content", None) is None and "7" in off.content


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"tools": [function("f", a={"$ref": "http://a.example/b"})], "tool_choice": "required"},
            "tools[0].function.parameters",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "any"}}}},
            "response_format",
        ),
        ({"extra_body": {"guided_regex": "a+"}}, "tool_choice"),
    ],
)
def test_what_cannot_be_promised_is_refused(client: OpenAI, fields: dict[str, Any], param: str) -> None:
    fields = {"tools": [NOW], **fields}
    with pytest.raises(openai.BadRequestError) as caught:
        asked(client, **fields)
    assert caught.value.param == param


def test_tools_of_a_model_that_has_none_are_refused(server: Any) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            asked(client, model=server.engine.info.name)
        assert caught.value.param == "tools"
