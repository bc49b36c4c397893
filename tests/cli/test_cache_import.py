"""``mlxkv cache import``: what it says, asks and ends with. The source is a stand-in; the store is real."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mlxkv.cache.catalogue import look
from mlxkv.cache.legacy.recognise import recognise
from mlxkv.cli import cache_import
from mlxkv.errors import ConfigError
from tests import headed, tiny
from tests.cache.legacy import shelf
from tests.cache.stores import records
from tests.probe import runtime


@pytest.fixture(scope="module")
def made(tiny_model, tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("made")
    model = tiny_model("qwen3_5")
    rt = runtime(model, folder / "cache")
    rt.store.close()
    shelf.fill(rt, folder / "old" / "a", tiny.ids(40, seed=3))
    return model, folder / "old"


@pytest.fixture
def old(made, tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr("mlxkv.cache.legacy.recognise.recognise", lambda path: "omlx")
    monkeypatch.setattr("mlxkv.decode.legacy.open_source", lambda kind, path, context: shelf.Shelf(path, context))
    monkeypatch.setenv("MLXKV_MODEL", str(made[0]))
    monkeypatch.setenv("MLXKV_CACHE_DIR", str(tmp_path / "c"))
    return Path(shutil.copytree(made[1], tmp_path / "old"))


def test_import_then_nothing_to_do_then_removal(cli, old, tmp_path):
    total = sum(path.stat().st_size for path in old.rglob("*.safetensors"))
    dry = cli("cache", "import", old, "--dry-run", "--assume-same-weights", "--json").json
    assert dry["imported"] == {"files": 8, "bytes": total} and dry["dry_run"]
    assert not (tmp_path / "c").exists()
    done = cli("cache", "import", old, "--assume-same-weights", "--json").json
    assert done == dry | {"dry_run": False}
    assert done["record_bytes"] == sum(path.stat().st_size for path in records(tmp_path / "c"))
    assert done["frees"] == total - done["record_bytes"]
    again = cli("cache", "import", old, "--json")  # consent was remembered
    assert again.code == 0 and again.json["already"]["files"] == 8 and again.json["records"] == 0
    # the demo: the folder's tokens are served by a run
    (tmp_path / "t.json").write_text(json.dumps(tiny.ids(40, seed=3)))
    ran = cli("run", "--prompt-tokens", tmp_path / "t.json", "--max-tokens", "1", "--json").json
    assert ran["cache"]["source"] == "ssd"
    refused = cli("cache", "import", old, "--remove-imported", stdin="n\n")
    assert refused.code == 0 and "Remove 8 files" in refused.err and len(list(old.rglob("*.safetensors"))) == 8
    nobody = cli("cache", "import", old, "--remove-imported", "--json", stdin="")  # the report comes all the same
    assert nobody.code == 2 and "nothing was removed" in nobody.err
    assert nobody.json["already"]["files"] == 8 and nobody.json["removed"] == {"files": 0, "bytes": 0, "kept": 8}
    gone = cli("cache", "import", old, "--remove-imported", "--yes", "--json").json
    assert gone["removed"] == {"files": 8, "bytes": total, "kept": 0}
    assert list(old.rglob("*.safetensors")) == []
    info = cli("cache", "info", "--json").json
    assert info["foreign"]["count"] == 0  # the journal is the store's own


def test_without_consent_every_file_is_refused_and_the_cure_named(cli, old):
    found = cli("cache", "import", old)
    assert found.code == 1 and "8 files" in found.out and "NO_CONSENT" in found.out
    assert "--assume-same-weights" in found.out


def test_on_a_terminal_consent_is_asked_for(cli, old, monkeypatch):
    monkeypatch.setattr(cache_import, "_vouch", lambda path, info: True)
    assert cli("cache", "import", old, "--json").json["imported"]["files"] == 8
    monkeypatch.setattr(cache_import, "_vouch", lambda path, info: pytest.fail("asked twice"))
    assert cli("cache", "import", old, "--json").json["already"]["files"] == 8


def test_what_does_not_fit_ends_with_1_and_numbers(cli, old):
    found = cli("cache", "import", old, "--assume-same-weights", "--write-budget", "10KB")
    assert found.code == 1 and "10,000" in found.err and "8 files" in found.out


def test_reasons_are_counted_and_files_named(cli, old):
    paths = sorted(old.rglob("*.safetensors"))
    shelf.rewrite(paths[7], model="other")
    shelf.spoil(paths[5])
    found = cli("cache", "import", old, "--assume-same-weights", "--json").json
    assert {code: part["files"] for code, part in found["refused"].items()} == {"MODEL": 1, "NOT_FINITE": 1, "CHAIN": 6}
    assert found["refused"]["MODEL"]["bytes"] == paths[7].stat().st_size
    assert found["refused"]["NOT_FINITE"]["examples"][0]["file"] == f"a/{paths[5].name}"
    shown = cli("cache", "import", old)
    assert shown.code == 1 and f"a/{paths[5].name}" in shown.out


def test_a_model_with_a_head_is_refused(cli, old, tmp_path):
    found = cli("cache", "import", old, "--model", headed.make(tmp_path / "headed"))
    assert found.code == 2 and "HEAD" in found.err
    with look(tmp_path / "c") as index:
        assert index is None or index.items() == []


def test_without_a_store_there_is_nothing_to_import_into(cli, old):
    assert cli("cache", "import", old, "--no-cache").code == 2


def test_a_folder_that_cannot_be_written_is_said(cli, old, tmp_path):
    (tmp_path / "c").write_text("a file")
    found = cli("cache", "import", old, "--assume-same-weights")
    assert found.code == 2 and "on disk" in found.err


def test_rows_are_quantised_where_the_store_has_them_so(cli, old, tmp_path):
    done = cli("cache", "import", old, "--assume-same-weights", "--store-bits", "8", "--json").json
    assert done["imported"]["files"] == 8
    (tmp_path / "t.json").write_text(json.dumps(tiny.ids(40, seed=3)))
    asked = ("run", "--prompt-tokens", tmp_path / "t.json", "--max-tokens", "1", "--json")
    ran = cli(*asked, "--store-bits", "8").json
    assert (ran["cache"]["source"], ran["usage"]["cached_tokens"]) == ("ssd", 35)
    assert cli(*asked, "--no-cache").json["token_ids"] == ran["token_ids"]
    with look(tmp_path / "c") as index:
        entry = next(iter(index.items()))
    shown = cli("cache", "show", entry.key.hex(), "--json").json
    assert {r["store_bits"] for r in shown["records"]} == {8}


@pytest.mark.parametrize(
    "args", [("--prompt", "x", "--prompt-file", "y"), ("--raw",), ("--prompt", "a", "--prompt-tokens", "b")]
)
def test_prompts_that_do_not_go_together(cli, old, args):
    assert cli("cache", "import", old, *args).code in (2, 4)


def test_what_a_path_is(tmp_path):
    block = tmp_path / "omlx" / "a" / ("a" * 64 + ".safetensors")
    block.parent.mkdir(parents=True)
    arrays = {"layer_0_keys": np.zeros(1, np.float32)}
    save_file(arrays, block, {"block_hash": "a" * 64, "omlx_cache_format_version": "3"})
    assert recognise(tmp_path / "omlx") == "omlx"
    caches = tmp_path / "caches"
    caches.mkdir()
    save_file({"0.0": arrays["layer_0_keys"], "1.0.1": arrays["layer_0_keys"]}, caches / "p.safetensors", {"0.0": ""})
    save_file({"0_keys": arrays["layer_0_keys"]}, caches / "old.safetensors")
    (caches / "notes.txt").write_text("")
    assert recognise(caches) == recognise(caches / "p.safetensors") == recognise(caches / "old.safetensors") == "mlx-lm"
    save_file({"model.embed": arrays["layer_0_keys"]}, tmp_path / "weights.safetensors")
    (tmp_path / "damaged.safetensors").write_bytes(b"\xff" * 100)
    (tmp_path / "link.safetensors").symlink_to(caches / "p.safetensors")
    (tmp_path / "empty").mkdir()
    for name, word in {
        "omlx/a/" + block.name: "one block",
        "weights.safetensors": "no prompt cache",
        "damaged.safetensors": "HEADER_LENGTH",
        "link.safetensors": "NOT_A_FILE",
        "empty": "neither",
        "absent": "does not exist",
    }.items():
        with pytest.raises(ConfigError, match=word):
            recognise(tmp_path / name)
    shutil.copytree(caches, tmp_path / "omlx", dirs_exist_ok=True)
    with pytest.raises(ConfigError, match="one by one"):
        recognise(tmp_path / "omlx")
