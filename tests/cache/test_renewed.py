"""A folder that is removed or replaced under a running store: it is opened again, and nothing wrong is served."""

from __future__ import annotations

import os
import shutil
import threading

import pytest

from mlxkv.cache import store as store_module
from mlxkv.cache.folder import CacheFolder
from tests.cache.drafts import BLOCK, chain, held, open_store, put, tokens
from tests.cache.stores import prompt, records, remove, reopened
from tests.cache.synthetic import MODELS, ask, verify
from tests.probe import equal, run, runtime

MODEL = MODELS["mixed"]
OLD, NEW = [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 9, 9, 9, 9, 9]


def make_anew(folder):
    remove(folder)
    CacheFolder(folder).prepare()


def move_away(folder):
    os.rename(folder, folder.with_name("away"))


def remove_records_and_index(folder):
    for path in [folder / "records", *folder.glob("index.sqlite*")]:
        remove(path) if path.is_dir() else path.unlink()


def replace_index(folder):
    shutil.copy(folder / "index.sqlite", folder.parent / "copy")
    os.replace(folder.parent / "copy", folder / "index.sqlite")


def remove_index(folder):
    for path in folder.glob("index.sqlite*"):
        path.unlink()


def remove_lock(folder):
    (folder / "LOCK").unlink()


ALL = [remove, make_anew, move_away, remove_records_and_index]
PART = [replace_index, remove_index, remove_lock]


@pytest.mark.parametrize("ram", [0, 1 << 24])
@pytest.mark.parametrize("how", [*ALL, *PART])
def test_it_is_opened_again_and_goes_on(tmp_path, how, ram, caplog):
    folder = tmp_path / "c"
    store = MODEL.open(folder, ram_budget=ram)
    ask(MODEL, store, OLD, ends=(5,))
    assert store.writer.flush(20)
    store.writer.write_tips()
    assert store.writer.flush(20)
    how(folder)
    kept = how in PART or ram > 0
    assert (ask(MODEL, store, OLD, keep=False).reason is None) == kept  # the files are there, or RAM has it
    ask(MODEL, store, NEW, ends=(5,))
    assert store.writer.flush(20) and not store.writer.stopped_because
    store.writer.write_tips()
    assert store.writer.flush(20)
    assert ask(MODEL, store, NEW, keep=False).reason is None
    assert sum("opened again" in r.message for r in caplog.records) == 1
    store.close()
    store = MODEL.open(folder)  # another process: what was stored since, and what hung on nothing, is whole
    assert ask(MODEL, store, NEW, keep=False).reason is None
    verify(folder, store)
    store.close()


def test_in_the_middle_of_a_group(tmp_path, monkeypatch):
    """The folder goes while its records are being made durable: that group is lost, the next one is not."""
    store = open_store(tmp_path / "c")
    there, gone = threading.Event(), threading.Event()
    real = os.fsync

    def hang(fd):
        there.set()
        assert gone.wait(20)
        real(fd)

    with monkeypatch.context() as m:
        m.setattr(os, "fsync", hang)
        assert store.writer.submit(chain(store, tokens(1, BLOCK)))
        assert there.wait(20)
        remove(tmp_path / "c")
        assert store.lookup(tokens(2, BLOCK)).reason == "empty"  # something is being written: not yet
        assert store.writer.stopped_because
        gone.set()
        assert store.writer.flush(20)
    assert store.lookup(tokens(2, BLOCK)).reason == "empty" and not store.writer.stopped_because
    put(store, drafts := chain(store, tokens(2, BLOCK)))
    assert held(store, drafts) == ["rows+state"] and len(records(tmp_path / "c")) == 2
    store.close()


def test_where_it_cannot_be_opened_it_is_tried_once_in_a_while(tmp_path, monkeypatch, caplog):
    folder = tmp_path / "c"
    store = MODEL.open(folder)
    ask(MODEL, store, OLD, ends=(5,))
    assert store.writer.flush(20)
    remove(folder)
    folder.write_text("a file")
    for _ in range(3):
        assert ask(MODEL, store, OLD).reason is not None
    assert store.writer.stopped_because and sum("tried again later" in r.message for r in caplog.records) == 1
    folder.unlink()
    ask(MODEL, store, OLD)
    assert store.writer.stopped_because and not folder.exists()
    monkeypatch.setattr(store, "_again", store._again - store_module.REOPEN)
    ask(MODEL, store, OLD, ends=(5,))
    assert store.writer.flush(20) and ask(MODEL, store, OLD, keep=False).reason is None
    store.close()


def test_two_stores_share_a_folder_that_is_made_anew(tmp_path):
    folder = tmp_path / "c"
    stores = [open_store(folder), open_store(folder)]
    put(stores[0], chain(stores[0], tokens(1, BLOCK)))
    remove(folder)
    for seed, store in enumerate(stores):
        assert store.lookup(tokens(1, BLOCK)).position == 0
        put(store, chain(store, tokens(10 + seed, BLOCK)))
    for store in stores:
        for seed in range(2):
            assert held(store, chain(store, tokens(10 + seed, BLOCK))) == ["rows+state"]
        assert store.index.execute("SELECT count(*) FROM holds WHERE budget IS NOT NULL").fetchone() == (2,)
    for store in stores:
        store.close()


def test_a_real_model_goes_on(tiny_model, tmp_path):
    rt = runtime(tiny_model("qwen3_5"), tmp_path / "c")
    asked = prompt()
    cold = run(rt, asked, use_cache=False)[0]
    run(rt, asked)
    assert rt.store.writer.flush(10)
    remove(tmp_path / "c")
    assert equal(run(rt, asked)[0], cold)
    assert rt.store.writer.flush(10)
    logits, completion = run(rt, asked, keep=False)
    assert equal(logits, cold) and completion.usage.cached_tokens == len(asked) - 1
    rt.store.close()
    rt = reopened(rt, tmp_path / "c")
    assert run(rt, asked, keep=False)[1].usage.cached_tokens == len(asked) - 1
    rt.store.close()
