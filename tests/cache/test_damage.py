"""Damage of every kind to what is stored: a miss with its reason, its fate as DESIGN §4 says, the right answer."""

from __future__ import annotations

import errno
import os
import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from mlxkv.cache.record import Reader
from mlxkv.cache.store import stats
from tests.cache.stores import LENGTH, Written, records, remove
from tests.probe import run

N1 = LENGTH - 1


@pytest.fixture(scope="module")
def written(tiny_model, tmp_path_factory):
    return Written(tiny_model("qwen3_5"), tmp_path_factory.mktemp("damage") / "cache")


def newest_state(folder: Path) -> Path:
    """The state that the stored prompt resumes from."""
    for path in records(folder, "state"):
        with Reader.open(path) as reader:
            if reader.meta.end == N1:
                return path
    raise AssertionError("no state at n-1")


def first_rows(folder: Path) -> Path:
    """Rows that every resume point needs."""
    for path in records(folder, "rows"):
        with Reader.open(path) as reader:
            if reader.meta.start == 0 and reader.meta.end == 8:
                return path
    raise AssertionError("no first block")


TARGETS = {"state": newest_state, "rows": first_rows}


def flip(path: Path, where: int) -> None:
    data = bytearray(path.read_bytes())
    data[where] ^= 1 << (where % 8)
    path.write_bytes(data)


def header_length(path: Path) -> int:
    return int.from_bytes(path.read_bytes()[:8], "little")


def cut(path: Path, _: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path, _: Path) -> None:
    path.write_bytes(b"")


def flip_data(path: Path, _: Path) -> None:
    flip(path, path.stat().st_size - 5)


def flip_metadata(path: Path, _: Path) -> None:
    flip(path, path.read_bytes().index(b'"tokens"') + 12)


def zero_block(path: Path, _: Path) -> None:
    data = path.read_bytes()
    at = 8 + header_length(path)
    path.write_bytes(data[:at] + bytes(512) + data[at + 512 :])


def longer(path: Path, _: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def swapped(path: Path, other: Path) -> None:
    path.write_bytes(other.read_bytes())


def deep_header(path: Path, _: Path) -> None:
    path.write_bytes((100_000).to_bytes(8, "little") + b"[" * 100_000)


def huge_header(path: Path, _: Path) -> None:
    path.write_bytes((1 << 60).to_bytes(8, "little") + b"{}")


def link(path: Path, other: Path) -> None:
    path.unlink()
    path.symlink_to(other)


def fifo(path: Path, _: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def directory(path: Path, _: Path) -> None:
    path.unlink()
    path.mkdir()


def removed(path: Path, _: Path) -> None:
    path.unlink()


DAMAGE = [
    (cut, "corrupt", "deleted"),
    (empty, "corrupt", "deleted"),
    (flip_data, "corrupt", "quarantined"),
    (flip_metadata, "corrupt", "quarantined"),
    (zero_block, "corrupt", "quarantined"),
    (swapped, "corrupt", "quarantined"),
    (deep_header, "corrupt", "quarantined"),
    (huge_header, "corrupt", "quarantined"),
    (longer, "corrupt", "kept"),
    (link, "io_error", "kept"),
    (fifo, "io_error", "kept"),
    (directory, "io_error", "kept"),
    (removed, "evicted", "deleted"),
]


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize(("damage", "reason", "fate"), DAMAGE, ids=[d[0].__name__ for d in DAMAGE])
def test_a_damaged_record_is_a_miss(written, tmp_path, caplog, kind, damage, reason, fate):
    folder = tmp_path / "c"
    rt = written.copy(folder)
    target = TARGETS[kind](folder)
    other = next(p for p in records(folder, kind) if p != target)
    damage(target, other)
    if damage is removed and kind == "state":
        reason = "no_state"  # the rows are there, only the state is not
    cached, said = written.ask(rt)
    assert said == reason and cached < N1
    assert cached == (20 if kind == "state" else 0)  # the next older state, or nothing without the first rows
    held = list((folder / "quarantine").iterdir())
    assert os.path.lexists(target) == (fate == "kept")
    assert len(held) == (fate == "quarantined")
    assert sum("cache miss" in r.message for r in caplog.records) >= 1
    written.ask(rt, keep=True)
    rt.store.close()
    if fate != "kept":  # what was lost is stored again by the next run
        assert target.is_file() and written.ask_anew(folder) == (N1, None)


def test_cut_at_any_place(written, tmp_path):
    rt = written.copy(tmp_path / "c")
    target = newest_state(tmp_path / "c")
    data = target.read_bytes()
    for size in sorted({0, 1, 7, 8, 9, *range(100, len(data), 1024), len(data) - 1}):
        target.write_bytes(data[:size])
        assert written.ask(rt) == (20, "corrupt"), size
        assert not target.exists()
        put_back(rt, target, data)
    assert written.ask(rt) == (N1, None)
    rt.store.close()


def test_flipped_at_any_place(written, tmp_path):
    rt = written.copy(tmp_path / "c")
    target = newest_state(tmp_path / "c")
    data, head = target.read_bytes(), 8 + header_length(target)
    rng = random.Random(7)
    places = [
        *range(8),
        *rng.sample(range(8, head), 40),
        *range(head - 3, head + 3),
        *rng.sample(range(head, len(data)), 20),
    ]
    for where in places:
        flip(target, where)
        assert written.ask(rt) == (20, "corrupt"), where
        put_back(rt, target, data)
    rt.store.close()


def put_back(rt, path: Path, data: bytes) -> None:
    """Restore a record and its row in the index."""
    path.write_bytes(data)
    with Reader.open(path) as reader:
        key, kind = reader.meta.key, reader.meta.kind
    rt.store.index._db.execute("INSERT OR REPLACE INTO records VALUES (?, ?, ?)", (key, kind, len(data)))


def test_a_failed_read_keeps_the_file(written, tmp_path, monkeypatch):
    rt = written.copy(tmp_path / "c")
    before = records(tmp_path / "c")

    def failing(*args):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as m:
        m.setattr(os, "preadv", failing)
        assert written.ask(rt) == (0, "io_error")
    assert records(tmp_path / "c") == before
    assert written.ask(rt) == (N1, None)
    rt.store.close()


def test_too_many_open_files_is_a_miss(written, tmp_path, monkeypatch):
    rt = written.copy(tmp_path / "c")
    real = os.open

    def full(path, *args, **kwargs):
        if str(path).endswith(".safetensors"):
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path, *args, **kwargs)

    with monkeypatch.context() as m:
        m.setattr(os, "open", full)
        assert written.ask(rt) == (0, "io_error")
    assert written.ask(rt) == (N1, None)
    rt.store.close()


def test_the_folder_removed_while_running(written, tmp_path):
    rt = written.copy(tmp_path / "c")
    remove(tmp_path / "c")
    assert written.ask(rt, keep=True) == (0, "empty")
    assert written.ask(rt, keep=True) == (29, None)  # the folder was made anew
    rt.store.close()


def test_states_removed_and_rows_left(written, tmp_path):
    shutil.copytree(written.folder, tmp_path / "c")
    for path in records(tmp_path / "c", "state"):
        path.unlink()
    assert written.ask_anew(tmp_path / "c") == (0, "no_state")


INDEX_DAMAGE = {
    "removed": None,
    "junk": b"junk" * 5000,
    "empty": b"",
    "sql": [
        "UPDATE entries SET end = 100000000000",
        "UPDATE entries SET end = end + 1, start = start + 1",
        "UPDATE entries SET row_start = start, base = NULL",
        "UPDATE entries SET base = key",
        "UPDATE entries SET parent = key",
        "UPDATE entries SET tokens = 'text'",
        "UPDATE entries SET start = 'x'",
        "UPDATE entries SET tokens = (SELECT tokens FROM entries LIMIT 1)",
        "UPDATE answers SET start = 'x', last = 'y'",
        "DELETE FROM entries",
        "DELETE FROM records WHERE kind = 'rows'",
        "DELETE FROM roots",
        "DROP TABLE records",
        "PRAGMA user_version = 99",
    ],
}


@pytest.mark.parametrize("how", [*(k for k in INDEX_DAMAGE if k != "sql"), *INDEX_DAMAGE["sql"]])
def test_the_index_is_only_a_hint(written, tmp_path, how):
    folder = tmp_path / "c"
    shutil.copytree(written.folder, folder)
    index = folder / "index.sqlite"
    if how == "removed":
        index.unlink()
    elif how in INDEX_DAMAGE:
        index.write_bytes(INDEX_DAMAGE[how])
    else:
        db = sqlite3.connect(index)
        db.execute(how)
        db.commit()
        db.close()
    stats(folder)  # never raises
    for _ in range(3):
        last = written.ask_anew(folder, keep=True)
    assert last == (N1, None)  # whatever it was, it heals


def test_a_name_in_the_index_that_is_no_text(written, tmp_path):
    """One flipped bit in the schema: what SQLite says of it cannot be decoded."""
    folder = tmp_path / "c"
    shutil.copytree(written.folder, folder)
    index = folder / "index.sqlite"
    data = index.read_bytes()
    places = [i for i in range(len(data)) if data.startswith(b"CREATE", i)]
    assert len(places) == 16
    for place in places:
        index.write_bytes(data)
        flip(index, place + (7 - place) % 8)  # the highest bit
        stats(folder)  # never raises
        assert written.ask_anew(folder) == (N1, None)


def test_an_index_of_a_format_that_sqlite_only_reads(written, tmp_path):
    """One flipped bit in the header, and SQLite calls the file read-only: it is built again, not refused for ever."""
    folder = tmp_path / "c"
    shutil.copytree(written.folder, folder)
    data = bytearray((folder / "index.sqlite").read_bytes())
    data[18] ^= 8
    (folder / "index.sqlite").write_bytes(data)
    assert written.ask_anew(folder) == (N1, None)


def test_a_damaged_answer_is_no_answer(written, tmp_path):
    """An answers table that lies, or runs in a circle, gives no ids and no hang."""
    rt = written.copy(tmp_path / "c")
    _, completion = run(rt, written.tokens, max_tokens=12)
    rt.store.writer.flush()
    assert rt.store.answer_ids(written.tokens, completion.text) == completion.token_ids
    db = rt.store.index._db
    for change in ("start = -5", "last = -1", "last = 'x'", "start = 'x'", "key = x'00'", "start = 1000"):
        db.execute(f"UPDATE answers SET {change}")
        assert rt.store.answer_ids(written.tokens, completion.text) in (None, []), change
        db.execute("DELETE FROM answers")
        run(rt, written.tokens, max_tokens=12)  # remembers it again
        rt.store.writer.flush()
    rt.store.close()


def test_older_index_with_newer_files(written, tmp_path):
    folder = tmp_path / "c"
    rt = written.copy(folder)
    old = tmp_path / "old.sqlite"
    sqlite3.connect(folder / "index.sqlite").backup(sqlite3.connect(old))
    longer_prompt = [*written.tokens, 5, 6, 7, 8]
    cold, _ = run(rt, longer_prompt, use_cache=False)
    run(rt, longer_prompt)
    rt.store.close()
    shutil.copy(old, folder / "index.sqlite")
    assert written.ask_anew(folder) == (20, "no_state")  # the longer prompt's n-1 has superseded this one's
    rt = written.at(folder)
    logits, completion = run(rt, longer_prompt)
    assert (logits == cold).all() and completion.cache.miss_reason is None
    rt.store.close()


def test_foreign_things_in_the_folder(written, tmp_path):
    folder = tmp_path / "c"
    shutil.copytree(written.folder, folder)
    one = records(folder)[0]
    shutil.copy(one, one.with_name(one.name.upper()))  # another case
    (folder / "records" / "zz").mkdir()
    (folder / "records" / "00").mkdir(exist_ok=True)
    if one.parent.name != "00":
        shutil.copy(one, folder / "records" / "00" / one.name)  # not where it belongs
    (folder / "tmp" / "99999999999999999999-x").touch()
    (folder / "tmp" / "notes").mkdir()
    (folder / "quarantine" / "sub").mkdir()
    (folder / "tmp" / f"{os.getpid()}-00000000-1-x.safetensors").touch()  # our id, another life
    (folder / "tmp" / "999999999-00000000-1-x.safetensors").touch()
    assert written.ask_anew(folder) == (N1, None)
    assert sorted(p.name for p in (folder / "tmp").iterdir()) == ["99999999999999999999-x", "notes"]
