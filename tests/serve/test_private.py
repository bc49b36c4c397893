"""Nothing of what a client wrote is in the log at the default level, whatever goes wrong with it."""

from __future__ import annotations

import io
import logging

import httpx
import pytest

from mlxkv.errors import EngineError
from mlxkv.serve.log import JsonLines, Lines
from tests.serve.raw import exchange, head

WORD = "Zanzibar"
MESSAGES = [{"role": "user", "content": f"Where is {WORD}?"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {WORD: {"const": WORD}}, "required": [WORD]}
TOOL = {"type": "function", "function": {"name": WORD, "description": WORD, "parameters": SCHEMA}}
#: (path, what differs from a request for two tokens, the status)
ASKED = [
    (CHAT, {}, 200),
    (CHAT, {"stream": True, "stop": [WORD], "user": WORD, "metadata": {WORD: WORD}, "cache_salt": WORD}, 200),
    (CHAT, {"structured_outputs": {"choice": [WORD]}, "max_tokens": 30}, 200),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": WORD, "schema": SCHEMA}}}, 200),
    (CHAT, {"tools": [TOOL]}, 400),
    (CHAT, {WORD: WORD}, 400),
    (CHAT, {"structured_outputs": {"regex": f"[{WORD}"}}, 400),
    (CHAT, {"structured_outputs": {"grammar": f"start: {WORD}"}}, 400),
    (CHAT, {"messages": [{"role": WORD, "content": WORD}]}, 400),
    (CHAT, {"messages": [{"role": "user", "content": WORD * 4000}]}, 400),
    (TEXT, {"messages": None, "prompt": WORD, "echo": True, "logprobs": 2}, 200),
    (TEXT, {"messages": None, "prompt": [WORD, WORD]}, 200),
    (
        "/v1/responses",
        {"messages": None, "max_tokens": None, "max_output_tokens": 2, "input": WORD, "instructions": WORD},
        200,
    ),
    ("/v1/messages", {"system": WORD}, 200),
    ("/v1/cache/explain", {"max_tokens": None}, 200),
    ("/tokenize", {"max_tokens": None}, 200),
    (f"/{WORD}?{WORD}={WORD}", {}, 404),
]


@pytest.fixture
def written():
    """What was logged so far, in both forms."""
    root, streams = logging.getLogger(), []
    handlers = []
    for formatter in (Lines(), JsonLines()):
        streams.append(io.StringIO())
        handlers.append(handler := logging.StreamHandler(streams[-1]))
        handler.setFormatter(formatter)
        root.addHandler(handler)
    level = logging.getLogger("mlxkv").level
    logging.getLogger("mlxkv").setLevel(logging.INFO)
    yield lambda: "".join(stream.getvalue() for stream in streams)
    logging.getLogger("mlxkv").setLevel(level)
    for handler in handlers:
        root.removeHandler(handler)


def ask(http, path, more):
    body = {"model": "llama", "messages": MESSAGES, "max_tokens": 2} | more
    return http.post(path, json={name: value for name, value in body.items() if value is not None})


def test_of_any_request(http, server, written):
    for path, more, status in ASKED:
        found = ask(http, path, more)
        assert found.status_code == status, found.text
    broken = f'{{"{WORD}": "{WORD}'.encode()
    assert exchange(server.port, head(CHAT, len(broken), f"X-{WORD}: {WORD}") + broken).status == 400
    assert exchange(server.port, f"{WORD} {WORD}\r\n\r\n".encode()).status == 400
    assert WORD not in written() and "status=200" in written() and "status=400" in written()


@pytest.mark.parametrize("kind", [KeyError, EngineError])
def test_of_one_that_fails_in_a_way_that_nobody_foresaw(server, written, monkeypatch, kind):
    def fails(*_):
        try:
            raise kind(WORD)
        except Exception as error:
            raise LookupError(WORD) from error

    monkeypatch.setattr(server.engine, "prepare", fails)
    with httpx.Client(base_url=server.url, timeout=30) as http:
        for path in (CHAT, "/tokenize"):  # in the life of a request, and beside it
            assert ask(http, path, {} if path == CHAT else {"max_tokens": None}).status_code == 500
    monkeypatch.undo()

    def broken(loop):
        def step(group, cycle):
            del loop.seats.step
            loop.seats.touched = [group]
            fails()

        loop.seats.step = step

    server.engine.inspect(broken)
    with httpx.Client(base_url=server.url, timeout=30) as http:
        assert ask(http, CHAT, {}).status_code == 500
    told = written()
    assert WORD not in told and told.count("LookupError") >= 6 and kind.__name__ in told
    assert "test_private.py" in told  # where it was stays
