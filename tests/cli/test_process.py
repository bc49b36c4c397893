"""What only a process of its own shows: how fast help comes, Ctrl-C, a closed pipe, a terminal."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import tiny
from tests.cli.terminal import ANSWERING, PROMPT, readable, terminal

MLXKV = [sys.executable, "-m", "mlxkv.cli"]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory) -> Path:
    """Wide enough that a prompt of thousands of tokens takes seconds, and a step milliseconds."""
    return tiny.make(
        "llama",
        tmp_path_factory.mktemp("slow") / "m",
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
    )


def start(*args, **more):
    command = [*MLXKV, *map(str, args)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)


def test_help_imports_nothing_heavy():
    code = "import sys, mlxkv.cli; print([m for m in sys.argv[1:] if m in sys.modules])"
    heavy = ["mlx.core", "mlx_lm", "numpy", "fastapi", "pydantic", "uvicorn", "rich", "prompt_toolkit", "transformers"]
    found = subprocess.run([sys.executable, "-c", code, *heavy], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_ctrl_c_in_decoding_keeps_what_came(slow_model):
    with start("run", "hi", "--model", slow_model, "-n", 4000, "--no-cache") as process:
        assert process.stdout is not None
        came = process.stdout.read(3)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert came + out and "Stopping" in err and "cancelled" in err and "Traceback" not in err


def test_ctrl_c_in_prefill_ends_soon_and_prints_the_object(slow_model, tmp_path):
    (tmp_path / "ids.json").write_text(json.dumps(tiny.ids(4000)))
    args = ("--prompt-tokens", tmp_path / "ids.json", "--model", slow_model, "--json", "--cache-dir", tmp_path / "c")
    for patience in (0.3, 1.0, 3.0):
        with start("run", *args, env=os.environ | {"MLXKV_PREFILL_CHUNK": "32"}) as process:
            began = time.monotonic()
            while not (tmp_path / "c" / "index.sqlite").exists() and time.monotonic() - began < 30:
                time.sleep(0.02)  # the store opens when the model is loaded
            time.sleep(patience)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        assert process.returncode == 130, err
        assert "Traceback" not in err
        if out:  # nothing is printed for a request that was not even asked yet, as on a busy machine
            break
        shutil.rmtree(tmp_path / "c")
    found = json.loads(out)
    assert (found["finish_reason"], found["token_ids"]) == ("cancelled", [])


def test_a_second_ctrl_c_ends_at_once(slow_model):
    with start("run", "hi", "--model", slow_model, "-n", 4000, "--no-cache") as process:
        assert process.stdout is not None
        process.stdout.read(3)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=10)
    assert process.returncode == 130


def test_ctrl_c_while_a_chat_waits(tiny_model):
    with start("chat", "--model", tiny_model("llama"), "-n", 4, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("hello\n")
        process.stdin.flush()
        process.stdout.readline()
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in err


def test_a_closed_pipe_is_quiet(tiny_model):
    with start("run", "hi", "--model", tiny_model("llama"), "-n", 2000, "--no-cache") as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        err = process.stderr.read()
        process.wait(timeout=30)
    assert process.returncode == 141 and err == ""


def test_two_processes_one_answer(tiny_model, tmp_path):
    """The first process writes, the second one restores, and exits are clean."""
    args = [*MLXKV, "run", "hello", "--model", str(tiny_model("qwen3_5")), "-n", "5", "--json"]
    args += ["--cache-dir", str(tmp_path / "c")]
    one, two = (subprocess.run(args, cwd=ROOT, capture_output=True, text=True) for _ in range(2))
    assert (one.returncode, two.returncode) == (0, 0), one.stderr + two.stderr
    first, second = json.loads(one.stdout), json.loads(two.stdout)
    assert second["usage"]["cached_tokens"] == second["usage"]["prompt_tokens"] - 1
    assert second["cache"]["source"] == "ssd" and second["token_ids"] == first["token_ids"]


def test_chat_on_a_terminal(endless):
    with terminal("chat", "--model", endless, "-n", 50_000) as chat:
        chat.until(PROMPT)
        chat.type("hello\r")
        chat.until(ANSWERING)
        chat.type(b"\x03")  # stops the answer, and keeps it
        assert "tok/s" in readable(chat.until(rb"Stopping.*cancelled.*" + PROMPT))
        assert "1 turn, kept as" in chat.ask("/stats")
        assert chat.end() == 0
