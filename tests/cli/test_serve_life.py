"""A serving process from start to end: several models, a reload, a drain."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests import tiny

ROOT = Path(__file__).parents[2]
USER = {"role": "user", "content": "Tell me something."}


@dataclass
class Served:
    """A process that serves. ``said``: what it has written to stderr."""

    process: subprocess.Popen[str]
    http: httpx.Client
    lines: list[str] = field(default_factory=list)

    @property
    def said(self) -> str:
        return "".join(self.lines)

    def heard(self, word: str, seconds: float = 60.0) -> str:
        """What was said once ``word`` (a pattern) is part of it."""
        until = time.monotonic() + seconds
        while not re.search(word, self.said):
            assert time.monotonic() < until and self.process.poll() is None, self.said
            time.sleep(0.01)
        return self.said

    def chat(self, model: str, **more: object) -> httpx.Response:
        return self.http.post(
            "/v1/chat/completions", json={"model": model, "messages": [USER], "max_tokens": 2, **more}
        )

    def states(self) -> dict[str, str]:
        return {m["id"]: m["mlxkv"]["state"] for m in self.http.get("/v1/models").json()["data"]}

    def ends(self) -> int:
        self.process.wait(30)
        return self.process.returncode


@contextmanager
def serving(*arguments: str) -> Iterator[Served]:
    command = [sys.executable, "-m", "mlxkv.cli", "serve", "--port", "0", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    served = Served(process, httpx.Client(timeout=60))

    def listen() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            served.lines.append(line)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        found = re.search(r"http://\S+?:(\d+)/v1", served.heard(r"Ctrl-C stops it"))
        assert found
        served.http.base_url = f"http://127.0.0.1:{found[1]}"
        yield served
    finally:
        served.http.close()
        if process.poll() is None:
            process.kill()
        process.wait()
        listener.join(10)


@pytest.fixture
def settings(home, tiny_model) -> Path:
    """A configuration file with two models, of which one fits, and a key."""
    file = home / "config" / "mlxkv" / "config.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    long = tiny.make("llama", home / "long", max_position_embeddings=10**6)
    file.write_text(
        f'api_keys = ["one"]\ngrace = "30s"\n'
        f'[models.first]\npath = "{long}"\naliases = ["gpt-x"]\n'
        f'[models.second]\npath = "{tiny_model("llama")}"\n'
    )
    return file


def test_swap_reload_and_drain(settings):
    with serving() as served:
        assert served.chat("first").status_code == 401
        served.http.headers["authorization"] = "Bearer one"
        assert served.states() == {"first": "ready", "second": "unloaded"}
        assert "  model: first  " in served.said  # its name here, not its folder's
        assert served.chat("gpt-x").json()["choices"]
        cached = served.chat("first").json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > 0
        assert served.chat("second").status_code == 200  # swapped in
        assert served.states() == {"first": "unloaded", "second": "ready"}
        again = served.chat("first").json()["usage"]  # and back: what was stored is found
        assert again["prompt_tokens_details"]["cached_tokens"] > 0

        # a file that cannot be read changes nothing
        text = settings.read_text()
        settings.write_text(text + "[models.third]\n")
        served.process.send_signal(signal.SIGHUP)
        served.heard("were not reloaded")
        assert served.chat("first").status_code == 200

        # a new key, a new default, another model less; the engine that is loaded stays
        loads = served.said.count("loaded in")
        settings.write_text(
            "max_tokens = 3\n"
            + text.replace('"one"', '"two"').partition("[models.second]")[0].replace("gpt-x", "gpt-y")
        )
        served.process.send_signal(signal.SIGHUP)
        served.heard("were reloaded")
        assert served.chat("first").status_code == 401
        served.http.headers["authorization"] = "Bearer two"
        assert served.states() == {"first": "ready"}
        assert served.chat("second").status_code == served.chat("gpt-x").status_code == 404
        answer = served.chat("gpt-y", max_tokens=None).json()["usage"]
        assert answer["completion_tokens"] == 3 and answer["prompt_tokens_details"]["cached_tokens"] > 0
        assert served.said.count("loaded in") == loads

        # told to stop: what runs comes to its end, nothing new begins
        got = []

        def stream() -> None:
            body = {"model": "first", "messages": [USER], "max_tokens": 400, "stream": True}
            with served.http.stream("POST", "/v1/chat/completions", json=body) as response:
                got.extend(line for line in response.iter_lines() if line.startswith("data: "))

        running = threading.Thread(target=stream)
        running.start()
        while len(got) < 2:
            assert running.is_alive()
            time.sleep(0.002)
        served.process.send_signal(signal.SIGTERM)
        until = time.monotonic() + 20
        refused = None
        while running.is_alive() and refused is None and time.monotonic() < until:
            answer = served.chat("first")
            refused = answer if answer.status_code == 503 else None
        assert refused is not None and refused.headers["retry-after"]
        running.join(60)
        assert got[-1] == "data: [DONE]" and json.loads(got[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert served.ends() == 0
    assert "Traceback" not in served.said and "one" not in re.findall(r"api_key\S*", served.said)


def test_a_default_model_that_does_not_load_ends_the_process(home, tiny_model):
    broken = home / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    command = [sys.executable, "-m", "mlxkv.cli", "serve", "--port", "0", "--model", str(broken)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, env=os.environ)
    assert found.returncode == 3 and "config.json" in found.stderr and "Traceback" not in found.stderr
