"""Every refusal is a small JSON error of OpenAI's form that names the field; the server goes on."""

from __future__ import annotations

import json

import pytest

from mlxkv.decode.engine import Engine
from mlxkv.serve.safety import Safety, own_names
from tests.serve.conftest import MAX_BODY, running

USER = {"role": "user", "content": "hi"}


def refused(answer, status=400):
    assert answer.status_code == status, answer.text
    assert len(answer.content) < 4096
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"] and error["type"]
    return error


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"model": None}, "model"),
        ({"model": 3}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [USER | {"colour": "red"}]}, "messages[0].colour"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant", "content": "x", "token_ids": [1]}]}, "messages[0].token_ids"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 7}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": -2}, "max_completion_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stop": ""}, "stop"),
        ({"seed": "x"}, "seed"),
        ({"seed": 2**70}, "seed"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": "a"}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"1": "a"}}, "logit_bias.1"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"n": 17}, "n"),
        ({"n": 0}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_everything": True}}, "stream_options.include_everything"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"user": 7}, "user"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
        ({"cache_salt": 1}, "cache_salt"),
        ({"logprobs": "yes"}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"temprature": 1}, "temprature"),
        ({"x" * 5000: 1}, "x" * 80),
    ],
)
def test_bad_fields(http, change, param):
    body = {"model": "llama", "messages": [USER], "max_tokens": 1} | change
    body = {name: value for name, value in body.items() if value is not None}
    assert refused(http.post("/v1/chat/completions", json=body))["param"] == param


def test_a_misspelt_field_is_told_its_name(http):
    error = refused(http.post("/v1/chat/completions", json={"model": "llama", "messages": [USER], "temprature": 1}))
    assert "temperature" in error["message"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"model": "llama", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "llama", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"model": "llama", "messages": [{"role": "user", "content": "x"}], "top_p": Infinity}',
        b'{"model": "llama", "messages": [{"role": "user", "content": "x"}], "stop": ["\\udfff"]}',
        b'{"model": "llama", "messages": [{"role": "user", "content": "x"}], "\\ud800": 1}',
    ],
)
def test_bad_bodies(http, content):
    refused(http.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"}))


def test_other_content_types(http):
    body = json.dumps({"model": "llama", "messages": [USER]})
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        error = refused(http.post("/v1/chat/completions", content=body, headers={"content-type": kind}))
        assert "application/json" in error["message"]


def test_too_large(http):
    body = {"model": "llama", "messages": [{"role": "user", "content": "x" * MAX_BODY}]}
    refused(http.post("/v1/chat/completions", json=body), 413)

    def parts():
        for _ in range(30):
            yield b" " * 10_000

    refused(http.post("/v1/chat/completions", content=parts(), headers={"content-type": "application/json"}), 413)


def test_routes_that_are_not_there(http):
    error = refused(http.get("/v1/nothing"), 404)
    assert "/v1/nothing" in error["message"] and "/openapi.json" in error["message"]
    error = refused(http.get("/v1/chat/completions"), 405)
    assert "POST, not GET" in error["message"] and error["code"] == "method_not_allowed"
    # a base URL with a /v1 too few or too many, which is what people get wrong
    assert "Did you mean /v1/chat/completions?" in refused(http.post("/chat/completions", json={}), 404)["message"]
    wrong = http.post("/v1/v1/messages", json={})
    assert wrong.status_code == 404 and "Did you mean /v1/messages?" in wrong.text
    error = refused(http.get("/nothing%0a" + "x" * 5000), 404)
    assert "\n" not in error["message"]
    refused(http.post("/v1/chat/completions", json={"model": "other", "messages": [USER]}), 404)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8642", "localhost.evil.example", "127.0.0.1.evil.example"]
)
def test_a_rebound_name_is_refused(http, host):
    assert refused(http.get("/v1/models", headers={"host": host}), 403)["code"] == "host_not_allowed"


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1:8642", "[::1]:8642", "192.168.1.7", "mac.local"]
)
def test_names_of_this_server(host):
    assert Safety(hosts=own_names("mac.local")).knows_host(host)


def test_a_closed_engine_tells_the_truth(tiny_model, http):
    import httpx

    engine = Engine(tiny_model("llama"))
    with running(engine) as server:
        engine.close()
        found = httpx.get(f"{server.url}/health")
        assert found.status_code == 503 and found.json()["status"] == "unavailable" and found.json()["reason"]
        for stream in (True, False):
            body = {"model": "llama", "messages": [USER], "stream": stream}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
            assert refused(answer, 503)["code"] == "engine_closed" and answer.headers["retry-after"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"[" * 50_000, "nested too deeply"),
        (b'{"model": "\xff"}', "UTF-8 at byte 11"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "thousands of digits"),
    ],
    ids=["deep", "bytes", "digits"],
)
def test_a_body_that_cannot_be_read_says_why(http, path, body, why):
    answer = http.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and why in answer.json()["error"]["message"]
