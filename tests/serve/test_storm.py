"""Clients that leave, steps that fail and steps that hang, with a real engine behind a real server."""

from __future__ import annotations

import random
import threading
import time

import httpx
import pytest

from mlxkv.decode.engine import Engine
from tests.serve.conftest import running
from tests.serve.storm import storm

CHAT = {"model": "llama", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def test_clients_that_leave(server):
    """Rows, queue and reservations are free soon, and who comes again finds what was read; scripts/soak has 200 at a
    time."""
    found = storm(server, "llama", random.Random(9), 60, retries=6)
    assert not found.wrong and found.free_s < 10
    assert found.hits >= 6


@pytest.fixture(scope="module")
def own(tiny_model, tmp_path_factory):
    """A server whose engine may be disturbed."""
    folder = tmp_path_factory.mktemp("own") / "cache"
    with Engine(tiny_model("llama"), cache_dir=folder, watchdog_s=0.4) as engine, running(engine) as found:
        yield found


def disturbed(own, step) -> None:
    """The engine's next step is ``step``, and then as before."""

    def change(loop) -> None:
        before = loop.seats.step

        def once(group, cycle=True):
            loop.seats.step = before
            loop.seats.touched = [group]  # as the step itself says whose rows it concerns
            return step(before, group, cycle)

        loop.seats.step = once

    own.engine.inspect(change)


def test_a_step_that_raises(own):
    def fails(before, group, cycle):
        raise ValueError("a step that fails")

    disturbed(own, fails)
    found = httpx.post(f"{own.url}/v1/chat/completions", json=CHAT, timeout=30)
    assert found.status_code == 500 and "error" in found.json(), found.text
    again = httpx.post(f"{own.url}/v1/chat/completions", json=CHAT, timeout=30)
    assert again.status_code == 200
    assert httpx.get(f"{own.url}/ready").status_code == 200


def test_a_step_that_hangs(own):
    """Whoever has set a time gets an error in it, /ready says what is the matter, new requests are refused, and all is
    well once the step has returned."""
    entered, released = threading.Event(), threading.Event()

    def hangs(before, group, cycle):
        entered.set()
        released.wait(30)
        return before(group, cycle)

    disturbed(own, hangs)
    answers: list[httpx.Response] = []

    def one() -> None:
        body = CHAT | {"timeout": 1.0}
        answers.append(httpx.post(f"{own.url}/v1/chat/completions", json=body, timeout=30))

    asking = threading.Thread(target=one)
    asking.start()
    try:
        assert entered.wait(20)
        until = time.monotonic() + 20
        while (ready := httpx.get(f"{own.url}/ready")).status_code == 200 and time.monotonic() < until:
            time.sleep(0.02)
        assert ready.status_code == 503 and ready.json()["reason"]
        refused = httpx.post(f"{own.url}/v1/chat/completions", json=CHAT, timeout=30)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        asking.join(20)
        assert answers and answers[0].status_code == 504 and answers[0].json()["error"]["code"] == "request_timeout"
    finally:
        released.set()
    asking.join(20)
    assert own.idle(20)
    until = time.monotonic() + 20
    while httpx.get(f"{own.url}/ready").status_code != 200 and time.monotonic() < until:
        time.sleep(0.02)
    assert httpx.post(f"{own.url}/v1/chat/completions", json=CHAT, timeout=30).status_code == 200
