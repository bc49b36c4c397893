"""Settings: precedence, sources, sizes, and errors that name what is wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mlxkv.config import Settings, data_dir, default_cache_dir, parse_size
from mlxkv.errors import ConfigError


def write(home: Path, text: str) -> Path:
    file = home / "config" / "mlxkv" / "config.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_flag_beats_environment_beats_file_beats_default(home, monkeypatch):
    file = write(home, "temperature = 0.1\ntop_p = 0.2\ntop-k = 3\n")
    monkeypatch.setenv("MLXKV_TEMP", "0.4")
    monkeypatch.setenv("MLXKV_TOP_P", "0.5")
    found = Settings.load({"temperature": 0.7, "top_p": None})
    assert (found.temperature, found.top_p, found.top_k, found.min_p) == (0.7, 0.5, 3, 0.0)
    assert str(found.source("temperature")) == "flag --temperature"
    assert str(found.source("top_p")) == "env MLXKV_TOP_P"
    assert str(found.source("top_k")) == f"file {file}"
    assert str(found.source("min_p")) == "default"


@pytest.mark.parametrize(
    ("flags", "environ", "expected"),
    [
        ({}, {}, True),
        ({"no_cache": True}, {}, False),
        ({}, {"MLXKV_NO_CACHE": "1"}, False),
        ({}, {"MLXKV_NO_CACHE": "0"}, True),
        ({}, {"MLXKV_CACHE": "off"}, False),
        ({"no_cache": False}, {"MLXKV_CACHE": "off"}, True),
        ({}, {"MLXKV_CACHE": ""}, True),
    ],
)
def test_cache_switch(flags, environ, expected):
    assert Settings.load(flags, environ).cache is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("512MB", 512 * 10**6), ("2GiB", 2 << 30), ("2G", 2 * 10**9), ("1.5 kib", 1536), ("0", 0), (7, 7), ("12b", 12)],
)
def test_sizes(text, expected):
    assert parse_size(text) == expected


def test_legacy_folders(home):
    write(home, 'legacy_dirs = ["~/.omlx/cache", "/a/b"]\n')
    assert Settings.load().legacy_dirs == (Path.home() / ".omlx/cache", Path("/a/b"))
    text = os.pathsep.join(("/x", "", "/y", "/x"))
    found = Settings.load({}, os.environ | {"MLXKV_LEGACY_DIRS": text})
    assert found.legacy_dirs == found.engine_options()["legacy_dirs"] == (Path("/x"), Path("/y"))
    for wrong in ("legacy_dirs = 3\n", "legacy_dirs = [3]\n"):
        write(home, wrong)
        with pytest.raises(ConfigError, match="legacy_dirs"):
            Settings.load()


@pytest.mark.parametrize("text", ["", "x", "-1", "2GiBs", "1e9", -1, 1.5, True, float("inf")])
def test_bad_sizes(text):
    with pytest.raises(ValueError):
        parse_size(text)


@pytest.mark.parametrize(
    ("environ", "parts"),
    [
        ({"MLXKV_TEMPRATURE": "1"}, ["MLXKV_TEMPRATURE", "MLXKV_TEMPERATURE"]),
        ({"MLXKV_TOP_P": "3"}, ["MLXKV_TOP_P", "'3'", "from 0 to 1"]),
        ({"MLXKV_MAX_TOKENS": "0"}, ["MLXKV_MAX_TOKENS", "'0'", "at least 1"]),
        ({"MLXKV_PORT": "70000"}, ["MLXKV_PORT", "70000", "65535"]),
        ({"MLXKV_WIRED": "much"}, ["MLXKV_WIRED", "2GiB"]),
        ({"MLXKV_CACHE_BUDGET": "80%"}, ["MLXKV_CACHE_BUDGET", "20GB"]),
        ({"MLXKV_DTYPE": "int8"}, ["MLXKV_DTYPE", "bf16"]),
        ({"MLXKV_NUMERICS": "slow"}, ["MLXKV_NUMERICS", "fast or exact"]),
        ({"MLXKV_SPLIT": "sometimes"}, ["MLXKV_SPLIT", "'sometimes'", "auto, always or never"]),
        ({"MLXKV_MAX_GAP_MS": "0"}, ["MLXKV_MAX_GAP_MS", "'0'", "milliseconds, from 1"]),
        ({"MLXKV_MAX_GAP_MS": "2.5"}, ["MLXKV_MAX_GAP_MS", "'2.5'", "a whole number"]),
        ({"MLXKV_MAX_ROWS": "257"}, ["MLXKV_MAX_ROWS", "'257'", "from 1 to 256"]),
        ({"MLXKV_COMPILE": "maybe"}, ["MLXKV_COMPILE", "'maybe'", "auto, on or off"]),
        ({"MLXKV_SEED": "1.5"}, ["MLXKV_SEED"]),
        ({"MLXKV_TEMPERATURE": "nan"}, ["MLXKV_TEMPERATURE", "nan"]),
        ({"MLXKV_TEMP": "1", "MLXKV_TEMPERATURE": "1"}, ["MLXKV_TEMP ", "MLXKV_TEMPERATURE"]),
        ({"MLXKV_STORE_BITS": "5"}, ["MLXKV_STORE_BITS", "'5'", "4, 8 or off"]),
        ({"MLXKV_CONFIG": "/nonexistent/c.toml"}, ["MLXKV_CONFIG", "/nonexistent/c.toml"]),
    ],
)
def test_environment_errors_name_the_variable(environ, parts):
    with pytest.raises(ConfigError) as caught:
        Settings.load({}, environ)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("temprature = 1", ["temprature", "temperature"]),
        ("[sampling]\ntop_p = 1", ["sampling"]),
        ("top_p = '0.5x'", ["top_p", "0.5x"]),
        ("cache = 3", ["cache", "3", "true or false"]),
        ("max_tokens = 2.5", ["max_tokens", "2.5"]),
        ("model = 5", ["model", "5"]),
        ("seed = true", ["seed", "True"]),
        ("store_bits = 8.0", ["store_bits", "8.0", "4, 8 or off"]),
        ("store_bits = true", ["store_bits", "True"]),
        ("cache_salt = 5", ["cache_salt", "5"]),
        ('temp = "a\ntop_p = 1', ["TOML", "line 1"]),
    ],
)
def test_file_errors_name_file_and_key(home, text, parts):
    file = write(home, text)
    with pytest.raises(ConfigError) as caught:
        Settings.load()
    for part in [str(file), *parts]:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "environ", "flags", "expected"),
    [
        ("", {}, {}, None),
        ("store_bits = 8", {}, {}, 8),
        ("store_bits = 8", {"MLXKV_STORE_BITS": "4"}, {}, 4),
        ("store_bits = 8", {}, {"store_bits": "off"}, None),
        ('store_bits = "off"', {}, {"store_bits": "4"}, 4),
    ],
)
def test_store_bits(home, text, environ, flags, expected):
    write(home, text)
    found = Settings.load(flags, os.environ | environ)
    assert found.store_bits == expected and found.engine_options()["store_bits"] == expected


@pytest.mark.parametrize(
    ("text", "environ", "flags", "expected"),
    [
        ("", {}, {}, (None, 16, "auto")),
        ('max_gap_ms = 100\nmax_rows = 4\ncompile = "off"', {}, {}, (100, 4, "off")),
        ("compile = true", {"MLXKV_MAX_ROWS": "1"}, {}, (None, 1, "on")),
        ("compile = false", {"MLXKV_COMPILE": "AUTO"}, {}, (None, 16, "auto")),
        ("max_gap_ms = 100", {"MLXKV_COMPILE": "0"}, {"max_gap_ms": "80", "max_rows": "8"}, (80, 8, "off")),
        ("", {"MLXKV_COMPILE": "off"}, {"compile": "on"}, (None, 16, "on")),
    ],
)
def test_many_at_once(home, text, environ, flags, expected):
    write(home, text)
    options = Settings.load(flags, os.environ | environ).engine_options()
    assert (options["max_gap_ms"], options["max_rows"], options["compile"]) == expected


def test_many_at_once_reaches_the_engine(home, cli, tiny_model, monkeypatch):
    from mlxkv.decode import engine

    seen = []
    of = engine.Options

    def note(**given):
        seen.append((given["max_gap_ms"], given["max_rows"], given["compile"]))
        return of(**given)

    monkeypatch.setattr(engine, "Options", note)
    write(home, "max_rows = 4")
    ask = ("run", "hello", "--model", tiny_model("qwen3_5"), "--max-tokens", 1, "--json")
    assert cli(*ask, "--max-gap-ms", 90, "--compile", "off").code == 0
    assert seen == [(90, 4, "off")]
    for flag, value, cure in (
        ("--max-gap-ms", "fast", "milliseconds"),
        ("--max-rows", "0", "from 1 to 256"),
        ("--compile", "often", "auto, on or off"),
    ):
        bad = cli(*ask, flag, value)
        assert bad.code == 2 and f"{flag} is '{value}'" in bad.err and cure in bad.err


@pytest.mark.parametrize(
    "wrong",
    [{"max_gap_ms": 0}, {"max_gap_ms": -5.0}, {"max_gap_ms": float("nan")}, {"max_rows": 0}, {"compile": "yes"}],
)
def test_what_cannot_work_is_refused_before_a_model_is_loaded(wrong):
    from mlxkv.decode.options import Options

    with pytest.raises(ConfigError):
        Options(model="m", **wrong)


DRAFTS = ("draft", "draft_model", "draft_depth", "ring_spare")


@pytest.mark.parametrize(
    ("text", "environ", "flags", "expected"),
    [
        ("", {}, {}, ("auto", None, None, 8)),
        ('draft = "ngram"\ndraft_depth = 3\nring_spare = 4', {}, {}, ("ngram", None, 3, 4)),
        ("draft = false", {}, {}, ("off", None, None, 8)),
        ('draft = "off"', {"MLXKV_DRAFT": "MTP"}, {}, ("mtp", None, None, 8)),
        ("draft_depth = 3", {"MLXKV_RING_SPARE": "2"}, {"draft_depth": "auto"}, ("auto", None, None, 2)),
        ('draft_model = "a"', {}, {"draft_model": "b", "draft_depth": "8"}, ("auto", "b", 8, 8)),
        ('draft_model = "a"', {}, {"draft_model": ""}, ("auto", None, None, 8)),
    ],
)
def test_drafts(home, text, environ, flags, expected):
    write(home, text)
    options = Settings.load(flags, os.environ | environ).engine_options()
    assert tuple(options[name] for name in DRAFTS) == expected


def test_drafts_reach_the_engine(home, cli, tiny_model, monkeypatch):
    from mlxkv.decode import engine

    seen = []
    of = engine.Options

    def note(**given):
        seen.append(tuple(given[name] for name in DRAFTS))
        return of(**given)

    monkeypatch.setattr(engine, "Options", note)
    write(home, "ring_spare = 3")
    ask = ("run", "hello", "--model", tiny_model("llama"), "--max-tokens", 1, "--json")
    assert cli(*ask, "--draft", "off", "--draft-depth", 2).code == 0
    assert seen == [("off", None, 2, 3)]
    for flag, value, cure in (
        ("--draft", "magic", "mtp, ngram, model or off"),
        ("--draft-depth", "9", "from 1 to 8, or auto"),
        ("--ring-spare", "0", "from 1 to 256"),
    ):
        bad = cli(*ask, flag, value)
        assert bad.code == 2 and f"{flag} is '{value}'" in bad.err and cure in bad.err
    bad = cli(*ask, "--draft", "model")
    assert bad.code == 2 and "none was named" in bad.err and "--draft-model" in bad.err


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"draft": "yes"}, "'yes'"),
        ({"draft": "model"}, "none was named"),
        ({"draft_depth": 0}, "depth of drafts is 0"),
        ({"draft_depth": 9}, "depth of drafts is 9"),
        ({"ring_spare": 0}, "rings is 0"),
        ({"ring_spare": 257}, "rings is 257"),
    ],
)
def test_drafts_that_cannot_work_are_refused_before_a_model_is_loaded(wrong, named):
    from mlxkv.decode.options import Options

    with pytest.raises(ConfigError, match=named) as e:
        Options(model="m", **wrong)
    assert e.value.cure


def test_a_bad_value_is_told_even_where_a_flag_hides_it(home):
    write(home, "top_p = 9")
    with pytest.raises(ConfigError):
        Settings.load({"top_p": 0.5})


def test_tools_have_variables_that_are_no_settings():
    Settings.load({}, {"MLXKV_VENV": "/x", "MLXKV_PYTHON": "p", "MLXKV_TEST_SLOW": "1", "OTHER": "1"})


def test_folders_follow_xdg(home):
    assert default_cache_dir() == home / "cache" / "mlxkv"
    assert data_dir() == home / "data" / "mlxkv"
    assert default_cache_dir({"HOME": "/h", "XDG_CACHE_HOME": "relative"}).is_relative_to("/h")


def test_numerics_and_blas_reach_the_environment(home, monkeypatch):
    write(home, "numerics = 'exact'\nblas = 'none'")
    monkeypatch.setenv("MLXKV_NUMERICS", "fast")
    monkeypatch.setenv("MLXKV_BLAS", "")
    Settings.load().apply_environment()
    assert (os.environ["MLXKV_NUMERICS"], os.environ["MLXKV_BLAS"]) == ("fast", "none")


def test_split_reaches_the_engine(home, cli, tiny_model, monkeypatch):
    from mlxkv.decode import runtime

    seen = []
    by = runtime.Split.by

    def note(setting, device, layout):
        seen.append((setting, found := by(setting, device, layout)))
        return found

    monkeypatch.setattr(runtime.Split, "by", note)
    write(home, "split = 'never'")
    monkeypatch.setenv("MLXKV_SPLIT", "")
    ask = ("run", "hello", "--model", tiny_model("qwen3_5"), "--max-tokens", 1, "--json")
    assert cli(*ask).code == 0 and cli(*ask, "--split", "always").code == 0
    monkeypatch.setenv("MLXKV_SPLIT", "auto")
    assert cli(*ask).code == 0
    assert [setting for setting, _ in seen] == ["never", "always", "auto"]
    assert seen[0][1].near > 0 == seen[1][1].near
    bad = cli(*ask, "--split", "often")
    assert bad.code == 2 and "--split is 'often'" in bad.err and "auto, always or never" in bad.err


def test_every_engine_option_exists():
    import inspect

    from mlxkv.decode.engine import Engine

    assert Settings().engine_options().keys() <= inspect.signature(Engine).parameters.keys()
