"""What a server offers, from its settings: models by name, limits, keys."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from mlxkv.config import Settings
from mlxkv.errors import ConfigError, ModelError
from mlxkv.serve.offer import OTHER_FILES, limits_of, registry_of, safety_of


def offered(text: str, tmp_path: Path, environ: dict[str, str] | None = None, **flags) -> Settings:
    """The settings of a file with ``text``."""
    file = tmp_path / "config.toml"
    file.write_text(text)
    return Settings.load(flags, {"MLXKV_CONFIG": str(file), "HOME": str(tmp_path)} | (environ or {}))


def folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"")
    return path


def test_the_model_that_was_named_comes_first(tmp_path):
    model = folder(tmp_path / "Some-4bit")
    text = '[models.other]\npath = "org/other"\naliases = ["o"]\n[models]\nplain = "org/plain"\n'
    found = registry_of(offered(text, tmp_path, model=str(model), aliases=["gpt-4o", "Some-4bit"]))
    assert [entry.name for entry in found] == ["Some-4bit", "other", "plain"]
    assert found["gpt-4o"] is found[str(model)] is found["Some-4bit"]
    assert found["o"].source == "org/other" and found["plain"].source == "org/plain"
    with pytest.raises(ModelError):
        found["org/other"]


def test_a_table_may_be_the_default(tmp_path):
    text = '[models.a]\npath = "/x/a"\n[models.b]\npath = "/x/b"\n'
    assert [e.name for e in registry_of(offered(text, tmp_path))] == ["a", "b"]  # and no demo model
    assert [e.name for e in registry_of(offered(text, tmp_path, model="b"))] == ["b", "a"]


def test_without_anything_the_demo(tmp_path):
    assert [e.name for e in registry_of(offered("", tmp_path))] == ["mlxkv-demo"]


def test_options_of_a_table_are_its_own(tmp_path):
    text = (
        'draft = "model"\ndraft_model = "/x/small"\nadapter = "mine"\nidle_ttl = "10m"\nmax_rows = 4\n'
        '[adapters]\nmine = "/x/lora"\n'
        '[models.a]\npath = "/x/a"\nadapter = "mine"\nidle_ttl = "never"\npin = true\nmax_rows = 2\n'
        '[models.b]\npath = "/x/b"\ndraft = "off"\n'
    )
    found = registry_of(offered(text, tmp_path, model="/x/main"))
    main, a, b = found.entries
    assert (main.adapter, main.options["adapter"], main.options["draft_model"]) == ("mine", Path("/x/lora"), "/x/small")
    assert (a.adapter, a.options["adapter"], a.ttl, a.pinned, a.options["max_rows"]) == (
        "mine",
        Path("/x/lora"),
        None,
        True,
        2,
    )
    # another model's draft model has other tokens
    assert (a.options["draft"], a.options["draft_model"]) == ("auto", None)
    assert (b.options["adapter"], b.options["draft"], b.options["max_rows"], b.ttl) == (None, "off", 4, 600.0)


def test_folders_and_the_hugging_face_cache(tmp_path, monkeypatch):
    models = tmp_path / "models"
    for name in ("one", "org/two", "org/one", ".hidden", "taken"):
        folder(models / name)
    (models / "empty").mkdir()
    hub = tmp_path / "hub"
    folder(hub / "models--mlx--three" / "snapshots" / "abc")
    (hub / "models--mlx--half" / "snapshots" / "abc").mkdir(parents=True)
    (hub / "datasets--mlx--data").mkdir()
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub))
    text = f'models_dir = "{models}"\nhf_models = true\n[models.taken]\npath = "/x"\n'
    found = registry_of(offered(text, tmp_path))
    assert [e.name for e in found] == ["taken", "one", "org/one", "org/two", "mlx/three"]
    assert found["taken"].source == "/x" and found["two"].name == "org/two" and found["three"].source == "mlx/three"
    assert found["one"].source == str(models / "one")
    with pytest.raises(ConfigError, match="models_dir"):
        registry_of(offered('models_dir = "/nowhere"', tmp_path))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[models.a]\naliases = ["x"]\n', ("models", "path")),
        ('[models.a]\npath = "/a"\ncolour = "red"\n', ("colour", "'a'", "idle_ttl")),
        ('[models.a]\npath = "/a"\nmax_rows = 0\n', ("max_rows", "'a'", "from 1 to 256")),
        ('[models.a]\npath = "/a"\nadapter = "none"\n', ("adapter", "'none'")),
        ('[models.a]\npath = "/a"\n[models.b]\npath = "/b"\naliases = ["a"]\n', ("'a'", "alias")),
        ('models = "a"\n', ("models", "[models.small]")),
        ('idle_ttl = "soon"\n', ("idle_ttl", "10m")),
        ('cors_origins = ["example.com"]\n', ("cors_origins", "https://app.example")),
        ('api_key = ["two words"]\n', ("api_key",)),
        ('api_key_file = "/nowhere"\n', ("/nowhere",)),
        ('ping = "loud"\n', ("ping", "comment, chunk or off")),
    ],
)
def test_mistakes_are_named(tmp_path, text, words):
    with pytest.raises(ConfigError) as caught:
        settings = offered(text, tmp_path)
        registry_of(settings)
        safety_of(settings)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "two words" not in str(caught.value)  # a key is not shown


def test_keys_from_everywhere(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# of the house\nthird\n\n  fourth  \n")
    settings = offered(f'api_key_file = "{file}"', tmp_path, {"MLXKV_API_KEY": "first, second"})
    keys = safety_of(settings).keys
    assert all(keys.holds(key) for key in ("first", "second", "third", "fourth"))
    assert not any(keys.holds(key) for key in ("", "# of the house", "first,second", "first, second"))
    assert settings.source("api_key").name == "MLXKV_API_KEY"
    file.write_text("# nothing\n")
    with pytest.raises(ConfigError, match="no key"):
        safety_of(settings)
    assert not safety_of(offered("", tmp_path)).keys


def test_names_and_origins(tmp_path):
    settings = offered('allow_hosts = "mac.lan, box"\n', tmp_path, cors_origins=["https://App.example", "null"])
    safety = safety_of(settings)
    assert safety.knows_host("mac.lan:8642") and safety.knows_host("BOX") and not safety.knows_host("lan")
    assert safety.knows_origin("https://app.example", "x") and safety.knows_origin("null", "x")
    assert not safety.knows_origin("https://other.example", "x")


def test_times_and_limits(tmp_path):
    text = (
        'request_timeout = "1.5m"\nping_interval = "500ms"\ngrace = 3\nidle_ttl = -1\nping = false\nmax_body = "1kB"\n'
    )
    settings = offered(text, tmp_path)
    limits = limits_of(settings, 10_000)
    assert (limits.timeout_s, limits.ping_s, limits.grace_s, limits.ping) == (90.0, 0.5, 3.0, "off")
    assert (limits.max_body, limits.max_connections, settings.idle_ttl) == (1000, 512, None)
    assert limits_of(settings, 300).max_connections == 300 - OTHER_FILES  # sockets leave room for files
    assert limits_of(offered('request_timeout = "off"\n', tmp_path), 10_000).timeout_s is None


def test_more_files_may_be_open_where_that_is_allowed():
    """A Mac allows 256 unless it is asked."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = 4096 if hard == resource.RLIM_INFINITY else min(hard, 4096)
    code = (
        "import resource; from mlxkv.serve.offer import raise_open_files\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard}))\n"
        "raise_open_files()\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({wanted // 2}, {wanted}))  # as mlx-lm does when it is imported\n"
        "print(raise_open_files(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.split() == [str(wanted)] * 2
