"""What goes when space is short: the oldest use first, the outermost first, and never what is needed now."""

from __future__ import annotations

import dataclasses
import time
from types import SimpleNamespace

import pytest

from mlxkv.cache import keeper
from mlxkv.cache.eviction import evict, free
from mlxkv.cache.ledger import minimum
from tests.cache.drafts import BLOCK, LAYOUT, chain, entry, held, open_store, put, tokens
from tests.cache.stores import Written, prompt, records, reopened
from tests.probe import run


@pytest.fixture
def store(tmp_path):
    made = open_store(tmp_path / "c")
    yield made
    made.close()


def test_children_go_before_parents_and_states_before_rows(store):
    drafts = chain(store, tokens(1, 3 * BLOCK))
    put(store, drafts)
    seen = []
    while free(store.folder, store.index, 1).records:
        seen.append(held(store, drafts))
    whole = "rows+state"
    # the state that is used least recently, and rows once nothing hangs on them
    assert seen == [
        ["rows", whole, whole],
        ["rows", "rows", whole],
        ["rows", "rows", "rows"],
        ["rows", "rows", ""],
        ["rows", "", ""],
        ["", "", ""],
    ]
    assert not records(store.folder.path) and store.index.execute("SELECT count(*) FROM entries").fetchone() == (0,)


def test_pieces_stay_while_a_block_needs_them(store):
    ids = tokens(2, BLOCK)
    first = entry(store, store.space().root, 0, ids[:5], states=False)
    second = entry(store, store.space().root, 0, ids[:11], base=first, states=False)
    block = entry(store, store.space().root, 0, ids, base=second, states=False)
    later = chain(store, tokens(3, BLOCK), states=False)
    for draft in (first, second, block, *later):
        put(store, [draft])
    seen = []
    while free(store.folder, store.index, 1).records:
        seen.append(held(store, [first, second, block, *later]))
    assert seen == [
        ["rows", "rows", "", "rows"],
        ["rows", "", "", "rows"],
        ["", "", "", "rows"],  # a chain is as old as its last use
        ["", "", "", ""],
    ]


def test_a_chain_that_was_used_stays(store):
    old, new = (chain(store, tokens(seed, 3 * BLOCK), states=False) for seed in (4, 5))
    put(store, old)
    put(store, new)
    store.index.touch([old[-1].meta.key])
    free(store.folder, store.index, sum(size for d in new for _, size in store.index.records_of(d.meta.key)))
    assert held(store, old) == ["rows"] * 3 and held(store, new) == [""] * 3


def test_what_is_pinned_stays_and_what_it_hangs_on(store):
    pinned, other = (chain(store, tokens(seed, 3 * BLOCK)) for seed in (6, 7))
    put(store, pinned)
    put(store, other)
    free(store.folder, store.index, 1 << 40, pinned={pinned[1].meta.key})
    assert held(store, pinned) == ["rows", "rows+state", ""] and held(store, other) == [""] * 3


def test_uses_keep_their_order_when_the_clock_goes_back(tmp_path, monkeypatch):
    """Across a restart, too: what was used last is used last, whatever the clock said."""
    store = open_store(tmp_path / "c")
    drafts = [chain(store, tokens(seed, BLOCK), states=False)[0] for seed in range(4)]
    for draft in drafts:
        put(store, [draft])
    real = time.time
    with monkeypatch.context() as m:
        m.setattr(time, "time", lambda: real() - 1e6)
        store.index.touch([drafts[0].meta.key])
    store.close()
    with monkeypatch.context() as m:
        m.setattr(time, "time", lambda: real() - 2e6)
        store = open_store(tmp_path / "c")
        store.index.touch([drafts[1].meta.key])
        assert free(store.folder, store.index, 1).records == 1
        assert held(store, drafts) == ["rows", "rows", "", "rows"]
        for left in (["rows", "rows", "", ""], ["", "rows", "", ""]):
            free(store.folder, store.index, 1)
            assert held(store, drafts) == left
    store.close()


def test_restoring_is_a_use(tiny_model, tmp_path):
    """A prompt that was restored survives one that was stored later; the uses are noted by closing the store."""
    written = Written(tiny_model("qwen3_5"), tmp_path / "c")
    rt = written.at(tmp_path / "c")
    other = prompt(seed=9)
    run(rt, other)
    rt.store.writer.flush()
    written.ask(rt)
    rt.store.close()
    rt = reopened(written.rt, tmp_path / "c")
    while (left := run(rt, other, keep=False)[1].usage.cached_tokens) > 0:
        free(rt.store.folder, rt.store.index, 1)
        assert written.ask(rt)[0] > 0
    assert left == 0
    rt.store.close()


def test_evict_comes_down_to_a_size_and_says_how_far_it_is(store):
    for seed in range(10):
        assert store.writer.submit(chain(store, tokens(seed, 2 * BLOCK)))
    store.writer.flush()
    store.index.checkpoint()
    said = []
    before = store.folder.size()
    done = evict(store.folder, store.index, before // 2, progress=lambda *p: said.append(p))
    assert before - done.bytes <= before // 2 and done.bytes < before // 2 + 100_000
    assert said[-1][0] == said[-1][1] and done.records > 10
    assert evict(store.folder, store.index, before).records == 0


def test_a_model_over_its_share_gives_first(tmp_path):
    """One model fills the folder; another's few entries, though older, stay."""
    small = open_store(tmp_path / "c", "small", budget=8 << 20)
    few = chain(small, tokens(1, 4 * BLOCK))
    put(small, few)
    small.close()
    big = open_store(tmp_path / "c", "big", budget=8 << 20, share=0.3)
    for seed in range(24):
        put(big, chain(big, tokens(seed, BLOCK), weight=1 << 17))
    assert big.writer.counters.written_bytes > 12 << 20 and not big.writer.counters.faults
    big.close()
    small = open_store(tmp_path / "c", "small", budget=8 << 20)
    assert held(small, few) == ["rows+state"] * 4
    small.close()


def test_a_folder_too_small_for_its_tips_does_not_write_them_for_ever(tmp_path, monkeypatch):
    """Three conversations take turns where one tip has room: each is written twice, then an hour later again."""
    now = [1e6]
    monkeypatch.setattr(keeper, "time", SimpleNamespace(monotonic=lambda: now[0]))
    store = open_store(tmp_path / "c", budget=(5 << 20) // 2 + minimum(LAYOUT, BLOCK))
    drafts = [chain(store, tokens(seed, BLOCK), weight=1 << 19)[0] for seed in range(3)]  # 2 MiB of state
    for draft in drafts:
        draft.meta = dataclasses.replace(draft.meta, role="tip")

    def rounds(n: int) -> int:
        """How many states of them were written in ``n`` rounds."""
        before = store.writer.counters.written_bytes
        for draft in drafts * n:
            put(store, [draft])
        return round((store.writer.counters.written_bytes - before) / (2 << 20))

    assert rounds(6) == 6
    assert store.writer.counters.skipped.again == 8 * (2 << 20)  # one of the three is still there
    assert rounds(2) == 0 and not store.writer.counters.faults
    now[0] += 3601
    assert rounds(6) == 6
    drafts[:] = [dataclasses.replace(d, meta=dataclasses.replace(d.meta, role="message")) for d in drafts]
    assert rounds(3) > 6  # other states have the budget of their chain, and the day's
    store.close()
