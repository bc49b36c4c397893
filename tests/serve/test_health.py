"""What /health and /ready say of an engine that fails, hangs, or is gone, and what requests get meanwhile."""

from __future__ import annotations

import threading
import time

import httpx

from mlxkv.decode.engine import Engine
from mlxkv.serve import Limits
from tests import tiny
from tests.decode.faulty import MARK, Trap
from tests.serve import chunks
from tests.serve.conftest import running

MARKED = {"model": "llama", "prompt": [1, MARK, 2], "max_tokens": 2}
PLAIN = {"model": "llama", "prompt": [1, 2, 3], "max_tokens": 2}


def reasons(url: str) -> list[tuple[int, str, str | None]]:
    answers = [httpx.get(url + path, timeout=10) for path in ("/health", "/ready")]
    return [(a.status_code, a.json()["status"], a.json()["reason"]) for a in answers]


def test_monitors_that_only_look_at_the_head(server, http):
    for path in ("/health", "/ready"):
        found = http.head(path)
        assert found.status_code == 200 and found.content == b""


def test_a_step_that_raises(tiny_model):
    def act(logits, marked):
        raise RuntimeError("a kernel went wrong")

    trap = Trap(act, width="more", at=1)
    with trap.engine(tiny_model("llama"), None) as engine, running(engine) as server:
        failed = httpx.post(f"{server.url}/v1/completions", json=MARKED, timeout=30)
        assert failed.status_code == 500 and failed.json()["error"]["code"] == "generation_failed"
        assert reasons(server.url) == [(200, "ok", None)] * 2
        for body in (PLAIN, MARKED):  # the trap is spent
            assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).status_code == 200


def test_a_step_that_hangs(tiny_model):
    """A stream that comes meanwhile has its headers and a sign of life; whoever has set a time gets an error in it;
    /ready says what is the matter; once the step has returned, all go on."""
    inside, released = threading.Event(), threading.Event()

    def act(logits, marked):
        inside.set()
        released.wait(30)
        return logits

    found: dict[str, httpx.Response] = {}

    def ask(name, body):
        found[name] = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)

    trap = Trap(act, width="more", at=1)
    limits = Limits(ping_s=0.1)
    with (
        trap.engine(tiny_model("llama"), None, watchdog_s=1.0) as engine,
        running(engine, limits=limits) as server,
    ):
        bodies = {"hung": MARKED, "timed": PLAIN | {"timeout": 0.5}}
        asking = [threading.Thread(target=ask, args=each) for each in bodies.items()]
        asking[0].start()
        try:
            assert inside.wait(10)
            asking[1].start()
            stream = httpx.stream("POST", f"{server.url}/v1/completions", json=PLAIN | {"stream": True}, timeout=30)
            with stream as answer:
                pieces = answer.iter_text()
                said = next(pieces)
                assert answer.status_code == 200 and said.startswith(": ping")
                until = time.monotonic() + 10
                while (told := reasons(server.url))[0][0] == 200:
                    assert time.monotonic() < until
                    time.sleep(0.02)
                assert [status for status, _, _ in told] == [503, 503]
                assert all(
                    word == "unavailable" and "llama" in (why or "") and "1 s" in (why or "") for _, word, why in told
                )
                refused = httpx.post(f"{server.url}/v1/completions", json=PLAIN, timeout=20)
                assert refused.status_code == 503 and refused.headers["retry-after"], refused.text
                asking[1].join(30)
                assert found["timed"].status_code == 504
                assert found["timed"].json()["error"]["code"] == "request_timeout"
                released.set()
                said += "".join(pieces)
            assert chunks.read(said, kind=chunks.TEXT).choices[0].finish == "length"
        finally:
            released.set()
        asking[0].join(30)
        assert found["hung"].status_code == 200 and server.idle()
        assert reasons(server.url) == [(200, "ok", None)] * 2
        assert httpx.post(f"{server.url}/v1/completions", json=PLAIN, timeout=30).status_code == 200


def test_a_loop_that_ends(tiny_model):
    """Whoever is being answered or waits is told so, and so is everybody who comes."""
    with Engine(tiny_model("llama"), max_rows=1) as engine, running(engine) as server:
        endless = PLAIN | {"max_tokens": 3000, "stream": True, "logit_bias": {str(tiny.EOS): -100}}
        waits: list[httpx.Response] = []
        with httpx.stream("POST", f"{server.url}/v1/completions", json=endless, timeout=30) as answer:
            pieces = answer.iter_text()
            said = next(pieces)
            asking = threading.Thread(
                target=lambda: waits.append(httpx.post(f"{server.url}/v1/completions", json=PLAIN, timeout=30))
            )
            asking.start()
            until = time.monotonic() + 10
            while not server.engine.health().queued and time.monotonic() < until:
                time.sleep(0.01)

            def breaks(loop):
                def status():
                    raise AssertionError("the books are wrong")

                loop.changed, loop.status = lambda: None, status  # not within a turn, whose failures it survives

            engine.inspect(breaks)
            said += "".join(pieces)
            assert chunks.read(said, kind=chunks.TEXT).error["code"] == "engine_closed"
        asking.join(30)
        assert waits and waits[0].status_code == 503
        assert [(status, word) for status, word, _ in reasons(server.url)] == [(503, "unavailable")] * 2
        assert "failed" in reasons(server.url)[0][2]
        began = time.monotonic()
        assert httpx.post(f"{server.url}/v1/completions", json=PLAIN, timeout=30).status_code == 503
        assert time.monotonic() - began < 5
