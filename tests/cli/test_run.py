"""``mlxkv run``: the JSON contract, the prefix cache across runs, and refusals with their exit codes."""

from __future__ import annotations

import json
import stat

import pytest

from tests import tiny

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Tell me about the sea."},
    {"role": "assistant", "content": "It is wide."},
    {"role": "user", "content": "And about the land?"},
]


@pytest.fixture
def ask(cli, model, home):
    """Run on messages with ``--json``."""

    def call(messages, *more):
        file = home / "messages.json"
        file.write_text(json.dumps(messages))
        return cli("run", "--messages", file, "--model", model, "--max-tokens", 8, "--json", *more)

    return call


def test_text_goes_to_stdout_and_numbers_to_stderr(cli, model):
    found = cli("run", "hello there", "--model", model, "--max-tokens", 5)
    assert found.code == 0
    assert found.out.endswith("\n") and len(found.out) > 1
    assert "tok/s" in found.err and "5 answer tokens" in found.err and "0 cached" in found.err
    assert "token limit" in found.err


def test_the_json_contract(ask):
    found = ask(CONVERSATION)
    assert found.code == 0
    assert found.out.count("\n") == 1
    answer = found.json
    fields = ["text", "finish_reason", "token_ids", "usage", "cache", "timings", "drafts", "logprobs"]
    assert list(answer) == [*fields, "prompt_logprobs", "stop", "stop_token"]
    assert answer["finish_reason"] == "length" and len(answer["token_ids"]) == 8
    assert answer["usage"].keys() == {"prompt_tokens", "completion_tokens", "cached_tokens"}
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["cache"].keys() == {"source", "miss_reason", "miss_position", "stored_tokens"}
    assert answer["drafts"] == {"drafted": 0, "accepted": 0}  # a model without a head
    assert answer["timings"].keys() == {"load_s", "lookup_s", "restore_s", "prefill_s", "ttft_s", "decode_tps"}


def test_the_second_run_reads_nothing_again(ask, home):
    first, second = ask(CONVERSATION).json, ask(CONVERSATION).json
    assert first["cache"]["source"] == "none" and first["cache"]["miss_reason"] == "empty"
    assert second["usage"]["cached_tokens"] == second["usage"]["prompt_tokens"] - 1
    assert second["cache"]["source"] == "ssd" and second["cache"]["miss_reason"] is None
    assert second["token_ids"] == first["token_ids"]
    assert stat.S_IMODE((home / "cache" / "mlxkv").stat().st_mode) == 0o700


def test_no_cache_keeps_nothing(ask, home):
    first, second = ask(CONVERSATION, "--no-cache").json, ask(CONVERSATION, "--no-cache").json
    assert second["usage"]["cached_tokens"] == 0 and second["cache"]["miss_reason"] == "off"
    assert second["token_ids"] == first["token_ids"]
    assert not (home / "cache").exists()


def test_ways_to_ask_agree(cli, model, home):
    common = ("--model", model, "--max-tokens", 6, "--json", "--no-cache")
    direct = cli("run", "hello", "--system", "Be kind.", *common).json
    assert cli("run", "-", "--system", "Be kind.", *common, stdin="hello").json["token_ids"] == direct["token_ids"]
    listed = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    ]
    file = home / "m.json"
    file.write_text(json.dumps({"messages": listed}))
    assert cli("run", "--messages", file, *common).json["token_ids"] == direct["token_ids"]
    ids = tiny.tokenizer().encode("plain text").ids
    (home / "ids.json").write_text(json.dumps(ids))
    raw = cli("run", "plain text", "--raw", *common).json
    assert cli("run", "--prompt-tokens", home / "ids.json", *common).json["token_ids"] == raw["token_ids"]
    assert raw["usage"]["prompt_tokens"] == len(ids)


def test_a_seed_repeats_and_a_temperature_varies(cli, model):
    def ids(*more):
        return cli("run", "hi", "--model", model, "-n", 12, "--json", "--temp", 2, *more).json["token_ids"]

    assert ids("--seed", 1) == ids("--seed", 1) != ids("--seed", 2)


def test_settings_come_from_the_environment_too(cli, model, monkeypatch):
    monkeypatch.setenv("MLXKV_MODEL", str(model))
    monkeypatch.setenv("MLXKV_MAX_TOKENS", "3")
    assert cli("run", "hi", "--json").json["usage"]["completion_tokens"] == 3
    assert cli("run", "hi", "--json", "--max-tokens", 4).json["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["run"], 2, "There is no question"),
        (["run", "hi", "--max-tokens", "0"], 2, "--max-tokens is 0"),
        (["run", "hi", "--max-tokens", "x"], 2, "--max-tokens"),
        (["run", "hi", "--temp", "-1"], 2, "--temperature is -1"),
        (["run", "hi", "--nonsense"], 2, "No such option"),
        (["run", "hi", "--dtype", "int8"], 2, "bf16"),
        (["run", "hi", "--wired", "lots"], 2, "2GiB"),
        (["run", "hi", "--model", "/nonexistent/model"], 3, "/nonexistent/model"),
        (["run", "   "], 4, "empty"),
        (["run", "--messages", "/nonexistent.json"], 2, "/nonexistent.json"),
        (["run", "hi", "--messages", "x.json"], 2, "given together"),
        (["run", "--messages", "x.json", "--raw"], 2, "--raw"),
        (["run", "hi", "--raw", "--system", "x"], 2, "--system"),
        (["run", "word " * 5000], 4, "4096"),
    ],
)
def test_refusals(cli, model, args, code, says):
    found = cli(*args, *([] if "--model" in args else ["--model", model]))
    assert found.code == code
    assert found.out == ""
    assert says in found.err and "Traceback" not in found.err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "at least one message"),
        ("{}", "no messages"),
        ('{"messages": [], "model": "x"}', "'model'"),
        ("[1]", "messages[0]"),
        ('[{"role": "robot", "content": ""}]', "messages[0].role"),
        ('[{"role": "user"}]', "messages[0].content"),
        ('[{"role": "user", "content": "a", "colour": 1}]', "messages[0].colour"),
        ('[{"role": "user", "content": [{"type": "image_url"}]}]', "messages[0].content[0].type"),
        ('[{"role": "user", "content": "\\ud800"}]', "surrogate"),
        ('[{"role": "assistant", "content": "a", "token_ids": [-1]}]', "token_ids"),
    ],
)
def test_bad_message_files(cli, model, home, text, says):
    (home / "m.json").write_text(text)
    found = cli("run", "--messages", home / "m.json", "--model", model)
    assert found.code == 4 and says in found.err and found.out == ""


@pytest.mark.parametrize("text", ["[]", '["a"]', "[true]", "[-1]", '{"a": 1}', "[1.5]"])
def test_bad_token_files(cli, model, home, text):
    (home / "t.json").write_text(text)
    found = cli("run", "--prompt-tokens", home / "t.json", "--model", model)
    assert found.code == 4 and "token ids" in found.err


def test_no_model_says_how_to_get_one(cli, monkeypatch, tmp_path):
    import mlxkv.config

    monkeypatch.setattr(mlxkv.config, "EMBEDDED", tmp_path / "missing")
    found = cli("run", "hi")
    assert found.code == 2
    assert "--model" in found.err and "MLXKV_MODEL" in found.err


def test_cache_stats(cli, ask):
    empty = cli("cache", "stats", "--json").json
    nothing = {"entries": 0, "records": 0, "waiting": 0, "bytes": 0, "written_today": 0, "merged_today": 0}
    assert empty == {**nothing, "by_model": []}
    ask(CONVERSATION)
    found = cli("cache", "stats", "--json").json
    assert found["entries"] > 0 and found["records"] > 0 and found["bytes"] > 0
    assert [m["model"] for m in found["by_model"]] == ["llama"]
    assert "llama" in cli("cache", "stats").out


def test_an_adapter_may_be_called_by_its_registered_name(cli, home):
    file = home / "config" / "mlxkv" / "config.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text('[adapters]\npoet = "/nowhere/poet"\n')
    refused = cli("run", "--adapter", "poet", "hi")
    assert refused.code == 3 and "/nowhere/poet" in refused.err
