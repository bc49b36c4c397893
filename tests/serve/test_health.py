"""What /health and /ready say of an engine that fails, hangs, or is gone, and what requests get meanwhile."""

from __future__ import annotations

import threading
import time

import httpx

from tests.decode.faulty import MARK, Trap
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
    inside, released = threading.Event(), threading.Event()

    def act(logits, marked):
        inside.set()
        released.wait(30)
        return logits

    trap = Trap(act, width="more", at=1)
    with trap.engine(tiny_model("llama"), None, watchdog_s=0.2) as engine, running(engine) as server:
        found: list[httpx.Response] = []
        asked = threading.Thread(
            target=lambda: found.append(httpx.post(f"{server.url}/v1/completions", json=MARKED, timeout=60))
        )
        asked.start()
        try:
            assert inside.wait(10)
            until = time.monotonic() + 10
            while (told := reasons(server.url))[0][0] == 200:
                assert time.monotonic() < until
                time.sleep(0.02)
            assert [status for status, _, _ in told] == [503, 503]
            assert all(
                word == "unavailable" and "llama" in (why or "") and "0.2 s" in (why or "") for _, word, why in told
            )
            late = httpx.post(f"{server.url}/v1/completions", json=PLAIN | {"timeout": 0.3}, timeout=20)
            assert late.status_code in (503, 504), late.text  # refused, or at its time's end: not a silent socket
        finally:
            released.set()
        asked.join(30)
        assert found and found[0].status_code == 200
        assert reasons(server.url) == [(200, "ok", None)] * 2
        assert httpx.post(f"{server.url}/v1/completions", json=PLAIN, timeout=30).status_code == 200
