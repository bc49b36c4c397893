"""``mlxkv cache verify``: every kind of damage is found, and gone after ``--repair`` as docs/store.md says."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlxkv.cache import record
from mlxkv.cache.folder import CacheFolder
from mlxkv.cache.index import Index
from tests.cache.stores import Written, records
from tests.cli.stored import items


@pytest.fixture(scope="module")
def written(tiny_model, tmp_path_factory) -> Written:
    return Written(tiny_model("qwen3_5"), tmp_path_factory.mktemp("written") / "c")


@pytest.fixture
def folder(written, tmp_path, monkeypatch) -> Path:
    """A copy of the store with its index; what a run opens later is this one."""
    rt = written.copy(tmp_path / "c")
    rt.store.close()
    monkeypatch.setenv("MLXKV_CACHE_DIR", str(tmp_path / "c"))
    return tmp_path / "c"


@pytest.fixture
def verify(cli):
    return lambda *args: cli("cache", "verify", "--json", *args)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def drop(folder: Path, path: Path) -> None:
    key, kind, _ = path.name.split(".")
    index = Index(folder)
    index.drop_record(bytes.fromhex(key), kind)
    index.close()


def swap(folder: Path, path: Path) -> None:
    """Another whole record under this name."""
    path.write_bytes(next(p for p in records(folder, "state") if p != path).read_bytes())


def span(folder: Path, path: Path) -> None:
    """The index says something else of where the rows begin."""
    index = Index(folder)
    index._db.execute("UPDATE entries SET row_start = end, base = key WHERE key = ?", (bytes.fromhex(path.name[:64]),))
    index.close()


#: name -> (what is done to a state record, reason, action)
DAMAGE = {
    "data": (lambda folder, path: flip(path, -1), "corrupt", "quarantine"),
    "header": (lambda folder, path: flip(path, 200), "corrupt", "quarantine"),
    "short": (lambda folder, path: os.truncate(path, path.stat().st_size - 1), "corrupt", "delete"),
    "empty": (lambda folder, path: os.truncate(path, 0), "corrupt", "delete"),
    "long": (lambda folder, path: path.write_bytes(path.read_bytes() + b"x"), "corrupt", "keep"),
    "another": (swap, "corrupt", "quarantine"),
    "gone": (lambda folder, path: path.unlink(), "evicted", "forget"),
    "not indexed": (drop, "not_indexed", "adopt"),
}


def test_a_whole_store_has_nothing_to_find(verify, folder, cli):
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*.safetensors")}
    found = verify("--repair")
    assert found.code == 0
    assert found.json["findings"] == [] and found.json["unreachable"] == 0
    assert found.json["records"] == len(records(folder))
    assert found.json["bytes"] == sum(p.stat().st_size for p in records(folder))
    assert before == {p: p.stat().st_mtime_ns for p in folder.rglob("*.safetensors")}
    assert "0 found" in cli("cache", "verify").out


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_and_repaired(verify, folder, written, cli, name):
    do, reason, action = DAMAGE[name]
    victim = max(records(folder, "state"), key=lambda p: p.name)
    do(folder, victim)
    left = victim.read_bytes() if victim.exists() else None
    seen = verify()
    assert seen.code == 1
    (finding,) = seen.json["findings"]
    assert (finding["reason"], finding["action"], finding["done"]) == (reason, action, False)
    assert finding["file"] == str(victim.relative_to(folder)) and finding["key"] == victim.name[:64]
    assert (victim.read_bytes() if victim.exists() else None) == left  # looking changes nothing
    assert finding["file"] in cli("cache", "verify").out

    done = verify("--repair")
    assert done.code == 1
    assert [f["done"] for f in done.json["findings"]] == [action != "keep"]
    assert victim.exists() == (action in ("keep", "adopt"))
    aside = [p.read_bytes() for p in (folder / "quarantine").glob("*.safetensors")]
    assert aside == ([left] if action == "quarantine" else [])
    again = verify()
    assert again.code == (1 if action == "keep" else 0)
    assert len(again.json["findings"]) == (action == "keep")
    cached, _ = written.ask_anew(folder, keep=True)  # the answer is the cold one, and
    assert cached >= 10
    if action != "keep":
        assert written.ask_anew(folder)[0] == len(written.tokens) - 1  # what was lost is stored again
        assert verify().code == 0


def test_rows_that_the_index_describes_otherwise(verify, folder, written):
    victim = max(records(folder, "rows"), key=lambda p: p.name)
    before = items(folder)
    span(folder, victim)
    findings = verify("--repair").json["findings"]
    assert [(f["kind"], f["reason"], f["action"], f["done"]) for f in findings] == [
        ("rows", "not_indexed", "adopt", True)
    ]
    assert items(folder) == before  # the file is the truth
    assert verify().code == 0
    assert written.ask_anew(folder)[0] == len(written.tokens) - 1


def test_records_of_one_entry_that_start_at_different_tokens(cli, tiny_model, tmp_path):
    """Others were merged into its rows, and not yet into its windows: no damage. An index that says otherwise of both
    is put right, and by the later start."""
    folder = tmp_path / "c"
    stored = Written(tiny_model("gemma3_text"), folder)
    item = next(item for item in items(folder) if item.base and "window" in item.sizes)
    where = CacheFolder(folder)
    rows, window = where.file(item.key, "rows"), where.file(item.key, "window")
    with record.Reader.open(rows) as reader:
        meta = replace(reader.meta, row_start=item.start, base=None)
        first = [(name, reader.tensors[name][0], reader.read(name)) for name in reader.tensors]
    more = ((0, 0), (0, 0), (item.row_start - item.start, 0), (0, 0))
    rows.unlink()
    record.write(rows, meta, record.Body.of({name: (dtype, np.pad(a, more)) for name, dtype, a in first}))
    assert cli("cache", "verify", "--repair", "--json", "--cache-dir", folder).json["findings"] == []
    index = Index(folder)
    index.execute("UPDATE entries SET row_start = start, base = NULL WHERE key = ?", (item.key,))
    index.close()
    found = cli("cache", "verify", "--repair", "--json", "--cache-dir", folder).json["findings"]
    assert [(f["kind"], f["action"], f["done"]) for f in found] == [("window", "adopt", True)]
    assert rows.exists() and window.exists()
    assert cli("cache", "verify", "--json", "--cache-dir", folder).json["findings"] == []
    now = next(each for each in items(folder) if each.key == item.key)
    assert (now.row_start, now.base) == (item.row_start, item.base)
    assert stored.ask_anew(folder) == (29, None)


def test_lost_rows_leave_what_hangs_on_them_unreachable_but_no_damage(verify, folder, written):
    first = next(item for item in items(folder) if item.start == 0 and item.base is None)
    flip(folder / "records" / first.key.hex()[:2] / f"{first.key.hex()}.rows.safetensors", -1)
    assert verify("--repair").json["repaired"] == 1
    found = verify()
    assert found.code == 0 and found.json["unreachable"] > 0
    written.ask_anew(folder, keep=True)
    assert verify().json["unreachable"] == 0  # of use again


def test_a_damaged_index_is_found_and_built_again(verify, folder, written):
    rows = len(records(folder))
    (folder / "index.sqlite").write_bytes(b"no database at all " * 500)
    for suffix in ("-wal", "-shm"):
        (folder / f"index.sqlite{suffix}").unlink(missing_ok=True)
    seen = verify()
    assert seen.code == 1 and seen.json["records"] == rows
    assert [(f["file"], f["action"], f["done"]) for f in seen.json["findings"]] == [("index.sqlite", "rebuild", False)]
    assert (folder / "index.sqlite").read_bytes().startswith(b"no database")
    assert verify("--repair").json["repaired"] == 1
    again = verify()
    assert again.code == 0 and again.json["records"] == rows
    assert written.ask_anew(folder) == (len(written.tokens) - 1, None)


def test_a_missing_index_is_found_and_built_again(verify, folder):
    for path in folder.glob("index.sqlite*"):
        path.unlink()
    assert verify().code == 1
    assert not (folder / "index.sqlite").exists()
    assert verify("--repair").json["repaired"] == 1
    assert verify().code == 0


def test_ctrl_c_stops_between_records(verify, folder, monkeypatch):
    bad = max(records(folder), key=lambda p: p.name)
    flip(bad, -1)
    read = record.Reader.read
    calls = []

    def interrupted(self, name):
        if not calls:
            os.kill(os.getpid(), signal.SIGINT)
        calls.append(name)
        return read(self, name)

    monkeypatch.setattr(record.Reader, "read", interrupted)
    found = verify("--repair")
    assert found.code == 130 and found.out == "" and "Traceback" not in found.err
    assert len(calls) == 1 and bad.exists()  # the read came to its end, the next one did not begin
