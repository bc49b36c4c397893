"""Attempts to break the store without a model: random histories, damage everywhere, faults, power loss, kill -9.

Each part is a function of a seed that ends after about the seconds it is given, and returns how many attempts it made.
What it finds is raised, with what is needed to see it again.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tempfile
import time

import mlxkv.models  # noqa: F401 - chooses the BLAS before MLX is imported

from soaks import legacy  # isort: skip
from hypothesis import HealthCheck, Phase, settings  # isort: skip
from hypothesis import seed as seeded
from hypothesis.stateful import run_state_machine_as_test

from tests.cache.faults import CALLS, each_turn, make_sound, tried
from tests.cache.kills import Victims, killed_once
from tests.cache.limits import LIMITS, MOUNTS
from tests.cache.machine import StoreMachine, scratch
from tests.cache.power import Disk, found_after
from tests.cache.sweeps import Sample
from tests.cache.test_power import MODEL, PROMPTS, record

KILLS = 300


def histories(seed: int, seconds: float) -> int:
    """Batches of the property test, each with a seed of its own; hypothesis prints the steps of a failure."""
    count, until = 0, time.monotonic() + seconds
    while count == 0 or time.monotonic() < until:
        machine = seeded(seed + count)(type("StoreMachine", (StoreMachine,), {}))
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=20,
                stateful_step_count=30,
                deadline=None,
                database=None,
                print_blob=True,
                phases=[Phase.generate],  # shrinking may take longer than all the rest
                suppress_health_check=list(HealthCheck),
            ),
        )
        count += 20
    return count


def sweeps(seed: int, seconds: float) -> int:
    """Every truncation and flip of records, every pair swapped; then flips of the index and its WAL until the end."""
    rng, until = random.Random(seed), time.monotonic() + seconds
    with scratch() as folder:
        sample = Sample(folder)
        count = sample.truncated_everywhere() + sample.flipped_everywhere()
        for sweep in (sample.swaps, sample.truncations):
            half = time.monotonic() + max(1.0, until - time.monotonic()) / 3
            while time.monotonic() < half:
                sweep(rng, 50)
                count += 50
        while time.monotonic() < until:
            sample.index_flips(rng, 50)
            count += 50
    return count


def calls(seed: int, seconds: float) -> int:
    """Every call fails in its turn, then from that turn on, with every error that it may give."""
    rng, until, count = random.Random(seed), time.monotonic() + seconds, 0
    with scratch() as folder:
        sound = make_sound(folder)
        while count == 0 or time.monotonic() < until:
            for call in rng.sample(sorted(CALLS), len(CALLS)):
                count += each_turn(sound, call, lambda n: rng.randint(1, 3))
                tried(sound, call, rng.randint(1, 60), 10**9, rng.choice(CALLS[call]))
                if time.monotonic() > until:
                    break
    return count


def limits(seed: int, seconds: float) -> int:
    """Limits of the system; as root on Linux also a full disk: a mount of 8 MB that no other process sees."""
    names = [n for n in LIMITS if n != "no_permission" or sys.platform.startswith("linux")]
    with tempfile.TemporaryDirectory() as name:
        subprocess.run([sys.executable, "-m", "tests.cache.limits", name, *names], check=True)
        mount = f'mount -t tmpfs -o size=8m tmpfs "{name}"'
        if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode:
            return len(names)
        for each in MOUNTS:
            script = f'{mount} && exec "{sys.executable}" -m tests.cache.limits "{name}" {each}'
            subprocess.run(["unshare", "-m", "sh", "-c", script], check=True)
    return len(names) + len(MOUNTS)


def power(seed: int, seconds: float) -> int:
    """Folders that a disk may hold after power failed, behind barriers that hold and behind some that lie."""
    rng, until, count, tape = random.Random(seed), time.monotonic() + seconds, 0, record()
    with scratch() as base:
        while count == 0 or time.monotonic() < until:
            upto, honest = rng.randint(0, len(tape.ops)), rng.random() < 0.7
            try:
                found_after(Disk(tape, upto, rng, honest=honest), base / "d", MODEL, PROMPTS)
            except Exception as e:
                raise AssertionError(f"attempt {count}, after {upto} of {len(tape.ops)} operations") from e
            shutil.rmtree(base / "d")
            count += 1
    return count


def kill9(seed: int, seconds: float) -> int:
    """Up to 300 writers killed at random moments, one after the other on one folder."""
    rng, until, count, victims = random.Random(seed), time.monotonic() + seconds, 0, Victims()
    try:
        with scratch() as folder:
            while count == 0 or (count < KILLS and time.monotonic() < until):
                killed_once(victims, folder / f"c{count // 20}", rng)
                count += 1
    finally:
        victims.close()
    return count


PARTS = (histories, sweeps, calls, limits, power, kill9, *legacy.PARTS)


def main(seed: int, seconds: float, only: list[str]) -> dict[str, int]:
    """Run the parts named (all if none), ``seconds`` together; prints each part's seed before it begins."""
    chosen = [p for p in PARTS if not only or p.__name__ in only]
    out = {}
    for i, part in enumerate(chosen):
        print(f"{part.__name__}: seed {seed + i}", flush=True)
        out[part.__name__] = part(seed + i, seconds / len(chosen))
        print(f"{part.__name__}: {out[part.__name__]} attempts, nothing broke", flush=True)
    return out
