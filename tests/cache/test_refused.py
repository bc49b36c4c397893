"""A folder that is refused, or may only be read: the RAM tier serves, what is there is read, and the reason is told."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mlxkv
from mlxkv.cache.unwritten import NOWHERE, UnwrittenStore, open_store
from tests.cache.faults import Faults
from tests.cache.stores import records
from tests.cache.synthetic import BLOCK, MODELS, ask
from tests.probe import run, runtime

RAM = 1 << 26
ASKED = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]


def no_locks(monkeypatch, folder):
    def flock(fd, what):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", flock)


def a_file(monkeypatch, folder):
    folder.write_text("a file")


def a_link(monkeypatch, folder):
    folder.mkdir()
    (folder.parent / "elsewhere").mkdir()
    (folder / "records").symlink_to(folder.parent / "elsewhere")


def full(monkeypatch, folder):
    usage = shutil.disk_usage(folder.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))


def broken(monkeypatch, folder):
    real = os.scandir

    def scandir(path="."):
        if os.fspath(path).endswith("records"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)


CASES = {
    no_locks: "locks do not work",
    a_file: "File exists",
    a_link: "symbolic link",
    full: "too full",
    broken: "Input/output error",
}


@pytest.mark.parametrize("how", CASES)
def test_ram_serves_and_the_reason_is_told(tiny_model, tmp_path, monkeypatch, how):
    folder = tmp_path / "c"
    how(monkeypatch, folder)
    with mlxkv.load(tiny_model("qwen3_5"), cache_dir=folder, block_size=8) as engine:
        info = engine.info
        assert info.store_off is None and not info.reads_disk
        assert CASES[how] in str(info.disk_off) and str(folder) in str(info.disk_off)
        first = mlxkv.generate(engine, ASKED, max_tokens=4)
        again = mlxkv.generate(engine, ASKED, max_tokens=4)
    assert (first.cache.source, first.cache.miss_reason) == ("none", "empty")
    assert (again.usage.cached_tokens, again.cache.source) == (len(ASKED) - 1, "ram")
    assert again.token_ids == first.token_ids
    monkeypatch.undo()
    assert not folder.is_dir() or not records(folder)
    assert not (tmp_path / "elsewhere").exists() or not list((tmp_path / "elsewhere").iterdir())


def test_without_ram_it_is_off(tiny_model, tmp_path):
    (tmp_path / "c").write_text("a file")
    with mlxkv.load(tiny_model("qwen3_5"), cache_dir=tmp_path / "c", ram_budget=0) as engine:
        assert "cannot be used" in engine.info.store_off and engine.info.disk_off
        assert mlxkv.generate(engine, ASKED, max_tokens=1).cache.miss_reason == "off"


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM])
@pytest.mark.parametrize("call", ["chmod", "unlink", "open"])
def test_where_only_writing_is_refused_what_is_there_is_served(tiny_model, tmp_path, call, code):
    folder = tmp_path / "c"
    rt = runtime(tiny_model("qwen3_5"), folder)
    cold = run(rt, ASKED)[1]
    rt.store.close()
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}
    with Faults(folder, call, 1, 1, code):
        rt = runtime(tiny_model("qwen3_5"), folder, ram_budget=RAM)
    assert isinstance(rt.store, UnwrittenStore) and rt.store.reads
    found, other = run(rt, ASKED)[1], run(rt, ASKED[::-1])[1]
    assert (found.usage.cached_tokens, found.cache.source) == (len(ASKED) - 1, "ssd")
    assert found.token_ids == cold.token_ids and other.cache.source == "none"
    assert run(rt, ASKED[::-1])[1].cache.source == "ram"
    assert rt.store.writer.flush(5) and not rt.store.faults
    rt.store.close()
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()} == before


def test_a_damaged_index_that_may_not_be_written_leaves_ram(tiny_model, tmp_path):
    folder = tmp_path / "c"
    rt = runtime(tiny_model("qwen3_5"), folder)
    run(rt, ASKED)
    rt.store.close()
    (folder / "index.sqlite").write_bytes(b"no index" * 4096)
    with Faults(folder, "chmod", 1, 1, errno.EROFS):
        rt = runtime(tiny_model("qwen3_5"), folder, ram_budget=RAM)
    assert isinstance(rt.store, UnwrittenStore) and rt.store.folder.path == NOWHERE
    assert run(rt, ASKED)[1].usage.cached_tokens == 0
    assert run(rt, ASKED)[1].cache.source == "ram"
    rt.store.close()


def test_what_waits_to_be_taken_into_the_index_cannot_be_found(tmp_path):
    """It stays a miss that says so, while only reading is allowed."""
    model, folder, asked = MODELS["mixed"], tmp_path / "c", [1, 2, 3, 4, 5, 6, 7, 8, 9]
    store = model.open(folder)
    ask(model, store, asked, ends=(5,))
    assert store.writer.flush(20)
    store.close()
    for path in folder.glob("index.sqlite*"):
        path.unlink()
    model.open(folder, at_once=0, behind=False).close()
    with Faults(folder, "chmod", 1, 1, errno.EROFS):
        store, refused = open_store(folder, model.identity, model.layout, block=BLOCK)
    assert isinstance(store, UnwrittenStore) and store.reads and refused is not None
    assert ask(model, store, asked).reason == "pending" and not store.faults
    store.close()
    store = model.open(folder)
    assert ask(model, store, asked, keep=False).reason is None
    store.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="rights and mounts as Linux knows them")
@pytest.mark.parametrize("how", ["rights", "mount"])
def test_a_folder_that_may_only_be_read(tmp_path, how):
    command = [sys.executable, "-m", "tests.cache.readonly", str(tmp_path), how]
    if how == "mount":
        own = ["unshare", "--map-root-user", "--mount"]
        if subprocess.run([*own, "true"], capture_output=True).returncode:
            pytest.skip("no mount namespaces here")
        command = [*own, *command]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
