"""Drafts, for as long as one likes: every architecture with a rewind, depths 1 to 8, drafts that are right as a script
says, beside others and with a store; each request gets what it gets alone and plainly, each record is a plain run's."""

from __future__ import annotations

import random
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxkv.errors import ConfigError, MlxkvError
from tests import architectures, headed, tiny
from tests.decode import equal
from tests.decode.scripted import PATTERNS, Scripted, pattern


@dataclass
class Drafts:
    """By model: requests, and the largest difference of stored states from a plain solo run's. cycles by depth.
    ``without``: models whose state cannot be taken back, and why. ``wrong`` must stay empty."""

    rounds: int = 0
    asked: dict[str, int] = field(default_factory=dict)
    cycles: dict[str, int] = field(default_factory=dict)
    drafted: int = 0
    kept: int = 0
    given_up: int = 0
    restored: int = 0
    records: int = 0
    worst: dict[str, float] = field(default_factory=dict)
    without: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def drafts(folder: Path, rng: random.Random, seconds: float) -> Drafts:
    """Every architecture, every kind of state and a head at least once, in random order, then over and over."""
    result, until = Drafts(), time.monotonic() + seconds
    names = [*tiny.ARCHS, *tiny.MORE_ARCHS, *equal.KINDS, "a head"]
    while not result.rounds or time.monotonic() < until:
        for name in rng.sample(names, len(names)):
            if name not in result.without:
                one(result, name, folder, rng)
        result.rounds += 1
    return result


def one(result: Drafts, name: str, folder: Path, rng: random.Random) -> None:
    where, seed, depth = folder / f"drafts-{name}", rng.randrange(1 << 32), rng.randint(1, 8)
    how: dict[str, Any] = {"draft": "ngram", "draft_depth": depth}
    if name in equal.KINDS:
        how |= equal.of_kind(name, where / "model")
    elif name == "a head":
        how = {"model": headed.make(where / "model"), "draft_depth": rng.choice((None, depth))}
    else:
        how |= {"model": tiny.make(name, where / "model"), "bound": equal.bound_of(name)}
    said = rng.choice(PATTERNS)
    drafter = Scripted(pattern(said, random.Random(seed)), architectures.VOCAB) if name != "a head" else None
    how |= {"requests": rng.randint(6, 14), "max_rows": rng.choice((1, 3, 16)), "drafter": drafter}
    label = f"{name}, depth {depth}, {said}, seed {seed}"
    try:
        report = equal.measure(folder=where, rng=random.Random(seed), **how)
    except ConfigError as e:
        result.without[name] = e.message
    except MlxkvError as e:
        result.wrong.append(f"{label}: {type(e).__name__}: {e}")
    else:
        result.asked[name] = result.asked.get(name, 0) + report.asked
        result.given_up += report.given_up
        result.restored += report.restored
        result.records += report.records
        result.worst[name] = max(result.worst.get(name, 0.0), report.worst)
        result.wrong += [f"{label}: {what}" for what in report.wrong]
        if drafter is not None:
            made = len(drafter.kept)
            result.cycles[str(depth)] = result.cycles.get(str(depth), 0) + made
            result.drafted += sum(k for _, k in drafter.kept)
            result.kept += sum(n for n, _ in drafter.kept)
            if not made:
                result.wrong.append(f"{label}: nothing was ever drafted")
    finally:
        shutil.rmtree(where, ignore_errors=True)
