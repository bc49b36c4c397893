"""About a hundred bad bodies over a raw socket: each gets a status and a small JSON error that names the field, and the
server lives."""

from __future__ import annotations

import json

import pytest

from tests.serve.conftest import MAX_BODY
from tests.serve.raw import Raw, exchange, head

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "hi"}
GOOD = {
    CHAT: {"model": "llama", "messages": [USER], "max_tokens": 1},
    COMPLETIONS: {"model": "llama", "prompt": "hi", "max_tokens": 1},
    RESPONSES: {"model": "llama", "input": "hi", "max_output_tokens": 16},
    MESSAGES: {"model": "llama", "messages": [USER], "max_tokens": 1},
    "/v1/messages/count_tokens": {"model": "llama", "messages": [USER]},
    "/tokenize": {"model": "llama", "prompt": "hi"},
    "/detokenize": {"model": "llama", "tokens": [5]},
}
_CHAT = json.dumps(GOOD[CHAT]).encode()


def post(server, path: str, body: bytes, *more: str) -> Raw:
    found = exchange(server.port, head(path, len(body), *more) + body)
    assert found is not None
    return found


def refused(found: Raw | None, status: int = 400) -> dict:
    """The error of an answer: small JSON in the form of OpenAI's API or of Anthropic's."""
    assert found is not None and found.status == status, found
    assert len(found.body) < 4096 and found.headers["content-type"] == "application/json"
    body = found.json()
    error = body["error"]
    assert isinstance(error["message"], str) and error["message"] and error["type"]
    if body.get("type") != "error":
        assert error.keys() == {"message", "type", "param", "code"}
    return error


@pytest.fixture(autouse=True, scope="module")
def it_lives(server):
    """After all of it: nothing runs, and every route answers what is right."""
    yield
    assert server.idle()
    for path, body in GOOD.items():
        assert post(server, path, json.dumps(body).encode()).status == 200, path


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b'{"model"',
        b'{"model": "llama"',
        b"[]",
        b"5",
        b"null",
        b"true",
        b'"text"',
        b"{}{}",
        b"{'model': 1}",
        b'{"model": "llama",}',
        b"\xff\xfe\x00",
        b'{"model": "\xff"}',
        b'{"model": "\xed\xa0\x80"}',
        b"\x00" * 100,
        b"[" * 50_000,
        b'{"a":' * 20_000,
        b"<xml/>",
        b"model=llama",
    ],
    ids=lambda body: repr(body[:12]),
)
def test_no_json_object(server, path, body):
    refused(post(server, path, body))


def _changed(path: str, **change: object) -> bytes:
    return json.dumps({**GOOD[path], **change}).encode()


#: (path, body as text, the field that is named). NaN, Infinity and lone surrogates are what Python's json lets through.
FIELDS = [
    (CHAT, _changed(CHAT, model=None), "model"),
    (CHAT, _changed(CHAT, model=["llama"]), "model"),
    (CHAT, _changed(CHAT, model={"a": 1}), "model"),
    (CHAT, _changed(CHAT, messages={}), "messages"),
    (CHAT, _changed(CHAT, messages=[[]]), "messages[0]"),
    (CHAT, _changed(CHAT, messages=[None]), "messages[0]"),
    (CHAT, _changed(CHAT, messages=[USER, 5]), "messages[1]"),
    (CHAT, _changed(CHAT, messages=[{"role": 5, "content": "x"}]), "messages[0].role"),
    (CHAT, _changed(CHAT, messages=[{"role": "user", "content": {"a": 1}}]), "messages[0].content"),
    (CHAT, _changed(CHAT, temperature=float("nan")), "temperature"),
    (CHAT, _changed(CHAT, temperature=float("inf")), "temperature"),
    (CHAT, _changed(CHAT, temperature=1e400), "temperature"),
    (CHAT, _changed(CHAT, temperature="1"), "temperature"),
    (CHAT, _changed(CHAT, top_p=float("-inf")), "top_p"),
    (CHAT, _changed(CHAT, top_p=-0.1), "top_p"),
    (CHAT, _changed(CHAT, top_k=1e9), "top_k"),
    (CHAT, _changed(CHAT, top_k=-1), "top_k"),
    (CHAT, _changed(CHAT, min_p=2), "min_p"),
    (CHAT, _changed(CHAT, max_tokens=-1), "max_tokens"),
    (CHAT, _changed(CHAT, max_tokens=0), "max_tokens"),
    (CHAT, _changed(CHAT, max_tokens=1.5), "max_tokens"),
    (CHAT, _changed(CHAT, max_tokens="5"), "max_tokens"),
    (CHAT, _changed(CHAT, max_tokens=True), "max_tokens"),
    (CHAT, _changed(CHAT, seed=2**64), "seed"),
    (CHAT, _changed(CHAT, seed=-(2**70)), "seed"),
    (CHAT, _changed(CHAT, seed=1.5), "seed"),
    (CHAT, _changed(CHAT, n=0), "n"),
    (CHAT, _changed(CHAT, n=10**6), "n"),
    (CHAT, _changed(CHAT, n="2"), "n"),
    (CHAT, _changed(CHAT, stop=[""]), "stop"),
    (CHAT, _changed(CHAT, stop=["a"] * 1000), "stop"),
    (CHAT, _changed(CHAT, stop=[["a"]]), "stop[0]"),
    (CHAT, _changed(CHAT, stop="\ud800"), "stop"),
    (CHAT, _changed(CHAT, logit_bias={"-1": 1}), "logit_bias"),
    (CHAT, _changed(CHAT, logit_bias={"99999999": 1}), "logit_bias"),
    (CHAT, _changed(CHAT, logit_bias={"1": float("nan")}), "logit_bias"),
    (CHAT, _changed(CHAT, logit_bias={"9" * 400: 1}), "logit_bias"),
    (CHAT, _changed(CHAT, top_logprobs=3), "top_logprobs"),
    (CHAT, _changed(CHAT, logprobs=True, top_logprobs=99), "top_logprobs"),
    (CHAT, _changed(CHAT, stream=1), "stream"),
    (CHAT, _changed(CHAT, stream="true"), "stream"),
    (CHAT, _changed(CHAT, stream_options={}), "stream_options"),
    (CHAT, _changed(CHAT, response_format={"type": "json"}), "response_format.type"),
    (CHAT, _changed(CHAT, response_format={"type": "json_schema"}), "response_format.json_schema"),
    (CHAT, _changed(CHAT, tools=[{}]), "tools[0].type"),
    (CHAT, _changed(CHAT, tools="f"), "tools"),
    (CHAT, _changed(CHAT, tool_choice={"type": "function"}), "tool_choice"),
    (CHAT, _changed(CHAT, timeout=0), "timeout"),
    (CHAT, _changed(CHAT, timeout=-5), "timeout"),
    (CHAT, _changed(CHAT, cache_salt="\ud800"), "cache_salt"),
    (CHAT, _changed(CHAT, metadata={"a": []}), "metadata.a"),
    (CHAT, _changed(CHAT, **{"\ud800": 1}), "?"),
    (CHAT, _changed(CHAT, **{"__proto__": 1}), "__proto__"),
    (CHAT, _changed(CHAT, **{"x" * 100_000: 1}), "x" * 80),
    (CHAT, _changed(CHAT, adapter="/etc/passwd"), "adapter"),
    (COMPLETIONS, _changed(COMPLETIONS, prompt=None), "prompt"),
    (COMPLETIONS, _changed(COMPLETIONS, prompt=[]), "prompt"),
    (COMPLETIONS, _changed(COMPLETIONS, prompt={"a": 1}), "prompt"),
    (COMPLETIONS, _changed(COMPLETIONS, prompt=[2**40]), "prompt"),
    (COMPLETIONS, _changed(COMPLETIONS, prompt=[-1]), "prompt"),
    (COMPLETIONS, _changed(COMPLETIONS, prompt=["a", 5]), "prompt[1]"),
    (COMPLETIONS, _changed(COMPLETIONS, suffix="x"), "suffix"),
    (COMPLETIONS, _changed(COMPLETIONS, logprobs=6), "logprobs"),
    (COMPLETIONS, _changed(COMPLETIONS, echo="yes"), "echo"),
    (COMPLETIONS, _changed(COMPLETIONS, best_of=7), "best_of"),
    (RESPONSES, _changed(RESPONSES, input=5), "input"),
    (RESPONSES, _changed(RESPONSES, input=None), "input"),
    (RESPONSES, _changed(RESPONSES, max_output_tokens=0), "max_output_tokens"),
    (RESPONSES, _changed(RESPONSES, input=[{"type": "unknown"}]), "input[0].type"),
    (MESSAGES, _changed(MESSAGES, max_tokens=None), "max_tokens"),
    (MESSAGES, _changed(MESSAGES, messages=[{"role": "tool", "content": "x"}]), "messages[0].role"),
    (MESSAGES, _changed(MESSAGES, thinking={"type": "maybe"}), "thinking"),
    (MESSAGES, _changed(MESSAGES, temperature=float("nan")), "temperature"),
    ("/tokenize", _changed("/tokenize", messages=[USER]), "messages"),
    ("/tokenize", _changed("/tokenize", prompt=5), "prompt"),
    ("/detokenize", _changed("/detokenize", tokens=[320]), "tokens"),
    ("/detokenize", _changed("/detokenize", tokens=[1.5]), "tokens[0]"),
    ("/detokenize", _changed("/detokenize", tokens="5"), "tokens"),
]


@pytest.mark.parametrize(("path", "body", "param"), FIELDS, ids=lambda value: str(value)[-40:])
def test_a_field_that_cannot_be(server, path, body, param):
    error = refused(post(server, path, body))
    assert param in (error["param"] or error["message"]), error


def test_a_path_as_the_name_of_a_model(server):
    for name in ("/etc", "../../etc/passwd", str(server.engine.info.path.parent), "llama/../llama", "", "\0", "~root"):
        error = refused(post(server, CHAT, _changed(CHAT, model=name)), 404)
        assert error["code"] == "model_not_found"
    for target in ("/v1/models//etc/passwd", "/v1/models/..%2f..%2fetc", "/v1/models/%00"):
        refused(exchange(server.port, head(target, None, "Connection: close", method="GET")), 404)


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_framing(server, path):
    """Bodies that are announced wrongly, too large, or come in pieces."""
    port, large = server.port, b" " * 10_000
    chunk = b"2710\r\n" + large + b"\r\n"
    chunked = head(path, None, "Transfer-Encoding: chunked")
    refused(exchange(port, head(path, MAX_BODY + 1)), 413)  # told before a byte of it came
    refused(exchange(port, head(path, 10**17)), 413)
    refused(exchange(port, head(path, 10**30)))
    refused(exchange(port, chunked, *[chunk] * (MAX_BODY // 10_000 + 1)), 413)
    refused(exchange(port, chunked + b"zz\r\n"))  # no length
    refused(exchange(port, chunked + b"-1\r\n"))
    refused(exchange(port, head(path, None, "Content-Length: -5")))
    refused(exchange(port, head(path, None, "Content-Length: 5", "Content-Length: 6")))
    refused(exchange(port, head(path, None, "Transfer-Encoding: gzip")), 501)
    refused(exchange(port, head(path, None)))  # no body at all
    assert exchange(port, head(path, 500) + _CHAT, end=True) is None  # a client that left in the middle of its body
    good = json.dumps(GOOD[path]).encode()
    pieces = [b"1\r\n%c\r\n" % byte for byte in good]
    found = exchange(port, chunked, b"".join(pieces[:20]), b"".join(pieces[20:]) + b"0\r\n\r\n")
    assert found is not None and found.status == 200


@pytest.mark.parametrize(
    ("bytes_", "status"),
    [
        (b"\r\n\r\n\r\n", 400),
        (b"nonsense\r\n\r\n", 400),
        (b"GET /\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),  # TLS
        (b"GET / HTTP/1.1\r\n\r\n", 400),  # no Host
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nbad header\r\n\r\n", 400),
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000 + b"\r\n\r\n", 431),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 404),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_no_http(server, bytes_, status):
    refused(exchange(server.port, bytes_), status)


def test_a_method_that_is_not_there(server):
    for method in ("GET", "PUT", "DELETE", "BREW"):
        refused(exchange(server.port, head(CHAT, 0, "Connection: close", method=method)), 405)
