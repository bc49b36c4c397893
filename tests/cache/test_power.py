"""Power fails at any moment of writing: what was reported durable is there, nothing wrong is served."""

from __future__ import annotations

import random
import shutil

import pytest

from mlxkv.cache.record import Reader
from tests.cache.machine import scratch
from tests.cache.power import Disk, Tape, found_after, recorded
from tests.cache.synthetic import BLOCK, MODELS, ask

MODEL = MODELS["mixed"]
FIRST = [1, 2, 3, 4, 5, 6, 7, 8, 9]
LONGER, BRANCH = [*FIRST, 1, 1, 1, 1], [1, 2, 3, 4, 5, 9, 9]
LONGEST = [*LONGER, 2, 2, 2]
PROMPTS = [FIRST, LONGER, BRANCH]


@pytest.fixture(scope="module")
def tape() -> Tape:
    return record()


def record() -> Tape:
    """A chat, a branch of it, merging, and an entry whose rows are written again because those before them were
    evicted."""
    with scratch() as base, recorded(base / "c") as tape:
        folder = base / "c"
        store = MODEL.open(folder)
        durable: list[list[int]] = []
        tape.mark(folder, durable)

        def go(prompt: list[int], *ends: int) -> None:
            ask(MODEL, store, prompt, ends=ends, more=(1, 2, 3))
            assert store.writer.flush(20)
            durable.append(prompt)
            tape.mark(folder, durable)

        for prompt in PROMPTS:
            go(prompt, 2, 6)
        store.writer.merge()
        assert store.writer.flush(20) and store.writer.counters.merged_blocks
        tape.mark(folder, durable)
        go(LONGEST, 10)
        store.writer.merge()
        assert store.writer.flush(20)
        tape.mark(folder, durable)
        for path in sorted((folder / "records").rglob("*.rows.safetensors")):
            with Reader.open(path) as reader:
                first_leaf = reader.meta.start == 0 and reader.meta.end < BLOCK
            if first_leaf:
                durable.clear()
                tape.mark(folder, durable)
                path.unlink()
        for prompt in PROMPTS:
            go(prompt, 6)
        store.close()
    assert {op[0] for op in tape.ops} == {
        "create", "write", "fsync", "mkdir", "unlink", "rename", "index", "durable",
    }  # fmt: skip
    return tape


@pytest.mark.parametrize("honest", [True, False], ids=["after-barriers", "barriers-that-lie"])
def test_power_fails_at_any_moment(tape, honest):
    rng = random.Random(5)
    with scratch() as base:
        for upto in sorted(rng.sample(range(len(tape.ops) + 1), 25)):
            found_after(Disk(tape, upto, rng, honest=honest), base / "d", MODEL, PROMPTS)
            shutil.rmtree(base / "d")
