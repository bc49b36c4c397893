"""What the test suite samples in seconds, for as long as one likes: nothing wrong is ever served, nothing durable lost.

Parts, and what each compares (docs/results/README.md says which promise each one holds):

  equality   every architecture: from SSD in a new process, from RAM, branches, another process's store; cold runs
  restores   random prompts on one store that is reopened now and then, against cold runs
  damage     records cut, flipped, swapped, lengthened, removed or zeroed, against cold runs
  kills      kill -9 of a process that runs a real model; what it left, against cold runs
  kill9      300 kills -9 of processes that do nothing but store, close and open
  budget     two writers frozen by a third process 500 times and at each reservation, over 20 times the budget
  prompts    prompt caches that mlx-lm saves, of every architecture and older forms, imported; against cold runs
  many       every architecture and state kind: random requests that come and go all at once, against each alone
  cancels    500 requests given up anywhere: nothing is left of them, and a retry is cheap
  drafts     every architecture whose state can be taken back, depths 1 to 8, drafts that are all, never, now and then
             right: as many, and after each cycle every array; against plain runs (--complete: every combination)
  late       requests that come at every point of a cycle, in bursts of 1 to 6, and whatever may happen in every state
             of the handoff, of several architectures and depths: counts from the queueing, streams against solo runs
  distribution
             what is said at a temperature with drafts: 50,000 texts a rule, then texts of engines of several
             architectures and depths; against plain sampling (--complete: 50,000 texts of engines)
  rows       batches whose rows draft, of every architecture and cache class; against single steps
  objects    two machines that share an object store, whose objects vanish, are cut, flipped and swapped
  arrivals   every architecture that can draft: streams, and requests that come at random points of their cycles
  clients    200 clients of a server that leave at random moments, over all routes: a second later nothing is left of
             them, and who comes again finds what was read; of several models
  words      16 conversations at once, each with a word of its own, with evictions and disk loads under way
  histories  random store, look up, extend, branch, evict, damage, restart; against a model that remembers everything
  flips      flipped bytes of the index (--complete: every one)
  wal        flipped bytes of a WAL and its index (--complete: every one)
  swaps      every pair of records in each other's place, every truncation and flip as the reader sees it
  records    truncations and flips of records, as those see it who ask (--complete: every one)
  calls      every system call of the store fails in its turn
  limits     limits of the system, a full disk
  power      power loss with reordered and torn writes
  headers    50,000 files of other tools that may be anything, as the import reads them
  blocks     changed blocks of a folder of oMLX: what is imported beside or of them is what it was
  damages    every damaged file of the tests in a folder that is asked at a miss
  imports    100 kills -9 at steps of an import; a re-run completes it
  names      20,000 files of no sense in a folder of oMLX

Prints the commit and the seed; the last line is JSON. Exit code 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlxkv.models  # noqa: F401 - chooses the BLAS before MLX is imported

import numpy as np  # isort: skip

from soaks import faults, legacy  # isort: skip
from soaks.budget import budget  # isort: skip
from soaks.distribution import distribution  # isort: skip
from soaks.drafts import drafts  # isort: skip
from soaks.late import late  # isort: skip
from soaks.many import arrivals, cancels, many, words  # isort: skip
from soaks.objects import objects  # isort: skip
from soaks.prompts import prompts  # isort: skip
from soaks.rows import rows  # isort: skip
from soaks.serve import clients  # isort: skip
from soaks.equality import equality  # isort: skip
from tests import tiny  # isort: skip
from mlxkv.decode.runtime import Runtime
from tests.architectures import MORE_INEXACT
from tests.cache.kills import Victims, engine_prompt, missing_blocks
from tests.cache.machine import scratch
from tests.cache.stores import reopened
from tests.cache.synthetic import verify
from tests.cache.test_equality import INEXACT as SUITE_INEXACT
from tests.probe import run, runtime

ROOT = Path(__file__).parents[2]
#: so many processes with a real model are killed whatever the time
KILLS = 40
ARCHS = (*tiny.ARCHS, *tiny.MORE_ARCHS, *tiny.OWN_ARCHS)
INEXACT = SUITE_INEXACT | MORE_INEXACT


@dataclass
class Count:
    """What one soak did. ``wrong`` lists comparisons that failed: it must stay empty."""

    runs: int = 0
    restored: int = 0
    tokens_restored: int = 0
    faults: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def compare(rt, arch: str, tokens: list[int], count: Count, keep: bool, what: str) -> None:
    logits, completion = run(rt, tokens, keep=keep, max_tokens=4)
    cold, plain = run(rt, tokens, use_cache=False, max_tokens=4)
    difference = float(np.abs(logits - cold).max() / np.abs(cold).max())
    count.runs += 1
    count.restored += completion.usage.cached_tokens > 0
    count.tokens_restored += completion.usage.cached_tokens
    reason = completion.cache.miss_reason or "none"
    count.reasons[reason] = count.reasons.get(reason, 0) + 1
    count.worst[arch] = max(count.worst.get(arch, 0.0), difference)
    if difference > INEXACT.get(arch, (0.0, ""))[0] or completion.token_ids != plain.token_ids:
        count.wrong.append(f"{what} {arch} n={len(tokens)} cached={completion.usage.cached_tokens} d={difference:.1e}")


def restores(folder: Path, rng: random.Random, seconds: float) -> Count:
    """Random prompts on one store, reopened now and then, for each architecture and several block sizes."""
    count, until = Count(), time.monotonic() + seconds
    while time.monotonic() < until:
        arch, pool = rng.choice(ARCHS), []
        cache = folder / f"restores-{count.runs}"
        for _ in range(3):
            rt = runtime(model(folder, arch), cache, prefill_chunk=rng.choice((5, 12, 64)))
            for _ in range(12):
                compare(rt, arch, engine_prompt(rng, pool), count, True, "restore")
            assert rt.store is not None
            rt.store.close()
    return count


def damage(folder: Path, rng: random.Random, seconds: float) -> Count:
    """Cut, flip, swap, lengthen or remove random records of a store, then ask again."""
    count, until = Count(), time.monotonic() + seconds
    while time.monotonic() < until:
        arch, pool = rng.choice(ARCHS), []
        cache = folder / f"damage-{count.runs}"
        rt = runtime(model(folder, arch), cache)
        for _ in range(4):
            run(rt, engine_prompt(rng, pool), max_tokens=8)
        assert rt.store is not None
        rt.store.close()
        for _ in range(3):
            files = sorted((cache / "records").rglob("*.safetensors"))
            for victim in rng.sample(files, min(len(files), 3)):
                hurt(victim, files, rng)
                count.faults += 1
            rt = runtime(model(folder, arch), cache)
            for tokens in pool[-4:]:
                compare(rt, arch, tokens, count, rng.random() < 0.5, "damage")
            assert rt.store is not None
            rt.store.close()
    return count


def hurt(victim: Path, files: list[Path], rng: random.Random) -> None:
    data = bytearray(victim.read_bytes() or b"x")  # one was cut to nothing before
    kind = rng.choice(("cut", "flip", "swap", "longer", "gone", "zero"))
    if kind == "cut":
        del data[rng.randrange(len(data)) :]
    elif kind == "flip":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "swap":
        data = bytearray(rng.choice([path for path in files if path.exists()]).read_bytes())
    elif kind == "longer":
        data += b"x" * rng.randint(1, 100)
    elif kind == "zero":
        a = rng.randrange(len(data))
        data[a : a + 64] = bytes(len(data[a : a + 64]))
    if kind == "gone":
        victim.unlink()
    else:
        victim.write_bytes(data)


def kills(folder: Path, rng: random.Random, seconds: float) -> Count:
    """A process that runs a model and stores is killed -9 at a random moment. What it left verifies clean, has the full
    blocks of what was reported durable, and gives the answers of cold runs."""
    count, until, victims = Count(), time.monotonic() + seconds, Victims()
    plain: dict[str, Runtime] = {}
    try:
        while count.faults < KILLS or time.monotonic() < until:
            arch = rng.choice(ARCHS)
            cache = folder / f"kills-{arch}"
            durable = victims.one(str(model(folder, arch)), cache, rng.randrange(1 << 32), rng.random() * 0.4)
            count.faults += 1
            if arch not in plain:
                plain[arch] = runtime(model(folder, arch), folder / f"unused-{arch}")
                plain[arch].store.close()
            rt = reopened(plain[arch], cache)
            try:
                verify(cache, rt.store)
            except AssertionError:
                count.wrong.append(f"kill {count.faults} {arch}: {traceback.format_exc(limit=-2)}")
            for tokens in durable:
                if missing := missing_blocks(rt.store, tokens):
                    count.wrong.append(f"kill {count.faults} {arch}: {tokens} was durable; {missing} are not there")
            pool = durable[-4:]
            for tokens in [*durable[-2:], engine_prompt(rng, pool)]:
                compare(rt, arch, tokens, count, rng.random() < 0.5, "kill")
            if list((cache / "quarantine").iterdir()):
                count.wrong.append(f"kill {count.faults} {arch}: something is in quarantine")
            rt.store.close()
    finally:
        victims.close()
    return count


def model(folder: Path, arch: str) -> Path:
    where = folder / arch
    return where if where.exists() else tiny.make(arch, where)


MODELS: dict[str, Callable[[Path, random.Random, float], Any]] = {
    f.__name__: f
    for f in (
        equality,
        restores,
        damage,
        kills,
        budget,
        prompts,
        many,
        cancels,
        words,
        drafts,
        late,
        arrivals,
        distribution,
        rows,
        objects,
        clients,
    )
}
FAULTS = {f.__name__: f for f in (*faults.PARTS, *legacy.PARTS)}
PARTS = [*FAULTS, *MODELS]


def share(text: str) -> tuple[int, int]:
    """ "1/2" -> (0, 2): the first of two shares."""
    which, _, of = text.partition("/")
    if not 1 <= int(which) <= int(of):
        raise ValueError
    return int(which) - 1, int(of)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=6.0, help="for all parts together (default: 6)")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; may be given again")
    parser.add_argument("--seed", type=int, help="as an earlier run printed it")
    parser.add_argument("--complete", action="store_true", help="go through all places, however long that takes")
    parser.add_argument("--share", type=share, default=(0, 1), metavar="K/N", help="of --complete: every N-th place")
    parser.add_argument("--first", type=int, default=0, help="of --complete: go on with this place")
    parser.add_argument("--out", type=Path, help="also write the result to this file")
    options = parser.parse_args()
    logging.getLogger("mlxkv").setLevel(logging.CRITICAL)  # damage is meant to be found
    seed = random.randrange(10**6) if options.seed is None else options.seed
    chosen = options.part or PARTS
    each = options.minutes * 60 / len(chosen)
    print(f"commit {commit()} seed {seed}", flush=True)
    result: dict[str, Any] = {"commit": commit(), "seed": seed, "minutes": options.minutes, "failed": []}
    for name in chosen:
        began = time.monotonic()
        print(f"{name}: begins", flush=True)
        try:
            if name in FAULTS:
                task = faults.Task(seed, each, options.complete, *options.share, options.first)
                found: dict[str, Any] = {"attempts": FAULTS[name](task), "wrong": []}
            else:
                endless = options.complete and name in ("equality", "many", "drafts", "distribution")
                with scratch() as folder:
                    found = asdict(MODELS[name](folder, random.Random(f"{seed} {name}"), math.inf if endless else each))
        except Exception:
            traceback.print_exc()
            found = {"wrong": [traceback.format_exc()]}
        found["seconds"] = round(time.monotonic() - began, 1)
        print(f"{name}: {found}", flush=True)
        result[name] = found
        if found["wrong"]:
            result["failed"].append(name)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print("nothing broke" if not result["failed"] else f"BROKEN: {', '.join(result['failed'])}", flush=True)
    print(json.dumps(result))
    return int(bool(result["failed"]))


def commit() -> str:
    """The commit, with "+" if files differ from it; "unknown" outside of a clone."""
    ran = [
        subprocess.run(["git", *how], cwd=ROOT, capture_output=True, text=True)
        for how in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
    ]
    return ran[0].stdout.strip() + "+" * bool(ran[1].stdout.strip()) if not ran[0].returncode else "unknown"


if __name__ == "__main__":
    sys.exit(main())
