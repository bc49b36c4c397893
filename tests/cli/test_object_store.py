"""``--object-store`` on the command line: what is refused, what doctor says, where an answer came from."""

from __future__ import annotations

import json

import pytest

from mlxkv.config import Settings
from mlxkv.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("foo://bucket", "no kind that is known"),
        ("s3:///prefix", "names no bucket"),
        ("file://folder/x", "names no folder"),
        ("s3://user:word@bucket/x", "credentials"),
        ("bucket", "no kind that is known"),
    ],
)
def test_a_url_that_cannot_work_is_refused_before_anything_is_loaded(cli, model, tmp_path, url, says):
    done = cli("run", "hi", "--model", model, "--cache-dir", tmp_path / "c", "--object-store", url)
    assert done.code == 2 and says in done.err
    assert not (tmp_path / "c").exists()


def test_a_short_secret_is_refused(cli, model, tmp_path, monkeypatch):
    monkeypatch.setenv("MLXKV_OBJECT_SECRET", "too short")
    url = f"file://{tmp_path}/shared"
    done = cli("run", "hi", "--model", model, "--cache-dir", tmp_path / "c", "--object-store", url)
    assert done.code == 2 and "at least 16" in done.err and "too short" not in done.err


def test_a_secret_that_came_to_nothing_is_not_taken_for_none(monkeypatch):
    monkeypatch.setenv("MLXKV_OBJECT_SECRET", "")
    assert Settings.load().object_store_secret() is None
    with pytest.raises(ConfigError, match="MLXKV_OBJECT_SECRET is set, and empty"):
        Settings.load({"object_store": "s3://b/p"})


def test_the_secret_comes_from_a_file_and_is_never_shown(cli, tmp_path, monkeypatch):
    file = tmp_path / "secret"
    file.write_text("what nobody may read\n")
    settings = Settings.load({"object_store": "s3://b/p", "object_secret_file": str(file), "object_timeout": "2s"})
    options = settings.engine_options()
    assert (options["object_secret"], options["object_timeout"]) == ("what nobody may read", 2.0)
    with pytest.raises(ConfigError, match="secret file"):
        Settings.load({"object_store": "s3://b/p", "object_secret_file": str(tmp_path / "none")}).engine_options()
    monkeypatch.setenv("MLXKV_OBJECT_SECRET", "what nobody may read")
    assert Settings.load().object_store_secret() == "what nobody may read"
    assert "nobody may read" not in cli("doctor", "--json").out


def test_doctor_asks_the_store(cli, tmp_path, monkeypatch):
    shared = tmp_path / "shared"

    def check(*flags: str) -> dict:
        checks = json.loads(cli("doctor", "--json", *flags).out)["checks"]
        return next(c for c in checks if c["name"] == "object store")

    good = check("--object-store", f"file://{shared}")
    assert good["status"] == "ok" and "in the clear" in good["detail"]
    assert not [path for path in shared.rglob("*") if path.is_file()], "the probe is removed"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    bad = check("--object-store", "s3://bucket/x", "--object-timeout", "3s")
    assert bad["status"] == "fail" and "docs/object-store.md" in bad["cure"]
    assert "object store" not in cli("doctor", "--json").out


def test_an_answer_says_that_it_came_from_there(cli, model, tmp_path):
    url = f"file://{tmp_path}/shared"
    said = [
        cli(
            "run",
            "Hello there",
            "--model",
            model,
            "--cache-dir",
            tmp_path / name,
            "--object-store",
            url,
            "-n",
            3,
            "--json",
        )
        for name in ("a", "b")
    ]
    assert [each.json["cache"]["source"] for each in said] == ["none", "object"]
    assert said[0].json["token_ids"] == said[1].json["token_ids"]
    off = cli("cache", "explain", "Hello there", "--model", model, "--cache-dir", tmp_path / "b", "--json")
    assert off.json["source"] == "ssd"
