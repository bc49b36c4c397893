"""``mlxkv serve`` as a process: where it listens, what it says, how it ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from mlxkv.cli.serve import port_owner
from tests import tiny

ROOT = Path(__file__).parents[2]


def test_a_port_in_use_is_told_before_the_model_is_loaded(cli):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = cli("serve", "--port", port, "--model", "/nonexistent")
        assert found.code == 2
        assert f"Port {port}" in found.err and "--port" in found.err
        if sys.platform == "linux":
            assert f"pid {os.getpid()}" in found.err
    assert port_owner(port) == ""


def test_a_host_that_is_not_here(cli):
    found = cli("serve", "--host", "203.0.113.1", "--port", 0, "--model", "/nonexistent")
    assert found.code == 2 and "203.0.113.1" in found.err
    assert cli("serve", "--port", 99999, "--model", "/nonexistent").code == 2


def test_a_model_that_is_not_there(cli):
    assert cli("serve", "--port", 0, "--model", "/nonexistent").code == 3


@pytest.mark.parametrize(("stop", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_start_answer_stop(tiny_model, home, stop, code):
    command = [sys.executable, "-m", "mlxkv.cli", "serve", "--port", "0", "--model", str(tiny_model("llama"))]
    command += ["--max-tokens", "3", "--host", "0.0.0.0" if stop == signal.SIGTERM else "127.0.0.1"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = ""
        while not (found := re.search(r"http://[\d.]+:(\d+)/v1", said)):
            line = process.stderr.readline()
            assert line, said
            said += line
        url = f"http://127.0.0.1:{found[1]}"
        body = {"model": "llama", "messages": [{"role": "user", "content": "secret"}]}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30).json()
        process.send_signal(stop)
        said += process.stderr.read()
        process.wait(timeout=30)
    assert process.returncode == code, said
    assert answer["usage"]["completion_tokens"] == 3  # --max-tokens is the default of requests
    assert "llama" in said and str(home / "cache" / "mlxkv") in said
    assert answer["id"] in said and "secret" not in said and "Traceback" not in said
    assert ("NO KEY" in said) == (stop == signal.SIGTERM)


def test_a_stream_that_is_running_when_the_server_stops_is_told_so(home):
    model = tiny.make("llama", home / "model", max_position_embeddings=10**6)
    command = [
        sys.executable,
        "-m",
        "mlxkv.cli",
        "serve",
        "--port",
        "0",
        "--no-cache",
        "--grace",
        "0.5",
        "--model",
        str(model),
    ]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = process.stderr.readline()
        found = re.search(r"http://[\d.]+:\d+/v1", said)
        assert found, said
        body = {"model": "model", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        with httpx.stream("POST", f"{found[0]}/chat/completions", json=body, timeout=30) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            came = [line for line in lines if line]
        said += process.stderr.read()
        process.wait(timeout=30)
    assert process.returncode == 0 and "Traceback" not in said
    assert "engine_closed" in came[-2] and came[-1] == "data: [DONE]"
