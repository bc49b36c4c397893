"""Clients that leave at random moments: over all routes, whole answers and streams, in the queue, in prefill and in
decoding."""

from __future__ import annotations

import json
import random
import re
import select
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.serve.raw import connect, head

#: a piece of an answer that is not empty, in each route's form
_TEXT = re.compile(rb'"(content|delta|text)":"[^"]')
#: what the prompts of a storm begin with, words
SHARED = "the keeper of the light wrote down every ship that passed "


@dataclass
class Client:
    """``seconds``: how long it stays. ``abrupt``: it resets the connection. ``sees``: it leaves when it has seen a part
    of its answer. ``saw``: it did."""

    route: str
    prompt: str
    stream: bool
    seconds: float
    abrupt: bool
    sees: bool = False
    saw: bool = False
    n: int = 1

    def body(self, model: str, **more: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": self.prompt}]
        limit = {"max_tokens": 400}
        if self.route == "/v1/completions":
            made = {"prompt": self.prompt} | limit
        elif self.route == "/v1/responses":
            made = {"input": messages, "max_output_tokens": 400, "store": False}
        else:
            made = {"messages": messages} | limit
        choices = {"n": self.n} if self.n > 1 else {}
        return {"model": model, "stream": self.stream} | made | choices | more


@dataclass
class Storm:
    """What became of it. free_s: seconds from the last one's leaving until the engine had nothing to do; wrong must
    stay empty."""

    clients: list[Client] = field(default_factory=list)
    free_s: float = 0.0
    hits: int = 0
    wrong: list[str] = field(default_factory=list)


ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


def clients(rng: random.Random, many: int, longest: float) -> list[Client]:
    made = []
    for n in range(many):
        prompt = f"{n} {rng.randrange(1 << 30)} {SHARED * rng.choice((1, 3, 12))}"
        stay = rng.random() ** 2 * longest
        made.append(Client(rng.choice(ROUTES), prompt, rng.random() < 0.6, stay, rng.random() < 0.5))
        if made[-1].route in ROUTES[:2] and rng.random() < 0.2:
            made[-1].n = 2
    for i, client in enumerate(made[:: max(1, many // 6)]):  # some are sure to see something, in each route
        client.route, client.stream, client.seconds, client.sees, client.n = (
            ROUTES[i % len(ROUTES)],
            True,
            30.0,
            True,
            1,
        )
    return made


def _live(client: Client, port: int, model: str) -> None:
    body = json.dumps(client.body(model)).encode()
    with connect(port) as sock:
        sock.sendall(head(client.route, len(body), "anthropic-version: 2023-06-01") + body)
        until, seen = time.monotonic() + client.seconds, b""
        while (left := until - time.monotonic()) > 0:
            if not select.select([sock], [], [], left)[0]:
                break
            piece = sock.recv(65536)
            if not piece:  # it was answered sooner
                break
            seen += piece
            if client.sees and _TEXT.search(seen):
                break
        client.saw = _TEXT.search(seen) is not None
        if client.abrupt:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def storm(server: Any, model: str, rng: random.Random, many: int, longest: float = 1.0, retries: int = 8) -> Storm:
    """``server``: as in conftest, with an engine that has a store. Then some requests are made again by clients that
    stay: what was read for them the first time is not read again."""
    made = Storm(clients(rng, many, longest))
    threads = [threading.Thread(target=_live, args=(client, server.port, model)) for client in made.clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gone = time.monotonic()
    while time.monotonic() < gone + 30:
        status = server.engine.status()
        waiting = status.waiting or status.queued or status.rows
        if not (status.active or waiting or status.reserved_bytes or status.reserved_rows):
            break
        time.sleep(0.005)
    else:
        made.wrong.append(f"not free after 30 s: {status}")
    made.free_s = time.monotonic() - gone
    until = time.monotonic() + 10
    while (left := _left(server.offered)) and time.monotonic() < until:
        time.sleep(0.01)
    if left:
        made.wrong.append(f"the server still has {left}")
    for client in rng.sample(saw := [c for c in made.clients if c.saw], min(len(saw), retries)):
        _retry(made, client, server.url, model)
    return made


def _left(offered: Any) -> dict[str, int]:
    """Requests that are being answered, and engines that somebody uses."""
    leases = sum(state.leases for state in offered.models.states())
    return {name: n for name, n in (("requests", offered.working), ("leases", leases)) if n}


def _retry(made: Storm, client: Client, url: str, model: str) -> None:
    again = Client(client.route, client.prompt, False, 0.0, False)
    limit = "max_output_tokens" if client.route == "/v1/responses" else "max_tokens"
    headers = {"anthropic-version": "2023-06-01"}
    found = httpx.post(f"{url}{client.route}", json=again.body(model, **{limit: 1}), headers=headers, timeout=60)
    if found.status_code != 200:
        made.wrong.append(f"{client.route} again: {found.status_code} {found.text[:200]}")
        return
    usage = found.json()["usage"]
    if "cache_read_input_tokens" in usage:
        fresh = usage["input_tokens"]
    else:
        kind = "prompt" if "prompt_tokens" in usage else "input"
        fresh = usage[f"{kind}_tokens"] - usage[f"{kind}_tokens_details"]["cached_tokens"]
    made.hits += fresh == 1
    if fresh != 1:
        made.wrong.append(f"{client.route} again: {fresh} tokens of its prompt were read a second time")
