"""Requests that come while a stream speculates, for as long as one likes: at every point of a cycle, in bursts, of many
architectures and depths; and whatever may happen in every state of the handoff."""

from __future__ import annotations

import random
import shutil
import time
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from mlxkv.decode.handoff import State
from mlxkv.decode.loop import Loop
from mlxkv.decode.options import MOST_DRAFTS
from tests import headed, tiny
from tests.decode import equal
from tests.decode.late import LONG, POINTS, Company, engine, scripted, watched
from tests.decode.many import Alone
from tests.decode.scripted import PATTERNS
from tests.decode.test_late import WHATS, WHERE, disturbed

HEAD = "a head"


@dataclass
class Late:
    """By model, streams and who came to them. ``handoffs``: changes of state, of all engines. ``disturbed``: by state,
    how often somebody left, or it failed or was shut down there. ``without``: models that draft nothing, and why.
    ``wrong`` must stay empty."""

    rounds: int = 0
    streams: dict[str, int] = field(default_factory=dict)
    came: dict[str, int] = field(default_factory=dict)
    bursts: dict[int, int] = field(default_factory=dict)
    cycles: int = 0
    handoffs: dict[str, int] = field(default_factory=dict)
    disturbed: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def late(folder: Path, rng: random.Random, seconds: float) -> Late:
    """A head at first, then models in random order, each with every point of a cycle and every state."""
    result, until, names = Late(), time.monotonic() + seconds, [HEAD]
    while not result.rounds or time.monotonic() < until:
        if not names:
            names = rng.sample(
                every := [*tiny.ARCHS, *tiny.OWN_ARCHS, "llama4", "gpt_oss", "lfm2_moe", HEAD], len(every)
            )
        one(result, names.pop(), folder / "late", rng)
        result.rounds += 1
    return result


def one(result: Late, name: str, where: Path, rng: random.Random) -> None:
    depth, said, seed = rng.randint(1, MOST_DRAFTS), rng.choice(PATTERNS), rng.randrange(1 << 32)
    label, rng = f"{name}, depth {depth}, {said}, seed {seed}", random.Random(seed)
    model = headed.make(where) if name == HEAD else tiny.make(name, where)
    options: dict[str, Any] = {"draft": "mtp" if name == HEAD else "ngram", "draft_depth": depth}
    drafter, alone = scripted(rng, said), Alone(model)
    try:
        company = Company(rng, alone, drafter, long=LONG * (depth + 4) // 4)
        with engine(model, drafter, **options) as made, watched(made) as house:
            for point, burst in product(POINTS, rng.sample(range(1, 7), 3)):
                scene = company.scene([(point, rng.randrange(3))] * burst)
                wrong(result, f"{label}, {burst} at {point!r}", scene.play(house, alone, depth, equal.bound_of(name)))
                counted(result, name, burst)
            for _ in range(12):
                scene = company.anywhere()
                wrong(result, f"{label}, anywhere", scene.play(house, alone, depth, equal.bound_of(name)))
                counted(result, name, len(scene.late))
            for state, what in product(WHERE, WHATS):
                disturbing(result, label, house, alone, company, state, what)
                made.inspect(Loop.check_integrity)
            status = made.status()
        result.cycles += status.cycles
        for change, n in status.handoffs.items():
            result.handoffs[change] = result.handoffs.get(change, 0) + n
        with engine(model, drafter, **options) as made, watched(made) as house:
            disturbing(result, label, house, alone, company, rng.choice(list(WHERE)), "shut down")
    finally:
        alone.close()
        shutil.rmtree(where, ignore_errors=True)


def wrong(result: Late, label: str, found: list[str]) -> None:
    result.wrong += [f"{label}: {each}" for each in found]


def counted(result: Late, name: str, burst: int) -> None:
    result.streams[name] = result.streams.get(name, 0) + 1
    result.came[name] = result.came.get(name, 0) + burst
    result.bursts[burst] = result.bursts.get(burst, 0) + 1


def disturbing(result: Late, label: str, house: Any, alone: Alone, company: Company, state: State, what: str) -> None:
    try:
        disturbed(house, alone, company, state, what)
    except AssertionError as e:
        result.wrong.append(f"{label}, {what} in {state}: {e}")
    result.disturbed[str(state)] = result.disturbed.get(str(state), 0) + 1
