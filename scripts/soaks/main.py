"""Random restores, damaged records and killed writers against cold runs: a miss is allowed, a wrong hit never.

Before them, attempts to break the store without a model (faults.py): histories, sweeps, calls, limits, power, kill9.
Prints the commit and the seed; the last line is JSON. Exit code 1 if any comparison failed.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import mlxkv.models  # noqa: F401 - chooses the BLAS before MLX is imported

import numpy as np  # isort: skip

from soaks import faults  # isort: skip
from soaks.budget import budget  # isort: skip
from tests import tiny  # isort: skip
from tests.architectures import MORE_INEXACT
from tests.cache.test_equality import INEXACT as SUITE_INEXACT
from tests.probe import run, runtime

ROOT = Path(__file__).parents[2]
ARCHS = (*tiny.ARCHS, *tiny.MORE_ARCHS)
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


def prompt(rng: random.Random, pool: list[list[int]]) -> list[int]:
    """Often a prompt seen before, cut, continued, or edited in one place; with message ends here and there."""
    if pool and rng.random() < 0.8:
        base = list(rng.choice(pool))
        base = base[: rng.randint(1, len(base))]
        if rng.random() < 0.3:
            base[rng.randrange(len(base))] = rng.randrange(300)
    else:
        base = []
    out = base + tiny.ids(rng.randint(0 if len(base) > 1 else 2, 40), rng.randrange(10**6))
    for i in range(len(base), len(out) - 1):
        if rng.random() < 0.07:
            out[i] = tiny.EOS
    pool.append(out)
    del pool[:-40]
    return out


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
                compare(rt, arch, prompt(rng, pool), count, True, "restore")
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
            run(rt, prompt(rng, pool), max_tokens=8)
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
    data = bytearray(victim.read_bytes())
    kind = rng.choice(("cut", "flip", "swap", "longer", "gone", "zero"))
    if kind == "cut":
        del data[rng.randrange(len(data)) :]
    elif kind == "flip":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "swap":
        data = bytearray(rng.choice(files).read_bytes())
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
    """A process that stores is killed -9 at a random moment; what it left is compared with cold runs."""
    count, until = Count(), time.monotonic() + seconds
    while time.monotonic() < until:
        arch, seed = rng.choice(ARCHS), rng.randrange(10**6)
        cache = folder / f"kills-{arch}"
        command = [sys.executable, "-m", "soaks.main", "--store", str(model(folder, arch)), str(cache), str(seed)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()  # it has begun
        time.sleep(rng.random() * 0.6)
        child.send_signal(signal.SIGKILL)
        child.wait()
        count.faults += 1
        rt = runtime(model(folder, arch), cache)
        pool: list[list[int]] = []
        again = random.Random(seed)
        for tokens in [prompt(again, pool) for _ in range(8)]:
            compare(rt, arch, tokens, count, rng.random() < 0.5, "kill")
        assert rt.store is not None
        rt.store.close()
    return count


def store(where: Path, cache: Path, seed: int) -> None:
    """The victim of ``kills``: stores prompt after prompt until it is killed."""
    rt, rng, pool = runtime(where, cache), random.Random(seed), []
    print("go", flush=True)
    while True:
        run(rt, prompt(rng, pool), max_tokens=8)


def model(folder: Path, arch: str) -> Path:
    where = folder / arch
    return where if where.exists() else tiny.make(arch, where)


WITH_MODELS = (restores, damage, kills, budget)
PARTS = [s.__name__ for s in (*faults.PARTS, *WITH_MODELS)]


def main() -> int:
    if sys.argv[1:2] == ["--store"]:
        store(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=6.0, help="for all soaks together")
    parser.add_argument("--only", action="append", choices=PARTS, help="run only this part; may be given again")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--out", type=Path, help="also write the result to this file")
    options = parser.parse_args()
    logging.getLogger("mlxkv").setLevel(logging.CRITICAL)  # damage is meant to be found
    seed = random.randrange(10**6) if options.seed is None else options.seed
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    print(f"commit {commit} seed {seed}", flush=True)
    rng, result = random.Random(seed), {"commit": commit, "seed": seed, "minutes": options.minutes}
    failed = False
    chosen = options.only or list(PARTS)
    each = options.minutes * 60 / len(chosen)
    if without := [p.__name__ for p in faults.PARTS if p.__name__ in chosen]:
        result |= faults.main(seed, each * len(without), without)  # raises what it finds
    for soak in (s for s in WITH_MODELS if s.__name__ in chosen):
        with tempfile.TemporaryDirectory() as name:
            count = soak(Path(name), rng, each)
        print(f"{soak.__name__}: {count}", flush=True)
        result[soak.__name__] = asdict(count)
        failed |= bool(count.wrong)
    print(json.dumps(result))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
