"""``mlxkv cache import`` of an oMLX folder, from its first look to the end of its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import tiny
from tests.cache.legacy.harness import fingerprint
from tests.cache.legacy.omlx_writer import Style, blocks, save
from tests.cache.legacy.stories import story
from tests.cache.stores import records
from tests.probe import runtime

BLOCK, N = 8, 6


@pytest.fixture(scope="module")
def told(tiny_model):
    """The model, a prompt of six blocks and some, and what a run over it left."""
    model = tiny_model("falcon_h1")
    tokens = tiny.ids(BLOCK * N + 3, seed=77)
    return model, tokens, story(runtime(model, None).model, tokens, range(BLOCK, BLOCK * N + 1, BLOCK))


@pytest.fixture
def folder(told, tmp_path, monkeypatch) -> Path:
    model, tokens, run = told
    save(tmp_path / "omlx", run, Style(model=str(model), block=BLOCK))
    monkeypatch.setenv("MLXKV_MODEL", str(model))
    monkeypatch.setenv("MLXKV_CACHE_DIR", str(tmp_path / "c"))
    (tmp_path / "prompt.json").write_text(json.dumps(tokens))
    return tmp_path / "omlx"


def served(cli, tmp_path):
    """(source, cached tokens, text) of a run over the prompt."""
    args = ("run", "--prompt-tokens", tmp_path / "prompt.json", "--max-tokens", "64", "--json")
    ran = cli(*args).json
    return ran["cache"]["source"], ran["usage"]["cached_tokens"], ran["text"]


def test_from_a_dry_run_to_the_removal_of_what_was_imported(cli, folder, tmp_path):
    cold = cli("run", "--no-cache", "--prompt-tokens", tmp_path / "prompt.json", "--max-tokens", "64", "--json").json
    files = list(folder.rglob("*.safetensors"))
    weight, before = sum(path.stat().st_size for path in files), fingerprint(folder)
    refused = cli("cache", "import", folder, "--json")
    assert refused.code == 1 and refused.json["refused"]["NO_CONSENT"]["files"] == N
    dry = cli("cache", "import", folder, "--dry-run", "--assume-same-weights", "--json").json
    assert dry["imported"] == {"files": N, "bytes": weight}
    done = cli("cache", "import", folder, "--assume-same-weights", "--json").json
    assert done == dry | {"dry_run": False}
    assert fingerprint(folder) == before
    stored = sum(path.stat().st_size for path in records(tmp_path / "c"))
    assert done["record_bytes"] == stored and done["frees"] == weight - stored > 0
    assert served(cli, tmp_path) == ("ssd", BLOCK * N, cold["text"])
    again = cli("cache", "import", folder, "--json").json  # consent is remembered
    assert again["already"]["files"] == N and not again["records"] and fingerprint(folder) == before
    gone = cli("cache", "import", folder, "--remove-imported", "--yes", "--json").json
    assert gone["removed"] == {"files": N, "bytes": weight, "kept": 0}
    assert not list(folder.rglob("*.safetensors"))
    assert served(cli, tmp_path)[2] == cold["text"]
    assert cli("cache", "verify", "--json").code == 0


def test_tokens_that_were_given_once_need_not_be_given_again(cli, folder, tmp_path):
    for path in folder.rglob("*.tokens"):
        path.unlink()
    unknown = cli("cache", "import", folder, "--assume-same-weights")
    assert unknown.code == 1 and "--prompt-tokens" in unknown.out and "--legacy-dirs" in unknown.out
    cli("cache", "import", folder, "--prompt-tokens", tmp_path / "prompt.json")
    before = {path: path.stat().st_mtime_ns for path in records(tmp_path / "c")}
    again = cli("cache", "import", folder, "--json")
    assert again.code == 0 and again.json["already"]["files"] == N and not again.json["refused"]
    assert {path: path.stat().st_mtime_ns for path in records(tmp_path / "c")} == before
    path = next(folder.rglob("*.safetensors"))
    path.write_bytes(path.read_bytes() + b" ")  # another file than the one in the journal
    changed = cli("cache", "import", folder, "--remove-imported", "--yes", "--json").json
    assert changed["removed"]["files"] == N - 1 and list(folder.rglob("*.safetensors")) == [path]


def test_what_is_no_longer_stored_whole_is_not_removed_and_says_so(cli, folder, tmp_path):
    cli("cache", "import", folder, "--assume-same-weights")
    states, size = len(records(tmp_path / "c", "state")), cli("cache", "info", "--json").json["bytes"]
    assert cli("cache", "prune", "--to", str(size - 1), "--yes").code == 0
    assert len(records(tmp_path / "c", "state")) < states
    kept = cli("cache", "import", folder, "--remove-imported", "--yes")
    assert kept.code == 0 and len(list(folder.rglob("*.safetensors"))) == N
    assert "0 files (0 B) removed" in kept.out and f"{N} files of those kept cannot be removed" in kept.out


def test_a_folder_of_another_name_says_how_to_name_it(cli, folder, told):
    found = cli("cache", "import", folder, "--assume-same-weights", "--source-model", "another")
    assert found.code == 1 and "MODEL" in found.out and "--source-model" in found.out
    named = cli("cache", "import", folder, "--assume-same-weights", "--source-model", told[0], "--json").json
    assert named["imported"]["files"] == N


def test_a_legacy_folder_that_is_not_there_is_said(cli, folder, tmp_path, caplog):
    args = ("run", "--prompt-tokens", tmp_path / "prompt.json", "-n", "1", "--legacy-dirs", tmp_path / "gone")
    assert cli(*args).code == 0
    assert "there is no such folder" in caplog.text and "--assume-same-weights" not in caplog.text


def test_a_refused_file_is_named_and_never_removed(cli, folder, told, tmp_path):
    model, _, run = told
    bad = blocks(run, Style(model=str(model), block=BLOCK))[-1]
    bad.metadata["omlx_cache_format_version"] = "5"
    path = bad.save(folder)
    done = cli("cache", "import", folder, "--assume-same-weights", "--remove-imported", "--yes", "--json").json
    (example,) = done["refused"]["TOO_NEW"]["examples"]
    assert example["file"] == str(path.relative_to(folder))
    assert list(folder.rglob("*.safetensors")) == [path] and done["removed"]["files"] == N - 1
