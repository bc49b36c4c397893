"""Restores under way: while threads read, the engine's thread does other things; what comes out is the same, and
nothing is left behind whatever becomes of them."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import mlx.core as mx
import pytest

from mlxkv.cache import restoring
from mlxkv.cache.host import Destination
from mlxkv.cache.readers import Job, Readers
from mlxkv.cache.record import Reader
from mlxkv.cache.restoring import RestoreCancelled
from mlxkv.cache.state import SequenceState
from tests import tiny
from tests.cache.stores import prompt, records
from tests.cache.synthetic import BLOCK, MODELS, ask
from tests.probe import run, runtime

LENGTH = 6 * BLOCK + 3
TOKENS = tiny.ids(LENGTH, 5)
PATIENCE = 20.0


@pytest.fixture(autouse=True)
def in_many_steps(monkeypatch):
    """However small: destinations are made one at a time, and reading is the threads' affair."""
    monkeypatch.setattr(restoring, "AT_ONCE", -1)
    monkeypatch.setattr(restoring, "PORTION", 1)


class Gate:
    """Holds up every read of certain files, as a file system does that does not answer."""

    def __init__(self, monkeypatch) -> None:
        self.inodes: set[int] = set()
        self.open, self.reached = threading.Event(), threading.Event()
        real = os.preadv

        def slow(fd, *args):
            if os.fstat(fd).st_ino in self.inodes:
                assert threading.current_thread().name.startswith("mlxkv-reader"), "the engine's thread is not held up"
                self.reached.set()
                assert self.open.wait(PATIENCE)
            return real(fd, *args)

        monkeypatch.setattr(os, "preadv", slow)

    def hold(self, paths: list[Path]) -> None:
        self.open.clear()
        self.reached.clear()
        self.inodes = {p.stat().st_ino for p in paths}


@pytest.fixture
def gate(monkeypatch):
    made = Gate(monkeypatch)
    yield made
    made.open.set()


def stored(model, folder: Path, tokens=TOKENS, **options):
    store = model.open(folder, **options)
    ask(model, store, tokens, ends=[BLOCK + 1, 3 * BLOCK])
    store.writer.write_tips()
    assert store.writer.flush(PATIENCE)
    return store


def fresh(model, capacity: int = LENGTH + 5):
    def new() -> SequenceState:
        state = SequenceState.new(model.make_cache())
        state.reserve(capacity)
        return state

    return new


def begin(model, store, tokens=TOKENS):
    return store.begin(store.lookup(tokens), tokens, fresh(model), LENGTH + 5)


def under_way(gate: Gate, under) -> None:
    """Until threads read for it, and are held up."""
    while not gate.reached.wait(0.001):
        assert not under.advance()


def driven(under):
    """To its end, as a loop does that never waits for it."""
    while not under.advance():
        assert under.wait(PATIENCE)
    return under.finish()


def left_behind(store) -> list[str]:
    """What a restore must not leave: pins, threads, open records, memory that is written into."""
    assert store.restores.readers.wait(PATIENCE)
    store.restores.tidy()
    links = []
    for fd in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    found = [link for link in links if link.startswith(str(store.folder.records))]
    for thread in threading.enumerate():
        if thread.name.startswith("mlxkv-reader"):
            thread.join(PATIENCE)  # it was told to end
            found += [thread.name] if thread.is_alive() else []
    if store.restores.pinned or store.restores.under_way or store.restores._leaving:
        found.append("pins")
    return found


@pytest.mark.parametrize("name", MODELS)
def test_what_threads_read_is_what_was_stored(tmp_path, name):
    model = MODELS[name]
    stored(model, tmp_path / "c").close()
    store = model.open(tmp_path / "c", ram_budget=1 << 24)
    branch = [*TOKENS[: BLOCK + 1], *tiny.ids(9, 6)]  # where it goes on, states and windows were not read yet
    for tokens, source in ((TOKENS, "ssd"), (TOKENS, "ram"), (branch, "ram" if name == "growing" else "ssd")):
        state, lookup, plan = driven(begin(model, store, tokens))
        assert lookup.tokens == plan.position > 0 and lookup.source == source
        assert not model.wrong(state, tokens[: lookup.tokens])
        for array in state.live():  # beyond its position a buffer is empty
            if name in ("growing", "recurrent") and array.ndim == 4:
                assert not array[:, :, lookup.tokens :].any()
    assert not left_behind(store)
    store.close()


@pytest.mark.parametrize("arch, bits", [("llama", None), ("gemma3_text", None), ("qwen3_5", None), ("llama", 4)])
def test_the_engine_goes_on_while_records_are_read(tiny_model, tmp_path, gate, arch, bits):
    """Forwards, and another restore from begin to end, while the file system holds one up: it has the same bits."""
    rt = runtime(tiny_model(arch), tmp_path / "c", store_bits=bits)
    store, first, second = rt.store, prompt(1), prompt(2)
    run(rt, first)
    assert store.writer.flush(PATIENCE)
    slow = records(tmp_path / "c")
    run(rt, second)
    assert store.writer.flush(PATIENCE)

    def new() -> SequenceState:
        state = SequenceState.new(rt.make_cache())
        state.reserve(64)
        return state

    def logits(state: SequenceState, tokens: list[int]) -> mx.array:
        out = rt.model(mx.array(tokens[state.position :])[None], cache=state.caches)
        mx.eval(out)
        return out

    alone, found, _ = store.restore(store.lookup(first), first, new, 64)
    assert found.tokens > 0
    other, _, _ = store.restore(store.lookup(second), second, new, 64)
    gate.hold(slow)
    held = store.begin(store.lookup(first), first, new, 64)
    under_way(gate, held)
    assert not held.done and not held.wait(0.01)

    meanwhile, lookup, _ = driven(store.begin(store.lookup(second), second, new, 64))
    assert lookup.source == "ssd"
    assert mx.array_equal(logits(meanwhile, second), logits(other, second))
    assert not held.advance() and store.restores.under_way == 1

    gate.open.set()
    state, lookup, _ = driven(held)
    assert lookup == found
    assert [a.shape for a in state.live()] == [a.shape for a in alone.live()]
    assert all(mx.array_equal(a, b) for a, b in zip(state.live(), alone.live(), strict=True))
    assert mx.array_equal(logits(state, first), logits(alone, first))
    assert not left_behind(store)
    store.close()


def test_what_is_read_is_pinned_for_as_long_as_it_is_read(tmp_path, gate):
    model = MODELS["mixed"]
    store = stored(model, tmp_path / "c")
    plan = store.lookup(TOKENS)
    gate.hold(records(tmp_path / "c"))
    one, two = begin(model, store), begin(model, store, TOKENS[: BLOCK + 2])
    under_way(gate, one)
    assert {p.entry.key for p in plan.pieces} | {plan.state.key} <= store.restores.pinned
    two.cancel()
    assert {p.entry.key for p in plan.pieces} <= store.restores.pinned, "the other one still reads them"
    assert store.ledger.make_room(1 << 30, pinned=store.writer._pins()).bytes > 0, "the answer goes"
    gate.open.set()
    state, lookup, _ = driven(one)
    assert lookup.tokens == plan.position and not model.wrong(state, TOKENS[: lookup.tokens])
    assert not left_behind(store)
    store.close()


STAGES = ("begun", "some destinations", "reading", "read", "attached")


@pytest.mark.parametrize("name", ["growing", "mixed"])
@pytest.mark.parametrize("stage", STAGES)
def test_cancelled_at_any_stage_it_leaves_nothing(tmp_path, gate, monkeypatch, stage, name):
    """Memory that a thread may still write into is kept until it does not, and then let go of."""
    model = MODELS[name]
    store = stored(model, tmp_path / "c")
    made: list[Destination] = []
    real = Destination.__init__
    monkeypatch.setattr(Destination, "__init__", lambda self, *args: (made.append(self), real(self, *args))[1])
    under = None
    if stage == "reading":
        gate.hold(records(tmp_path / "c"))
    under = begin(model, store)
    if stage == "some destinations":
        under.advance()
    elif stage == "reading":
        under_way(gate, under)
    elif stage == "read":
        while under._job is None:
            under.advance()
        assert under.wait(PATIENCE)
    elif stage == "attached":
        result = driven(under)
    under.cancel()
    under.cancel()
    assert not store.restores.pinned
    if stage == "attached":
        assert under.finish() is result, "who has the result keeps it"
    else:
        with pytest.raises(RestoreCancelled):
            under.finish()
        with pytest.raises(RestoreCancelled):
            under.advance()
    if stage == "reading":
        store.lookup(TOKENS)
        assert under._restorer._rows, "a thread is still held up in there"
        gate.open.set()
        assert under.wait(PATIENCE)
    assert not left_behind(store)
    assert made and not under._restorer._rows and not under._restorer._states and not under._restorer._windows
    state, lookup, _ = driven(begin(model, store))  # and nothing is the worse for it
    assert lookup.tokens == LENGTH - 1 and not model.wrong(state, TOKENS[: lookup.tokens])
    store.close()


def test_a_state_that_cannot_be_made_ends_the_restore(tmp_path):
    model = MODELS["growing"]
    store = stored(model, tmp_path / "c")

    def none() -> SequenceState:
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        store.begin(store.lookup(TOKENS), TOKENS, none, LENGTH)
    assert not left_behind(store)
    store.close()


def rows_of(folder: Path, start: int) -> Path:
    for path in records(folder, "rows"):
        with Reader.open(path) as reader:
            if reader.meta.row_start == start:
                return path
    raise AssertionError(start)


@pytest.mark.parametrize("name", ["growing", "window", "mixed", "quantised"])
def test_a_record_that_fails_is_a_miss_from_there_on(tmp_path, name):
    """Two are bad, and whichever thread comes first, the verdicts are those of one that reads them in order."""
    model = MODELS[name]
    stored(model, tmp_path / "c").close()
    for block in (2, 4):
        path = rows_of(tmp_path / "c", block * BLOCK)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    store = model.open(tmp_path / "c")
    before = len(records(tmp_path / "c"))
    assert store.lookup(TOKENS).position == LENGTH - 1
    state, lookup, plan = driven(begin(model, store))
    assert lookup.reason == "corrupt" and lookup.source == "ssd"
    assert lookup.tokens == plan.position == (BLOCK + 1 if model.layout.needs_state else 2 * BLOCK)
    assert not model.wrong(state, TOKENS[: lookup.tokens])
    assert store.faults == {"corrupt": 1}, "the plan does not reach the second any more"
    assert len(records(tmp_path / "c")) == before - 1
    assert not left_behind(store)
    store.close()


def test_a_file_that_goes_while_it_is_waited_for(tmp_path, gate):
    """What was verified before stays, and is not read again."""
    model = MODELS["growing"]
    store = stored(model, tmp_path / "c")
    gate.hold([rows_of(tmp_path / "c", 0)])
    under = begin(model, store)
    under_way(gate, under)
    going = rows_of(tmp_path / "c", 3 * BLOCK)
    os.truncate(going, 100)
    gate.open.set()
    state, lookup, _ = driven(under)
    # a thread may have read it before that
    assert (lookup.tokens, lookup.reason) in ((LENGTH - 1, None), (3 * BLOCK, "corrupt"))
    assert not model.wrong(state, TOKENS[: lookup.tokens])
    assert going.exists() == (lookup.reason is None)
    assert not left_behind(store)
    store.close()


def test_the_store_closes_while_records_are_read(tmp_path, gate, monkeypatch):
    """It does not wait for a disk that does not answer, and what is read into is not freed before that has."""
    monkeypatch.setattr(restoring, "READERS_WITHIN", 0.05)
    monkeypatch.setattr(restoring, "_stuck", stuck := [])
    model = MODELS["mixed"]
    store = stored(model, tmp_path / "c")
    gate.hold(records(tmp_path / "c"))
    under = begin(model, store)
    under_way(gate, under)
    store.close()
    assert under.cancelled and stuck == [under] and under._restorer._rows
    with pytest.raises(RestoreCancelled):
        under.finish()
    gate.open.set()
    assert under.wait(PATIENCE)
    again = model.open(tmp_path / "c")
    state, lookup, _ = driven(begin(model, again))
    assert lookup.tokens == LENGTH - 1 and not model.wrong(state, TOKENS[: lookup.tokens])
    again.close()


def test_many_at_once_take_turns(tmp_path):
    model = MODELS["mixed"]
    store = stored(model, tmp_path / "c")
    all_of = [TOKENS[:n] for n in range(3, LENGTH + 1, 2)]
    under = [begin(model, store, tokens) for tokens in all_of]
    results = [None] * len(under)
    while not all(results):
        results = [r or (u.finish() if u.advance() else None) for r, u in zip(results, under, strict=True)]
    for tokens, (state, lookup, _) in zip(all_of, results, strict=True):
        alone = store.restore(store.lookup(tokens), tokens, fresh(model), LENGTH + 5)[1]
        assert lookup == alone and (not lookup.tokens or not model.wrong(state, tokens[: lookup.tokens]))
    assert not left_behind(store)
    store.close()


def test_the_first_of_several_errors_counts():
    """Tasks of a job end in any order; which of their errors it tells does not depend on that."""
    begun, late, seen = threading.Event(), threading.Event(), []

    def fails(name: str, wait: bool = False):
        def task() -> None:
            begun.set()
            assert not wait or late.wait(PATIENCE)
            seen.append(name)
            raise ValueError(name)

        return task

    job = Job([fails("a", wait=True), fails("b"), fails("c")])
    other = threading.Thread(target=job.step)
    other.start()
    assert begun.wait(PATIENCE)
    assert job.step() and not job.ended
    late.set()
    other.join(PATIENCE)
    assert job.wait(PATIENCE) and not job.step()
    assert str(job.error) == "a" and job.error.__traceback__ is None
    assert seen == ["b", "a"], "after one has failed, no other is begun"


def test_without_threads_it_is_done_all_the_same(monkeypatch):
    def none(self) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none)
    done = []
    job = Job([lambda: done.append(1), lambda: done.append(2)])
    Readers().submit(job)
    assert done == [1, 2] and job.ended


def test_the_store_is_busy_while_any_request_runs_or_restores(tmp_path, gate):
    """Else pieces are merged, and tips written, in between."""
    model = MODELS["mixed"]
    store = stored(model, tmp_path / "c")
    assert not store._busy()
    gate.hold(records(tmp_path / "c"))
    under = begin(model, store)
    under_way(gate, under)
    assert store._busy()
    gate.open.set()
    state, _, plan = driven(under)
    one = store.recorder(state, list(TOKENS), plan, mx.synchronize)
    other, _, plan = store.restore(store.lookup(TOKENS[:9]), TOKENS[:9], fresh(model), 16)
    two = store.recorder(other, TOKENS[:9], plan, mx.synchronize)
    two.drop()
    assert store._busy(), "the first still runs"
    one.commit(everything=True)
    assert not store._busy()
    store.close()
