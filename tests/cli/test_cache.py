"""``mlxkv cache dir | ls | info | show``: what is stored, as the files themselves say it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlxkv.cache.folder import CacheFolder
from mlxkv.cache.index import Index
from mlxkv.cache.opening import open_index
from mlxkv.cli.cache_text import decoder
from mlxkv.config import EMBEDDED, Settings
from tests import tiny
from tests.cache.stores import records
from tests.cli.stored import Stored, forest, items

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def stored(tiny_model, tmp_path_factory) -> Stored:
    return Stored(tiny_model("qwen3_5"), tiny_model("llama"), tmp_path_factory.mktemp("stored") / "c")


@pytest.fixture
def cache(cli, stored, monkeypatch):
    """``cache("ls", …)`` on the shared store; nothing here may change it."""
    monkeypatch.setenv("MLXKV_CACHE_DIR", str(stored.folder))
    return lambda *args, **more: cli("cache", *args, **more)


@pytest.fixture
def own(stored, tmp_path, monkeypatch) -> Path:
    """A copy that a test may change."""
    monkeypatch.setenv("MLXKV_CACHE_DIR", str(tmp_path / "own"))
    return stored.copy(tmp_path / "own")


def test_looking_and_removing_need_no_mlx(stored, tmp_path):
    """What imports MLX takes seconds to start."""
    folder = stored.copy(tmp_path / "c")
    key = items(folder)[0].key.hex()
    commands = [["stats"], ["dir"], ["ls", "--text"], ["info"], ["show", key], ["verify", "--repair"]]
    commands += [["rm", key, "--yes"], ["prune", "--to", "1", "--yes"]]
    code = f"""
import sys
from mlxkv.cli import app
for args in {commands!r}:
    app(["cache", *args, "--cache-dir", {str(folder)!r}], standalone_mode=False)
print([m for m in ("mlx", "mlx.core", "mlx_lm", "transformers") if m in sys.modules])
"""
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-1] == "[]"


def test_dir(cache, stored, cli, home):
    assert cache("dir").out == f"{stored.folder}\n"
    found = cli("cache", "dir", "--json", "--cache-dir", home / "nowhere").json
    assert found == {"path": str(home / "nowhere"), "exists": False, "from": "flag --cache-dir"}


def test_a_folder_that_is_not_there_yet(cli, home):
    where = ("--cache-dir", home / "nowhere", "--json")
    assert cli("cache", "ls", *where).json == {"total": 0, "entries": []}
    assert cli("cache", "verify", *where).json["findings"] == []
    assert cli("cache", "prune", "--to", "1GB", *where).json["removed"] == []
    info = cli("cache", "info", *where).json
    assert not info["exists"] and info["bytes"] == 0 and info["models"] == [] and info["free_disk_bytes"] > 0
    for name in ("show", "rm"):
        found = cli("cache", name, "ab", *where)
        assert found.code == 2 and found.out == "" and "Nothing is stored" in found.err
    assert "does not exist yet" in cli("cache", "ls", "--cache-dir", home / "nowhere").err
    assert not (home / "nowhere").exists()


@pytest.mark.parametrize(
    "args", [[c] for c in ("ls", "info", "stats", "verify")] + [["show", "ab"], ["rm", "ab"], ["prune", "--to", "1"]]
)
def test_a_file_in_place_of_the_folder(cli, home, args):
    (home / "file").write_text("x")
    found = cli("cache", *args, "--cache-dir", home / "file", "--json")
    assert found.code == 2 and found.out == ""
    assert "is a file" in found.err and "Traceback" not in found.err


@pytest.mark.parametrize("args", [["ls"], ["info"], ["stats"], ["show", "ab"], ["rm", "ab"], ["prune", "--to", "1"]])
def test_a_damaged_index_says_what_mends_it(cache, own, args):
    (own / "index.sqlite").write_bytes(b"not a database" * 1000)
    found = cache(*args, "--json")
    assert found.code == 2 and found.out == ""
    assert "verify --repair" in found.err and "Traceback" not in found.err


def test_ls_lists_ends_of_conversations(cache, stored):
    found = cache("ls", "--json").json
    lines = found["entries"]
    assert found["total"] == len(lines) == 3
    assert sorted((line["model"], line["tokens"]) for line in lines) == [
        ("llama", 30),
        ("qwen3_5", 30),
        ("qwen3_5", 30),
    ]
    for line in lines:
        assert line["tip"] and line["resumable"]
        assert line["chain_bytes"] > line["bytes"] > 0 and line["chain_entries"] >= 4
        assert line["kinds"] == (["rows", "state"] if line["model"] == "qwen3_5" else ["rows"])
    used = [line["used"] for line in lines]
    assert used == sorted(used, reverse=True)
    shown = cache("ls").out
    assert all(line["key"][:12] in shown for line in lines) and "3 conversations" in shown


def test_ls_filters_and_limits(cache, stored):
    everything = cache("ls", "--all", "--json").json
    assert everything["total"] == len(everything["entries"]) == len(items(stored.folder)) > 6
    assert {line["model"] for line in cache("ls", "--all", "--model", "llama", "--json").json["entries"]} == {"llama"}
    assert cache("ls", "--model", "/some/where/llama", "--json").json["total"] == 1
    short = cache("ls", "--all", "--limit", 2, "--json").json
    assert short["entries"] == everything["entries"][:2] and short["total"] == everything["total"]
    assert "not shown" in cache("ls", "--all", "--limit", 2).out
    lost = cache("ls", "--model", "gpt", "--json")
    assert lost.code == 2 and lost.out == "" and "llama, qwen3_5" in lost.err


def test_ls_shows_what_was_used_last_first(cache, own):
    tip = cache("ls", "--json").json["entries"][-1]["key"]
    index = Index(own)
    index.touch([bytes.fromhex(tip)])
    index.close()
    assert cache("ls", "--json").json["entries"][0]["key"] == tip


def test_ls_shows_words(cache, tiny_model, stored):
    found = cache("ls", "--text", "--model", tiny_model("llama"), "--json").json["entries"]
    leaf = stored.tokens[24:30]
    assert [line["text"] for line in found] == [tiny.tokenizer().decode(leaf, skip_special_tokens=False)]


def test_ls_says_that_it_has_no_words(cache):
    found = cache("ls", "--text", "--json")
    assert {line["text"] for line in found.json["entries"]} == {None} and found.err.count("tokenizer of llama") == 1


def test_the_words_of_the_embedded_model_are_found():
    decode = decoder(EMBEDDED.name, Settings.load())
    ids = json.loads((EMBEDDED / "tokenizer.json").read_text())["model"]["vocab"]
    assert decode is not None and decode([ids["a"]]) == "a"


def test_info_counts_every_file_once(cache, own):
    (own / "tmp" / "4194303-00000000-1-x.rows.safetensors").write_bytes(b"x" * 1000)  # of a process that is gone
    (own / "notes.txt").write_bytes(b"mine")
    (own / "records" / "00").mkdir(exist_ok=True)
    (own / "records" / "00" / "stray.safetensors").write_bytes(b"stray")
    (own / "quarantine" / "1-x").write_bytes(b"bad")
    lost = records(own, "rows")[0]
    size = lost.stat().st_size
    lost.unlink()
    found = cache("info", "--json").json
    assert found["path"] == str(own) and found["exists"]
    assert found["bytes"] == sum(p.stat().st_size for p in own.rglob("*") if p.is_file())
    for kind in ("rows", "window", "state"):
        files = records(own, kind)
        assert found["records"][kind] == {"count": len(files), "bytes": sum(p.stat().st_size for p in files)}
    assert found["temporaries"] == {"count": 1, "bytes": 1000, "left_over": 1}
    assert found["quarantine"] == {"count": 1, "bytes": 3}
    assert found["foreign"] == {"count": 2, "bytes": 9}
    parts = [*found["records"].values(), *(found[name] for name in ("temporaries", "quarantine", "foreign"))]
    assert found["bytes"] == sum(p["bytes"] for p in parts) + found["index_bytes"] + found["notes_bytes"]
    assert (found["rows_without_file"], found["files_without_row"]) == (1, 0)
    assert sum(m["bytes"] for m in found["models"]) == sum(p.stat().st_size for p in records(own)) + size
    by_name = {m["model"]: m for m in found["models"]}
    hybrid = by_name["qwen3_5"]
    assert hybrid["compute"]["mode"] == "exact" and hybrid["compute"]["dtype"] == "float32" and hybrid["block"] == 8
    assert len(hybrid["fingerprint"]) == len(hybrid["layout"]) == len(hybrid["root"]) == 64
    assert {t["name"] for t in hybrid["tensors"]["rows"]} == {"1.keys", "1.values", "3.keys", "3.values"}
    assert by_name["llama"]["tensors"].keys() == {"rows"}
    assert found["used"] == max(m["used"] for m in found["models"])
    shown = cache("info").out
    assert str(own) in shown and "qwen3_5" in shown and "out of step" in shown


def test_show_tells_all_of_an_entry(cache, stored, tiny_model):
    held = forest(stored.folder)
    tip = next(i for i in held.tips() if len(i.sizes) == 2 and i.end == 30)
    before = held.items[tip.parent]
    found = cache("show", tip.key.hex(), "--json", "--model", tiny_model("qwen3_5")).json
    assert found["key"] == tip.key.hex() and found["model"] == "qwen3_5"
    assert (found["start"], found["tokens"]) == (24, 30)
    assert found["token_ids"] in (stored.tokens[24:30], stored.other[24:30])
    assert found["text"] == tiny.tokenizer().decode(found["token_ids"], skip_special_tokens=False)
    assert found["parent"] == before.key.hex() and found["hanging"] == []
    assert [link["end"] for link in found["chain"]] == sorted(link["end"] for link in found["chain"])
    assert found["chain"][0]["start"] == 0 and found["chain"][-1]["key"] == tip.key.hex()
    assert found["resumable"] and found["reason"] is None
    rows, state = found["records"]
    assert (rows["kind"], state["kind"]) == ("rows", "state")
    assert rows["bytes"] == Path(rows["file"]).stat().st_size and rows["problem"] is None
    assert {"name": "1.keys", "dtype": "F32", "shape": [1, 1, 30 - found["row_start"], 32]}.items() <= next(
        t for t in rows["tensors"] if t["name"] == "1.keys"
    ).items()
    shown = cache("show", tip.key.hex()).out
    assert "can stand here" in shown and tip.parent.hex() in shown and "not found" in shown


def test_show_says_why_nothing_can_stand_there(cache, own):
    full = next(i for i in items(own) if i.end == 24 and i.sizes.keys() == {"rows"} and i.base)
    held = forest(own)
    hybrid = held.kinds(full.root) == ("rows", "state")
    found = cache("show", full.key.hex(), "--json").json
    assert found["reason"] == ("no_state" if hybrid else None)
    assert {link["key"] for link in found["hanging"]} == {i.key.hex() for i in held.hanging(full.key)} != set()
    assert found["base"] == full.base.hex()
    tip = next(i for i in held.tips() if i.root == full.root and full in held.chain(i)[0])
    index = Index(own)
    index.drop_record(full.key, "rows")
    index.close()
    found = cache("show", tip.key.hex(), "--json").json
    assert found["reason"] == "evicted" and full.key.hex()[:12] in found["why"] and not found["resumable"]
    assert "cannot stand here" in cache("show", tip.key.hex()).out


def test_keys_that_name_nothing_or_too_much(cache, stored):
    keys = sorted(i.key.hex() for i in items(stored.folder))
    shared = next(a[:n] for n in range(8, 0, -1) for a, b in zip(keys, keys[1:], strict=False) if a[:n] == b[:n])
    for wanted, says in (
        ("xyz", "is no key"),
        ("", "is no key"),
        ("0" * 65, "is no key"),
        ("0" * 64, "No entry"),
        (shared, "several"),
    ):
        for name in ("show", "rm"):
            found = cache(name, wanted, "--json")
            assert found.code == 2 and found.out == "" and says in found.err, wanted
    alone = os.path.commonprefix([keys[0], keys[1]]) + keys[0][len(os.path.commonprefix([keys[0], keys[1]]))]
    assert cache("show", alone.upper(), "--json").json["key"] == keys[0]


def test_commands_see_all_of_an_index_that_was_just_built_again(cli, own, stored):
    """Each takes in first what the run that built it left waiting."""

    def listed(*args: str):
        found = cli("cache", *args, "--json").json
        if args[0] == "ls":
            return sorted((e["key"], e["kinds"], e["chain_bytes"], e["resumable"]) for e in found["entries"])
        if args[0] == "verify":
            return found["records"], found["findings"], found["unreachable"]
        if args[0] == "info":
            return found["files_without_row"], [(m["root"], m["records"]) for m in found["models"]]
        return {"removed": sorted(found["removed"])} if "removed" in found else (found["records"], found["waiting"])

    key = items(own)[0].key.hex()
    commands = [["ls", "--all"], ["stats"], ["info"], ["verify"], ["rm", key, "--dry-run"]]
    commands.append(["prune", "--model", "llama", "--dry-run"])
    before = [listed(*command) for command in commands]
    for command, expected in zip(commands, before, strict=True):
        (own / "index.sqlite").unlink()
        open_index(CacheFolder(own), at_once=1).close()
        left = Index(own, create=False)
        assert left.waiting() == len(records(own)) - 1
        left.close()
        seen = listed(*command)
        assert sorted(map(str, seen)) == sorted(map(str, expected)), command
