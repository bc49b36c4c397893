"""Two sides measured in turn, A B A B, and what may be said of their ratio (DESIGN §10)."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Bar:
    """``ratio`` must be at least (or, with ``at_most``, at most) ``limit``."""

    limit: float
    at_most: bool = False

    def met(self, value: float, slack: float = 1.0) -> bool:
        return value <= self.limit / slack if self.at_most else value >= self.limit * slack

    def __str__(self) -> str:
        return f"{'≤' if self.at_most else '≥'} {self.limit:g}"


@dataclass
class Result:
    """One line of the table. value: the median ratio; low, high: quartiles; holds: None if there were too few pairs."""

    name: str
    value: float
    bar: str
    holds: bool | None
    low: float
    high: float
    pairs: int
    note: str = ""
    ratios: list[float] = field(default_factory=list)


def judge(name: str, ratios: list[float], bar: Bar, note: str = "") -> Result:
    """A bar holds if the median meets it and at least 7 of 9 pairs do; one of ≥ 1.0 if the median is ≥ 1.0 and the
    lower quartile ≥ 0.97. Three pairs are enough if all meet it with a factor of 1.5 to spare. Fewer prove nothing."""
    ordered = sorted(ratios)
    median = statistics.median(ordered)
    low, _, high = statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else (median,) * 3
    holds: bool | None
    if len(ratios) >= 9:
        if bar.limit == 1.0 and not bar.at_most:
            holds = median >= 1.0 and low >= 0.97
        else:
            holds = bar.met(median) and sum(map(bar.met, ratios)) * 9 >= 7 * len(ratios)
    elif len(ratios) >= 3 and all(bar.met(r, 1.5) for r in ratios):
        holds = True
    else:
        holds = None
    return Result(name, median, str(bar), holds, low, high, len(ratios), note, [round(r, 4) for r in ratios])


def counted(name: str, value: float, bar: Bar, note: str = "") -> Result:
    """A ratio of counts, not of timings: it comes out the same every time, and one is enough."""
    return Result(name, value, str(bar), bar.met(value), value, value, 1, note, [round(value, 4)])


def unshown(name: str, bar: Bar, note: str) -> Result:
    """What could not be measured; ``note`` says why."""
    return Result(name, math.nan, str(bar), None, math.nan, math.nan, 0, note)


def in_turn(n: int, a: Callable[[], float], b: Callable[[], float], *, warm: bool = True) -> list[tuple[float, float]]:
    """``n`` pairs of measurements, A B A B …, after one of each that is thrown away."""
    if warm:
        a(), b()
    return [(a(), b()) for _ in range(n)]


def environment(root: Path) -> dict[str, Any]:
    """What the figures belong to."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True).stdout.strip()
    dirty = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True).stdout.strip()
    from mlxkv import numerics

    now = numerics.current()
    return {
        "commit": commit + ("+changes" if dirty else ""),
        "python": platform.python_version(),
        "mlx": now.mlx_version,
        "blas": now.blas,
        "numerics": now.mode,
        "device": now.device,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "load_average": [round(x, 2) for x in os.getloadavg()],
    }


def report(results: list[Result], env: dict[str, Any], as_json: bool) -> int:
    """Print the table, then with ``as_json`` one last line of JSON. 0 if no bar was missed, else 1."""
    width = max(len(r.name) for r in results)
    print(f"{'what':{width}}  {'ratio':>8}  {'quartiles':>17}  {'pairs':>5}  {'bar':>7}  holds")
    for r in results:
        holds = {True: "yes", False: "NO", None: "too few pairs" if r.pairs else "not shown"}[r.holds]
        print(
            f"{r.name:{width}}  {r.value:8.3f}  {r.low:8.3f}{r.high:9.3f}  {r.pairs:5}  {r.bar:>7}  {holds}  {r.note}"
        )
    print(" ".join(f"{k}={v}" for k, v in env.items()))
    if as_json:
        # NaN is no JSON
        plain = [{k: None if v != v else v for k, v in asdict(r).items()} for r in results]
        print(json.dumps({"results": plain, "environment": env}))
    sys.stdout.flush()
    return int(any(r.holds is False for r in results))
