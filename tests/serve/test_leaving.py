"""Many clients that leave at random moments: nothing of them stays, and who asks again finds what was computed."""

from __future__ import annotations

import json
import random
import socket
import threading
import time

CLIENTS = 30


def body(i):
    long = i % 3 == 0
    text = f"Client {i}. " + ("A long story about the sea. " * 60 if long else "")
    made = {"model": "llama", "messages": [{"role": "user", "content": text}], "max_tokens": 400, "stream": i % 2 == 0}
    return made | ({"n": 2} if i % 5 == 0 else {})


def ask_and_leave(port, i, seconds):
    content = json.dumps(body(i)).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        time.sleep(seconds)


def test_clients_that_leave_at_random_leave_nothing_behind(server, http):
    rng = random.Random(9)
    threads = [
        threading.Thread(target=ask_and_leave, args=(server.port, i, rng.uniform(0, 1.0))) for i in range(CLIENTS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    until = time.monotonic() + 10
    while (left := _left(server)) and time.monotonic() < until:
        time.sleep(0.01)
    assert not left
    answer = http.post("/v1/chat/completions", json=body(1) | {"max_tokens": 2, "stream": False})
    assert answer.status_code == 200


def _left(server):
    """What of the clients is still there: rows, room for them, places in the queue, leases."""
    health, status = server.engine.health(), server.engine.status()
    found = {"active": health.active, "queued": health.queued, "bytes": status.reserved_bytes}
    found |= {"rows": status.reserved_rows, "working": server.offered.working}
    found["leases"] = sum(state.leases for state in server.offered.models.states())
    return {name: count for name, count in found.items() if count}


def test_asking_again_is_cheap(server, http):
    """A prompt whose reading was broken off is read on from where it was."""
    text = "Once upon a time there was a client who left. " * 60
    asked = {"model": "llama", "messages": [{"role": "user", "content": text}], "max_tokens": 2}
    content = json.dumps(asked).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        assert server.busy()
        until = time.monotonic() + 10
        while not any(row.done_tokens >= 128 for row in server.engine.status().rows) and time.monotonic() < until:
            time.sleep(0.001)
    assert server.idle(10)
    found = http.post("/v1/chat/completions", json=asked).json()
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128
