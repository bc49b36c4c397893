"""Processes that store without pause and are killed -9; run as a module, this is where they come from.

``python -m tests.cache.kills`` imports what is needed once, then forks a victim for each line it reads: JSON
``[model, folder, seed]``, where the model is one of ``synthetic`` or the folder of a real one. A victim says ``[pid,
null]``, then ``[pid, prompt]`` for each prompt reported durable. It opens and closes its store again and again.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import mlxkv.cache.folder
from mlxkv.cache.store import PrefixStore
from tests import tiny
from tests.cache.stores import reopened
from tests.cache.synthetic import MODELS, ask, verify
from tests.probe import run, runtime

ROOT = Path(__file__).parents[2]


def prompts(rng: random.Random) -> list[int]:
    """Few first tokens, so that chains are shared, extended and branched off."""
    return [1, 2, 3, 4, 5, 6, 7, 8][: rng.randint(1, 8)] + [rng.randint(1, 3) for _ in range(rng.randint(2, 16))]


def engine_prompt(rng: random.Random, pool: list[list[int]]) -> list[int]:
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


def victim(model: str, folder: str, seed: int) -> None:
    rng = random.Random(seed)
    mlxkv.cache.folder._PREFIX = f"{os.getpid()}-{seed:08x}-"  # as a process of its own would name its temporaries

    def say(what: list[int] | None) -> None:
        print(json.dumps([os.getpid(), what]), flush=True)

    def durable(store: PrefixStore, batch: list[list[int]]) -> None:
        assert store.writer.flush(20) and not store.writer.counters.faults
        if rng.random() < 0.5:
            store.writer.merge()
        for prompt in batch:
            say(prompt)

    if model not in MODELS:
        rt, pool = runtime(Path(model), Path(folder)), []
        say(None)
        while True:
            batch = [engine_prompt(rng, pool) for _ in range(rng.randint(1, 3))]
            for prompt in batch:
                run(rt, prompt, max_tokens=rng.randint(1, 8))
            assert rt.store is not None
            durable(rt.store, batch)
            if rng.random() < 0.3:
                rt.store.close()
                rt = reopened(rt, Path(folder))
    say(None)
    while True:
        store = MODELS[model].open(Path(folder))
        for _ in range(rng.randint(1, 4)):
            batch = [prompts(rng) for _ in range(rng.randint(1, 3))]
            for prompt in batch:
                ask(MODELS[model], store, prompt, ends=(rng.randint(1, 9),), more=(1, 2, 3))
            durable(store, batch)
        store.close()


class Victims:
    """A source of processes to kill. ``one`` starts one and kills it ``after`` so many seconds, counted from its start
    or, with ``first``, from when it said that something was durable; gives the prompts it said were."""

    def __init__(self) -> None:
        self.source = subprocess.Popen(
            [sys.executable, "-m", "tests.cache.kills"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # what was said is read here, not kept in a buffer
        )

    def one(self, model: str, folder: Path, seed: int, after: float, *, first: bool = False) -> list[list[int]]:
        assert self.source.stdin is not None and self.source.stdout is not None
        self.source.stdin.write(json.dumps([model, str(folder), seed]).encode() + b"\n")
        self.source.stdin.flush()
        pid, _ = json.loads(self.source.stdout.readline())
        said, fd = self.source.stdout.readline() if first else b"", self.source.stdout.fileno()
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)
        while not said.endswith(b"gone\n"):  # the source says so once it has buried its child
            assert select.select([fd], [], [], 30)[0]
            more = os.read(fd, 1 << 16)
            assert more, "the victim ended by itself"
            said += more
        # a line that was cut off by the kill was not said
        lines = said.removesuffix(b"gone\n").split(b"\n")[:-1]
        return [json.loads(line)[1] for line in lines]

    def close(self) -> None:
        assert self.source.stdin is not None and self.source.stdout is not None
        self.source.stdin.close()
        self.source.wait(30)
        self.source.stdout.close()


def killed_once(victims: Victims, folder: Path, rng: random.Random) -> int:
    """Kill a writer at a random moment; what it reported durable is there, and the folder is sound."""
    model = rng.choice(sorted(MODELS))
    durable = victims.one(model, folder, rng.randrange(1 << 32), rng.random() * 0.08, first=rng.random() < 0.5)
    store = MODELS[model].open(folder)
    for prompt in durable:
        got = ask(MODELS[model], store, prompt, keep=False)
        assert got.reason is None, f"{prompt} was reported durable: {got}"
    verify(folder, store)
    assert not store.faults and not list((folder / "quarantine").iterdir())
    store.close()
    return len(durable)


def missing_blocks(store: PrefixStore, prompt: list[int]) -> list[int]:
    """Where full blocks of a prompt begin whose rows do not stand in the index."""
    space = store.space()
    parent, missing = space.root, []
    for start in range(0, (len(prompt) - 1) // space.block * space.block, space.block):
        parent = space.key(parent, prompt[start : start + space.block])
        if not set(store.layout.kinds) - {"state"} <= {kind for kind, _ in store.index.records_of(parent)}:
            missing.append(start)
    return missing


def main() -> None:
    for line in sys.stdin:
        model, folder, seed = json.loads(line)
        if (pid := os.fork()) == 0:
            victim(model, folder, seed)  # ends by a kill; if not, by an error
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        print("gone", flush=True)


if __name__ == "__main__":
    main()
