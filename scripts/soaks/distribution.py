"""What is said at a temperature, for as long as one likes: texts over a tiny vocabulary against plain sampling."""

from __future__ import annotations

import math
import random
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

from mlxkv.decode.options import MOST_DRAFTS
from tests import heads, tiny
from tests.decode import distribution as rules
from tests.decode.texts import PROMPTS, Said, deviates

#: texts of each case of the rules, and of one engine
SAMPLES, OF_ENGINE = 50_000, 1_000
#: a deviate that chance passes three times in ten million
TOO_FAR = 5.0
#: models that draft for themselves, and models that another drafts for
MODELS = (*heads.KINDS, *tiny.ARCHS, *tiny.OWN_ARCHS, "llama4", "gpt_oss", "granitemoehybrid")


@dataclass
class Distribution:
    """``rules``: by case, the largest normal deviate of ``SAMPLES`` texts from their exact distribution and from plain
    ones. ``engines``: by model and depth, that of ``OF_ENGINE`` texts; ``all_engines``: of all of these together.
    ``wrong`` must stay empty."""

    texts: int = 0
    rules: dict[str, float] = field(default_factory=dict)
    texts_of_engines: int = 0
    cycles: int = 0
    accepted: int = 0
    engines: dict[str, float] = field(default_factory=dict)
    all_engines: float = 0.0
    wrong: list[str] = field(default_factory=list)


def distribution(folder: Path, rng: random.Random, seconds: float) -> Distribution:
    """Rules and engines by turns, one of each at least; where there is no end, each rule and ``SAMPLES`` texts of
    engines."""
    result, until, found = Distribution(), time.monotonic() + seconds, []
    names = rng.sample(list(rules.CASES), len(rules.CASES))
    wanted = SAMPLES if seconds == math.inf else math.inf
    while not found or (time.monotonic() < until and (names or result.texts_of_engines < wanted)):
        if names or rng.random() < 0.1:
            by_rule(result, names.pop() if names else rng.choice(list(rules.CASES)), rng)
        found.append(by_engine(result, folder, rng))
        result.all_engines = sum(found) / math.sqrt(len(found))
    if result.all_engines > TOO_FAR:
        result.wrong.append(f"all engines together: {result.all_engines:.1f}")
    return result


def by_rule(result: Distribution, name: str, rng: random.Random) -> None:
    seed = rng.randrange(1 << 32)
    worst = max(rules.deviates(rules.CASES[name], SAMPLES, seed))
    result.texts += SAMPLES
    result.rules[name] = max(result.rules.get(name, -math.inf), worst)
    if worst > TOO_FAR:
        result.wrong.append(f"{name}, seed {seed}: {worst:.1f}")


def by_engine(result: Distribution, folder: Path, rng: random.Random) -> float:
    where, seed = folder / "distribution", rng.randrange(1 << 32)
    model = rng.choice(MODELS)
    depth = 1 if model == "mimo" else rng.randint(1, MOST_DRAFTS)  # as deep as that head was trained
    case = Said(model, depth, rng.choice((1, 3, 8)), rng.choice(PROMPTS))
    try:
        found = deviates(case, where, OF_ENGINE, seed, plain=True)
    finally:
        shutil.rmtree(where, ignore_errors=True)
    name, worst = f"{case.model}, {case.depth} drafts", max(found.exact, found.plain or 0.0)
    result.texts_of_engines += OF_ENGINE
    result.cycles += found.cycles
    result.accepted += found.accepted
    result.engines[name] = max(result.engines.get(name, -math.inf), worst)
    if worst > TOO_FAR or (case.rows == 1 and not found.cycles):
        result.wrong.append(f"{case}, seed {seed}: {found}")
    return found.exact
