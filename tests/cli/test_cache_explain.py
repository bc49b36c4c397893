"""``mlxkv cache explain`` says beforehand what the run that follows reports."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from tests import tiny
from tests.cache.stores import records

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Tell me about the sea."},
    {"role": "assistant", "content": "It is wide."},
    {"role": "user", "content": "And about the land?"},
]


@pytest.fixture
def model(tiny_model) -> Path:
    return tiny_model("qwen3_5")


@pytest.fixture
def foretold(cli, model):
    """Explain twice, then run: all three must agree. Gives the explanation."""

    def call(*args, model=model, **more):
        common = (*args, "--model", model, "--json")
        first, second = (cli("cache", "explain", *common, **more) for _ in range(2))
        assert (first.code, second.code) == (0, 0), first.err
        run = cli("run", *common, "--max-tokens", 4, **more).json
        told = first.json
        assert told == second.json
        assert told["prompt_tokens"] == run["usage"]["prompt_tokens"]
        assert told["cached_tokens"] == run["usage"]["cached_tokens"]
        for key in ("source", "miss_reason", "miss_position"):
            assert told[key] == run["cache"][key], key
        return told

    return call


@pytest.fixture
def talk(home):
    def write(messages) -> tuple[str, Path]:
        (home / "messages.json").write_text(json.dumps(messages))
        return "--messages", home / "messages.json"

    return write


def test_nothing_stored_yet(foretold, cli, home, model):
    cli("cache", "explain", "hello", "--model", model)
    assert not (home / "cache").exists()  # asking makes nothing
    told = foretold("hello")
    assert (told["cached_tokens"], told["miss_reason"], told["miss_position"]) == (0, "empty", 0)
    assert told["text_before"] == "" and told["text_after"].startswith("<|im_start|>user\nhello")


def test_all_of_it(foretold, talk):
    foretold(*talk(TALK))
    told = foretold(*talk(TALK))
    assert told["cached_tokens"] == told["prompt_tokens"] - 1
    assert told["miss_reason"] is None and told["why"] == "" and told["source"] == "ssd"


def test_where_another_message_begins(foretold, talk, cli, model):
    foretold(*talk(TALK))
    told = foretold(*talk([*TALK[:3], {"role": "user", "content": "What of the sky?"}]))
    assert told["miss_reason"] == "different_tokens" and "other tokens" in told["why"]
    assert told["text_before"].endswith("It is wide.<|im_end|>\n")
    assert "What of the" in told["text_after"]
    assert tiny.tokenizer().decode(told["ids_after"], skip_special_tokens=False) == told["text_after"]
    shown = cli("cache", "explain", "Something else", "--model", model)
    assert "different_tokens" in shown.out and "Something" in shown.out


def test_an_answer_that_is_sent_back(foretold, talk, cli, model):
    asked = TALK[:2]
    answer = cli("run", *talk(asked), "--model", model, "--max-tokens", 9, "--json").json
    more = [*asked, {"role": "assistant", "content": answer["text"]}, {"role": "user", "content": "Go on."}]
    told = foretold(*talk(more))
    assert told["cached_tokens"] >= answer["usage"]["prompt_tokens"] + 8


def test_token_ids_and_raw_text(foretold, home):
    ids = tiny.ids(300)
    (home / "ids.json").write_text(json.dumps(ids))
    foretold("--prompt-tokens", home / "ids.json")
    (home / "ids.json").write_text(json.dumps([*ids, 5, 6]))
    assert foretold("--prompt-tokens", home / "ids.json")["cached_tokens"] >= 299
    foretold("plain text", "--raw")


@pytest.mark.parametrize("kind", ["rows", "state"])
@pytest.mark.parametrize("damage", ["flip", "gone"])
def test_a_bad_record_is_told_and_left_for_the_run(foretold, cli, talk, home, model, kind, damage):
    cli("run", *talk(TALK), "--model", model, "--max-tokens", 1, "--json")
    folder = home / "cache" / "mlxkv"
    victims = records(folder, kind)
    for victim in victims:
        if damage == "gone":
            victim.unlink()
        else:
            data = bytearray(victim.read_bytes())
            data[-1] ^= 1
            victim.write_bytes(data)
    told = foretold(*talk(TALK))
    assert told["cached_tokens"] == 0
    if damage == "flip":
        assert told["miss_reason"] == "corrupt"
        assert list((folder / "quarantine").glob("*.safetensors"))  # by the run: explain saw it twice
    else:
        assert told["miss_reason"] == {"rows": "empty", "state": "no_state"}[kind]


def test_other_weights_and_switched_off(foretold, cli, tmp_path, model):
    other = tiny.make("qwen3_5", tmp_path / "other", seed=5)
    foretold("hello")
    assert foretold("hello", model=other)["miss_reason"] == "other_model"
    assert foretold("hello", "--no-cache")["miss_reason"] == "off"
    (tmp_path / "file").write_text("no folder")
    told = foretold("hello", "--cache-dir", tmp_path / "file", "--ram-budget", 0)
    assert told["miss_reason"] == "off" and "cannot be used" in told["why"]
    told = foretold("hello", "--cache-dir", tmp_path / "file")  # RAM is there, and empty when a process starts
    assert told["miss_reason"] == "empty" and "kept on disk" in told["why"] and "cannot be used" in told["why"]


def test_asking_is_no_use(cli, home, model):
    cli("run", "hello", "--model", model, "--max-tokens", 4, "--json")

    def used():
        with sqlite3.connect(home / "cache" / "mlxkv" / "index.sqlite") as db:
            return db.execute("SELECT key, used FROM entries ORDER BY key").fetchall()

    before = used()
    cli("cache", "explain", "hello", "--model", model)
    assert used() == before


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        ([], 2, "There is no question"),
        (["hi", "--messages", "x.json"], 2, "given together"),
        (["  "], 4, "empty"),
        (["word " * 5000], 4, "4096"),
        (["hi", "--model", "/nonexistent/model"], 3, "/nonexistent/model"),
    ],
)
def test_refusals_are_those_of_run(cli, model, args, code, says):
    args = [*args, *([] if "--model" in args else ["--model", model])]
    for command in (["cache", "explain"], ["run"]):
        found = cli(*command, *args, "--json")
        assert found.code == code and found.out == "" and says in found.err
