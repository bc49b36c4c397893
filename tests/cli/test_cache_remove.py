"""``mlxkv cache prune`` and ``rm``: what goes, what stays usable, and what other processes see meanwhile."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from mlxkv.cache import removal
from mlxkv.cache.catalogue import Catalogue, Forest
from mlxkv.cache.eviction import free
from mlxkv.cache.folder import CacheFolder
from mlxkv.cache.index import Entry, Index
from mlxkv.cache.verify import verify
from tests.cache.stores import records
from tests.cli.stored import Stored, forest, items


@pytest.fixture(scope="module")
def stored(tiny_model, tmp_path_factory) -> Stored:
    return Stored(tiny_model("qwen3_5"), tiny_model("llama"), tmp_path_factory.mktemp("stored") / "c")


@pytest.fixture
def folder(stored, tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("MLXKV_CACHE_DIR", str(tmp_path / "c"))
    return stored.copy(tmp_path / "c")


@pytest.fixture
def cache(cli, folder):
    def call(*args, **more):
        return cli("cache", *args, "--json", **more)

    return call


def sound(folder: Path) -> None:
    """Nothing hangs on what is gone, and files and rows agree."""
    found = verify(folder)
    assert found.findings == [] and found.unreachable == 0
    with Index(folder)._db as db:
        known = {key for (key,) in db.execute("SELECT key FROM entries")}
        assert {key for (key,) in db.execute("SELECT key FROM answers")} <= known


def age(folder: Path, keys: set[bytes], seconds: float) -> None:
    index = Index(folder)
    for key in keys:
        index._db.execute("UPDATE entries SET used = ? WHERE key = ?", (time.time() - seconds, key))
    index.close()


@pytest.mark.parametrize("share", [0.9, 0.6, 0.3, 0.1])
def test_prune_to_a_size(cache, folder, stored, share):
    live = stored.hybrid.at(folder)  # another process, as far as the folder can tell
    total = CacheFolder(folder).size()
    target = int(total * share)
    seen = cache("prune", "--to", target, "--dry-run").json
    assert seen["dry_run"] and seen["folder_bytes"] == total and seen["removed"] + seen["removed_states"]
    assert len(records(folder)) == len(records(stored.folder))
    found = cache("prune", "--to", target, "--yes").json
    assert found["removed"][: len(seen["removed"])] == seen["removed"] and found["kept"] == 0
    assert found["bytes"] >= seen["bytes"]
    left = CacheFolder(folder).size()
    assert found["folder_bytes"] == left
    beside = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file() and p.suffix != ".safetensors")
    assert left <= max(target, beside)
    assert {i.key.hex() for i in items(folder)} == {i.key.hex() for i in items(stored.folder)} - set(found["removed"])
    without = {i.key.hex() for i in items(stored.folder) if "state" in i.sizes} - set(found["removed"])
    without -= {i.key.hex() for i in items(folder) if "state" in i.sizes}
    assert without == set(found["removed_states"])  # of these only the state is gone
    sound(folder)
    stored.hybrid.ask(live)  # the answer is the cold one
    stored.hybrid.ask(live, keep=True)
    live.store.close()
    assert stored.hybrid.ask_anew(folder)[0] == 29
    sound(folder)


def test_prune_takes_what_was_not_used_for_longest(cache, folder):
    held = forest(folder)
    plain = {i.key for i in held.items.values() if "state" not in held.kinds(i.root)}
    age(folder, held.items.keys() - plain, 1000)
    size = CacheFolder(folder).size()
    seen = cache("prune", "--to", size - 1, "--dry-run").json
    removed = seen["removed"] + seen["removed_states"]
    assert len(removed) == 1 and removed[0] not in {key.hex() for key in plain}
    age(folder, plain, 5000)
    removed = cache("prune", "--to", "1", "--yes").json["removed"]
    assert {bytes.fromhex(key) for key in removed[: len(plain)]} == plain
    assert len(removed) == len(held.items)


@pytest.mark.parametrize("share", [0.9, 0.6, 0.4])
def test_prune_removes_what_the_store_itself_would_evict(cache, folder, tmp_path, share):
    tips = sorted(forest(folder).tips(), key=lambda i: i.key)
    age(folder, {tips[0].key, tips[-1].key}, 1000)
    other = CacheFolder(Path(shutil.copytree(folder, tmp_path / "other")))
    found = cache("prune", "--to", int(CacheFolder(folder).size() * share), "--yes").json
    assert found["bytes"] > 0
    index = Index(other.path)
    assert free(other, index, found["bytes"]).bytes == found["bytes"]
    index.close()
    assert [path.name for path in records(folder)] == [path.name for path in records(other.path)]


def test_prune_to_a_size_takes_first_what_serves_nobody(cache, folder):
    before = len(items(folder))
    (folder / "quarantine" / "1-x").write_bytes(b"x" * 4000)
    left_over = folder / "tmp" / "4194303-00000000-1-x.rows.safetensors"
    left_over.write_bytes(b"x" * 4000)
    mine = folder / "tmp" / f"{os.getppid()}-00000000-1-x.rows.safetensors"  # of a process that lives
    mine.write_bytes(b"x" * 4000)
    size = CacheFolder(folder).size()
    found = cache("prune", "--to", size - 8000, "--yes").json
    assert (found["removed"], found["removed_files"], found["bytes"]) == ([], 2, 8000)
    assert len(items(folder)) == before and mine.exists() and not left_over.exists()
    assert cache("prune", "--to", "1TB", "--yes").json["bytes"] == 0


def test_prune_older_than(cache, folder, stored):
    held = forest(folder)
    assert cache("prune", "--older-than", "1h", "--yes").json["removed"] == []
    tip = max(held.tips(), key=lambda i: i.key)
    old = {i.key for i in held.chain(tip)[0]}
    age(folder, old, 7200)
    removed = cache("prune", "--older-than", "1.5h", "--yes").json["removed"]
    shared = {i.key for other in held.tips() if other != tip for i in held.chain(other)[0]}
    assert set(removed) == {key.hex() for key in old - shared}  # what newer things hang on stays
    assert removed[0] == tip.key.hex()  # children first
    sound(folder)


def test_prune_one_model(cache, folder, stored):
    found = cache("prune", "--model", "llama", "--yes").json
    assert found["removed"]
    assert cache("stats").json["by_model"] == [
        model for model in [*_by_model(stored.folder)] if model["model"] == "qwen3_5"
    ]
    assert [m["model"] for m in cache("info").json["models"]] == ["qwen3_5"]
    sound(folder)
    assert stored.hybrid.ask_anew(folder)[0] == 29
    lost = cache("prune", "--model", "llama", "--yes")
    assert lost.code == 2 and "qwen3_5" in lost.err and lost.out == ""


def _by_model(folder: Path):
    from mlxkv.cache.inspect import stats

    return stats(folder)["by_model"]


def test_rm_takes_what_hangs_on_it(cache, folder, stored):
    held = forest(folder)
    root = next(i for i in held.items.values() if i.start == 0 and len(held.hanging(i.key)) and i.base is None)
    hanging = held.above([root.key])
    seen = cache("rm", root.key.hex()[:20], "--dry-run").json
    assert seen["removed"] == [i.key.hex() for i in hanging] and len(records(folder)) == len(records(stored.folder))
    found = cache("rm", root.key.hex()[:20], "--yes").json
    assert found["removed"] == seen["removed"] and found["bytes"] == sum(i.bytes for i in hanging)
    assert {i.key for i in items(folder)} == held.items.keys() - {i.key for i in hanging}
    sound(folder)


def test_rm_of_several_keys_at_once(cache, folder):
    tips = [tip.key.hex() for tip in forest(folder).tips()]
    assert sorted(cache("rm", *tips, tips[0], "--yes").json["removed"]) == sorted(tips)


@pytest.mark.parametrize("args", [["rm", "KEY"], ["prune", "--to", "1"]])
def test_it_asks_first(cli, folder, args):
    tip = forest(folder).tips()[0].key.hex()
    args = [tip if arg == "KEY" else arg for arg in args]
    before = len(records(folder))
    no = cli("cache", *args, stdin="n\n")
    assert no.code == 0 and "0 entries" in no.out and "[y/N]" in no.err
    nobody = cli("cache", *args, stdin="")
    assert nobody.code == 2 and "--yes" in nobody.err and nobody.out == ""
    assert len(records(folder)) == before
    yes = cli("cache", *args, stdin="y\n")
    assert yes.code == 0 and "removed" in yes.out and len(records(folder)) < before


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "--older-than"),
        (["--to", "much"], "20GiB"),
        (["--older-than", "soon"], "30d"),
        (["--older-than", "5"], "30d"),
        (["--model", "gpt"], "qwen3_5"),
    ],
)
def test_refusals(cache, folder, args, says):
    found = cache("prune", *args, "--yes")
    assert found.code == 2 and found.out == "" and says in found.err
    assert len(records(folder)) > 0


def test_what_others_need_meanwhile_stays(folder):
    """Between planning and removing another process used one entry and stored something on another."""
    index = Catalogue(folder)
    planned = removal.plan_pruning(CacheFolder(folder), index, to=0, before=None, model=None)
    assert len(planned.entries) == len(items(folder)) and not planned.states
    tips = Forest(planned.entries).tips()
    used, grown = tips[0], tips[1]
    other = Index(folder)
    other.touch([used.key])
    other.add_entry(Entry(b"k" * 32, grown.root, grown.key, 32, 33, 32, None, b"\1\0\0\0", frozenset()), {})
    other.close()
    done = removal.prune(CacheFolder(folder), index, lambda: planned)
    index.close()
    held = forest(folder)
    assert {used.key, grown.key} <= held.items.keys() and held.items[used.key].sizes == used.sizes
    assert held.chain(held.items[used.key])[1] is None and held.chain(held.items[grown.key])[1] is None
    assert done.kept == len(planned.units) - len(done.units) > 1
    assert done.entries and done.bytes == planned.bytes - sum(i.bytes for i in held.items.values())
    assert not {i.key for i in done.entries} & held.items.keys()


def test_ctrl_c_stops_after_a_whole_step(cache, folder, monkeypatch):
    monkeypatch.setattr(removal, "BATCH", 2)
    before = len(records(folder))
    unlink = Path.unlink

    def interrupted(self, missing_ok=False):
        if self.parent.parent.name == "records":
            os.kill(os.getpid(), signal.SIGINT)
            monkeypatch.setattr(Path, "unlink", unlink)
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", interrupted)
    found = cache("prune", "--to", "1", "--yes")
    assert found.code == 130 and found.out == "" and "Traceback" not in found.err
    assert len(records(folder)) == before - 2
    sound(folder)
