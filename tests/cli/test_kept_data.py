"""``--store-bits`` and ``--cache-salt`` at the command line: what is kept, and who finds it."""

from __future__ import annotations

import json

import pytest

QUESTION = "Tell me about the sea, and about the land, and about all the ships."


@pytest.fixture
def ask(cli, model):
    def call(*more, command=("run",)):
        limit = ("--max-tokens", 1) if command == ("run",) else ()
        found = cli(*command, QUESTION, "--model", model, "--json", *limit, *more)
        assert found.code == 0, found.err
        return found.json

    return call


def seen(answer):
    cached = answer["usage"]["cached_tokens"] == answer["usage"]["prompt_tokens"] - 1
    return cached, answer["cache"]["source"], answer["cache"]["miss_reason"]


def test_store_bits_from_run_to_verify(cli, ask):
    assert seen(ask()) == (False, "none", "empty")
    assert seen(ask("--store-bits", 8)) == (False, "none", "other_layout")
    assert seen(ask("--store-bits", "4")) == (False, "none", "other_layout")
    for bits in ("off", 8, 4):
        told = ask("--store-bits", bits, command=("cache", "explain"))
        assert (told["source"], told["miss_reason"]) == ("ssd", None)
        assert seen(ask("--store-bits", bits)) == (True, "ssd", None)
    kept = {m["store_bits"]: m for m in cli("cache", "info", "--json").json["models"]}
    assert kept.keys() == {None, 8, 4}
    assert len({m["layout"] for m in kept.values()}) == 3
    text = cli("cache", "info").out
    assert "rows in 8 bits" in text and "rows in 4 bits" in text
    lines = cli("cache", "ls", "--all", "--json").json["entries"]
    assert all(line["resumable"] for line in lines)
    dtypes, weights = set(), {None: 0, 8: 0, 4: 0}
    for line in lines:
        shown = cli("cache", "show", line["key"], "--json").json
        assert shown["resumable"] and shown["token_ids"]
        rows = next(r for r in shown["records"] if r["kind"] == "rows")
        weights[rows["store_bits"]] += sum(t["bytes"] for t in rows["tensors"])
        dtypes.add((rows["store_bits"], *sorted({t["dtype"] for t in rows["tensors"]})))
    assert dtypes == {(None, "F32"), (8, "F32", "U32"), (4, "F32", "U32")}
    assert (weights[8], weights[4]) == (0.3125 * weights[None], 0.1875 * weights[None])
    assert cli("cache", "verify", "--json").json["findings"] == []


def test_a_number_of_bits_that_is_none(cli, model):
    found = cli("run", "hello", "--model", model, "--store-bits", 5)
    assert found.code == 2 and "--store-bits is '5'" in found.err and "4, 8 or off" in found.err


def test_a_salt_keeps_users_apart(ask, cli, monkeypatch):
    assert seen(ask("--cache-salt", "ruby")) == (False, "none", "empty")
    assert seen(ask("--cache-salt", "ruby")) == (True, "ssd", None)
    assert ask("--cache-salt", "ruby", command=("cache", "explain"))["miss_reason"] is None
    for other in ((), ("--cache-salt", "opal"), ("--cache-salt", "jade", "--store-bits", "8")):
        told = ask(*other, command=("cache", "explain"))
        assert (told["cached_tokens"], told["miss_reason"], told["miss_position"]) == (0, "empty", 0)
        assert seen(ask(*other)) == (False, "none", "empty")
    monkeypatch.setenv("MLXKV_CACHE_SALT", "ruby")
    assert seen(ask()) == (True, "ssd", None)
    assert seen(ask("--cache-salt", "")) == (True, "ssd", None)  # what was kept above without a salt


def test_a_chat_has_the_salt_of_its_settings(cli, model):
    def chat(*more):
        found = cli("chat", "--model", model, "--max-tokens", 4, "--json", *more, stdin=QUESTION + "\n")
        assert found.code == 0, found.err
        return json.loads(found.out)

    assert seen(chat("--cache-salt", "ruby")) == (False, "none", "empty")
    assert seen(chat("--cache-salt", "opal")) == (False, "none", "empty")
    assert seen(chat("--cache-salt", "ruby")) == (True, "ssd", None)
