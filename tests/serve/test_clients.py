"""Tours of the client libraries that people use, against ``mlxkv serve`` with the demo model as they would start it.

Each has a chat, a stream, a tool, a JSON schema, the counts, and errors. The demo model calls tools and writes JSON by
itself, copying values from the question.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from pydantic import BaseModel

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for prices when it is imported

ROOT = Path(__file__).parents[2]
KEY = "a-key-of-the-tours"
MODEL = "mlxkv-demo"
QUESTION = [{"role": "user", "content": "My name is Nora. What is my name?"}]
CALL_IT = "Use get_weather with the city Lisbon."
GIVE_JSON = "Answer as JSON: name is Nora and city is Lisbon."
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
FUNCTION = {"name": "get_weather", "description": "Gets the weather of a city.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}


class Person(BaseModel):
    name: str
    city: str


NORA = Person(name="Nora", city="Lisbon")


@dataclass
class Served:
    url: str

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("tours")
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MLXKV_") or k == "MLXKV_NUMERICS"}
    env = kept | {f"XDG_{name}_HOME": str(home) for name in ("CACHE", "DATA", "CONFIG")} | {"MLXKV_API_KEY": KEY}
    command = [sys.executable, "-m", "mlxkv.cli", "serve", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = ""
        while not (found := re.search(r"http://127\.0\.0\.1:\d+", said)):
            line = process.stderr.readline()
            assert line, said
            said += line
        try:
            yield Served(found[0])
        finally:
            process.terminate()
            said += process.communicate(timeout=30)[1]
    assert process.returncode == 0 and "Traceback" not in said, said
    assert "Lisbon" not in said and KEY not in said


def test_openai(served):
    import openai

    with openai.OpenAI(base_url=served.v1, api_key=KEY, max_retries=0) as client:
        assert MODEL in [model.id for model in client.models.list()]
        chat = client.chat.completions.create
        found = chat(model=MODEL, messages=QUESTION, max_tokens=40)
        assert "Nora" in found.choices[0].message.content and found.choices[0].finish_reason == "stop"

        chunks = list(
            chat(
                model=MODEL,
                messages=QUESTION,
                max_tokens=40,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == found.choices[0].message.content
        usage = chunks[-1].usage
        assert usage.prompt_tokens_details.cached_tokens == found.usage.prompt_tokens - 1

        messages = [{"role": "user", "content": CALL_IT}]
        asked = chat(model=MODEL, messages=messages, tools=[TOOL], max_tokens=60).choices[0]
        (call,) = asked.message.tool_calls
        assert asked.finish_reason == "tool_calls" and call.function.name == "get_weather"
        assert json.loads(call.function.arguments) == {"city": "Lisbon"}
        messages += [asked.message, {"role": "tool", "tool_call_id": call.id, "content": "It is sunny."}]
        assert chat(model=MODEL, messages=messages, tools=[TOOL], max_tokens=30).choices[0].message.content

        stream = chat(model=MODEL, messages=messages[:1], tools=[TOOL], max_tokens=60, stream=True)
        deltas = [c.choices[0].delta.tool_calls[0] for c in stream if c.choices and c.choices[0].delta.tool_calls]
        assert deltas[0].function.name == "get_weather"
        assert json.loads("".join(d.function.arguments or "" for d in deltas)) == {"city": "Lisbon"}

        parsed = client.chat.completions.parse(
            model=MODEL, messages=[{"role": "user", "content": GIVE_JSON}], response_format=Person, max_tokens=60
        )
        assert parsed.choices[0].message.parsed == NORA

        response = client.responses.create(model=MODEL, input=QUESTION[0]["content"], max_output_tokens=40)
        assert response.output_text == text

        with pytest.raises(openai.NotFoundError):
            chat(model="gpt-4o", messages=QUESTION)
        with pytest.raises(openai.BadRequestError) as caught:
            chat(model=MODEL, messages=QUESTION, temperature=-1)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.BadRequestError) as caught:
            chat(model=MODEL, messages=[{"role": "user", "content": "word " * 40_000}])
        assert caught.value.code == "context_length_exceeded"
    with (
        openai.OpenAI(base_url=served.v1, api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_anthropic(served):
    import anthropic

    tool = {"name": "get_weather", "description": FUNCTION["description"], "input_schema": SCHEMA}
    with anthropic.Anthropic(base_url=served.url, api_key=KEY, max_retries=0) as client:
        assert MODEL in [model.id for model in client.models.list()]
        options = {"model": MODEL, "messages": QUESTION, "max_tokens": 40}
        found = client.messages.create(**options)
        assert "Nora" in found.content[0].text and found.stop_reason == "end_turn"
        count = client.messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens
        assert found.usage.input_tokens + found.usage.cache_read_input_tokens == count

        with client.messages.stream(**options) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text == found.content[0].text == final.content[0].text
        assert final.usage.cache_read_input_tokens == count - 1 and final.usage.input_tokens == 1
        assert final.usage.output_tokens == found.usage.output_tokens

        messages = [{"role": "user", "content": CALL_IT}]
        asked = client.messages.create(model=MODEL, messages=messages, tools=[tool], max_tokens=60)
        count = client.messages.count_tokens(model=MODEL, messages=messages, tools=[tool]).input_tokens
        assert asked.usage.input_tokens + asked.usage.cache_read_input_tokens == count
        call = asked.content[-1]
        assert asked.stop_reason == "tool_use" and call.name == "get_weather" and call.input == {"city": "Lisbon"}
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "It is sunny."}
        messages += [{"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
        assert client.messages.create(model=MODEL, messages=messages, tools=[tool], max_tokens=30).content[0].text

        @anthropic.beta_tool
        def get_weather(city: str) -> str:
            """Gets the weather of a city."""
            asked_for.append(city)
            return "It is sunny."

        asked_for: list[str] = []
        runner = client.beta.messages.tool_runner(
            model=MODEL, messages=messages[:1], tools=[get_weather], max_tokens=60, stream=True
        )
        assert [m.get_final_message().stop_reason for m in runner] == ["tool_use", "end_turn"]
        assert asked_for == ["Lisbon"]

        parsed = client.messages.parse(
            model=MODEL, messages=[{"role": "user", "content": GIVE_JSON}], output_format=Person, max_tokens=60
        )
        assert parsed.parsed_output == NORA

        forced = client.messages.create(**options, tools=[tool], tool_choice={"type": "any"})
        assert [block.name for block in forced.content if block.type == "tool_use"] == ["get_weather"]
        begun = [*QUESTION, {"role": "assistant", "content": "Your name is"}]
        assert client.messages.create(**options | {"messages": begun}).content[0].text.strip(" .") == "Nora"
        stopped = client.messages.create(**options, stop_sequences=["Nora"])
        assert stopped.stop_sequence == "Nora" and stopped.content[0].text == text[: text.index("Nora")]
        thinking = {"type": "enabled", "budget_tokens": 30}
        thought, answer = client.messages.create(**options, thinking=thinking).content
        assert thought.type == "thinking" and thought.thinking and "Nora" in answer.text

        with pytest.raises(anthropic.NotFoundError) as caught:
            client.messages.create(**options | {"model": "claude"})
        assert caught.value.type == "not_found_error"
        with pytest.raises(anthropic.BadRequestError, match="temperature") as caught:
            client.messages.create(**options, extra_body={"temperature": -1})
        assert caught.value.type == "invalid_request_error"
    with (
        anthropic.Anthropic(base_url=served.url, api_key="wrong", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError),
    ):
        client.messages.create(**options)


def test_what_an_agent_asks_of_messages(served):
    """All fields that Claude Code sends. Its note to the biller differs each time, and the prompt is found again."""
    mark = {"type": "ephemeral"}
    said = [{"type": "text", "text": "<system-reminder>\nBe kind.\n</system-reminder>"}]
    said.append({"type": "text", "text": CALL_IT, "cache_control": mark})
    messages = [{"role": "user", "content": said}]
    schema = SCHEMA | {"$schema": "https://json-schema.org/draft/2020-12/schema", "additionalProperties": False}
    tool = {"name": "get_weather", "description": FUNCTION["description"], "input_schema": schema}
    headers = {"authorization": f"Bearer {KEY}", "anthropic-version": "2023-06-01", "x-app": "cli"}
    headers["anthropic-beta"] = "claude-code-20250219,context-management-2025-06-27"

    def ask(note):
        system = [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.0; cch={note};"},
            {"type": "text", "text": "You help with code. " * 30, "cache_control": mark | {"ttl": "1h"}},
        ]
        body = {
            "model": MODEL,
            "max_tokens": 60,
            "system": system,
            "messages": messages,
            "tools": [tool | {"eager_input_streaming": True}],
            "metadata": {"user_id": '{"device_id": "d", "session_id": "s"}'},
            "thinking": {"type": "disabled"},
            "output_config": {"effort": "high"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "stream": True,
        }
        answer = httpx.post(f"{served.v1}/messages?beta=true", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]

    found = ask("a1")
    call = next(e["content_block"] for e in found if e["type"] == "content_block_start")
    assert call["name"] == "get_weather" and found[-2]["delta"]["stop_reason"] == "tool_use"
    first = found[-2]["usage"]
    messages.append({"role": "assistant", "content": [call | {"input": {"city": "Lisbon"}}]})
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "It is sunny."}]}
    messages.append({"role": "user", "content": [result | {"cache_control": mark}]})
    second = ask("b2")[-2]["usage"]
    whole = first["input_tokens"] + first["cache_read_input_tokens"] + first["output_tokens"]
    assert second["cache_read_input_tokens"] >= whole - 2


def test_what_an_agent_asks_of_responses(served):
    """All fields that Codex sends."""
    body = {
        "model": MODEL,
        "instructions": "You help with code.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Ask first."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": CALL_IT}]},
        ],
        "tools": [{"type": "function", "strict": False, **FUNCTION}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": None,
        "store": False,
        "stream": True,
        "include": [],
        "prompt_cache_key": "0199-thread",
        "client_metadata": {"x-codex-installation-id": "i"},
        "timeout": 20,  # ours: what Codex asks for has no end of its own
    }
    with httpx.Client(headers={"authorization": f"Bearer {KEY}"}, timeout=60) as http:

        def ask():
            answer = http.post(f"{served.v1}/responses", json=body)
            assert answer.status_code == 200, answer.text
            events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            assert events[-1]["type"] == "response.completed"
            return events[-1]["response"]["output"]

        items = ask()
        call = items[-1]
        assert call["type"] == "function_call" and json.loads(call["arguments"]) == {"city": "Lisbon"}
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "It is sunny."}
        body["input"] += [*items, result]
        assert ask()[-1]["content"][0]["text"]


def test_langchain(served):
    import openai
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, base_url=served.v1, api_key=KEY, temperature=0, max_tokens=60, max_retries=0)
    found = model.invoke(QUESTION[0]["content"])
    assert "Nora" in found.content and found.response_metadata["finish_reason"] == "stop"
    again = model.invoke(QUESTION[0]["content"]).usage_metadata
    assert again["input_token_details"]["cache_read"] == again["input_tokens"] - 1
    assert again["output_tokens"] == found.usage_metadata["output_tokens"]

    chunks = list(model.stream(QUESTION[0]["content"], stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == found.content
    assert sum(c.usage_metadata["output_tokens"] for c in chunks if c.usage_metadata) == again["output_tokens"]

    asked: list = [HumanMessage(CALL_IT)]
    with_tool = model.bind_tools([TOOL])
    answer = with_tool.invoke(asked)
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Lisbon"})
    assert with_tool.invoke([*asked, answer, ToolMessage("It is sunny.", tool_call_id=call["id"])]).content
    forced = model.bind_tools([TOOL], tool_choice="get_weather").invoke("Hello.")
    assert forced.tool_calls[0]["name"] == "get_weather"

    assert model.with_structured_output(Person).invoke(GIVE_JSON) == NORA

    with pytest.raises(openai.BadRequestError, match="top_p"):
        model.bind(top_p=3).invoke("x")


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_litellm(served, provider):
    import litellm

    litellm.suppress_debug_info = True
    base = served.v1 if provider == "openai" else served.url
    options = {"model": f"{provider}/{MODEL}", "api_base": base, "api_key": KEY, "max_tokens": 60, "num_retries": 0}
    found = litellm.completion(messages=QUESTION, **options)
    assert "Nora" in found.choices[0].message.content and found.choices[0].finish_reason == "stop"
    again = litellm.completion(messages=QUESTION, **options)
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1
    assert again.usage.completion_tokens == found.usage.completion_tokens

    stream = litellm.completion(messages=QUESTION, stream=True, **options)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == found.choices[0].message.content

    messages = [{"role": "user", "content": CALL_IT}]
    asked = litellm.completion(messages=messages, tools=[TOOL], **options).choices[0]
    (call,) = asked.message.tool_calls
    assert asked.finish_reason == "tool_calls" and call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Lisbon"}
    messages += [asked.message, {"role": "tool", "tool_call_id": call.id, "content": "It is sunny."}]
    assert litellm.completion(messages=messages, tools=[TOOL], **options).choices[0].message.content

    if provider == "openai":  # for Anthropic's own, it makes a tool of a schema unless it knows the model's name
        parsed = litellm.completion(
            messages=[{"role": "user", "content": GIVE_JSON}], response_format=Person, **options
        )
        assert Person.model_validate_json(parsed.choices[0].message.content) == NORA

    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(messages=QUESTION, **options, temperature=-1)
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(messages=QUESTION, **options | {"api_key": "wrong"})


def test_the_llm_command(served, tmp_path, monkeypatch):
    from click.testing import CliRunner
    from llm.cli import cli

    homes = tmp_path / "here", tmp_path / "beside"  # two that make one log database at once fail
    for home in homes:
        home.mkdir()
        (home / "extra-openai-models.yaml").write_text(
            f"- model_id: local\n  model_name: {MODEL}\n  api_base: {served.v1}\n  api_key_name: mlxkv\n"
            "  supports_tools: true\n  supports_schema: true\n"
        )
        (home / "keys.json").write_text(json.dumps({"mlxkv": KEY}))
    monkeypatch.setenv("LLM_USER_PATH", str(homes[0]))
    beside = os.environ | {"LLM_USER_PATH": str(homes[1])}

    def llm(*args: str, code: int = 0):
        found = CliRunner().invoke(cli, ["prompt", "-m", "local", "--no-log", *args])
        assert found.exit_code == code, (found.output, found.exception)
        return found

    command = [sys.executable, "-m", "llm", "prompt", "-m", "local", "-u", QUESTION[0]["content"]]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    with subprocess.Popen(command, env=beside, **pipes) as process:
        code = "def get_weather(city: str) -> str:\n    'Gets the weather of a city.'\n    return 'sunny in ' + city\n"
        assert "sunny in Lisbon" in llm("--functions", code, "--td", CALL_IT).stderr
        made = llm("--no-stream", "--schema", "name, city", GIVE_JSON).stdout
        assert Person.model_validate_json(made) == NORA
        assert "top_p" in llm("-o", "top_p", "3", "x", code=1).stderr
        out, err = process.communicate(timeout=60)
    assert b"Nora" in out and re.search(rb"\d+ input, \d+ output", err), err
