"""Several processes fill one folder, are frozen and killed at random: it must never weigh more than the budget."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from mlxkv.cache.record import Reader, RecordError
from tests.cache.drafts import open_store
from tests.cache.test_budget import weigh

MIB = 1 << 20


@dataclass
class Budget:
    """What the soak did; ``wrong`` must stay empty. ``written``: bytes of records; ``fullest``: the largest part of a
    budget that was used."""

    frozen: int = 0
    killed: int = 0
    folders: int = 0
    written: int = 0
    fullest: float = 0.0
    wrong: list[str] = field(default_factory=list)


class Filler:
    def __init__(self, folder: Path, seed: int, budget: int) -> None:
        command = [sys.executable, "-m", "tests.cache.filler", str(folder), str(seed), str(budget), ""]
        self.log = folder.with_name(f"{folder.name}-{seed}.log")
        with open(self.log, "w") as out:
            self.process = subprocess.Popen(command, stdout=out)

    def written(self) -> int:
        lines = self.log.read_text().split()
        return int(lines[-1]) if len(lines) > 1 else 0

    def signal(self, what: int) -> None:
        self.process.send_signal(what)
        if what == signal.SIGSTOP:
            os.waitpid(self.process.pid, os.WUNTRACED)
        if what == signal.SIGKILL:
            self.process.wait()


def budget(folder: Path, rng: random.Random, seconds: float) -> Budget:
    """Two or three fillers on one folder; now and then one is killed and another takes its place. Each folder is opened
    at the end: what is left is whole, and the index agrees with the files."""
    result, until = Budget(), time.monotonic() + seconds
    while time.monotonic() < until:
        where, limit = folder / f"budget-{result.folders}", rng.randint(4 * MIB, 10 * MIB)
        where.mkdir()
        result.folders += 1
        fillers = [Filler(where, rng.randrange(10**6), limit) for _ in range(rng.choice((2, 2, 3)))]
        ends = min(until, time.monotonic() + 120)
        while time.monotonic() < ends:
            time.sleep(rng.random())
            for filler in fillers:
                filler.signal(signal.SIGSTOP)
            found = weigh(where)
            result.frozen += 1
            result.fullest = max(result.fullest, found / limit)
            if found > limit:
                result.wrong.append(f"{found - limit} bytes over {limit} after {result.frozen} looks")
            if rng.random() < 0.03:
                victim = fillers.pop(rng.randrange(len(fillers)))
                result.written += victim.written()
                victim.signal(signal.SIGKILL)
                result.killed += 1
                fillers.append(Filler(where, rng.randrange(10**6), limit))
            for filler in fillers:
                filler.signal(signal.SIGCONT)
        for filler in fillers:
            result.written += filler.written()
            filler.signal(signal.SIGKILL)
        check(where, limit, result)
    return result


def check(where: Path, limit: int, result: Budget) -> None:
    store = open_store(where, budget=limit)
    listed = {
        name: store.folder.file(bytes.fromhex(name[:64]), name.split(".")[1]) for name in store.index.file_names()
    }
    found = {path.name for path in (where / "records").rglob("*.safetensors")}
    if listed.keys() != found:
        result.wrong.append(f"{len(listed.keys() ^ found)} files and rows do not fit each other")
    for path in listed.values():
        try:
            with Reader.open(path) as reader:
                for name in reader.tensors:
                    reader.read(name)
        except RecordError as e:
            result.wrong.append(f"{path.name}: {e}")
    store.close()
    if weigh(where) > limit:
        result.wrong.append("over the budget after closing")
