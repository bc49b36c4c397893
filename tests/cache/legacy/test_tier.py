"""The live legacy tier: a request that misses is served from a folder of oMLX's, the next one from our own store."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path

import mlx.core as mx
import pytest

from mlxkv.cache.legacy import tier
from mlxkv.cache.legacy.journal import Journal
from mlxkv.cache.legacy.omlx_keys import chain, file_of
from mlxkv.cache.restoring import RestoreCancelled
from mlxkv.cache.state import SequenceState
from mlxkv.decode.explain import explain
from mlxkv.decode.options import Options
from mlxkv.decode.request import Request, SamplingParams
from mlxkv.decode.runtime import Runtime
from tests import tiny
from tests.cache.stores import records
from tests.probe import BLOCK, equal, kept_in_memory, probe, run, runtime

from .harness import fingerprint, taken_in
from .omlx_writer import Style, save
from .stories import story

BORDERS = (8, 16, 24)
TOKENS = tiny.ids(30, seed=5)
for _end in BORDERS:
    TOKENS[_end - 1] = tiny.EOS


class Users:
    """A model, the folder that oMLX has left of it, and what a cold run gives."""

    def __init__(self, folder: Path, base: Path, **style) -> None:
        self.model, self.omlx, self.cache = folder, base / "omlx", base / "cache"
        self.plain = runtime(folder, None)
        self.cold, done = run(self.plain, TOKENS, use_cache=False, max_tokens=64)
        self.text = done.token_ids
        style = {"model": str(folder), "block": 8} | style
        save(self.omlx, story(self.plain.model, TOKENS, BORDERS), Style(**style))
        self.before = fingerprint(self.omlx)

    def open(self, *, consent: bool = True, **options) -> Runtime:
        rt = runtime(self.model, self.cache, legacy_dirs=(self.omlx,), **options)
        if consent:
            with closing(Journal(self.cache, rt.store.ledger)) as journal:
                journal.give_consent(self.omlx, rt.store.identity.fingerprint)
        return rt

    def ask(self, rt: Runtime, tokens=TOKENS, *, keep=False):
        """(cached tokens, source); the answer must be the cold one."""
        done = probe(rt, tokens, keep=keep, max_tokens=64 if tokens is TOKENS else 1)
        at = done.completion.usage.cached_tokens
        edges = [] if rt.layout.growing_only else [b for b in BORDERS if b < len(tokens)]
        if at:
            assert equal(done.logits, kept_in_memory(self.plain, tokens[:at] + [0], tokens, edges, at))
        if tokens is TOKENS:
            assert done.completion.token_ids == self.text
        assert fingerprint(self.omlx) == self.before
        return at, done.completion.cache.source


@pytest.mark.parametrize(
    ("arch", "style"),
    [
        ("falcon_h1", {"composite": "pm", "stamped": True}),
        ("gemma3_text", {"snapshots": frozenset()}),
    ],
    ids=["per member", "windows, last block alone"],
)
def test_a_miss_is_served_from_the_folder_and_then_from_our_own(tiny_model, tmp_path, arch, style):
    users = Users(tiny_model(arch), tmp_path, **style)
    rt = users.open()
    assert users.ask(rt) == (24, "legacy")
    assert rt.store.writer.flush(10)
    assert users.ask(rt) == (24, "ssd")
    rt.store.close()
    rt = users.open(consent=False)  # it was said once
    assert users.ask(rt) == (24, "ssd")
    report = taken_in(rt, users.omlx, rt.store, source_model=str(users.model))
    assert report.already.files == report.files - sum(r.files for r in report.refused.values()) > 0
    assert report.new_bytes == 0
    with closing(Journal(users.cache, rt.store.ledger)) as journal:  # also what the tier had no time to read
        noted = [journal.imported(users.omlx, n, rt.store.space().root) for n in journal.names(users.omlx)]
    assert len(noted) == report.already.files and all(row.digest for row in noted)
    rt.store.close()


def test_what_two_prompts_share_is_read_once(tiny_model, tmp_path):
    users = Users(tiny_model("falcon_h1"), tmp_path)
    rt = users.open()
    assert users.ask(rt, TOKENS[:16] + [7, 7]) == (16, "legacy")
    assert rt.store.writer.flush(10)
    have = {p: p.stat().st_ino for p in records(users.cache)}
    assert len(have) == 4  # rows and states of two blocks
    assert users.ask(rt) == (24, "legacy")
    assert rt.store.writer.flush(10)
    assert {p: p.stat().st_ino for p in records(users.cache) if p in have} == have
    assert len(records(users.cache)) == 6
    rt.store.close()


def test_a_salted_request_and_another_model_find_nothing(tiny_model, tmp_path):
    users = Users(tiny_model("falcon_h1"), tmp_path)
    rt = users.open()
    plan = rt.store.lookup(list(TOKENS), "mine")
    assert plan.position == 0 and rt.store.legacy.counters.asked == 0
    rt.store.close()
    other = Users(tiny_model("falcon_h1"), tmp_path / "other", model="/models/another")
    rt = other.open()
    assert other.ask(rt) == (0, "none")
    rt.store.close()


def test_a_refused_file_is_not_read_again(tiny_model, tmp_path):
    users = Users(tiny_model("falcon_h1"), tmp_path, composite="pm")
    damaged = file_of(users.omlx, list(chain(str(users.model), TOKENS, 8))[1])
    damaged.write_bytes(damaged.read_bytes()[:-4])
    users.before = fingerprint(users.omlx)
    rt = users.open()
    counters = rt.store.legacy.counters
    assert users.ask(rt) == (8, "legacy")
    assert rt.store.writer.flush(10)
    refused = counters.refused
    assert refused == 1
    assert users.ask(rt) == (8, "ssd")
    assert users.ask(rt, TOKENS[:20] + [7]) == (8, "ssd")
    assert (counters.refused, counters.faults) == (refused, 0)
    rt.store.close()


def test_a_request_takes_what_its_time_and_bytes_allow(tiny_model, tmp_path):
    users = Users(tiny_model("falcon_h1"), tmp_path)
    rt = users.open()
    rt.store.legacy.nbytes = 1  # a group of records is handed over whole
    assert users.ask(rt)[1] == "legacy"
    rt.store.close()
    users.cache = tmp_path / "again"
    rt = users.open()
    rt.store.legacy.seconds = 0.0
    assert [users.ask(rt), users.ask(rt)] == [(0, "none")] * 2
    assert rt.store.legacy.counters.faults == 0
    rt.store.close()


def test_explain_says_it_and_stores_nothing(tiny_model, tmp_path):
    users = Users(tiny_model("falcon_h1"), tmp_path)
    users.open().store.close()
    options = Options(model=users.model, cache_dir=users.cache, block_size=BLOCK, legacy_dirs=(users.omlx,))
    request = Request(tokens=list(TOKENS), sampling=SamplingParams(max_tokens=1))
    found, _ = explain(options, request, stored=True)
    assert (found.lookup.tokens, found.lookup.source) == (24, "legacy")
    assert not records(users.cache)
    assert fingerprint(users.omlx) == users.before


def test_a_folder_that_is_gone_or_is_none_is_a_miss(tiny_model, tmp_path):
    users = Users(tiny_model("falcon_h1"), tmp_path)
    rt = users.open()
    users.omlx.rename(tmp_path / "elsewhere")
    assert probe(rt, TOKENS, keep=False).completion.usage.cached_tokens == 0
    users.omlx.write_text("no folder")
    assert probe(rt, TOKENS, keep=False).completion.usage.cached_tokens == 0
    assert rt.store.legacy.counters.faults == 0
    rt.store.close()


class Held:
    """Reads of oMLX's blocks wait until ``open``; on the thread that is there for them."""

    def __init__(self, monkeypatch) -> None:
        self.open, self.reached = threading.Event(), threading.Event()
        real = tier.read_block

        def slow(*args):
            assert threading.current_thread().name == "mlxkv-legacy", "the engine's thread is not held up"
            self.reached.set()
            assert self.open.wait(20)
            return real(*args)

        monkeypatch.setattr(tier, "read_block", slow)


def fresh(rt: Runtime):
    def new() -> SequenceState:
        state = SequenceState.new(rt.make_cache())
        state.reserve(64)
        return state

    return new


def test_the_engine_goes_on_while_a_folder_is_read(tiny_model, tmp_path, monkeypatch):
    users = Users(tiny_model("falcon_h1"), tmp_path)
    rt = users.open()
    alone, found, _ = rt.store.restore(rt.store.lookup(TOKENS), TOKENS, fresh(rt), 64)
    assert (found.tokens, found.source) == (24, "legacy")
    rt.store.close()
    users.cache = tmp_path / "again"
    rt = users.open()
    held = Held(monkeypatch)
    plan = rt.store.lookup(TOKENS, legacy=False)
    assert plan.position == 0 and plan.unasked and not held.reached.is_set()
    under = rt.store.begin(plan, TOKENS, fresh(rt), 64)
    assert held.reached.wait(20) and not under.done and not under.advance()
    run(rt, tiny.ids(20, seed=9), keep=False, use_cache=False)  # a whole request meanwhile
    assert not under.wait(0.01)
    held.open.set()
    while not under.advance():
        assert under.wait(20)
    state, lookup, plan = under.finish()
    assert lookup == found and plan.position == 24
    assert all(mx.array_equal(a, b) for a, b in zip(state.live(), alone.live(), strict=True))
    assert rt.store.writer.flush(10) and users.ask(rt) == (24, "ssd")
    rt.store.close()


def test_a_request_that_is_cancelled_while_a_folder_is_read(tiny_model, tmp_path, monkeypatch):
    users = Users(tiny_model("falcon_h1"), tmp_path)
    rt = users.open()
    held = Held(monkeypatch)
    under = rt.store.begin(rt.store.lookup(TOKENS, legacy=False), TOKENS, fresh(rt), 64)
    assert held.reached.wait(20)
    under.cancel()
    with pytest.raises(RestoreCancelled):
        under.finish()
    held.open.set()
    assert under.wait(20) and rt.store.legacy.readers.wait(20)
    assert rt.store.lookup(TOKENS, legacy=False).position == 0, "nothing was handed over"
    monkeypatch.undo()
    assert users.ask(rt) == (24, "legacy"), "and nothing is held against the folder"
    rt.store.close()
