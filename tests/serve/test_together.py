"""Requests of every kind at once, each of which gets what it gets alone, while others come and leave between."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from mlxkv.decode.engine import Engine
from tests import tiny
from tests.serve.conftest import running

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
KINDS = [
    (CHAT, {}),
    (CHAT, {"logit_bias": {"7": 6.0, str(tiny.EOS): -100.0}, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}),
    (CHAT, {"temperature": 1.2, "seed": 2**64 - 3, "n": 2}),
    (CHAT, {"structured_outputs": {"regex": "[a-z]{2,9}( [a-z]{2,9})*"}, "temperature": 0.9, "seed": 5}),
    (CHAT, {"temperature": 0.8, "seed": 11, "frequency_penalty": 1.0, "repetition_penalty": 1.2, "min_p": 0.02}),
    (CHAT, {"stop": ["e", "the"], "max_tokens": 60}),
    (TEXT, {"echo": True, "logprobs": 3, "temperature": 1.0, "seed": 1}),
]


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def server(request, tiny_model, tmp_path_factory):
    """Few rows, so that some wait."""
    folder = tmp_path_factory.mktemp("together") / "cache"
    options = {"cache_dir": folder, "max_rows": 5, "prefill_chunk": 32}
    with Engine(tiny_model(request.param), **options) as engine, running(engine) as found:
        yield found


def ask(http, model, i, **more):
    path, fields = KINDS[i]
    words = f"This is request {i}. " * (1 + 3 * (i % 3))
    asked = {"prompt": words} if path == TEXT else {"messages": [{"role": "user", "content": words}]}
    return http.post(path, json={"model": model, "max_tokens": 24} | asked | fields | more)


def said(answer):
    """What an answer says, with every number."""
    assert answer.status_code == 200, answer.text
    return [{name: c[name] for name in c if name != "index"} for c in answer.json()["choices"]]


def test_everybody_gets_what_it_gets_alone(server):
    rng, model = random.Random(8), server.engine.info.name
    with httpx.Client(base_url=server.url, timeout=60) as http, ThreadPoolExecutor(14) as pool:
        alone = [said(ask(http, model, i, cache_salt="alone")) for i in range(len(KINDS))]

        def one(i):
            time.sleep(rng.random() * 0.3)
            return said(ask(http, model, i))

        def leaves(k):
            time.sleep(rng.random() * 0.5)
            messages = [{"role": "user", "content": f"Somebody else, {k}. " * 9}]
            body = {"model": model, "messages": messages, "max_tokens": 2000, "stream": True}
            with http.stream("POST", CHAT, json=body) as answer:
                next(answer.iter_raw())
                time.sleep(rng.random() * 0.3)

        for _ in range(2):  # cold, and with what the first time has stored
            gone = [pool.submit(leaves, k) for k in range(5)]
            found = list(pool.map(one, range(len(KINDS))))
            assert found == alone
            for each in gone:
                each.result()
    assert server.idle(10)
