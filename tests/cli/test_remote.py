"""What a chat makes of servers that say more, less or something else than mlxkv's own; each answer is scripted."""

from __future__ import annotations

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mlxkv.cli.remote import Remote, ServerError
from mlxkv.cli.render import Thought
from mlxkv.decode.request import Delta, Finished, Progress, Started
from mlxkv.errors import ConfigError, EngineError, ModelError, RequestError
from tests.cli.terminal import PROMPT, readable, terminal


class Scripted(ThreadingHTTPServer):
    """Answers a chat with ``answers`` (status, headers, pieces), the last one for ever; keeps what it was asked."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers, self.asked, self.go_on = [], [], threading.Event()
        self.models = [{"id": "toy"}, {"id": "other"}]

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def stream(self, *pieces):
        """An answer of server-sent events: objects, or lines as they are; None waits until ``go_on`` is set."""
        self.answers.append((200, {"Content-Type": "text/event-stream; charset=utf-8"}, pieces))

    def refuse(self, status, body, **headers):
        self.answers.append((status, {"Content-Type": "application/json"} | headers, [body]))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"  # the end of the connection ends an answer

    def log_message(self, *_):
        pass

    def do_GET(self):
        body = json.dumps({"data": self.server.models}) if self.path.endswith("/v1/models") else "{}"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((self.path, dict(self.headers), body))
        answers = self.server.answers
        status, headers, pieces = answers.pop(0) if len(answers) > 1 else answers[0]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):
            for piece in pieces:
                if piece is None:
                    self.server.go_on.wait(20)
                elif isinstance(piece, bytes):
                    self.wfile.write(piece)
                elif isinstance(piece, str):
                    self.wfile.write(f"{piece}\n\n".encode())
                else:
                    self.wfile.write(b"data: " + json.dumps(piece).encode() + b"\n\n")
                self.wfile.flush()


@pytest.fixture
def server():
    with Scripted() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.02,))
        thread.start()
        yield made
        made.go_on.set()
        made.shutdown()
        thread.join()


def delta(finish=None, **fields):
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def progress(done, total):
    return {"choices": [], "usage": None, "mlxkv": {"progress": {"choice": 0, "done": done, "total": total}}}


DONE = "data: [DONE]"
USAGE = {"prompt_tokens": 100, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 90}}


def events(server, **body):
    return list(Remote(server.url, "secret").ask({"model": "toy", "messages": []} | body))


def test_everything_a_server_may_tell(server):
    extension = {
        "cache": {"source": "ssd", "miss_reason": "no_state", "miss_position": 90, "stored_tokens": 4},
        "timings": {"ttft_s": 0.25, "decode_tps": 40.0, "new": 1},
        "drafts": {"drafted": 2, "accepted": 1},
    }
    server.stream(
        delta(role="assistant", content=""),
        progress(1024, 4000),
        ": ping",
        progress(2048, 4000),
        delta(reasoning_content="hm"),
        "event: message\nid: 7",
        delta(content="a"),
        delta(content="\N{SNOWMAN}", tool_calls=[]),
        delta("length") | {"mlxkv": extension},
        {"choices": [], "usage": USAGE},
        DONE,
        delta(content="never read"),
    )
    *came, last = events(server, seed=1)
    assert came == [
        Started(4000, 1024),
        Progress(1024, 4000),
        Progress(2048, 4000),
        Thought("hm"),
        Delta("a", []),
        Delta("\N{SNOWMAN}", []),
    ]
    assert isinstance(last, Finished)
    found = last.completion
    assert (found.text, found.finish_reason, found.token_ids) == ("a\N{SNOWMAN}", "length", [])
    assert found.usage.__dict__ == {"prompt_tokens": 100, "completion_tokens": 3, "cached_tokens": 90}
    assert found.cache.__dict__ == extension["cache"] and found.drafts.__dict__ == extension["drafts"]
    assert (found.timings.ttft_s, found.timings.decode_tps, found.timings.load_s) == (0.25, 40.0, 0.0)
    (path, headers, body) = server.asked[0]
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer secret"
    assert body["stream"] and body["stream_options"] == {"include_usage": True} and body["seed"] == 1
    server.models = [{"id": "toy", "owned_by": "mlxkv"}]
    remote = Remote(server.url)
    remote.models()
    list(remote.ask({}))
    assert server.asked[-1][2]["stream_options"] == {"include_usage": True, "include_progress": True}


def test_a_server_that_tells_little(server):
    server.stream(
        delta(content="a"),
        {"usage": None, "mlxkv": {"cache": 5, "timings": {"ttft_s": "soon"}, "drafts": []}, "choices": "none"},
        delta("stop"),
        {"usage": {"prompt_tokens": "many"}, "choices": []},
    )
    found = events(server)[-1].completion
    assert (found.text, found.finish_reason) == ("a", "stop")
    assert found.usage.prompt_tokens == 0 and found.cache.source == "none" and found.timings.ttft_s >= 0


@pytest.mark.parametrize(
    ("status", "body", "kind", "says"),
    [
        (400, {"error": {"message": "top_p is 3.", "code": "invalid_value"}}, RequestError, "top_p is 3."),
        (400, {"error": {"message": "Too long.", "code": "context_length_exceeded"}}, RequestError, "Too long."),
        (401, {"error": {"message": "No key."}}, ConfigError, "No key. Give its key in MLXKV_API_KEY"),
        (401, "", ConfigError, "--api-key"),
        (404, {"error": {"message": "No such.", "code": "model_not_found"}}, ModelError, "No such."),
        (404, "<html>", ServerError, "no chat API"),
        (429, {"error": {"message": "Full."}}, EngineError, "again in 7 s"),
        (503, {"error": {"message": "\x1b[2JLoading."}}, EngineError, "[2JLoading."),
        (500, {"error": "oops"}, ServerError, "status 500"),
        (302, "", ServerError, "status 302"),
    ],
)
def test_refusals(server, status, body, kind, says):
    server.refuse(status, body if isinstance(body, str) else json.dumps(body).encode(), **{"Retry-After": "7"})
    with pytest.raises(kind) as caught:
        events(server)
    assert says in str(caught.value) and "\x1b" not in str(caught.value)
    if isinstance(body, dict) and "code" in body.get("error", {}):
        assert caught.value.code == body["error"]["code"]


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ([delta(content="a")], "ended in the middle"),
        ([], "ended in the middle"),
        ([delta(content="a"), {"error": {"message": "The step failed.", "code": "generation_failed"}}, DONE], "step"),
        (["data: {"], "no answer of a model's server"),
        ([b"data: " + b"\xff" * 9 + b"\n"], "no answer of a model's server"),
        (["data: []"], "no answer of a model's server"),
    ],
)
def test_streams_that_break_off(server, pieces, says):
    server.stream(*pieces)
    with pytest.raises(EngineError, match=says):
        events(server)


def test_what_is_no_stream(server):
    server.answers.append((200, {"Content-Type": "text/html"}, ["<html>hello"]))
    with pytest.raises(ServerError, match="<html>hello"):
        events(server)


def test_a_chat_on_a_pipe(cli, server):
    """stdout is the answer; the reasoning is kept, and goes back with the history."""
    server.stream(delta(reasoning_content="I think"), delta(content="yes"), delta("stop"), {"usage": USAGE}, DONE)
    found = cli("chat", "--url", server.url, "--seed", 5, stdin="one\ntwo\n")
    assert (found.code, found.out) == (0, "yes\nyes\n")
    assert "100 prompt + 3 answer tokens · 90 cached" in found.err
    (_, headers, first), (_, _, second) = server.asked
    assert "Authorization" not in headers
    assert first["model"] == "toy" and first["seed"] == 5 and "max_tokens" not in first and "temperature" not in first
    assert second["messages"][1] == {"role": "assistant", "content": "yes", "reasoning_content": "I think"}
    turn = cli("chat", "--url", server.url, "--json", "--model", "other", stdin="one\n").lines[0]
    assert turn["reasoning"] == "I think" and server.asked[-1][2]["model"] == "other"


def test_a_failed_turn_is_not_kept(cli, server):
    server.refuse(503, json.dumps({"error": {"message": "Loading the model."}}).encode())
    server.stream(delta(content="yes"), delta("stop"), DONE)
    found = cli("chat", "--url", server.url, stdin="one\ntwo\n")
    assert found.code == 5 and "Loading the model." in found.err and found.out == "yes\n"
    assert [m["content"] for m in server.asked[-1][2]["messages"]] == ["two"]


def test_servers_without_models(cli, server):
    for models in ([], None, [{"name": "x"}]):
        server.models = models
        found = cli("chat", "--url", server.url, stdin="one\n")
        assert found.code == 3 and "has no model" in found.err


def test_on_a_terminal(server):
    """Ctrl-C before an answer begins; then how much of the prompt is read, the reasoning, the answer."""
    server.stream(None)
    server.stream(
        progress(1024, 4000),
        None,
        delta(reasoning_content="**I** \x1b[2Jthink"),
        delta(content="It is *done*."),
        delta("stop"),
        {"usage": USAGE},
        DONE,
    )
    with terminal("chat", "--url", server.url, "--api-key", "k") as chat:
        chat.until(rb"toy at http.*" + PROMPT)
        chat.type("hello\r")
        chat.until(rb"waiting for the answer")
        chat.type(b"\x03")
        chat.until(rb"question was not kept.*" + PROMPT)
        assert "0 turns" in chat.ask("/stats")
        chat.type(b"\x1b[200~pasted\nlines\x1b[201~\x1b\rmore\r")  # Alt-Enter before the last line
        chat.until(rb"reading the prompt: 1,024 of 4,000 tokens")
        assert server.asked[1][2]["messages"] == [{"role": "user", "content": "pasted\nlines\nmore"}]
        chat.until(rb"tokens \xc2\xb7 [12] s")
        server.go_on.set()
        shown = chat.until(rb"tok/s.*" + PROMPT)
        assert b"\x1b[2m**I** [2Jthink\x1b[0m" in shown and b"\x1b[2J" not in shown
        # the reasoning as it is, the answer as Markdown
        assert "**I** [2Jthink\n\nIt is done." in readable(shown) and b"90 cached" in shown
        assert chat.end() == 0
