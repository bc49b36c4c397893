"""The main job with the real model, as a user runs it: numerics ``fast``, a new process each time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MODEL = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct"
pytestmark = pytest.mark.skipif(not MODEL.is_dir(), reason="scripts/test fetches SmolLM2 first")


def ask(home: Path, messages: list[dict[str, str]]) -> dict:
    (home / "messages.json").write_text(json.dumps(messages))
    command = [
        sys.executable,
        "-m",
        "mlxkv",
        "run",
        "--json",
        "--model",
        str(MODEL),
        "--cache-dir",
        str(home / "cache"),
    ]
    done = subprocess.run(
        [*command, "--messages", str(home / "messages.json"), "--max-tokens", "16"],
        capture_output=True,
        text=True,
        env=os.environ | {"MLXKV_NUMERICS": "fast"},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_ask_remember_restart_go_on(home):
    question = [{"role": "user", "content": "What is the capital of France?"}]
    first, again = ask(home, question), ask(home, question)
    assert "Paris" in first["text"] and first["finish_reason"] == "stop"
    assert again["usage"]["cached_tokens"] == again["usage"]["prompt_tokens"] - 1
    assert again["cache"] == {"source": "ssd", "miss_reason": None, "miss_position": None, "stored_tokens": 0}
    assert again["token_ids"] == first["token_ids"]
    assert set(again["timings"]) == {"load_s", "lookup_s", "restore_s", "prefill_s", "ttft_s", "decode_tps"}

    back = [*question, {"role": "assistant", "content": first["text"]}, {"role": "user", "content": "And of Spain?"}]
    following = ask(home, back)
    kept = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"] - 1
    assert following["usage"]["cached_tokens"] >= kept and following["cache"]["source"] == "ssd"
