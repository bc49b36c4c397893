"""Batches whose rows draft, for as long as one likes: random joins, steps, cycles and moves, against single steps."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from mlxkv.cache.batch import obstacle, obstacle_of_drafts
from mlxkv.cache.layout import probe
from mlxkv.models.spans import install
from tests import tiny
from tests.cache.batch.schedules import Schedule, tolerance
from tests.cache.test_kinds import CACHES


@dataclass
class Rows:
    """By model, cycles made. ``without``: why the rows of the others do not draft. ``wrong`` must stay empty."""

    moves: int = 0
    cycles: dict[str, int] = field(default_factory=dict)
    compiled: int = 0
    without: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def rows(folder: Path, rng: random.Random, seconds: float) -> Rows:
    """Every architecture and every cache class at least once, in random order, then over and over; one schedule in
    eight, once each had its turn, of compiled steps."""
    result, until, round = Rows(), time.monotonic() + seconds, 0
    names = [*tiny.ARCHS, *tiny.MORE_ARCHS, *tiny.OWN_ARCHS, *CACHES]
    while not round or time.monotonic() < until:
        for name in rng.sample(names, len(names)):
            if round and time.monotonic() >= until:
                break
            one(result, name, rng, "on" if round and rng.random() < 0.125 else "off")
        round += 1
    return result


def one(result: Rows, name: str, rng: random.Random, compile: str) -> None:
    seed, drafts = rng.randrange(1 << 32), rng.randint(1, 8)
    model, _ = tiny.build("llama" if name in CACHES else name)
    make: Callable[[], list[Any]] = CACHES.get(name, lambda: make_prompt_cache(model))
    live, (journals, _) = probe(model, make), install(model)
    why = obstacle(model, make, live) or obstacle_of_drafts(model, make, live, journals, drafts)
    if why:
        result.without[name] = why
        return
    options: dict[str, Any] = {"journals": journals, "drafts": drafts, "compile": compile}
    schedule = Schedule(model, make, seed, live, slots=rng.randint(1, 4), **options)
    worst = schedule.run(12 if compile == "on" else 60)
    result.moves += sum(schedule.moves.values())
    result.compiled += compile == "on"
    result.cycles[name] = result.cycles.get(name, 0) + schedule.moves.get("cycle", 0)
    if worst > tolerance():
        result.wrong.append(f"{name}, seed {seed}, {drafts} drafts, compiled {compile}: {worst:.1e} {schedule.moves}")
