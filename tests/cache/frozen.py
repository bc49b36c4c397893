"""A third process watches others fill a folder: it freezes all of them while it adds up what is there. For tests and
soaks.

Each filler stops itself right after each reservation, and goes on once that was looked at; between, all are frozen at
random moments, in the middle of whatever they do.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]


def weigh(folder: Path) -> int:
    """What a user's ``find -type f`` would add up."""
    total = 0
    for base, _, files in os.walk(folder):
        for name in files:
            total += os.lstat(os.path.join(base, name)).st_size
    return total


class Filler:
    """``tests.cache.filler`` as a child that is stopped and continued. What it says goes to a file, so that it never
    waits for a reader."""

    def __init__(self, folder: Path, seed: int, budget: int) -> None:
        self.log = folder.with_name(f"{folder.name}-{seed}.log")
        command = [sys.executable, "-m", "tests.cache.filler", str(folder), str(seed), str(budget), "stop"]
        with open(self.log, "w") as out:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=out)
        self.stopped = False

    @property
    def written(self) -> int:
        """Bytes of records so far."""
        lines = self.log.read_text().split("\n")[:-1]  # a line that is cut off is not said
        return int(lines[-1]) if len(lines) > 1 else 0

    def stopped_itself(self) -> bool:
        return not self.stopped and self._wait(os.WNOHANG)

    def stop(self) -> None:
        if not self.stopped:
            self.process.send_signal(signal.SIGSTOP)
            assert self._wait(0)

    def _wait(self, how: int) -> bool:
        pid, status = os.waitpid(self.process.pid, os.WUNTRACED | how)
        assert pid == 0 or os.WIFSTOPPED(status), f"a filler ended by itself: {self.log.read_text()[-300:]}"
        self.stopped = pid != 0
        return self.stopped

    def go(self) -> None:
        self.stopped = False
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class Watched:
    """What was seen; ``wrong`` must stay empty. ``looks`` at all frozen, ``reservations`` of them at one;
    ``fullest``: the largest part of the budget that was used."""

    budget: int
    looks: int = 0
    reservations: int = 0
    killed: int = 0
    written: int = 0
    fullest: float = 0.0
    wrong: list[str] = field(default_factory=list)


def watch(
    folder: Path, rng: random.Random, budget: int, *, looks: int, times: int, within: float, kills: float = 0.0
) -> Watched:
    """Two fillers on one folder until there were so many ``looks``, and ``times`` the budget was written by the two;
    that must happen ``within`` so many seconds. ``kills``: how often a look is the last of one, and another begins."""
    seen, until, ended = Watched(budget), time.monotonic() + within, 0
    fillers = [Filler(folder, seed, budget) for seed in (1, 2)]
    try:
        while seen.looks < looks or seen.written < times * budget or seen.reservations < looks // 10:
            if time.monotonic() > until:
                seen.wrong.append(f"only {seen.looks} looks and {seen.written} bytes within {within} s")
                break
            again = time.monotonic() + rng.random() * 0.03
            while not (at := [f for f in fillers if f.stopped_itself()]) and time.monotonic() < again:
                time.sleep(0.0005)
            for filler in fillers:
                filler.stop()
            found = weigh(folder)
            seen.looks += 1
            seen.reservations += bool(at)
            seen.fullest = max(seen.fullest, found / budget)
            if found > budget:
                seen.wrong.append(f"{found - budget} bytes over {budget} at look {seen.looks}")
                break
            if rng.random() < kills:
                victim = fillers.pop(rng.randrange(2))
                ended += victim.written
                victim.end()
                seen.killed += 1
                fillers.append(Filler(folder, 3 + seen.killed, budget))
            seen.written = ended + sum(f.written for f in fillers)
            for filler in fillers:
                filler.go()
    finally:
        for filler in fillers:
            filler.end()
    return seen
