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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import mlxkv.models  # noqa: F401 - chooses the BLAS before MLX is imported

from hypothesis import HealthCheck, Phase, settings  # isort: skip
from hypothesis import seed as seeded
from hypothesis.stateful import run_state_machine_as_test

from tests.cache.faults import CALLS, each_turn, make_sound, tried
from tests.cache.flips import Indexed
from tests.cache.kills import Victims, killed_once
from tests.cache.limits import LIMITS, MOUNTS
from tests.cache.machine import StoreMachine, scratch
from tests.cache.power import Disk, found_after
from tests.cache.sweeps import OWNERS, Sample
from tests.cache.test_power import MODEL, PROMPTS, record

T = TypeVar("T")

#: so many writers are killed whatever the time
KILLS = 300
#: bytes of a page of the index of which every byte is flipped; as the store makes them it would take an hour
PAGE = 512


@dataclass(frozen=True)
class Task:
    """``complete``: sweeps go through all places, or a share of them (``share`` of ``shares``, from 0), beginning with
    the place ``first`` of that share; else through what ``seconds`` allow from a random place on."""

    seed: int
    seconds: float
    complete: bool = False
    share: int = 0
    shares: int = 1
    first: int = 0

    def rng(self) -> random.Random:
        return random.Random(self.seed)

    @contextmanager
    def places(self, name: str, all_places: Sequence[T]) -> Iterator[tuple[Iterator[T], Callable[[], int]]]:
        """What is this task's of a list, and how many of them were taken; says now and then how far it is."""
        mine = all_places[self.share :: self.shares]
        if self.complete:
            mine = mine[self.first :]
        else:
            at = self.rng().randrange(len(mine))
            mine = [*mine[at:], *mine[:at]]
        until, taken = time.monotonic() + self.seconds, 0

        def each() -> Iterator[T]:
            nonlocal taken
            said = time.monotonic()
            for place in mine:
                if not self.complete and taken and time.monotonic() > until:
                    return
                if time.monotonic() > said + 30:
                    said = time.monotonic()
                    print(f"{name}: {self.first + taken} of {self.first + len(mine)}", flush=True)
                yield place
                taken += 1

        yield each(), lambda: taken
        print(f"{name}: {taken} of {len(mine)} places", flush=True)


def histories(task: Task) -> int:
    """Batches of the property test, each with a seed of its own; hypothesis prints the steps of a failure."""
    count, until = 0, time.monotonic() + task.seconds
    while count == 0 or time.monotonic() < until:
        machine = seeded(task.seed + count)(type("StoreMachine", (StoreMachine,), {}))
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


def flips(task: Task) -> int:
    """Every byte of an index of small pages; unless ``complete``, half the time goes to one as it is made. First those
    bits that make stored tokens what is asked for."""
    if task.complete:
        return _flipped(task, PAGE, log=False)
    half = Task(task.seed, task.seconds / 2)
    return _flipped(half, PAGE, log=False) + _flipped(half, None, log=False)


def wal(task: Task) -> int:
    """Every byte of a WAL, and of the index that it belongs to."""
    return _flipped(task, PAGE, log=True)


def _flipped(task: Task, page: int | None, *, log: bool) -> int:
    with scratch() as folder:
        indexed = Indexed(folder, page, log=log)
        if not task.first:
            indexed.flip_likenesses(indexed.likenesses())
        name = f"flips of an index with {page or 'the usual'} bytes a page{' and a WAL' if log else ''}"
        with task.places(name, indexed.every_place if page else indexed.places) as (mine, taken):
            indexed.flip(mine, lambda at: (at + task.seed) % 8)
            return taken()


def swaps(task: Task) -> int:
    """Every pair of records in each other's place; and every truncation and flip, as the reader sees it."""
    with scratch() as folder:
        sample = Sample(folder)
        count = sample.refused_truncations() + sample.refused_flips(task.rng())
        with task.places("swaps", list(sample.swaps())) as (mine, taken):
            for damage in mine:
                sample.hurt(*damage)
            return count + taken()


def records(task: Task) -> int:
    """Every truncation of every record, and a flip of every byte, as those see it who ask for what is stored."""
    with scratch() as folder:
        sample = Sample(folder, OWNERS[:2], prompts=1)
        both = [(how, *place) for place in sample.places for how in ("cut", "flip")]
        with task.places("records", both) as (mine, taken):
            for how, path, at in mine:
                bit = (at + task.seed) % 8
                sample.hurt(*(sample.truncation(path, at) if how == "cut" else sample.flip(path, at, bit)))
            return taken()


def calls(task: Task) -> int:
    """Every call fails in its turn, then from that turn on, with every error that it may give."""
    rng, until, count = task.rng(), time.monotonic() + task.seconds, 0
    with scratch() as folder:
        sound = make_sound(folder)
        while count == 0 or time.monotonic() < until:
            for call in rng.sample(sorted(CALLS), len(CALLS)):
                count += each_turn(sound, call, lambda n: rng.randint(1, 3))
                tried(sound, call, rng.randint(1, 60), 10**9, rng.choice(CALLS[call]))
                if time.monotonic() > until:
                    break
    return count


def limits(task: Task) -> int:
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


def power(task: Task) -> int:
    """Folders that a disk may hold after power failed, behind barriers that hold and behind some that lie."""
    rng, until, count, tape = task.rng(), time.monotonic() + task.seconds, 0, record()
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


def kill9(task: Task) -> int:
    """300 writers killed at random moments, twenty one after the other on each folder, and more until the time ends."""
    rng, until, count, victims = task.rng(), time.monotonic() + task.seconds, 0, Victims()
    try:
        with scratch() as folder:
            while count < KILLS or time.monotonic() < until:
                killed_once(victims, Path(folder) / f"c{count // 20}", rng)
                count += 1
    finally:
        victims.close()
    return count


PARTS = (histories, flips, wal, swaps, records, calls, limits, power, kill9)
