"""Two machines share an object store whose objects vanish, are cut, flipped and swapped: never a wrong hit."""

from __future__ import annotations

import random
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from tests.cache.objects.conversations import conversations
from tests.cache.objects.machines import machines


@dataclass
class Objects:
    """``rounds``: pairs of machines of two layouts each; ``wrong`` must stay empty."""

    rounds: int = 0
    wrong: list[str] = field(default_factory=list)


def objects(folder: Path, rng: random.Random, seconds: float) -> Objects:
    """At least one round, whose seed is named with what was wrong."""
    result, until = Objects(), time.monotonic() + seconds
    while not result.rounds or time.monotonic() < until:
        seed, where = rng.randrange(2**32), folder / f"objects-{result.rounds}"
        where.mkdir(parents=True)
        try:
            with machines(where) as machine:
                conversations(random.Random(seed), machine, where)
        except Exception:
            result.wrong.append(f"seed {seed}: {traceback.format_exc(limit=4)}")
        result.rounds += 1
    return result
