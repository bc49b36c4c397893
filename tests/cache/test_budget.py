"""The budget is hard: nothing in the folder is ever over it, whoever writes, is stopped or is killed."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from mlxkv.cache.folder import FolderRefused
from mlxkv.cache.ledger import default_budget, minimum
from mlxkv.cache.opening import open_index
from mlxkv.cache.record import Reader
from mlxkv.errors import ConfigError
from tests.cache.drafts import BLOCK, LAYOUT, chain, held, open_store, put, tokens
from tests.cache.frozen import watch, weigh
from tests.cache.machine import scratch
from tests.cache.stores import Written, prompt, records
from tests.probe import equal, run, runtime

MIB = 1 << 20
BIG = 1 << 16  # floats of a state: 256 KiB


class Writing:
    """A process that stores entry after entry."""

    def __init__(self, folder: Path, seed: int, budget: int, how: str) -> None:
        command = [sys.executable, "-m", "tests.cache.filler", str(folder), str(seed), str(budget), how]
        self.process = subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True)

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture
def writing(tmp_path):
    started = []

    def start(*args, **kwargs):
        started.append(Writing(*args, **kwargs))
        return started[-1]

    yield start
    for each in started:
        each.end()


def test_two_processes_never_exceed_it():
    """They write twenty times the budget. A third one freezes both five hundred times, and at each reservation, and
    adds up what is in the folder. The budget is so large that what the index may not use hides no record."""
    with scratch() as folder:
        seen = watch(folder / "c", random.Random(1), 16 * MIB, looks=500, times=20, within=240)
    assert not seen.wrong and seen.reservations >= 100
    assert seen.fullest > 0.75  # it was used, not avoided


def test_what_a_killed_process_reserved_is_free_again(tmp_path, writing):
    """Killed with files written and not entered: another process, running meanwhile, takes in what is whole."""
    folder, budget = tmp_path / "c", 8 * MIB
    store = open_store(folder, budget=budget)
    child = writing(folder, 1, budget, "hang")
    assert child.said() == "ready" and child.said() == "renamed"
    (reserved,) = store.index.execute("SELECT sum(bytes) FROM holds").fetchone()
    assert reserved > 256 << 10 and not store.ledger.reclaim()  # it lives
    temporaries = list((folder / "tmp").iterdir())
    assert len(temporaries) == 3 and len(records(folder)) == 1
    child.end()
    assert store.ledger.reclaim()
    assert store.index.execute("SELECT sum(bytes), count(*) FROM holds").fetchone() == (0, 1)
    assert not list((folder / "tmp").iterdir())
    (path,) = records(folder)
    with Reader.open(path) as reader:
        assert dict(store.index.records_of(reader.meta.key)) == {reader.meta.kind: path.stat().st_size}
    for seed in range(12):  # and all of the budget can be used
        put(store, chain(store, tokens(seed, BLOCK), weight=2 * BIG))
    assert not store.writer.counters.faults and weigh(folder) <= budget
    store.close()


def test_foreign_files_and_the_quarantine_count(tmp_path):
    folder, budget = tmp_path / "c", 8 * MIB
    store = open_store(folder, budget=budget)
    drafts = [chain(store, tokens(seed, BLOCK), weight=BIG)[0] for seed in range(14)]
    for draft in drafts:
        put(store, [draft])
    assert held(store, drafts) == ["rows+state"] * 14
    store.close()
    for where in (
        "notes.bin",
        "records/zz/deep.bin",
        "records/00/x.rows.safetensors",
        "quarantine/1-old",
        "tmp/strange",
    ):
        (folder / where).parent.mkdir(exist_ok=True)
        (folder / where).write_bytes(bytes(MIB // 2))
    store = open_store(folder, budget=budget)  # over it: what was used first goes
    assert weigh(folder) <= budget and store.index.charge() <= budget
    kept = held(store, drafts)
    assert kept[0] == "" and kept[-1] == "rows+state"
    assert all((folder / where).exists() for where in ("notes.bin", "records/zz/deep.bin", "tmp/strange"))
    (folder / "more.bin").write_bytes(bytes(MIB // 2))  # while it is open: seen at the next count
    store.ledger.rescan(every=0)
    put(store, chain(store, tokens(99, BLOCK), weight=BIG))
    assert weigh(folder) <= budget
    store.close()


def test_a_smaller_budget_is_kept_from_the_start_on(tmp_path):
    folder = tmp_path / "c"
    store = open_store(folder, budget=32 * MIB)
    for seed in range(24):
        assert store.writer.submit(chain(store, tokens(seed, BLOCK), weight=BIG))
    store.writer.flush()
    assert weigh(folder) > 6 * MIB
    other = open_store(folder, budget=5 * MIB)  # the smaller one counts while it is open
    assert weigh(folder) <= 5 * MIB
    for seed in range(30, 40):
        put(store, chain(store, tokens(seed, BLOCK), weight=BIG))
        assert weigh(folder) <= 5 * MIB
    other.close()
    for seed in range(40, 60):
        assert store.writer.submit(chain(store, tokens(seed, BLOCK), weight=BIG))
    store.writer.flush()
    assert weigh(folder) > 6 * MIB and not store.writer.counters.faults
    store.close()


def test_answers_are_right_under_a_budget_that_is_always_short(tiny_model, tmp_path):
    """A real model in a folder of the least size: hits or misses, but the answers of a cold run."""
    written = Written(tiny_model("qwen3_5"), tmp_path / "full")
    rt = written.at(tmp_path / "full")
    least = minimum(rt.layout, 8)
    rt.store.close()
    rt = written.copy(tmp_path / "c", budget=least + 40_000)
    for seed in range(5):
        ids = prompt(seed=seed)
        cold, _ = run(rt, ids, use_cache=False)
        assert equal(run(rt, ids)[0], cold)
        assert rt.store.writer.flush(30)
        assert weigh(tmp_path / "c") <= least + 40_000
        assert equal(run(rt, ids)[0], cold)
    assert rt.store.writer.counters.written_records > 8
    rt.store.close()


def test_a_budget_in_which_nothing_fits_is_refused_with_the_number(tmp_path):
    with pytest.raises(ConfigError) as caught:
        open_store(tmp_path / "c", budget=1000)
    least = minimum(LAYOUT, BLOCK)
    assert f"{least:,}" in str(caught.value) and "--cache-budget" in caught.value.cure
    assert not (tmp_path / "c").exists()
    store = open_store(tmp_path / "c", budget=least)  # and with that number it works
    for seed in range(3):
        drafts = chain(store, tokens(seed, BLOCK))
        put(store, drafts)
        assert held(store, drafts) == ["rows+state"]
        assert weigh(tmp_path / "c") <= least
    store.close()


def test_an_engine_refuses_such_a_budget_when_it_starts(tiny_model, tmp_path):
    with pytest.raises(ConfigError, match="cache budget is 1,000 bytes"):
        runtime(tiny_model("qwen3_5"), tmp_path / "c", cache_budget=1000)


def test_what_can_never_fit_is_dropped_and_said_once(tmp_path, caplog):
    folder = tmp_path / "c"
    store = open_store(folder, budget=6 * MIB)
    small = chain(store, tokens(1, 2 * BLOCK))
    put(store, small)
    for seed in (2, 3):
        put(store, chain(store, tokens(seed, BLOCK), weight=2 * MIB))
    assert store.writer.counters.faults == {"budget": 2} and not store.writer.stopped_because
    assert sum("stops writing" in r.message for r in caplog.records) == 1
    assert held(store, small) == ["rows+state"] * 2  # nothing went for it
    put(store, more := chain(store, tokens(4, BLOCK)))
    assert held(store, more) == ["rows+state"]
    store.close()


def test_a_full_disk_is_met_by_eviction_first(tmp_path, monkeypatch, caplog):
    folder = tmp_path / "c"
    store = open_store(folder, disk_floor=MIB)
    drafts = [chain(store, tokens(seed, BLOCK), weight=BIG)[0] for seed in range(8)]
    for draft in drafts[:7]:
        put(store, [draft])
    real, total = os.statvfs, weigh(folder) + MIB + MIB // 8

    def small_disk(path):
        found = list(real(path))
        found[4] = (total - weigh(folder)) // found[1]  # f_bavail, in blocks of f_frsize
        return os.statvfs_result(found)

    with monkeypatch.context() as m:
        m.setattr(os, "statvfs", small_disk)
        put(store, drafts[7:])
        kept = held(store, drafts)
        assert kept[0] != "rows+state" and kept[-1] == "rows+state" and not store.writer.stopped_because
        total = 0
        put(store, chain(store, tokens(50, BLOCK)))
    assert "left on the disk" in store.writer.stopped_because
    assert sum("stops writing" in r.message for r in caplog.records) == 1
    store.close()


def test_the_default_is_a_tenth_of_the_free_disk(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=50 * 10**9))
    assert default_budget(tmp_path, 0) == 5 * 10**9 and default_budget(tmp_path, 10**10) == 6 * 10**9
    assert default_budget(tmp_path, 10**12) == 32 * 10**9
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(FolderRefused, match="too full"):
        open_store(tmp_path / "c")


def test_an_index_replaced_under_way_is_not_written_to(tmp_path, caplog):
    folder = tmp_path / "c"
    store = open_store(folder)
    put(store, chain(store, tokens(1, BLOCK)))
    shutil.copy(folder / "index.sqlite", tmp_path / "copy")
    os.replace(tmp_path / "copy", folder / "index.sqlite")
    before = (folder / "index.sqlite").read_bytes()
    put(store, chain(store, tokens(2, BLOCK)))
    assert not store.writer.submit(chain(store, tokens(3, BLOCK)))
    assert "replaced" in store.writer.stopped_because
    assert sum("stops writing" in r.message for r in caplog.records) == 1
    assert len(records(folder)) == 2 and (folder / "index.sqlite").read_bytes() == before
    store.close()
    store = open_store(folder)
    put(store, again := chain(store, tokens(2, BLOCK)))
    assert held(store, again) == ["rows+state"]
    store.close()


@pytest.mark.parametrize("how", ["refused", "given to everybody"])
def test_without_locks_the_store_is_off(tmp_path, monkeypatch, how):
    def flock(fd, what):
        if how == "refused":
            raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(FolderRefused, match="locks do not work"):
        open_store(tmp_path / "c")


def test_a_damaged_index_waits_until_the_folder_is_free(tmp_path):
    folder = tmp_path / "c"
    first = open_store(folder)
    put(first, drafts := chain(first, tokens(1, 2 * BLOCK)))
    (folder / "index.damaged").touch()
    with pytest.raises(FolderRefused, match="other processes"):
        open_store(folder)
    put(first, more := chain(first, tokens(2, BLOCK)))  # who has it open goes on
    assert held(first, more) == ["rows+state"]
    first.close()
    second = open_store(folder)
    assert held(second, [*drafts, *more]) == ["rows+state"] * 3
    second.close()


def test_a_rebuild_says_how_far_it_is_and_keeps_the_budget(tmp_path):
    folder = tmp_path / "c"
    store = open_store(folder)
    drafts = chain(store, tokens(1, 4 * BLOCK), weight=BIG)
    for draft in drafts:
        put(store, [draft])
    store.close()
    for n, draft in enumerate(drafts):
        for path in records(folder):
            if draft.meta.key.hex() in path.name:
                os.utime(path, (n, n))
    said = []
    (folder / "index.sqlite").unlink()
    store = open_store(folder, progress=lambda *p: said.append(p))
    assert said[0] == (0, 8) and said[-1] == (8, 8)
    assert held(store, drafts) == ["rows+state"] * 4
    store.close()
    (folder / "index.sqlite").unlink()
    store = open_store(folder, budget=3 * MIB + MIB // 4)
    assert weigh(folder) <= 3 * MIB + MIB // 4 and 0 < len(records(folder)) < 8
    store.close()


def test_a_ledger_that_lies_is_found_at_the_next_start(tmp_path):
    folder = tmp_path / "c"
    store = open_store(folder)
    put(store, chain(store, tokens(1, BLOCK)))
    db = sqlite3.connect(folder / "index.sqlite")
    db.execute("UPDATE ledger SET bytes = -5")
    db.commit()
    put(store, lost := chain(store, tokens(2, BLOCK)))  # a fault, not a failure
    assert held(store, lost) == [""] and store.writer.counters.faults["write"] == 1
    store.close()
    db.close()
    store = open_store(folder)
    put(store, lost)
    assert held(store, lost) == ["rows+state"]
    store.close()
    for change in (
        "DELETE FROM ledger",
        "UPDATE ledger SET bytes = 'x'",
        "UPDATE ledger SET name = 'recordz' WHERE name = 'records'",
        "INSERT INTO holds (budget, bytes, files) VALUES ('many', 0, '[]')",
        "DROP TABLE holds",
    ):
        db = sqlite3.connect(folder / "index.sqlite")
        db.execute(change)
        db.commit()
        db.close()
        store = open_store(folder)
        assert held(store, lost) == ["rows+state"] and store.index.charge() < 40 * MIB
        store.close()


def test_opening_the_index_alone_locks_it(tmp_path):
    store = open_store(tmp_path / "c")
    put(store, chain(store, tokens(1, BLOCK)))
    index = open_index(store.folder)  # as a command does while a server runs
    assert index.budget() == store.budget
    index.close()
    store.close()
