"""Two processes with separate SSD folders and one S3 server: what one stores the other resumes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import mlxkv
from mlxkv.decode.request import Completion, Request, SamplingParams
from tests import tiny
from tests.cache.objects.server import objects

ROOT = Path(__file__).resolve().parents[3]


def another(server, model: Path, folder: Path, url: str, tokens: list[int], more: dict[str, str]) -> dict:
    """What ``mlxkv run`` says, in a process of its own."""
    command = [sys.executable, "-m", "mlxkv", "run", "--model", model, "--cache-dir", folder, "--object-store", url]
    command += ["--prompt-tokens", "-", "--max-tokens", "6", "--json"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "MLXKV_"))}
    environment |= server.environment | {"PYTHONPATH": str(ROOT), "MLXKV_NUMERICS": "exact"}
    environment |= {"MLXKV_OBJECT_TIMEOUT": "60"} | more  # of a slow machine; how long one waits is another test's
    done = subprocess.run(
        [str(c) for c in command],
        input=json.dumps(tokens),
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder.parent,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_two_processes_share_prefixes(server, bucket, tiny_model, tmp_path):
    """This process stores, another goes on from there, and this one from what that stored."""
    model, secret = tiny_model("qwen3_5"), "the secret of both of them"
    tokens = tiny.ids(300, 5)
    options = {"cache_dir": tmp_path / "mine", "object_store": bucket, "object_secret": secret, "object_timeout": 60.0}

    def ask(engine: mlxkv.Engine, prompt: list[int], **more) -> Completion:
        return engine.submit(Request(tokens=prompt, sampling=SamplingParams(max_tokens=6), **more)).result()

    with mlxkv.load(model, **options) as engine:
        first = ask(engine, tokens)
        longer = [*tokens, *first.token_ids, *tiny.ids(20, 6)]
        cold = ask(engine, longer, use_cache=False)
    assert first.usage.cached_tokens == 0 and first.cache.miss_reason == "empty"
    theirs = another(server, model, tmp_path / "theirs", bucket, longer, {"MLXKV_OBJECT_SECRET": secret})
    assert theirs["cache"]["source"] == "object" and theirs["token_ids"] == cold.token_ids
    assert theirs["usage"]["cached_tokens"] == len(tokens) + 5  # the answer's end: its last token was not processed
    with mlxkv.load(model, **options) as engine:
        back = ask(engine, longer)
        status = engine.status().store
    assert (back.cache.source, back.cache.miss_reason) == ("object", None)
    assert back.usage.cached_tokens == len(longer) - 1 and back.token_ids == cold.token_ids
    assert status is not None and status.objects is not None and not status.faults
    assert status.objects.served == 1 and status.read_bytes["object"] == status.objects.downloaded_bytes > 0
    assert not any(b"mlxkv-record" in data for data in objects(bucket).values())
