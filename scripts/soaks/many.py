"""Many requests at once, for as long as one likes: equal to each alone, given up at random, with words of their own."""

from __future__ import annotations

import random
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxkv.errors import ConfigError
from tests import headed, tiny
from tests.decode import cancels as cancelling
from tests.decode import equal
from tests.decode import late as coming
from tests.decode import words as worded
from tests.decode.many import Alone
from tests.decode.scripted import PATTERNS

#: so many requests are given up whatever the time
CANCELLED = 500
#: small talk before and after the word, in pairs of messages: the model recalls what was told that long ago
TALK = ((2, 1), (4, 2), (1, 6), (6, 0))


@dataclass
class Many:
    """By model: requests, the largest difference of stored states from a solo run's, and the most that ran together.
    ``wrong`` must stay empty."""

    rounds: int = 0
    asked: dict[str, int] = field(default_factory=dict)
    given_up: int = 0
    restored: int = 0
    records: int = 0
    together: dict[str, int] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def many(folder: Path, rng: random.Random, seconds: float) -> Many:
    """Every architecture, every kind of state and a head at least once, in random order, then over and over."""
    result, until = Many(), time.monotonic() + seconds
    names = [*tiny.ARCHS, *tiny.MORE_ARCHS, *tiny.OWN_ARCHS, *equal.KINDS, "a head"]
    while not result.rounds or time.monotonic() < until:
        for name in rng.sample(names, len(names)):
            one(result, name, folder, rng)
        result.rounds += 1
    return result


def one(result: Many, name: str, folder: Path, rng: random.Random) -> None:
    where, seed = folder / f"many-{name}", rng.randrange(1 << 32)
    if name in equal.KINDS:
        how: dict[str, Any] = equal.of_kind(name, where / "model")
    else:
        model = headed.make(where / "model") if name == "a head" else tiny.make(name, where / "model")
        how = {"model": model, "bound": equal.bound_of(name)}
    how |= {"requests": rng.randint(8, 40), "max_rows": rng.choice((3, 16))}
    report = equal.measure(folder=where, rng=random.Random(seed), **how)
    shutil.rmtree(where)
    result.asked[name] = result.asked.get(name, 0) + report.asked
    result.given_up += report.given_up
    result.restored += report.restored
    result.records += report.records
    result.together[name] = max(result.together.get(name, 0), report.together)
    result.worst[name] = max(result.worst.get(name, 0.0), report.worst)
    result.wrong += [f"{name}, seed {seed}: {what}" for what in report.wrong]


@dataclass
class Cancels:
    """As ``tests.decode.cancels.Report``, of all architectures together. ``wrong`` must stay empty."""

    given_up: int = 0
    places: dict[str, int] = field(default_factory=dict)
    retries: int = 0
    hits: int = 0
    wrong: list[str] = field(default_factory=list)


def cancels(folder: Path, rng: random.Random, seconds: float) -> Cancels:
    """``CANCELLED`` at least, from RAM and from disk, of architectures in random order."""
    result, until = Cancels(), time.monotonic() + seconds
    while result.given_up < CANCELLED or time.monotonic() < until:
        arch, seed = rng.choice((*tiny.ARCHS, *tiny.MORE_ARCHS, *tiny.OWN_ARCHS)), rng.randrange(1 << 32)
        where = folder / f"cancels-{result.given_up}"
        model = tiny.make(arch, where / "model")
        report = cancelling.measure(
            model, where / "c", random.Random(seed), 50, ram=rng.choice((0, 1 << 26)), bound=equal.bound_of(arch)
        )
        shutil.rmtree(where)
        result.given_up += report.given_up
        for place, n in report.places.items():  # a Counter does not survive ``asdict``
            result.places[place] = result.places.get(place, 0) + n
        result.retries += report.retries
        result.hits += report.hits
        result.wrong += [f"{arch}, seed {seed}: {what}" for what in report.wrong]
    return result


@dataclass
class Arrivals:
    """``came``: requests that were queued at a point of a cycle; ``skipped``: models nothing can be drafted with.
    ``wrong`` must stay empty."""

    scenes: int = 0
    came: int = 0
    cycles: int = 0
    accepted: int = 0
    handoffs: dict[str, int] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def arrivals(folder: Path, rng: random.Random, seconds: float) -> Arrivals:
    """Streams that speculate, 1 to 8 drafts deep, of every architecture that can, and up to six that come at random
    points of their cycles: nobody waits for more than a forward, all are what they are alone, and nothing is left."""
    result, until = Arrivals(), time.monotonic() + seconds
    archs = [*tiny.ARCHS, *tiny.MORE_ARCHS, *tiny.OWN_ARCHS, "a head"]
    while not result.scenes or time.monotonic() < until:
        for arch in rng.sample(archs, len(archs)):
            if arch not in result.skipped:
                _scenes(result, arch, folder / f"arrivals-{arch}", rng)
            if result.scenes and time.monotonic() > until:
                break
    return result


def _scenes(result: Arrivals, arch: str, where: Path, rng: random.Random, count: int = 12) -> None:
    model = where if where.exists() else headed.make(where) if arch == "a head" else tiny.make(arch, where)
    depth, seed = rng.randint(1, 8), rng.randrange(1 << 32)
    random_ = random.Random(seed)
    drafter = coming.scripted(random_, random_.choice(PATTERNS))
    alone = Alone(model, draft="off")
    try:
        company = coming.Company(random_, alone, drafter)
        options: dict[str, Any] = {"draft": "mtp" if arch == "a head" else "ngram", "draft_depth": depth}
        options |= {"max_rows": random_.choice((8, 16))}
        with coming.engine(model, drafter, **options) as engine, coming.watched(engine) as house:
            for _ in range(count):
                scene = company.anywhere()
                wrong = scene.play(house, alone, depth, equal.bound_of(arch))
                result.wrong += [f"{arch}, depth {depth}, seed {seed}, {scene.late}: {what}" for what in wrong]
                result.scenes += 1
                result.came += len(house.tickets) - 1
            status = engine.status()
            result.cycles += status.cycles
            result.accepted += status.accepted
            for change, n in status.handoffs.items():
                result.handoffs[change] = result.handoffs.get(change, 0) + n
    except ConfigError:
        result.skipped.append(arch)
    finally:
        alone.close()


@dataclass
class Words:
    """As ``tests.decode.words.Report``, of all folders together. ``wrong`` must stay empty."""

    folders: int = 0
    answers: int = 0
    from_disk: int = 0
    whole: int = 0
    lost: int = 0
    wrong: list[str] = field(default_factory=list)


def words(folder: Path, rng: random.Random, seconds: float) -> Words:
    """Four rounds a folder, with more or less talk around the words; every answer is compared with the one alone."""
    result, until = Words(), time.monotonic() + seconds
    while not result.folders or time.monotonic() < until:
        before, after = rng.choice(TALK)
        chosen = rng.sample(worded.CODES, 16)
        where = folder / f"words-{result.folders}"
        report = worded.measure(where, rng, rounds=4, before=before, after=after, words=chosen, compared=16)
        shutil.rmtree(where)
        result.folders += 1
        for name in ("answers", "from_disk", "whole", "lost", "wrong"):
            setattr(result, name, getattr(result, name) + getattr(report, name))
    return result
