"""Clients that leave at random moments, over all routes, with a real engine behind a real server."""

from __future__ import annotations

import json
import random
import time

from tests.serve.raw import connect, head
from tests.serve.storm import storm


def test_clients_that_leave(server):
    """Rows, queue and reservations are free soon, and who comes again finds what was read; scripts/soak has 200 at a
    time."""
    found = storm(server, "llama", random.Random(9), 60, retries=6)
    assert not found.wrong and found.free_s < 10
    assert found.hits >= 6


def test_asking_again_is_cheap(server, http):
    """A prompt whose reading was broken off is read on from where it was."""
    text = "Once upon a time there was a client who left. " * 60
    asked = {"model": "llama", "messages": [{"role": "user", "content": text}], "max_tokens": 2}
    content = json.dumps(asked).encode()
    with connect(server.port) as client:
        client.sendall(head("/v1/chat/completions", len(content)) + content)
        assert server.busy()
        until = time.monotonic() + 10
        while not any(row.done_tokens >= 128 for row in server.engine.status().rows) and time.monotonic() < until:
            time.sleep(0.001)
    assert server.idle(10)
    found = http.post("/v1/chat/completions", json=asked).json()
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128
