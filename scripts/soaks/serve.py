"""The server under clients that leave: 200 at a time, at random moments, over all routes."""

from __future__ import annotations

import logging
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

from mlxkv.config import EMBEDDED
from mlxkv.decode.engine import Engine
from tests import tiny
from tests.serve.conftest import running
from tests.serve.storm import storm

CLIENTS = 200
#: seconds after the last one left until nothing of them may be there
FREE_S = 1.0


@dataclass
class Clients:
    """By model: clients that left, and seconds until the engine was free, at worst. ``hits``: retries that read one
    token. ``wrong`` must stay empty."""

    left: dict[str, int] = field(default_factory=dict)
    saw: int = 0
    free_s: dict[str, float] = field(default_factory=dict)
    hits: int = 0
    wrong: list[str] = field(default_factory=list)


def clients(folder: Path, rng: random.Random, seconds: float) -> Clients:
    """The demo model first, whose head drafts, then others in random order."""
    logging.getLogger("mlxkv").setLevel(logging.ERROR)
    result, until, names = Clients(), time.monotonic() + seconds, ["demo"]
    while not result.left or time.monotonic() < until:
        if not names:
            names = rng.sample(every := [*tiny.ARCHS, *tiny.OWN_ARCHS, "llama4", "demo"], len(every))
        name, seed = names.pop(), rng.randrange(1 << 32)
        where = folder / f"clients-{name}"
        model = EMBEDDED if name == "demo" else where if where.exists() else tiny.make(name, where)
        cache = folder / f"clients-cache-{seed}"
        with Engine(model, cache_dir=cache, cache_budget=1 << 30) as engine, running(engine) as server:
            found = storm(server, engine.info.name, random.Random(seed), CLIENTS, longest=3.0, retries=20)
        result.left[name] = result.left.get(name, 0) + len(found.clients)
        result.saw += sum(client.saw for client in found.clients)
        result.hits += found.hits
        result.free_s[name] = max(result.free_s.get(name, 0.0), round(found.free_s, 3))
        result.wrong += [f"{name}, seed {seed}: {what}" for what in found.wrong]
        if found.free_s > FREE_S:
            result.wrong.append(f"{name}, seed {seed}: free after {found.free_s:.2f} s only")
    return result
