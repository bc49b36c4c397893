"""Folders of records that cannot be listed when a store opens: said once, counted, and nothing in them is given up."""

from __future__ import annotations

import errno
import os

import pytest

from mlxkv.cache.index import Index
from tests.cache.stores import records
from tests.cache.synthetic import MODELS, ask, verify

MODEL = MODELS["mixed"]
OLD = [1, 2, 3, 4, 5, 6, 7, 8, 9]


@pytest.fixture
def folder(tmp_path):
    store = MODEL.open(tmp_path / "c")
    ask(MODEL, store, OLD, ends=(5,))
    assert store.writer.flush(20)
    store.close()
    return tmp_path / "c"


def blind(monkeypatch, names: set[str], code: int, call: str = "scandir") -> None:
    """``names``: the parts of a path whose ``call`` fails."""
    real = getattr(os, call)

    def failing(path=".", *args, **kwargs):
        if not isinstance(path, int) and os.path.basename(os.fspath(path)) in names:
            raise OSError(code, os.strerror(code), os.fspath(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, call, failing)


def rows(folder) -> int:
    index = Index(folder)
    try:
        return len(index.names())
    finally:
        index.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EMFILE])
def test_rows_of_what_cannot_be_seen_stay(folder, monkeypatch, caplog, code):
    subs = sorted({path.parent.name for path in records(folder)})
    before = rows(folder)
    gone = next(path for path in records(folder) if path.parent.name == subs[0])
    beside = [path for path in records(folder) if path.parent.name == subs[0]]
    gone.unlink()
    with monkeypatch.context() as m:
        blind(m, set(subs[1:]), code)
        store = MODEL.open(folder)
        said = [r.message for r in caplog.records if "cannot be listed" in r.message]
        assert len(said) == 1 and os.strerror(code) in said[0] and f"{len(subs) - 1} of the folders" in said[0]
        assert store.writer.counters.faults == {"open": len(subs) - 1}
        store.close()
    assert rows(folder) == before - 1 and len(beside) >= 1  # where the listing was good, a row without a file goes
    store = MODEL.open(folder)
    assert not store.writer.counters.faults
    verify(folder, store)
    ask(MODEL, store, OLD, ends=(5,))
    assert store.writer.flush(20) and ask(MODEL, store, OLD, keep=False).reason is None
    assert rows(folder) == before
    store.close()


def test_a_file_that_cannot_be_looked_at_is_not_gone(folder, monkeypatch):
    """Its folder's listing lacks it, but nobody says that it is not there."""
    before = rows(folder)
    victim = records(folder)[0]
    victim.rename(folder / "kept")
    with monkeypatch.context() as m:
        blind(m, {victim.name}, errno.EIO, "lstat")
        MODEL.open(folder).close()
    assert rows(folder) == before
    (folder / "kept").rename(victim)
    store = MODEL.open(folder)
    assert ask(MODEL, store, OLD, keep=False).reason is None
    store.close()


def test_an_index_built_again_meanwhile_takes_them_in_later(folder, monkeypatch, caplog):
    subs = sorted({path.parent.name for path in records(folder)})
    before = rows(folder)
    for path in folder.glob("index.sqlite*"):
        path.unlink()
    with monkeypatch.context() as m:
        blind(m, set(subs[1::2]), errno.EIO)
        store = MODEL.open(folder)
        ask(MODEL, store, OLD, keep=False)
        assert store.writer.counters.faults["open"] == len(subs[1::2])
        assert sum("cannot be listed" in r.message for r in caplog.records) == 1
        store.close()
    assert len(records(folder)) == before
    store = MODEL.open(folder)
    assert ask(MODEL, store, OLD, keep=False).reason is None and rows(folder) == before
    verify(folder, store)
    store.close()
