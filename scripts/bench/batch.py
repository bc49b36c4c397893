"""Many requests at once: streams together, a long prompt beside them, a short one that comes late, memory over time.

The other side is mlx-lm's own BatchGenerator in the same process: the same weights in float32, the same BLAS, the same
prompts (ids), greedy. Nothing else should run on the machine.

together: tokens/s of 1, 4 and 8 streams, from when all emit until the first ends. beside: four streams run, a long
prompt arrives, and a short one when a quarter of the time has passed that the long one takes alone on the same side;
how long the streams' tokens are waited for, how fast the long prompt is read (decoding steps' time taken off) against
alone, and how soon the short one has its first token. memory: after 10,000 requests against after 1,000.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlxkv.models  # noqa: F401 - chooses the BLAS before MLX is imported

import mlx.core as mx  # isort: skip
import numpy as np  # isort: skip

import mlxkv
from mlxkv.config import EMBEDDED

from .main import ROOT, float32
from .memory import child, memory
from .pairs import Bar, Result, environment, in_turn, judge, report, unshown
from .streams import Crowd, Ours, Side, Theirs, aggregate, crowd, wait

#: the lengths of prompts of streams, and for each a seed with which the text of both models goes on and on
LENGTHS = {40: 8, 47: 103, 54: 204, 61: 304, 68: 405, 75: 501, 82: 600, 90: 701}
MB = 10**6


@dataclass(frozen=True)
class Case:
    """A model and how much is asked of it. tokens: of each stream, together; long: tokens of the long prompt; settle:
    tokens that streams have made when it arrives; most: tokens that they may make."""

    name: str
    folder: Path
    tokens: int
    long: int
    settle: int
    most: int


def prompt(n: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(50, 1950) for _ in range(n)]


def streams_of(count: int) -> list[list[int]]:
    """Prompts of ``count`` streams, as different in length as they can be."""
    chosen = sorted(LENGTHS)[:: len(LENGTHS) // count][:count]
    return [prompt(n, LENGTHS[n]) for n in chosen]


def median(values: list[float]) -> str:
    value = statistics.median(values)
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def gap_target(engine: mlxkv.Engine) -> float:
    """Seconds: the default of --max-gap-ms."""
    return 0.5 if engine.info.device == "cpu" else 0.25


def together(case: Case, engine: mlxkv.Engine, model: Any, pairs: int, counts: tuple[int, ...]) -> list[Result]:
    out = []
    for count in counts:
        prompts = streams_of(count)
        turns: list[bool] = []

        def tps(side: Side, prompts: list[list[int]] = prompts, turns: list[bool] = turns) -> float:
            streams = [side.send(p, case.tokens) for p in prompts]
            wait(side, lambda: all(s.ended for s in streams))
            if short := [len(s.times) for s in streams if len(s.times) < case.tokens]:
                raise SystemExit(f"{case.name}: a text ended after {short[0]} of {case.tokens} tokens")
            value, at_once = aggregate(streams)
            turns += [] if at_once else [True]
            return value

        measured = in_turn(pairs, lambda: tps(Theirs(model)), lambda: tps(Ours(engine)), warm=pairs > 1)
        note = (
            f"medians: mlx-lm {median([a for a, _ in measured])} tok/s, mlxkv {median([b for _, b in measured])} tok/s"
        )
        note += "; streams took turns" if turns else ""
        name = f"tokens/s of {count} stream{'s' if count > 1 else ''} / BatchGenerator, {case.name}"
        out.append(judge(name, [b / a for a, b in measured], Bar(1.0), note))
    return out


def alone(side: Side, tokens: list[int]) -> float:
    """Seconds from a prompt's arrival to its first token, with nothing beside it."""
    stream = side.send(tokens, 1)
    wait(side, lambda: stream.ended)
    return stream.times[0] - stream.sent


def beside(case: Case, engine: mlxkv.Engine, model: Any, pairs: int) -> list[Result]:
    prompts, long, short = streams_of(4), prompt(case.long, 1), prompt(20, 2)

    def run(side: Side, takes: float) -> Crowd:
        return crowd(side, prompts, long, short, settle=case.settle, most=case.most, arrives=takes / 4)

    def pair() -> tuple[float, Crowd, Crowd]:
        by_itself = alone(Ours(engine), long)
        return by_itself, run(Ours(engine), by_itself), run(Theirs(model), their_time)

    their_time = alone(Theirs(model), long)
    measured = [pair() for _ in range(pairs + 1)][1:] if pairs > 1 else [pair()]
    gap, speed, late = Bar(1.25, at_most=True), Bar(0.8), Bar(0.5, at_most=True)
    what = f"{case.long:,} tokens beside 4 streams, {case.name}"
    names = (
        f"p99 gap / --max-gap-ms, {what}",
        f"prefill tokens/s / alone, {what}",
        f"first token of 20 / BatchGenerator's, {what}",
    )
    if not all(ours.together for _, ours, _ in measured):
        why = "the streams took turns: never four at the same time"
        return [unshown(name, bar, why) for name, bar in zip(names, (gap, speed, late), strict=True)]

    target = gap_target(engine)
    gaps = [float(np.quantile(ours.gaps, 0.99)) for _, ours, _ in measured]
    others = [float(np.quantile(theirs.gaps, 0.99)) for *_, theirs in measured]
    note = f"medians: {median(gaps)} s of {target:g} s, {len(measured[-1][1].gaps)} gaps; BatchGenerator's "
    note += f"{median(others)} s"
    first = judge(names[0], [each / target for each in gaps], gap, note)

    told = [ours.told for _, ours, _ in measured]
    own = [ours.decoding for _, ours, _ in measured]
    steps = own if None in told else [t or 0.0 for t in told]

    def speeds(steps: list[float]) -> list[float]:
        """The prefill's speed beside streams / alone; ``steps``: seconds to be taken off."""
        return [a / (ours.long - s) for (a, ours, _), s in zip(measured, steps, strict=True)]

    note = f"medians: alone {median([a for a, *_ in measured])} s, beside {median([o.long for _, o, _ in measured])} s "
    by = "tokens by their rate before" if steps is own else "as the engine says"
    note += f"of which steps {median(steps)} s ({by}), "
    note += f"{median([float(o.tokens) for _, o, _ in measured])} tokens"
    if steps is not own:
        note += f"; with tokens by their rate before: {median(speeds(own))}"
    second = judge(names[1], speeds(steps), speed, note)

    pairs_of = [(ours.short or 0.0, theirs.short or 0.0) for _, ours, theirs in measured]
    note = f"medians: mlxkv {median([a for a, _ in pairs_of])} s, BatchGenerator {median([b for _, b in pairs_of])} s"
    third = judge(names[2], [a / b for a, b in pairs_of], late, note)
    return [first, second, third]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_batch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smollm2", type=Path, help="SmolLM2-135M-Instruct's folder")
    parser.add_argument("--quick", action="store_true", help="under two minutes; too few pairs for most bars")
    parser.add_argument("--json", action="store_true", help="a last line of JSON")
    parser.add_argument(
        "--only", help="run only parts whose name contains this: together, beside, demo, SmolLM2, memory"
    )
    parser.add_argument("--memory", type=int, nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name in [n for n in os.environ if n.startswith("MLXKV_") and n != "MLXKV_BLAS"]:
        del os.environ[name]
    if options.memory:
        return child(*options.memory)
    if options.smollm2 is None:
        parser.error("--smollm2 is needed")
    quick = options.quick
    demo = Case("demo model", EMBEDDED, tokens=160, long=4096, settle=32, most=512)
    smol = Case("SmolLM2", options.smollm2, tokens=24, long=1024, settle=6, most=160)
    many = (3, 3, 1, 1) if quick else (15, 9, 9, 9)
    counts = (1, 4, 8)
    parts = {
        "together, demo": lambda e, m: together(demo, e, m, many[0], counts),
        "beside, demo": lambda e, m: beside(demo, e, m, many[1]),
        "together, SmolLM2": lambda e, m: together(smol, e, m, many[2], counts),
        "beside, SmolLM2": lambda e, m: beside(smol, e, m, many[3]),
    }
    results: list[Result] = []
    if options.only is not None and not any(options.only in title for title in (*parts, "memory")):
        parser.error(f"no part is named {options.only}: there are {'; '.join(parts)}; memory")

    def wanted(title: str) -> bool:
        if options.only is not None and options.only not in title:
            return False
        print(f"… {title}", file=sys.stderr, flush=True)
        return True

    if wanted("memory"):  # before this process has grown
        results += memory(250, 500, 16 * MB, 64 * MB) if quick else memory(1000, 10_000, 64 * MB, 256 * MB)
    for case in (demo, smol):
        todo = [part for title, part in parts.items() if title.endswith(case.name.split()[0]) and wanted(title)]
        if todo:
            model, _ = float32(case.folder)
            with mlxkv.load(case.folder, cache=False) as engine:
                for part in todo:
                    results += part(engine, model)
            del model
            mx.clear_cache()
    return report(results, environment(ROOT), options.json)


if __name__ == "__main__":
    sys.exit(main())
