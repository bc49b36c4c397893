"""Two clients with the same long prefix, cut at different places: full blocks are stored once, and serve both."""

from __future__ import annotations

import sqlite3

import pytest

from tests.cache.machine import scratch
from tests.cache.synthetic import BLOCK, MODELS, ask, verify

PREFIX = list(range(1, 8 * BLOCK + 1))
#: where each client's messages end, and what it goes on with
CLIENTS = (((3, 9, 18, 27), [50, 51, 52]), ((5, 12, 22, 30), [60]))


def full_blocks(store) -> dict[str, tuple[int, int]]:
    """Name -> (inode, written at) of each record but the states of the full blocks of PREFIX."""
    space, parent, out = store.space(), store.space().root, {}
    for start in range(0, len(PREFIX), BLOCK):
        parent = space.key(parent, PREFIX[start : start + BLOCK])
        for kind, _ in store.index.records_of(parent):
            if kind != "state":
                info = store.folder.file(parent, kind).stat()
                out[f"{start} {kind}"] = (info.st_ino, info.st_mtime_ns)
    return out


@pytest.mark.parametrize("resumes", [True, False], ids=["resumes", "begins anew"])
@pytest.mark.parametrize("name", MODELS)
def test_all_full_blocks_are_shared(name, resumes):
    """The second client either goes on from what the first one left, or, where no state suits it, computes all again:
    it writes no full block in both cases."""
    model = MODELS[name]
    with scratch() as folder:
        first, second = model.open(folder / "c"), model.open(folder / "c")
        (ends, more), (other_ends, other_more) = CLIENTS
        ask(model, first, PREFIX + more, ends=ends if resumes else (), messages=True)
        assert first.writer.flush(20)
        blocks = full_blocks(first)
        kinds = [kind for kind in model.layout.kinds if kind != "state"]
        assert len(blocks) == len(kinds) * len(PREFIX) // BLOCK
        began = ask(model, second, PREFIX + other_more, ends=other_ends, messages=True).tokens
        assert resumes or not model.layout.needs_state or began == 0
        assert second.writer.flush(20)
        assert full_blocks(second) == blocks  # not one was written again
        for prompt in (PREFIX + more, PREFIX + other_more):
            for store in (first, second):
                assert ask(model, store, prompt, keep=False).reason is None
        for end in other_ends:  # each boundary that the second client made serves the first one
            if end > began:
                assert ask(model, first, [*PREFIX[:end], 99, 98], keep=False).tokens == end
        first.close()
        second.close()


@pytest.mark.parametrize("name", MODELS)
def test_clients_that_compute_the_same_at_once(name):
    """Neither sees what the other is about to write, and both write it: what is left is one of each, and whole, though
    they cut their blocks at different places."""
    model = MODELS[name]
    with scratch() as folder:
        stores = [model.open(folder / "c") for _ in CLIENTS]
        other = sqlite3.connect(folder / "c" / "index.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")  # no writer gets on
        for store, (ends, more) in zip(stores, CLIENTS, strict=True):
            assert ask(model, store, PREFIX + more, ends=ends, messages=True).tokens == 0
        other.execute("ROLLBACK")
        other.close()
        for store in stores:
            assert store.writer.flush(20) and not store.writer.counters.faults
        blocks = full_blocks(stores[0])
        kinds = [kind for kind in model.layout.kinds if kind != "state"]
        assert len(blocks) == len(kinds) * len(PREFIX) // BLOCK
        verify(folder / "c", stores[0])
        for store in stores:
            for _, more in CLIENTS:
                assert ask(model, store, PREFIX + more, keep=False).reason is None
            store.close()
