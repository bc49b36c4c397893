"""Merged blocks and what else happens to a folder: records that wait, pruning, replacement, quantised rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxkv.cache.catalogue import take
from mlxkv.cache.folder import CacheFolder
from mlxkv.cache.removal import Pruning, plan_pruning, prune
from mlxkv.cache.verify import verify as verify_all
from tests.cache.machine import scratch
from tests.cache.stores import records, remove, reopened
from tests.cache.synthetic import MODELS, ask, verify
from tests.cache.test_merging import BLOCK, answers, merged, talk
from tests.probe import run, runtime


@pytest.fixture
def folder() -> Iterator[Path]:
    with scratch() as base:
        yield base / "c"


@pytest.mark.parametrize(("name", "at_once"), [("growing", 0), ("kept", 3), ("chunked", 3), ("list", 0), ("mixed", 3)])
def test_merged_records_wait_to_be_taken_in(folder, name, at_once):
    """A new index of merged blocks finds all again, however it is filled; until then a miss says that it may."""
    model = MODELS[name]
    store, prompts = talk(model, folder)
    before = answers(model, merged(store), prompts)
    store.close()
    there = records(folder)
    (folder / "index.sqlite").unlink()
    store = model.open(folder, block=BLOCK, at_once=at_once, behind=False)
    for (tokens, reason), (whole, _) in zip(
        [a for a in answers(model, store, prompts) if isinstance(a, tuple)],
        [a for a in before if isinstance(a, tuple)],
        strict=True,
    ):
        assert tokens <= whole and (tokens == whole or reason == "pending")
    store.close()
    (folder / "index.sqlite").unlink()
    store = model.open(folder, block=BLOCK, at_once=at_once)
    assert store.adopter is not None and store.adopter.wait(20)
    assert answers(model, store, prompts) == before
    assert not store.faults and records(folder) == there
    verify(folder, store)
    store.close()
    found = verify_all(folder)
    assert not found.findings and not found.unreachable


def test_nothing_is_merged_while_records_wait(folder):
    """A record that waits may hang on a piece."""
    model = MODELS["mixed"]
    store, prompts = talk(model, folder)
    before = answers(model, store, prompts)
    store.close()
    (folder / "index.sqlite").unlink()
    store = model.open(folder, block=BLOCK, at_once=4, behind=False)
    there = records(folder)
    assert merged(store).writer.counters.merged_blocks == 0 and records(folder) == there
    store.close()
    store = model.open(folder, block=BLOCK)
    assert store.adopter is not None and store.adopter.wait(20)
    assert merged(store).writer.counters.merged_blocks > 0
    assert answers(model, store, prompts) == before
    store.close()


def pruned(place: CacheFolder, before: float | None) -> Pruning:
    with take(place.path) as index:
        assert index is not None
        return prune(place, index, lambda: plan_pruning(place, index, to=None, before=before, model=None))


@pytest.mark.parametrize("name", ["growing", "window", "mixed"])
def test_merged_blocks_are_pruned(folder, name):
    """In the order of eviction; nothing counts as used meanwhile, and what is left can be used."""
    model = MODELS[name]
    store, prompts = talk(model, folder)
    merged(store)
    store.close()
    place = CacheFolder(folder)
    with take(folder) as index:
        assert index is not None
        used = sorted(item.used for item in index.items())
    done = pruned(place, before=used[len(used) // 2])
    assert done.entries and not done.kept
    store = model.open(folder, block=BLOCK)
    found = [ask(model, store, prompt, keep=False) for prompt in prompts]
    assert any(f.tokens for f in found) and not store.faults
    verify(folder, store)
    store.close()
    assert not verify_all(folder).unreachable
    done = pruned(place, before=None)
    assert done.entries and not done.kept and not records(folder)


def test_merging_goes_on_in_a_folder_that_was_made_anew(folder):
    model = MODELS["mixed"]
    store, _ = talk(model, folder)
    first = merged(store).writer.counters.merged_blocks
    remove(folder)
    tokens = [7, 7]
    for turn in range(9):
        tokens = [*tokens, turn % 5 + 1, 2, 3]
        ask(model, store, tokens, more=(1, 2, 3))
        assert store.writer.flush(20)
        tokens = [*tokens, 1, 2, 3]
    assert merged(store).writer.counters.merged_blocks > first > 0 and not store.faults
    verify(folder, store)
    store.close()


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_rows_are_merged_as_they_are(tiny_model, tmp_path, bits):
    """The same bits before and after, from RAM and from disk: nothing is quantised twice."""
    rt = runtime(tiny_model("qwen3_5"), tmp_path, store_bits=bits)
    tokens = [3]
    for turn in range(12):
        tokens = [*tokens, 5 + turn, 9]
        run(rt, tokens)
    asked = [[*tokens[:end], 5] for end in range(3, len(tokens), 4)]
    assert rt.store.writer.flush(30)
    before = [run(rt, prompt, keep=False) for prompt in asked]
    assert merged(rt.store).writer.counters.merged_blocks > 0
    for anew in (False, True):
        if anew:
            rt.store.close()
            rt = reopened(rt, tmp_path)
        for prompt, (logits, was) in zip(asked, before, strict=True):
            again, now = run(rt, prompt, keep=False)
            assert now.usage.cached_tokens == was.usage.cached_tokens
            assert (again == logits).all()
    assert not rt.store.faults
    rt.store.close()
