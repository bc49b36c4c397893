"""Imports that are killed -9 at a chosen step; run as a module, this is where they come from.

``python -m tests.cache.legacy.kills`` imports what is needed once, then forks a victim for each line it reads: JSON
``[folder, cache, step]``. A victim imports the folder into the cache and kills itself before the step-th call of ``os``
or statement of SQLite (counted from 1; 0: never); the source answers with how many there were, or ``null`` for one that
was killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import mlxkv.cache.folder
from mlxkv.cache.store import PrefixStore
from tests.cache.faults import CALLS
from tests.cache.synthetic import ask, verify

from .damage import LAYOUTS
from .harness import fingerprint, taken_in
from .omlx_writer import Style, save
from .stories import hashed

ROOT = Path(__file__).parents[3]
MODEL = LAYOUTS["list"]
#: two chains that share two blocks, and one of its own
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, *more] for more in ([9, 9, 9, 9], [7, 6, 5, 4, 3, 2, 1, 0])] + [[5] * 12]


def make(folder: Path) -> None:
    for prompt in PROMPTS:
        stops = range(4, len(prompt) + 1, 4)
        save(folder, hashed(MODEL, prompt, stops), Style())


class Steps:
    """Counts, and ends the process before one."""

    def __init__(self, last: int) -> None:
        self.last, self.seen, self._lock = last, 0, threading.Lock()

    def step(self, *_: Any) -> None:
        with self._lock:
            self.seen += 1
            if self.seen == self.last:
                os.kill(os.getpid(), signal.SIGKILL)

    def everywhere(self) -> None:
        """For the rest of this process."""
        for name in CALLS:
            setattr(os, name, self._before(getattr(os, name)))
        connect = sqlite3.connect

        def traced(*args: Any, **kwargs: Any) -> sqlite3.Connection:
            made = connect(*args, **kwargs)
            made.set_trace_callback(self.step)
            return made

        sqlite3.connect = traced  # type: ignore[assignment]

    def _before(self, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.step()
            return real(*args, **kwargs)

        return call


def victim(folder: str, cache: str, last: int) -> int:
    mlxkv.cache.folder._PREFIX = f"{os.getpid()}-{random.getrandbits(32):08x}-"
    steps = Steps(last)
    steps.everywhere()
    store = MODEL.open(Path(cache))
    taken_in(MODEL, Path(folder), store)
    store.close()
    return steps.seen


class Victims:
    """A source of processes that import and die."""

    def __init__(self) -> None:
        self.source = subprocess.Popen(
            [sys.executable, "-m", "tests.cache.legacy.kills"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def one(self, folder: Path, cache: Path, last: int) -> int | None:
        """How many steps an import took; None if it was killed."""
        assert self.source.stdin is not None and self.source.stdout is not None
        self.source.stdin.write(json.dumps([str(folder), str(cache), last]) + "\n")
        self.source.stdin.flush()
        return json.loads(self.source.stdout.readline())

    def close(self) -> None:
        assert self.source.stdin is not None and self.source.stdout is not None
        self.source.stdin.close()
        self.source.wait(30)
        self.source.stdout.close()


def sizes(store: PrefixStore) -> dict[tuple[bytes, str], int]:
    return dict(store.index.names())


def killed_at(
    victims: Victims, folder: Path, cache: Path, steps: list[int], want: dict[tuple[bytes, str], int]
) -> None:
    """Kill an import at each of ``steps``, one after the other on the same cache; then it is completed, and once more:
    there is nothing left to do. What is stored is ``want``, the names and sizes of an import that nobody killed."""
    before = fingerprint(folder)
    for step in steps:
        victims.one(folder, cache, step)
    store = MODEL.open(cache)
    first = taken_in(MODEL, folder, store)
    assert not first.refused and not first.unstored.files and not first.why, first
    second = taken_in(MODEL, folder, store)
    assert second.already.files == second.files == first.files and not second.records, second
    assert sizes(store) == want
    verify(cache, store)
    for prompt in PROMPTS:
        assert ask(MODEL, store, [*prompt, 1], keep=False).reason is None, f"{prompt} was lost"
    assert not store.faults and not list((cache / "quarantine").iterdir())
    store.close()
    assert fingerprint(folder) == before


def main() -> None:
    for line in sys.stdin:
        folder, cache, last = json.loads(line)
        told, tell = os.pipe()
        if (pid := os.fork()) == 0:
            os.write(tell, str(victim(folder, cache, last)).encode())
            os._exit(0)
        os.close(tell)
        said = os.read(told, 64)
        os.close(told)
        _, status = os.waitpid(pid, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        assert killed or (os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0), status
        print("null" if killed else int(said), flush=True)


if __name__ == "__main__":
    main()
