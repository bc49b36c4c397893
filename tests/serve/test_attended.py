"""Questions that wait for a model before any answer has begun: a client that leaves, or whose time is up, waits on no
more, and nothing is loaded for it."""

from __future__ import annotations

import threading
import time

import httpx
import pytest

from mlxkv.serve import Limits
from mlxkv.serve.models import Models
from mlxkv.serve.registry import Entry, Registry
from tests.serve.acting import Acting
from tests.serve.conftest import NO_TLS, running
from tests.serve.test_refusals import refused

MESSAGES = [{"role": "user", "content": "hi"}]
QUESTIONS = {
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/completions": {"prompt": ["a", "b"]},
    "/v1/completions?scored": {"prompt": "a", "echo": True, "logprobs": 1},
    "/v1/completions?streamed": {"prompt": ["a", "b"], "stream": True},
}


@pytest.fixture(scope="module")
def late():
    """A server whose model is not loaded before the end, its models, and a client."""
    engine, loaded = Acting(), threading.Event()

    def load(entry):
        assert loaded.wait(60)
        return engine

    with running(engine) as server, httpx.Client(base_url=server.url, timeout=20, verify=NO_TLS) as http:
        server.offered.models = models = Models(Registry([Entry("late", "/models/late")]), load)
        yield server.offered, models, http
        loaded.set()


def until(true) -> None:
    end = time.monotonic() + 5
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("path", QUESTIONS)
def test_who_leaves_waits_for_no_model(late, path):
    offered, models, http = late
    offered.limits = Limits()
    with pytest.raises(httpx.ReadTimeout):
        http.post(path, json=QUESTIONS[path] | {"model": "late"}, timeout=0.2)
    until(lambda: models.states()[0].waiting == 0 and offered.working == 0)


@pytest.mark.parametrize("path", QUESTIONS)
def test_a_time_out_counts_from_the_start(late, path):
    offered, models, http = late
    offered.limits = Limits(timeout_s=0.1)
    error = http.post(path, json=QUESTIONS[path] | {"model": "late"})
    assert error.status_code == 504 and "0.1 s" in error.text
    if not path.startswith("/v1/messages"):
        assert refused(error, 504)["code"] == "request_timeout"
    until(lambda: models.states()[0].waiting == 0)
