"""Drafts, for as long as one likes: every architecture with a rewind, depths 1 to 8, drafts that are right as a script
says, beside others and with a store; each request gets what it gets alone and plainly, each record is a plain run's."""

from __future__ import annotations

import math
import random
import shutil
import time
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from mlxkv.decode.options import MOST_DRAFTS
from mlxkv.errors import ConfigError, MlxkvError
from tests import architectures, headed, tiny
from tests.decode import equal
from tests.decode.scripted import PATTERNS, Scripted, pattern

HEAD = "a head"
#: a depth and how drafts fare; a head's own drafts fare as they do, and its depth adapts once in a while
CASES: list[tuple[int | None, str]] = list(product(range(1, MOST_DRAFTS + 1), PATTERNS))
HEAD_CASES: list[tuple[int | None, str]] = [(depth, "its own") for depth in (None, *range(1, MOST_DRAFTS + 1))]


@dataclass
class Drafts:
    """By model: requests, cases (depth and pattern) that were met and are to come, the largest difference of stored and
    live states from a plain run's. cycles by depth. ``compared``: states of rows after a cycle. ``without``: models
    whose state cannot be taken back, and why; ``quiet``: those whose rows did not draft beside others, which ``rows``
    is about. ``wrong`` must stay empty."""

    rounds: int = 0
    asked: dict[str, int] = field(default_factory=dict)
    met: dict[str, int] = field(default_factory=dict)
    to_come: dict[str, int] = field(default_factory=dict)
    cycles: dict[str, int] = field(default_factory=dict)
    compared: int = 0
    drafted: int = 0
    kept: int = 0
    given_up: int = 0
    restored: int = 0
    records: int = 0
    worst: dict[str, float] = field(default_factory=dict)
    without: dict[str, str] = field(default_factory=dict)
    quiet: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def drafts(folder: Path, rng: random.Random, seconds: float) -> Drafts:
    """Every architecture, every kind of state and a head once a round, in random order, each with another depth and
    pattern until it has had all of them. Without an end (``--complete``) until all have."""
    result, until = Drafts(), time.monotonic() + seconds
    names = [*tiny.ARCHS, *tiny.MORE_ARCHS, *tiny.OWN_ARCHS, *equal.KINDS, HEAD]
    cases: dict[str, list[tuple[int | None, str]]] = {name: [] for name in names}
    while not result.rounds or (time.monotonic() < until and (seconds < math.inf or any(result.to_come.values()))):
        for name in rng.sample(names, len(names)):
            if name in result.without:
                continue
            if not cases[name]:
                cases[name] = rng.sample(every := HEAD_CASES if name == HEAD else CASES, len(every))
            one(result, name, *cases[name].pop(), folder, rng)
            if name not in result.without:
                result.met[name] = met = result.met.get(name, 0) + 1
                result.to_come[name] = max(0, len(HEAD_CASES if name == HEAD else CASES) - met)
        result.rounds += 1
    return result


def one(result: Drafts, name: str, depth: int | None, said: str, folder: Path, rng: random.Random) -> None:
    where, seed, rows = folder / f"drafts-{name}", rng.randrange(1 << 32), rng.choice((1, 3, 16))
    drafter = None if name == HEAD else Scripted(pattern(said, random.Random(seed)), architectures.VOCAB)
    how: dict[str, Any] = {"draft": "mtp" if name == HEAD else "ngram", "draft_depth": depth, "max_rows": rows}
    how |= {"requests": rng.randint(6, 14), "drafter": drafter, "ladder": rng.choice((None, 16))}
    if name in equal.KINDS:
        how |= equal.of_kind(name, where / "model")
    elif name == HEAD:
        how |= {"model": headed.make(where / "model")}
    else:
        how |= {"model": tiny.make(name, where / "model"), "bound": equal.drafts_bound_of(name)}
    label = f"{name}, depth {depth}, {said}, rows {rows}, seed {seed}"
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
        result.compared += report.compared
        result.worst[name] = max(result.worst.get(name, 0.0), report.worst)
        result.wrong += [f"{label}: {what}" for what in report.wrong]
        result.cycles[str(depth)] = result.cycles.get(str(depth), 0) + report.cycles
        if drafter is not None:
            result.drafted += sum(k for _, k in drafter.kept)
            result.kept += sum(n for n, _ in drafter.kept)
        if not report.cycles:
            # all of them may have been together from their first token to their last, where rows do not draft
            result.quiet[name] = result.quiet.get(name, 0) + 1
            if rows == 1:
                result.wrong.append(f"{label}: nothing was ever drafted")
    finally:
        shutil.rmtree(where, ignore_errors=True)
