"""What every version of mlxkv that ever landed stored is read by this one: frozen folders, and ``cache upgrade``."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from mlxkv.cache.legacy.own import survey, upgrade
from mlxkv.cache.record import Reader
from mlxkv.cache.tables import VERSION
from tests.cache.legacy import fixture_model
from tests.cache.legacy.frozen import FOLDERS, NAMES, expected
from tests.cache.stores import records
from tests.cache.test_equality import FAST

#: rows in 8 bits are near what was computed, and always the same: measured 8e-4
QUANTISED = 5e-3


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "tests.cache.legacy.frozen", str(tmp_path_factory.mktemp("frozen"))],
        capture_output=True,
        text=True,
        env=os.environ | {"MLXKV_NUMERICS": "fast"},
        cwd=Path(__file__).parents[3],
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("how", ["lazy", "eager"])
@pytest.mark.parametrize("name", NAMES)
def test_what_was_stored_is_resumed(found, name, how):
    mine, then = found[name][how], expected(name)
    assert (mine["cached"], mine["source"], mine["reason"]) == (fixture_model.LENGTH - 1, "ssd", None)
    logits = np.array(mine["logits"])
    cold = QUANTISED if then["options"] else FAST
    for other, bound in ((then["resumed"], FAST), (mine["cold"], cold), (then["logits"], cold)):
        assert np.abs(logits - other).max() <= bound * np.abs(logits).max()
    assert mine["sampled"] == mine["plain"] == then["sampled"]
    assert mine["answer"] == then["sampled"]  # a client that sends the text back gets the very ids
    assert mine["kept"] and mine["findings"] == []


@pytest.mark.parametrize("name", NAMES)
def test_an_eager_upgrade_leaves_nothing_to_a_run(found, name):
    done, files = found[name]["upgraded"], found[name]["lazy"]["files"]
    old = int(name.removeprefix("index")[0])
    assert done["before"] == found[name]["lazy"]["outdated"]
    assert done["before"]["index"] == old
    assert done["before"]["unknown"] == (files if old != VERSION else 0)
    assert done["records"] == files
    assert done["after"] == found[name]["eager"]["outdated"] == found[name]["lazy"]["after"]
    assert done["after"] == {"index": VERSION, "unknown": 0, "gone": 0, "newer": 0}


def test_there_is_a_frozen_folder_for_every_version():
    assert {int(name.removeprefix("index")[0]) for name in NAMES} >= set(range(1, VERSION + 1))


@pytest.mark.parametrize("name", NAMES)
def test_the_folders_are_what_their_names_say(name):
    for path in records(FOLDERS / name / "cache"):
        with path.open("rb") as file:
            head = file.read(16384)
        assert (b'"role":' in head) == (name not in ("index1", "index2")), path
        with Reader.open(path) as reader:
            assert json.loads(reader.meta.compute)["mode"] == "fast"


def test_a_folder_that_is_up_to_date_is_left_alone(cli_cache, tmp_path):
    name = next(name for name in NAMES if name.startswith(f"index{VERSION}"))
    shutil.copytree(FOLDERS / name / "cache", tmp_path / "c")
    cli_cache("upgrade")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    done = cli_cache("upgrade")
    assert done.exit_code == 0 and done.stdout == "There is nothing to do.\n"
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_upgrade_says_what_it_does(cli_cache, tmp_path):
    assert json.loads(cli_cache("upgrade", "--json").stdout)["before"] is None
    shutil.copytree(FOLDERS / "index2" / "cache", tmp_path / "c")
    count = len(records(tmp_path / "c"))
    damaged = records(tmp_path / "c", "state")[0]
    damaged.write_bytes(damaged.read_bytes().replace(b'"kind":"state"', b'"kind":"stare"', 1))
    dry = json.loads(cli_cache("upgrade", "--dry-run", "--json").stdout)
    assert dry["before"] == {"index": 2, "unknown": count, "gone": 0, "newer": 0, "nothing_to_do": False}
    assert survey(tmp_path / "c").index == 2
    done = json.loads(cli_cache("upgrade", "--json").stdout)
    assert done["before"] == dry["before"] and done["after"]["nothing_to_do"]
    assert (done["records"], done["set_aside"], done["version"]) == (count - 1, 1, VERSION)
    assert done["bytes"] == sum(path.stat().st_size for path in records(tmp_path / "c"))
    assert "nothing to do" in cli_cache("upgrade").stdout


def test_a_version_that_is_not_known_yet_is_built_again(tmp_path):
    shutil.copytree(FOLDERS / "index2" / "cache", tmp_path / "c")
    with closing(sqlite3.connect(tmp_path / "c" / "index.sqlite")) as db:
        db.execute("PRAGMA user_version=99")
    assert survey(tmp_path / "c").index == 99
    assert upgrade(tmp_path / "c").after.nothing_to_do


@pytest.mark.parametrize("damage", ["gone", "garbage", "suspected"])
def test_an_index_that_cannot_be_read_is_built_again(tmp_path, damage):
    shutil.copytree(FOLDERS / "index2" / "cache", tmp_path / "c")
    upgrade(tmp_path / "c")
    index = tmp_path / "c" / "index.sqlite"
    if damage == "gone":
        index.unlink()
    elif damage == "garbage":
        index.write_bytes(b"x" * 9000)
    else:
        (tmp_path / "c" / "index.damaged").touch()
    assert survey(tmp_path / "c").index is None
    done = upgrade(tmp_path / "c")
    assert done.after.nothing_to_do and done.records == len(records(tmp_path / "c")) and done.set_aside == 0


def test_a_stopped_upgrade_goes_on(tmp_path):
    shutil.copytree(FOLDERS / "index1" / "cache", tmp_path / "c")

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        upgrade(tmp_path / "c", stop)
    done = upgrade(tmp_path / "c")
    assert done.after.nothing_to_do and done.records == len(records(tmp_path / "c"))


@pytest.fixture
def cli_cache(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from mlxkv.cli import app

    monkeypatch.setenv("MLXKV_CACHE_DIR", str(tmp_path / "c"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return lambda *args: CliRunner().invoke(app, ["cache", *args], catch_exceptions=False)
