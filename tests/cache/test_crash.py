"""What may happen while the store is written: kills, several processes, device errors, a full disk."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import pytest

from mlxkv.cache.record import Reader
from mlxkv.decode.request import Request, SamplingParams
from tests import tiny
from tests.cache.stores import LENGTH, Written, prompt, records, reopened
from tests.probe import Probe, equal, run, runtime

N1 = LENGTH - 1


@pytest.fixture(scope="module")
def written(tiny_model, tmp_path_factory):
    return Written(tiny_model("qwen3_5"), tmp_path_factory.mktemp("crash") / "cache")


BUSY = """
import random, sys
from pathlib import Path
from tests.probe import run, runtime
rt = runtime(Path(sys.argv[1]), Path(sys.argv[2]))
assert rt.store is not None
rng = random.Random(int(sys.argv[3]))
print("ready", flush=True)
while True:
    tokens = [1] * 12 + [rng.choice([1, 2]) for _ in range(rng.randint(1, 12))]
    cold, _ = run(rt, tokens, use_cache=False)
    logits, _ = run(rt, tokens)
    assert (cold == logits).all(), tokens
"""


def test_killed_while_several_processes_write(written, tiny_model, tmp_path):
    """Three processes use one folder at once; two are killed at a bad moment. The third sees nothing of it,
    no temporary stays, and every record that is left is whole."""
    folder = tmp_path / "c"
    rt = written.at(folder)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", BUSY, str(tiny_model("qwen3_5")), str(folder), str(seed)],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in (1, 2)
    ]
    for child in children:
        assert child.stdout.readline() == "ready\n", child.stderr.read()
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        tokens = [1] * 12 + [1 + int(b) for b in bin(time.monotonic_ns() % 4096)[2:]]
        cold, _ = run(rt, tokens, use_cache=False)
        assert equal(run(rt, tokens)[0], cold)
    for child in children:
        assert child.poll() is None, child.stderr.read()
        child.send_signal(signal.SIGKILL)
        child.communicate()
    rt.store.close()
    assert set(rt.store.faults) <= {"evicted"}  # a state that another process superseded between plan and reading
    rt = written.at(folder)
    assert not list((folder / "tmp").iterdir()) and not list((folder / "quarantine").iterdir())
    for path in records(folder):
        with Reader.open(path) as reader:
            for name in reader.tensors:
                reader.read(name)
    listed = {f"{key.hex()}.{kind}.safetensors" for key, kind in rt.store.index.names()}
    assert listed == {p.name for p in records(folder)}
    rt.store.close()


class Stop(Exception):
    pass


@pytest.mark.parametrize("step", ["replace", "index", "fsync"])
def test_an_end_between_any_two_steps(written, tmp_path, monkeypatch, step):
    """The writer is stopped dead: before a rename, between renames and index, before the data is durable."""
    folder = tmp_path / "c"
    rt = reopened(written.rt, folder)
    calls = 0

    def dying(real, at):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls >= at:
                raise Stop(step)
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as m:
        if step == "replace":
            m.setattr(os, "replace", dying(os.replace, 4))
        elif step == "fsync":
            m.setattr(os, "fsync", dying(os.fsync, 3))
        else:
            m.setattr("mlxkv.cache.index.Index.add_entry", dying(lambda *a: None, 1))
        written.ask(rt, keep=True)
        rt.store.close()
    assert calls
    cached, _ = written.ask_anew(folder, keep=True)  # what was renamed is adopted, what was not is missing
    assert cached in ((N1,) if step == "index" else (0, 10, 20))
    assert written.ask_anew(folder) == (N1, None)
    assert not list((folder / "tmp").iterdir())


def test_a_device_error_between_capture_and_commit_stores_nothing(written, tmp_path):
    rt = reopened(written.rt, tmp_path / "c")
    fail_at = 0
    while True:
        fail_at += 1
        calls = 0

        def barrier(fail_at=fail_at):
            nonlocal calls
            calls += 1
            if calls == fail_at:
                raise RuntimeError("the command buffer failed")

        try:
            run(dataclasses.replace(rt, barrier=barrier), written.tokens)
        except RuntimeError:
            assert rt.store.writer.flush(10)
            assert not records(tmp_path / "c"), f"barrier {fail_at}"
            continue
        break
    assert fail_at > 4  # captures and the hand-over each had their turn
    rt.store.writer.flush(10)
    assert written.ask(rt) == (N1, None)
    rt.store.close()


def test_cancelled_at_a_boundary_keeps_it_once(written, tmp_path):
    rt = reopened(written.rt, tmp_path / "c")
    asked = iter([False, True])
    request = Request(tokens=written.tokens, sampling=SamplingParams(max_tokens=1))
    assert Probe(rt, request, lambda e: None, lambda: next(asked, True), time.monotonic()).run().finish_reason == (
        "cancelled"
    )
    assert rt.store.writer.flush(10) and not rt.store.writer.counters.faults
    assert written.ask(rt)[0] == 10
    rt.store.close()


def test_nan_is_never_stored(tmp_path):
    """A model whose state runs into NaN answers as it can, and nothing of it is kept."""
    rt = runtime(tiny.make("qwen3_5", tmp_path / "m"), tmp_path / "c")
    embed = rt.model.language_model.model.embed_tokens
    embed.weight = mx.where(mx.arange(embed.weight.shape[0])[:, None] == 77, float("nan"), embed.weight)
    for tokens in ([5, 6, 77, 8, 9, 10, 11, 12, 13, 14], [77, 1]):
        run(rt, tokens)
        assert rt.store.writer.flush(10)
        assert not records(tmp_path / "c")
    run(rt, prompt())
    rt.store.writer.flush(10)
    assert records(tmp_path / "c")
    rt.store.close()


def full_disk(*args):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_full_disk_ends_writing_and_says_so_once(written, tmp_path, monkeypatch, caplog, call):
    rt = written.copy(tmp_path / "c")
    before = records(tmp_path / "c")
    other = prompt(seed=8)
    cold, _ = run(rt, other, use_cache=False)
    with monkeypatch.context() as m:
        m.setattr(os, call, full_disk)
        for _ in range(3):
            assert equal(run(rt, other)[0], cold)
            assert rt.store.writer.flush(10)
    assert "No space left" in rt.store.writer.stopped_because
    assert sum("stops writing" in r.message for r in caplog.records) == 1
    assert written.ask(rt) == (N1, None)  # what is stored is still read
    rt.store.close()
    assert records(tmp_path / "c") == before and not list((tmp_path / "c" / "tmp").iterdir())


def test_a_passing_failure_costs_one_group(written, tmp_path, monkeypatch):
    rt = reopened(written.rt, tmp_path / "c")

    def too_many(*args):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as m:
        m.setattr(os, "fsync", too_many)
        written.ask(rt, keep=True)
    assert not rt.store.writer.stopped_because
    written.ask(rt, keep=True)
    assert written.ask(rt) == (N1, None)
    rt.store.close()


def test_a_busy_index_is_read_not_waited_for(written, tmp_path):
    """Another process holds the index's write lock all the while: answers come, from the store."""
    rt = written.copy(tmp_path / "c")
    other = sqlite3.connect(tmp_path / "c" / "index.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert written.ask(rt) == (N1, None)
    other.execute("ROLLBACK")
    other.close()
    rt.store.close()


def test_a_full_queue_is_refused_not_waited_for(written, tmp_path, monkeypatch):
    """More bytes wait than are allowed: the newest groups are dropped whole, and no entry hangs on a missing one."""
    rt = written.copy(tmp_path / "c", queue_limit=1)
    real = os.fsync

    def slow(fd):
        time.sleep(0.02)
        real(fd)

    with monkeypatch.context() as m:
        m.setattr(os, "fsync", slow)
        for seed in range(4):
            run(rt, prompt(seed=20 + seed))
        assert run(rt, prompt(seed=20), keep=False)[1].usage.cached_tokens == N1  # but for one's own
    rt.store.writer.flush(20)
    assert rt.store.writer.counters.refused_bytes > 0
    for seed in range(4):
        cold, _ = run(rt, prompt(seed=20 + seed), use_cache=False)
        assert equal(run(rt, prompt(seed=20 + seed))[0], cold)
    rt.store.close()
