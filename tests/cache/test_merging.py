"""Merging: the pieces of a block become one file at idle, and nothing that could be resumed is lost by it."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from mlxkv.cache.catalogue import Forest, look
from mlxkv.cache.eviction import free
from mlxkv.cache.folder import CacheFolder
from mlxkv.cache.ledger import minimum
from mlxkv.cache.merging import Merger
from mlxkv.cache.policy import Policy
from mlxkv.cache.record import Reader
from mlxkv.cache.store import PrefixStore, stats
from mlxkv.cache.verify import verify as verify_all
from tests import tiny
from tests.cache.machine import scratch
from tests.cache.stores import records, reopened
from tests.cache.synthetic import MODELS, Model, ask, verify
from tests.probe import equal, run, runtime

BLOCK = 16


@pytest.fixture
def folder() -> Iterator[Path]:
    with scratch() as base:
        yield base


def merged(store: PrefixStore) -> PrefixStore:
    assert store.writer.flush(20) and store.writer.merge() and store.writer.flush(20)
    return store


def rows(folder: Path) -> dict[int, tuple[int, int]]:
    """End of an entry -> the rows that are in its file (one conversation alone)."""
    out = {}
    for path in records(folder, "rows"):
        with Reader.open(path) as reader:
            out[reader.meta.end] = (reader.meta.row_start, reader.meta.end)
    return out


def talk(model: Model, folder: Path, turns: int = 9, **options) -> tuple[PrefixStore, list[list[int]]]:
    """A conversation of turns of six tokens; the store is returned open, with the prompt of each turn."""
    store = model.open(folder, block=BLOCK, **options)
    prompts, tokens = [], [7, 7]
    for turn in range(turns):
        tokens = [*tokens, turn % 5 + 1, 2, 3]
        ask(model, store, tokens, more=(1, 2, 3))
        assert store.writer.flush(20)
        prompts.append(list(tokens))
        tokens = [*tokens, 1, 2, 3]
    return store, prompts


def answers(model: Model, store: PrefixStore, prompts: list[list[int]]) -> list[tuple]:
    """What is restored of each prompt, and of each cut after its answer and inside it."""
    out = []
    for prompt in prompts:
        for asked in (prompt, [*prompt, 1, 2, 9, 9], prompt[:-1]):
            found = ask(model, store, asked, keep=False)
            out.append((found.tokens, found.reason))
        out.append(store.answer_ids(prompt, "1 2 3"))
    return out


def test_a_hundred_turns_are_merged(tiny_model, folder):
    """Every earlier boundary still resumes, from far fewer files, with the logits of a cold run."""
    rt = runtime(tiny_model("qwen3_5"), folder / "c")
    tokens: list[int] = []
    for turn in range(100):
        tokens = [*tokens, *tiny.ids(1, seed=turn), tiny.EOS]
        run(rt, tokens)
    assert rt.store.writer.flush(30)
    asked = [[*tokens[:end], 5] for end in range(2, len(tokens) + 1, 2)]
    before = [rt.store.lookup(prompt).position for prompt in asked]
    assert before[1:] == [end for end in range(4, len(tokens) + 1, 2)]
    files, weight = records(folder / "c"), sum(p.stat().st_size for p in records(folder / "c", "rows"))
    written = rt.store.writer.counters.written_bytes
    merged(rt.store)
    counters = rt.store.writer.counters
    assert counters.merged_blocks == 200 // 8 and counters.written_bytes == written and not counters.faults
    assert counters.merged_bytes > 0 and len(records(folder / "c")) == len(files) - counters.merged_files
    assert len(records(folder / "c", "rows")) < 0.75 * len([p for p in files if ".rows." in p.name])
    assert sum(p.stat().st_size for p in records(folder / "c", "rows")) < weight
    assert stats(folder / "c")["merged_today"] == counters.merged_bytes
    rt.store.close()
    rt = reopened(rt, folder / "c")
    assert [rt.store.lookup(prompt).position for prompt in asked] == before
    for prompt, position in list(zip(asked, before, strict=True))[1::14]:
        logits, completion = run(rt, prompt, keep=False)
        assert completion.usage.cached_tokens == position and completion.cache.miss_reason is None
        assert equal(logits, run(rt, prompt, use_cache=False)[0])
    assert not rt.store.faults
    rt.store.close()


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_lost(name):
    """What could be restored before can be after, from RAM's view too, in another process, and from a new index; the
    files say nothing twice."""
    model = MODELS[name]
    with scratch() as base:
        folder = base / "c"
        store, prompts = talk(model, folder, ram_budget=1 << 20)
        before, many = answers(model, store, prompts), len(records(folder))
        merged(store)
        assert len(records(folder)) < many and store.writer.counters.merged_files
        assert answers(model, store, prompts) == before
        verify(folder, store)
        held = {(a, b) for a, b in rows(folder).values() if a < b}
        assert sum(b - a for a, b in held) == max(rows(folder))
        full = range(0, max(rows(folder)) // BLOCK * BLOCK, BLOCK)
        assert {(a, b) for a, b in held if b % BLOCK == 0} == {(a, a + BLOCK) for a in full}
        there = records(folder)
        assert merged(store).writer.counters.merged_blocks == len(full) and records(folder) == there
        store.close()
        for how in ("as it is", "new index"):
            if how == "new index":
                (folder / "index.sqlite").unlink()
            store = model.open(folder, block=BLOCK)
            assert answers(model, store, prompts) == before, how
            assert not store.faults and records(folder) == there
            verify(folder, store)
            store.close()
            found = verify_all(folder)
            assert not found.findings and not found.unreachable
        # and the conversation goes on, also from a place whose rows are in a block
        store = model.open(folder, block=BLOCK)
        branch = [*prompts[3], 9, 9, 9, 9, 9, 9, 9, 9]
        ask(model, store, branch)
        assert store.writer.flush(20)
        assert ask(model, store, branch, keep=False).reason is None
        assert answers(model, merged(store), prompts) == before
        assert ask(model, store, branch, keep=False).reason is None
        assert sum(b - a for a, b in rows(folder).values()) <= max(rows(folder)) + len(branch)
        store.close()
        found = verify_all(folder)
        assert not found.findings and not found.unreachable


def test_what_another_branch_hangs_on_stays(folder):
    """Rows that two blocks share are not written twice; they are merged once the other branch is gone."""
    model = MODELS["recurrent"]
    shared = [1, 2, 3, 4, 5, 6]
    one, two = [*shared, *[1] * 12], [*shared, *[2] * 12]
    store = model.open(folder / "c", block=BLOCK)
    for prompt in (shared, [*shared, 1, 1, 1], one, two):
        ask(model, store, prompt, ends=(5,), more=(1,))
        assert store.writer.flush(20)
    merged(store)
    spans = sorted(
        (m.row_start, m.end)
        for path in records(folder / "c", "rows")
        for m in [Reader.open(path).meta]
        if m.row_start < m.end <= BLOCK
    )
    assert (0, 5) in spans and (0, BLOCK) not in spans and len([s for s in spans if s[1] == BLOCK]) == 2
    for prompt in (one, two, shared):
        assert ask(model, store, prompt, keep=False).reason is None
    verify(folder / "c", store)
    store.close()


@pytest.mark.parametrize("where", ["rows alone", "not entered", "leaves left", "a window left"])
def test_a_merge_that_was_cut_short(where, folder):
    """Nothing is lost, nothing is said to be damaged, and the next pass does the rest."""
    model = MODELS["mixed"]
    store, prompts = talk(model, folder / "a", turns=6)
    before = answers(model, store, prompts)
    store.close()
    shutil.copytree(folder / "a", folder / "b")
    store = model.open(folder / "b", block=BLOCK)
    merged(store).close()
    done = {p.name for p in records(folder / "b")}
    if where == "leaves left":
        with mock.patch.object(Merger, "_absorb", lambda self, key: None):
            store = model.open(folder / "a", block=BLOCK)
            merged(store).close()
        assert {p.name for p in records(folder / "a")} > done
    else:
        for path in records(folder / "b"):
            with Reader.open(path) as reader:
                m = reader.meta
            to = folder / "a" / path.relative_to(folder / "b")
            if m.end % BLOCK == 0 and (m.kind == "rows" or where != "rows alone"):
                shutil.copy(path, to)
        if where == "a window left":
            for path in records(folder / "a", "rows"):
                if path.name not in done:
                    path.unlink()
    store = model.open(folder / "a", block=BLOCK)
    assert answers(model, store, prompts) == before
    verified = verify_all(folder / "a")
    assert not verified.findings and not verified.unreachable
    merged(store)
    assert answers(model, store, prompts) == before and not store.faults and not store.writer.counters.faults
    assert {p.name for p in records(folder / "a")} == done
    verify(folder / "a", store)
    store.close()


def test_two_processes(folder):
    """One merges what the other is going on from: its next records hang on the block."""
    model = MODELS["mixed"]
    first, prompts = talk(model, folder / "c", turns=8)
    other = model.open(folder / "c", block=BLOCK)
    real, done = other.restore, []

    def restore(*args, **more):
        found = real(*args, **more)
        if not done:  # planned and read; what it records will hang on a leaf
            done.append(merged(first))
        return found

    branch = [*prompts[2], 9, 9, 9]
    other.restore = restore
    ask(model, other, branch)
    assert other.writer.flush(20) and done and other.writer.counters.skipped_drafts == 0
    other.restore = real
    plan = other.lookup(branch)
    with mock.patch.object(other, "lookup", return_value=plan):
        assert ask(model, other, branch, keep=False).reason is None
    stale = first.lookup(prompts[4])
    ask(model, other, [*prompts[4], 4, 4])
    merged(other)
    with mock.patch.object(first, "lookup", return_value=stale):
        assert ask(model, first, prompts[4], keep=False).reason is None
    verify(folder / "c", first)
    assert not verify_all(folder / "c").unreachable
    for store in (first, other):
        store.close()


def test_a_plan_from_before(folder):
    """Files that were merged between a look-up and its restore are found where they are now."""
    model = MODELS["mixed"]
    store, prompts = talk(model, folder / "c", turns=8)
    other = model.open(folder / "c", block=BLOCK)
    plan = other.lookup(prompts[2])
    merged(store)
    with mock.patch.object(other, "lookup", return_value=plan):
        assert ask(model, other, prompts[2], keep=False).reason is None and not other.faults
    other.close()
    store.close()


def test_it_costs_no_more_than_it_may(folder):
    """Without room in the folder, or in the day's writes, nothing is evicted and nothing is merged."""
    model = MODELS["mixed"]
    store, prompts = talk(model, folder / "c", turns=6)
    before, there = answers(model, store, prompts), records(folder / "c")
    used = stats(folder / "c")["written_today"]
    store.close()
    store = model.open(folder / "c", block=BLOCK, policy=Policy(daily=used * 4 // 3))
    assert merged(store).writer.counters.merged_bytes == 0 and records(folder / "c") == there
    store.close()
    store = model.open(folder / "c", block=BLOCK)
    with mock.patch.object(type(store.ledger), "reserve", side_effect=_no_room):
        merged(store)
    assert records(folder / "c") == there and not store.writer.counters.faults
    assert answers(model, store, prompts) == before
    store.close()


def test_the_budget_holds_while_it_merges(folder):
    """At every write and rename, with a budget that is nearly used up: what the files weigh is never over it."""
    model = MODELS["mixed"]
    budget = minimum(model.layout, BLOCK) + (160 << 10)
    over, seen = [], 0

    def watched(real):
        def call(*args, **more):
            nonlocal seen
            out = real(*args, **more)
            seen += 1
            if (size := store.folder.size()) > budget:
                over.append(size)
            return out

        return call

    store, prompts = talk(model, folder / "c", turns=16, budget=budget)
    room = budget - store.index.charge()
    (folder / "c" / "foreign").write_bytes(bytes(room - 8000))  # the block's file and the index's growth have no place
    store.ledger.rescan(every=0)
    with mock.patch.object(os, "write", watched(os.write)), mock.patch.object(os, "replace", watched(os.replace)):
        assert merged(store).writer.counters.merged_blocks == 0
        (folder / "c" / "foreign").write_bytes(bytes(max(0, room - (140 << 10))))
        store.ledger.rescan(every=0)
        assert merged(store).writer.counters.merged_blocks == len(prompts) * 6 // BLOCK
    assert seen and not over
    verify(folder / "c", store)
    assert all(ask(model, store, prompt, keep=False).reason is None for prompt in prompts)
    store.close()


def _no_room(*args, **more):
    from mlxkv.cache.index import OverBudget

    raise OverBudget(1)


def test_a_damaged_piece_is_left_for_a_look_up(folder):
    model = MODELS["mixed"]
    store, prompts = talk(model, folder / "c", turns=6)
    victim = next(p for p in records(folder / "c", "rows") if Reader.open(p).meta.end == 7)
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    merged(store)
    assert store.writer.counters.merged_blocks == len(prompts) * 6 // BLOCK - 1 and victim.read_bytes() == data
    assert ask(model, store, prompts[1], keep=False).reason == "corrupt" and not victim.exists()
    store.close()


def test_states_go_before_the_block_that_has_their_rows(folder):
    """Eviction never takes what a state still needs; a leaf that nothing keeps any more is forgotten."""
    model = MODELS["mixed"]
    store, prompts = talk(model, folder / "c", turns=6)
    merged(store)
    while free(store.folder, store.index, 1).records:
        with look(folder / "c") as index:
            assert index is not None
            held = Forest(index.items())
        assert all(held.chain(item)[1] is None for item in held.items.values())
        verify(folder / "c", store)
    assert not records(folder / "c") and not held.items
    assert ask(model, store, prompts[0], keep=False).tokens == 0
    store.close()


def test_ends_of_conversations_and_their_removal(folder):
    """Leaves inside a block are no ends; all can be removed, outermost first."""
    model = MODELS["window"]
    store, _ = talk(model, folder / "c", turns=6)
    with look(folder / "c") as index:
        before = [item.end for item in Forest(index.items()).ends()]
    merged(store).close()
    with look(folder / "c") as index:
        held = Forest(index.items())
    assert [item.end for item in held.ends()] == before and len(held.tips()) > len(before)
    order = held.above([item.key for item in held.items.values() if item.start == 0])
    gone: set[bytes] = set()
    for item in order:
        assert all(other.key in gone for other in held.hanging(item.key))
        gone.add(item.key)
    assert gone == {*held.items}


def test_it_happens_at_idle_and_not_during_a_request(folder):
    model = MODELS["mixed"]
    store, prompts = talk(model, folder / "c", turns=6, policy=Policy(idle_s=0.05))
    end = time.monotonic() + 20
    while not store.writer.counters.merged_files and time.monotonic() < end:
        time.sleep(0.02)
    assert store.writer.counters.merged_files
    assert ask(model, store, prompts[1], keep=False).reason is None
    store.close()
    store, prompts = talk(model, folder / "d", turns=6)
    with mock.patch.object(store, "_running", lambda: mock.Mock(done=False)):
        merged(store)
    assert store.writer.counters.merged_files == 0 and os.listdir(folder / "d" / "tmp") == []
    store.close()


def test_files_that_go_before_the_index_says_so(folder):
    """Who meets a file that is gone, while the transaction that merges it is still open, waits for that: nothing was
    evicted, and nothing of the leaf is forgotten."""
    model = MODELS["mixed"]
    store, prompts = talk(model, folder / "c", turns=8)
    other = model.open(folder / "c", block=BLOCK)
    plans = [other.lookup(prompt) for prompt in prompts]
    real, gone = CacheFolder.remove, threading.Event()

    def remove(self, key: bytes, kind: str) -> None:
        real(self, key, kind)
        if self is store.folder and kind == "rows" and not gone.is_set():
            gone.set()
            time.sleep(0.3)

    with mock.patch.object(CacheFolder, "remove", remove):
        assert store.writer.flush(20) and store.writer.merge() and gone.wait(20)
        for prompt, plan in zip(prompts, plans, strict=True):
            with mock.patch.object(other, "lookup", return_value=plan):
                assert ask(model, other, prompt, keep=False).reason is None
    assert store.writer.flush(20) and not other.faults
    verify(folder / "c", store)
    assert not verify_all(folder / "c").unreachable
    for each in (store, other):
        each.close()
