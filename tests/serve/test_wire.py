"""Streams as bytes on a socket: however an answer ends, its chunks are closed in order, and the socket serves on."""

from __future__ import annotations

import json

import pytest

from mlxkv.errors import DeviceError, EngineError
from tests.serve.acting import Acting
from tests.serve.conftest import running
from tests.serve.raw import connect, head

MESSAGES = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
#: (path, body, the last event of an answer, the last one after an error)
STREAMS = [
    ("/v1/chat/completions", MESSAGES, "data: [DONE]", "data: [DONE]"),
    ("/v1/completions", {"prompt": "hi"}, "data: [DONE]", "data: [DONE]"),
    ("/v1/responses", {"input": "hi"}, "event: response.completed", "event: response.failed"),
    ("/v1/messages", MESSAGES, "event: message_stop", "event: error"),
]
ENDS = [None, EngineError("It broke."), KeyError("inside"), DeviceError("It is gone.")]


def read(sock) -> tuple[bytes, bytes]:
    """Headers, and the body joined from its chunks, of which the last is empty."""
    file = sock.makefile("rb")
    top = b"".join(iter(file.readline, b"\r\n"))
    assert b"transfer-encoding: chunked" in top.lower() and b"200" in top.split(b"\r\n")[0]
    body = b""
    while length := int(file.readline(), 16):
        body += file.read(length)
        assert file.read(2) == b"\r\n"
    assert file.readline() == b"\r\n"
    return top, body


@pytest.fixture(scope="module")
def acting():
    engine = Acting()
    with running(engine) as server:
        yield engine, server


@pytest.mark.parametrize("end", ENDS, ids=lambda end: type(end).__name__)
@pytest.mark.parametrize(("path", "body", "done", "failed"), STREAMS, ids=[path for path, *_ in STREAMS])
@pytest.mark.parametrize("said", ["", "abc"], ids=["nothing", "text"])
def test_every_stream_is_closed(acting, path, body, done, failed, end, said):
    engine, server = acting
    content = json.dumps(body | {"model": engine.info.name, "stream": True}).encode()
    with connect(server.port) as sock:
        for _ in range(2):  # the second on the same socket
            came = len(engine.tickets)
            sock.sendall(head(path, len(content)) + content)
            ticket = engine.begin(came)
            engine.say(ticket, said)
            engine.finish(ticket) if end is None else ticket.fail(end)
            _, text = read(sock)
            last = text.decode().rstrip("\n").rsplit("\n\n", 1)[-1]
            assert last.startswith(done if end is None else failed), last
            assert b"inside" not in text
