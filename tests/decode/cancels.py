"""Waves of requests that are given up at random places: nothing is left of them, and a retry is cheap."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from mlxkv import Engine
from mlxkv.decode.request import Delta, Progress
from tests import tiny
from tests.decode.many import Alone, Outcome, Planned, ask, drive, load, settled, wrong_with

#: requests a wave
WAVE = 12
#: tokens that an answer would have
LONG = 48


@dataclass
class Report:
    """``places``: where a request was when it ended, given up. ``hits``: retries that resumed on what it had read.
    ``wrong`` must stay empty."""

    waves: int = 0
    places: dict[str, int] = field(default_factory=Counter)
    retries: int = 0
    hits: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def given_up(self) -> int:
        return sum(self.places.values())


def place(outcome: Outcome) -> str:
    """What had come of a request last."""
    last = [e for e in outcome.events if isinstance(e, (Progress, Delta))]
    return "queue" if not outcome.events else "decoding" if last and isinstance(last[-1], Delta) else "prefill"


def wave(rng: random.Random, pool: list[list[int]]) -> list[Planned]:
    """New prompts, and some that were asked before: those are being restored when they are given up at once. One in
    four is not given up."""
    plan = []
    for number in range(WAVE):
        again = pool and rng.random() < 0.4
        tokens = rng.choice(pool) if again else tiny.ids(rng.randint(20, 120), seed=rng.randrange(1 << 30))
        if not again:
            pool.append(tokens)
        cancel = None if rng.random() < 0.25 else rng.choice((0, 1, rng.randrange(2, 9), rng.randrange(8, 40)))
        after = (rng.randrange(number), rng.randrange(4)) if number and rng.random() < 0.3 else None
        plan.append(Planned(ask(tokens, 12 if cancel is None else LONG), after, cancel))
    return plan


def measure(model: Path, folder: Path, rng: random.Random, count: int, *, ram: int = 0, bound: float = 0.0) -> Report:
    """Until ``count`` were given up. ``ram``: bytes of records in RAM; 0: all are restored from disk."""
    found, alone = Report(), Alone(model)
    pool: list[list[int]] = []
    with load(model, folder, ram_budget=ram) as engine:
        while found.given_up < count:
            plan = wave(rng, pool)
            outcomes = drive(engine, plan)
            found.waves += 1
            if left := settled(engine):
                found.wrong.append(f"wave {found.waves}: it still has {left}")
            for planned, outcome in zip(plan, outcomes, strict=True):
                right = alone(ask(planned.request.tokens or [], LONG if planned.cancel is not None else 12))
                found.wrong += [f"wave {found.waves}: {what}" for what in wrong_with(planned, outcome, right, bound)]
                done = outcome.completion
                if planned.cancel is not None and (done is None or done.finish_reason == "cancelled"):
                    found.places[place(outcome)] += 1
            retry(engine, plan, outcomes, alone, found)
            del pool[:-WAVE]
    alone.close()
    return found


def retry(engine: Engine, plan: list[Planned], outcomes: list[Outcome], alone: Alone, found: Report) -> None:
    """What was read of a prompt before it was given up is not read again."""
    for planned, outcome in zip(plan, outcomes, strict=True):
        if planned.cancel is None or not outcome.done:
            continue
        tokens = planned.request.tokens or []
        got, right = engine.submit(ask(tokens, 4)).result(), alone(ask(tokens, LONG))
        found.retries += 1
        found.hits += got.usage.cached_tokens >= outcome.done
        if got.token_ids != right.token_ids[:4]:
            found.wrong.append(f"a retry with {got.usage.cached_tokens} cached: {got.token_ids}, {right.token_ids[:4]}")
        if got.usage.cached_tokens < outcome.done:
            found.wrong.append(f"{outcome.done} of {got.usage.prompt_tokens} were read, {got.usage.cached_tokens} kept")
