"""``mlxkv chat --url``: a conversation with a server that runs already, in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from mlxkv.cli import session as sessions
from mlxkv.cli.remote import Remote
from mlxkv.decode.request import Finished, Progress, Started
from tests.cli.terminal import ANSWERING, PROMPT, terminal

ROOT = Path(__file__).parents[2]


KEY = "its-key"


@pytest.fixture(autouse=True)
def key(home, monkeypatch):
    monkeypatch.setenv("MLXKV_API_KEY", KEY)


@pytest.fixture(scope="module")
def url(endless, tmp_path_factory):
    cache = tmp_path_factory.mktemp("served")
    command = [sys.executable, "-m", "mlxkv.cli", "serve", "--port", "0", "--model", str(endless), "--alias", "nick"]
    environment = os.environ | {"MLXKV_API_KEY": KEY, "MLXKV_PREFILL_CHUNK": "64", "MLXKV_CACHE_DIR": str(cache)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = process.stderr.readline()
        found = re.search(r"http://[\d.]+:\d+", said)
        assert found, said
        yield found[0]
        process.terminate()
        process.stderr.read()
    assert process.returncode == 0


def becomes(url, active, seconds=10.0):
    """Whether the server has so many requests within ``seconds``."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        now = httpx.get(f"{url}/health").json()
        if (now["active"], now["queued"]) == (active, 0):
            return True
        time.sleep(0.05)
    return False


def test_the_same_conversation_as_with_an_engine_here(cli, url, endless):
    asked = ("chat", "--json", "--max-tokens", 6)
    one, two = cli(*asked, "--url", url, stdin="hello\nand again\n").lines
    assert two["usage"]["cached_tokens"] >= one["usage"]["prompt_tokens"] + one["usage"]["completion_tokens"] - 1
    assert one["finish_reason"] == "length" and two["timings"]["decode_tps"] > 0
    here = cli(*asked, "--model", endless, stdin="hello\nand again\n").lines
    assert [turn["text"] for turn in here] == [one["text"], two["text"]]
    assert [turn["usage"] for turn in here] == [one["usage"], two["usage"]]
    assert here[1]["cache"]["miss_reason"] == two["cache"]["miss_reason"]


def test_a_session_goes_from_one_to_the_other(cli, url, endless):
    first = cli("chat", "--json", "-n", 6, "--model", endless, stdin="hello\n").lines[0]
    there = cli("chat", "--json", "-n", 6, "--url", f"{url}/v1/", "--resume", stdin="more\n")
    assert there.code == 0 and there.err == ""  # the model's name is the folder's
    again = cli("chat", "--json", "-n", 6, "--model", endless, "--resume", stdin="still more\n")
    assert again.code == 0 and "held with" not in again.err
    back = again.lines[0]
    assert there.lines[0]["session"] == back["session"] == first["session"]
    assert (there.lines[0]["turn"], back["turn"]) == (2, 3)
    answers = [m for m in sessions.find(back["session"]).messages if m["role"] == "assistant"]
    assert ["token_ids" in m for m in answers] == [True, False, True]


def test_the_folder_of_a_model_may_be_named_but_is_not_told(url, endless):
    http = httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"})
    (listed,) = http.get("/v1/models").json()["data"]
    assert listed["mlxkv"]["aliases"] == ["nick"] and str(endless) not in str(listed)
    body = {"model": str(endless.resolve()), "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_what_cannot_be_is_said_at_once(cli, url, endless):
    unknown = cli("chat", "--url", url, "--model", "nobody", stdin="")
    assert unknown.code == 3 and "'nobody'" in unknown.err and "endless" in unknown.err
    for key in ("", "another"):
        keyless = cli("chat", "--url", url, "--api-key", key, stdin="")
        assert keyless.code == 2 and "key" in keyless.err and "another" not in keyless.err
    for flags in (["--no-cache"], ["--draft", "off"], ["--ram-budget", "1GB"], ["--max-rows", 2], ["--dtype", "fp16"]):
        own = cli("chat", "--url", url, *flags, stdin="")
        assert own.code == 2 and f"{flags[0]} is an engine's setting" in own.err and "mlxkv serve" in own.err
    alone = cli("chat", "--api-key", "x", "--model", endless, stdin="")
    assert alone.code == 2 and "--api-key" in alone.err and "--url" in alone.err
    for wrong in ("ftp://127.0.0.1", "http://", "http://a:b@c", "http://[::1", "http://h:x", "http://h/?q"):
        found = cli("chat", "--url", wrong, stdin="")
        assert found.code == 2 and wrong in found.err and "It looks like" in found.err
    nobody = cli("chat", "--url", "127.0.0.1:9", stdin="")
    assert nobody.code == 5 and "http://127.0.0.1:9: Connection refused" in nobody.err
    assert cli("chat", "--url", f"{url}/elsewhere", stdin="").code != 0


def test_a_model_that_is_not_there_leaves_the_one_that_is(cli, url):
    found = cli("chat", "--url", url, "--json", "-n", 3, stdin="/model nope\nhello\n")
    assert "has no model 'nope'" in found.err and found.code == 3
    assert [line["turn"] for line in found.lines] == [1]


def test_an_alias_will_do(cli, url):
    assert cli("chat", "--url", url, "--model", "nick", "--json", "-n", 3, stdin="hello\n").code == 0


def test_how_much_of_a_long_prompt_is_read(url):
    remote = Remote(url, KEY)
    (name,) = remote.models()
    asked = {"model": name, "messages": [{"role": "user", "content": "word " * 500}], "max_tokens": 2}
    first, *came = remote.ask(asked)
    steps = [event for event in came if isinstance(event, Progress)]
    assert isinstance(first, Started) and len(steps) > 3
    assert [step.done for step in steps] == sorted({step.done for step in steps})
    (finished,) = [event for event in came if isinstance(event, Finished)]
    assert {step.total for step in steps} == {first.prompt_tokens} == {finished.completion.usage.prompt_tokens}


def test_from_the_environment(cli, url, monkeypatch):
    """A model in the settings is one for an engine here; where the server has none of that name, it has its own."""
    monkeypatch.setenv("MLXKV_URL", url)
    monkeypatch.setenv("MLXKV_MODEL", "~/models/elsewhere")
    assert cli("chat", "--json", "-n", 3, stdin="hello\n").lines[0]["usage"]["completion_tokens"] == 3


def test_on_a_terminal(url, home):
    with terminal("chat", "--url", url) as chat:
        chat.until(rb"endless at " + url.encode() + rb".*" + PROMPT)
        chat.type("hello\r")
        assert becomes(url, 1)
        chat.until(ANSWERING)  # the answer has begun, and would never end
        chat.type(b"\x03")
        chat.until(rb"Stopping.*cancelled.*" + PROMPT)
        assert becomes(url, 0)
        stats = chat.ask("/stats")
        assert re.search(r"conversation +1 turn, kept as \d{8}-", stats) and url in stats
        assert re.search(r"requests +0 active, 0 queued", stats) and re.search(r"context +1,000,000 tokens", stats)
        assert "* endless" in chat.ask("/model")
        # Enter is a new line inside quotes
        chat.type('"""one\r')
        chat.until(rb"one.*\n.*\x1b\[\?25h")
        chat.type('two"""\r')
        chat.until(ANSWERING)
        assert becomes(url, 1)
        chat.type(b"\x03")
        chat.until(rb"cancelled.*" + PROMPT)
        assert "A new conversation." in chat.ask("/reset")
        (session,) = sessions.paths()
        listed = chat.ask("/load")
        assert session.stem in listed and "2 turns" in listed
        assert "2 turns loaded" in chat.ask(f"/load {session.stem[:10]}")
        assert chat.end() == 0
    kept = sessions.load(session)
    assert [m["content"] for m in kept.messages if m["role"] == "user"] == ["hello", "one\ntwo"]
    assert all(m["content"] for m in kept.messages)
    assert '"""one' in (home / "data" / "mlxkv" / "history").read_text()
