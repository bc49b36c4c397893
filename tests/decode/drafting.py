"""A machine and a drafter that exist on paper: what ``Depth`` decides is judged by the time that they would take."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from mlxkv.decode.depth import Depth, History

#: of so many rows, drafts, and tokens so far: seconds of a cycle; 0 drafts are a plain step
Cost = Callable[[int, int, int], float]
#: of a place, and the tokens so far: how often a draft is accepted there
Acceptance = Callable[[int, int], float]


def demo(rows: int, k: int, at: int) -> float:
    return 1.15 + 0.25 * k if k else 1.0


def gpu(rows: int, k: int, at: int) -> float:
    return 1.05 + 0.08 * k if k else 1.0


def always(rate: float) -> Acceptance:
    return lambda place, at: rate


def best(cost: Cost, rate: float, rows: int = 1, most: int = 8) -> tuple[int, float]:
    """The depth that gives the most tokens a second, and how many times those of plain steps."""
    gains = {0: 1.0}
    for k in range(1, most + 1):
        tokens = sum(rate**n for n in range(k + 1))
        gains[k] = tokens * cost(rows, 0, 0) / cost(rows, k, 0)
    return max(gains.items(), key=lambda item: item[1])


@dataclass
class Ran:
    """``seconds`` that it took, and would have taken by plain steps. ``depths``: tokens of the slowest row so far, and
    drafts of the step made then."""

    seconds: float = 0.0
    plain: float = 0.0
    tokens: int = 0
    depths: list[tuple[int, int]] = field(default_factory=list)

    @property
    def gain(self) -> float:
        return self.plain / self.seconds

    def reached(self, k: int) -> int:
        """Tokens there were when a cycle as deep as ``k`` was first made."""
        return next((at for at, depth in self.depths if depth >= k), 10**9)


@dataclass
class Paper:
    """Times are off by up to ``noise`` of themselves, and one in many waits for something else."""

    cost: Cost
    accepts: Acceptance
    noise: float = 0.0
    hiccups: float = 0.0
    seed: int = 0

    def run(self, depth: Depth, rows: int = 1, tokens: int = 200, histories: list[History] | None = None) -> Ran:
        """Each row has ``tokens`` tokens or more at the end. What a hiccup takes is not counted: it would have come
        to plain steps too."""
        rng, ran = random.Random(self.seed), Ran()
        histories = histories or [depth.history() for _ in range(rows)]
        done = [0] * rows
        depth.interrupt()
        while (at := min(done)) < tokens:
            k = depth.next(histories, tokens - at - 1)
            ran.depths.append((at, k))
            seconds = self.cost(rows, k, at)
            ran.seconds += seconds
            seconds *= 1 + self.noise * rng.uniform(-1, 1)
            seconds *= 10 if rng.random() < self.hiccups else 1
            if k:
                kept = [self._kept(rng, k, n) for n in done]
                depth.cycled(histories, k, kept, seconds)
            else:
                kept = [1] * rows
                depth.stepped(histories, seconds)
            done = [n + more for n, more in zip(done, kept, strict=True)]
        ran.tokens = sum(done)
        ran.plain = sum(self.cost(rows, 0, at) for at in range(min(done))) * ran.tokens / (rows * min(done))
        return ran

    def _kept(self, rng: random.Random, k: int, at: int) -> int:
        n = 1
        while n <= k and rng.random() < self.accepts(n - 1, at):
            n += 1
        return n
