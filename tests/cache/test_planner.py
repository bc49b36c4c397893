"""Random conversations on one store: it goes as far as was stored, no further, and gives the cold answer."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxkv.cache.index import Entry, Index
from mlxkv.cache.keys import KeySpace, common, pack
from tests import tiny
from tests.cache.stores import records, reopened
from tests.probe import BLOCK, TOLERANCE, run, runtime

#: relative difference of logits that mlx-lm's sums allow (tests/cache/test_equality.py)
BOUND = {"llama": TOLERANCE, "qwen3_5": TOLERANCE, "gemma3_text": max(2e-6, TOLERANCE)}
QUIET = settings(
    max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
)


class Runs(tuple):
    """(architecture, a runtime, cold logits by prompt)"""

    def __repr__(self) -> str:  # a failing example prints it
        return self[0]


@pytest.fixture(scope="module", params=BOUND)
def runs(request, tiny_model, tmp_path_factory):
    rt = runtime(tiny_model(request.param), tmp_path_factory.mktemp("planner"), prefill_chunk=12)
    rt.store.close()
    return Runs((request.param, rt, {}))


# (how much of which earlier sequence, new ids, sampled tokens, what happens to the store afterwards)
STEP = st.tuples(
    st.integers(0, 7),
    st.integers(0, 40),
    st.lists(st.sampled_from([1, 2, tiny.EOS]), max_size=12),
    st.integers(1, 5),
    st.sampled_from(["", "", "", "reopen", "remove"]),
)


class Kept:
    """What a store must be able to resume, and may: positions of sequences, found by comparing lists. A longer prompt's
    n-1 supersedes those before it; until they are deleted they may still be used."""

    def __init__(self, layout) -> None:
        self.layout = layout
        self.sequences: list[list[int]] = []
        self.points: set[tuple[int, ...]] = set()
        self.tips: set[tuple[int, ...]] = set()
        self.superseded: set[tuple[int, ...]] = set()

    def best(self, prompt: list[int]) -> tuple[int, int]:
        """(at least, at most)"""
        limit = len(prompt) - 1
        if self.layout.growing_only:
            n = max([min(limit, common(pack(s), pack(prompt))) for s in self.sequences], default=0)
            return n, n
        least, most = (
            max([len(p) for p in points if len(p) <= limit and list(p) == prompt[: len(p)]], default=0)
            for points in (self.points, self.points | self.superseded)
        )
        return least, most

    def add(self, prompt: list[int], sampled: list[int], resumed: int) -> None:
        """A run that resumed at ``resumed`` passes the boundaries before it over."""
        whole = [*prompt, *sampled[:-1]]
        ends = {i for i in range(1, len(prompt) - 1) if prompt[i - 1] == tiny.EOS} | {len(prompt) - 1, len(whole)}
        if not self.layout.needs_state:
            ends |= set(range(BLOCK, len(whole), BLOCK))
        self.sequences.append(whole)
        new = {tuple(whole[:e]) for e in ends if e > resumed} - self.points
        self.points |= new
        end = tuple(prompt[:-1])
        if self.layout.needs_state:
            self.tips = (self.tips - new) | ({end} & new)
            old = {t for t in self.tips if len(t) < len(end) and end[: len(t)] == t and t[-1] != tiny.EOS}
            self.points -= old
            self.superseded |= old


@QUIET
@given(
    steps=st.lists(STEP, min_size=3, max_size=8),
    pick=st.randoms(use_true_random=False),
    ram=st.sampled_from([0, 60_000, 1 << 30]),
)
def test_any_sequence_of_runs(runs, steps, pick, ram):
    arch, rt, cold = runs
    folder = Path(tempfile.mkdtemp(prefix="mlxkv-planner-"))
    rt = reopened(rt, folder / "c", ram_budget=ram)
    kept, damaged, sequences = Kept(rt.layout), False, [[1]]
    try:
        for which, length, new, count, after in steps:
            prompt = (sequences[which % len(sequences)][:length] + new)[:40] or [1]
            logits, completion = run(rt, prompt, max_tokens=count)
            if (key := tuple(prompt)) not in cold:
                cold[key] = run(rt, prompt, use_cache=False)[0]
            assert np.abs(logits - cold[key]).max() <= BOUND[arch] * np.abs(cold[key]).max()
            cached, reason = completion.usage.cached_tokens, completion.cache.miss_reason
            assert (reason is None) == (cached == len(prompt) - 1)
            least, most = kept.best(prompt)
            assert (0 if damaged else least) <= cached <= most, (prompt, reason)
            kept.add(prompt, completion.token_ids, cached)
            sequences.append([*prompt, *completion.token_ids])
            assert rt.store.writer.flush(10)
            assert not rt.store.writer.counters.faults
            if after == "reopen":
                rt.store.close()
                rt = reopened(rt, folder / "c", ram_budget=ram)
            elif after == "remove" and (files := records(folder)):
                pick.choice(files).unlink()
                damaged = True
    finally:
        rt.store.close()
        shutil.rmtree(folder)


def test_every_length_stored_and_restored(runs, tmp_path):
    """Prompts of 2 to 40 tokens of one text, longest to shortest and back."""
    arch, rt, _ = runs
    rt = reopened(rt, tmp_path / "c")
    text = tiny.ids(40, seed=4)
    for n in [*range(40, 0, -4), *range(2, 41, 5)]:
        logits, completion = run(rt, text[:n])
        cold, _ = run(rt, text[:n], use_cache=False)
        assert np.abs(logits - cold).max() <= BOUND[arch] * np.abs(cold).max()
        rt.store.writer.flush()
        _, again = run(rt, text[:n], keep=False)
        assert again.usage.cached_tokens == n - 1 and again.cache.miss_reason is None
    rt.store.close()


def test_no_writer_no_hit(runs, tmp_path):
    """With no room in the queue nothing is stored, and nothing is said to be."""
    arch, rt, _ = runs
    rt = reopened(rt, tmp_path / "c", disk_floor=1 << 60)
    prompt = tiny.ids(20, seed=5)
    for _ in range(2):
        _, completion = run(rt, prompt)
        assert completion.usage.cached_tokens == 0 and completion.cache.miss_reason == "empty"
        rt.store.writer.flush()
    assert rt.store.writer.stopped_because
    rt.store.close()


IDS = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(stored=st.lists(IDS, max_size=25), asked=IDS)
def test_children_are_those_that_matter(stored, asked):
    """The index looks at few of the entries that hang on a parent; a scan of all of them finds nothing better."""
    space = KeySpace(b"r" * 32, BLOCK)
    with tempfile.TemporaryDirectory() as folder:
        index = Index(Path(folder))
        for ids in stored:
            packed = pack(ids)
            key = space.key_packed(space.root, packed)
            index.add_entry(Entry(key, space.root, space.root, 0, len(ids), 0, None, packed, frozenset()), {"rows": 1})
        found = index.children(space.root, pack(asked))
        index.close()
    lists = [list(np.frombuffer(e.tokens, "<u4")) for e in found]
    prefixes = sorted({tuple(s) for s in stored if asked[: len(s)] == s}, key=len, reverse=True)
    assert [tuple(x) for x in lists if asked[: len(x)] == x] == prefixes
    longest = max((common(pack(s), pack(asked)) for s in stored), default=0)
    assert max((common(e.tokens, pack(asked)) for e in found), default=0) == longest
    assert bool(found) == bool(stored)  # else a miss would say that nothing is stored here


def test_looking_up_does_not_cost_more_with_more_neighbours(runs, tmp_path):
    """2,000 other conversations that begin alike: a look-up reads a handful of rows, not all."""
    _, rt, _ = runs
    rt = reopened(rt, tmp_path / "c")
    space, index = rt.store.space(), rt.store.index
    with index.transaction():
        for i in range(2000):
            packed = pack([1, 2, 3, 4, 1000 + i])
            key = space.key_packed(space.root, packed)
            index.add_entry(Entry(key, space.root, space.root, 0, 5, 0, None, packed, frozenset()), {"rows": 1})
    assert len(index.children(space.root, pack([1, 2, 3, 4, 5, 6]))) <= 24
    rt.store.close()
