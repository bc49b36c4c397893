"""What a server tells of itself: metrics, status, and what its prefix store remembers."""

from __future__ import annotations

import json
import threading
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mlxkv.serve import status
from mlxkv.serve.safety import Keys, Safety
from tests.serve.conftest import running

WORD = "Zanzibar"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Tell me of {WORD}."}]


def ask(http: httpx.Client, messages=None, **more) -> dict:
    body = {"model": "llama", "messages": messages or MESSAGES, "max_tokens": 6} | more
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def scrape(http: httpx.Client) -> dict[tuple[str, frozenset], float]:
    answer = http.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    made = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            made[sample.name.removeprefix("mlxkv:"), frozenset(sample.labels.items())] = sample.value
    return made


class Change:
    """What a counter went up by: ``change("requests_total", route=…)``, all series with these labels together."""

    def __init__(self, http: httpx.Client) -> None:
        self.http, self.before = http, scrape(http)

    def __call__(self, name: str, **labels: str) -> float:
        after = scrape(self.http)
        wanted = set(labels.items())
        return sum(n - self.before.get(key, 0.0) for key, n in after.items() if key[0] == name and wanted <= key[1])


def until(test, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not test():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def test_a_request_is_counted_as_its_usage_says(http):
    change = Change(http)
    first = ask(http)
    again = ask(http)
    usages = [answer["usage"] for answer in (first, again)]
    chat = {"model_name": "llama", "route": "/v1/chat/completions"}
    assert until(lambda: change("requests_total", **chat, status="200", finished_reason="length") == 2)
    assert change("request_success_total", model_name="llama", finished_reason="length") == 2
    assert change("prompt_tokens_total") == sum(u["prompt_tokens"] for u in usages)
    assert change("generation_tokens_total") == sum(u["completion_tokens"] for u in usages) == 12
    cached = [u["prompt_tokens_details"]["cached_tokens"] for u in usages]
    assert change("prefix_cache_hits_total") == sum(cached) and cached[1] == usages[1]["prompt_tokens"] - 1
    assert change("prefix_cache_hits_total", tier="ram") >= cached[1]
    assert change("prefix_cache_queries_total") == sum(u["prompt_tokens"] for u in usages)
    reason = first["mlxkv"]["cache"]["miss_reason"]
    assert change("prefix_cache_misses_total", reason=reason) == 1 == change("prefix_cache_misses_total")
    assert change("prefix_cache_missed_tokens_total", reason=reason) == usages[0]["prompt_tokens"] - cached[0]
    seconds = ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time")
    for name in (*(f"{name}_seconds" for name in seconds), "request_prompt_tokens", "request_generation_tokens"):
        assert change(name + "_count", model_name="llama") == 2, name
    assert change("inter_token_latency_seconds_count") == change("inter_token_latency_seconds_bucket", le="+Inf") > 0
    assert change("decode_steps_total") > 0 and change("prefix_cache_read_bytes_total", tier="ram") > 0


def test_every_request_over_http_is_counted_by_its_route(http):
    change = Change(http)
    assert http.get("/health").status_code == 200
    assert http.get("/v1/models/none").status_code == 404
    for _ in range(2):
        assert http.get("/no/such/place").status_code == 404
    assert http.post("/v1/chat/completions", json={"model": "llama"}).status_code == 400
    assert http.post("/v1/chat/completions", json={"model": "made up", "messages": MESSAGES}).status_code == 404
    assert change("http_requests_total", method="GET", handler="/health", status="200") == 1
    assert change("http_requests_total", handler="/v1/models/{model:path}", status="404") == 1
    assert change("http_requests_total", handler="none", status="404") == 2
    assert change("http_requests_total", method="POST", handler="/v1/chat/completions", status="400") == 1
    assert not [key for key in scrape(http) if "made up" in dict(key[1]).values()]


def test_a_client_that_leaves_is_counted_as_such(http, server):
    change = Change(http)
    body = {"model": "llama", "messages": MESSAGES, "max_tokens": 3000, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = answer.iter_lines()  # kept: to let go of it is to hang up
        next(line for line in lines if '"content":"' in line and '"content":""' not in line)
        now = http.get("/v1/status").json()
        assert now["active"] == 1
        (row,) = now["models"][0]["engine"]["rows"]
        assert row["id"].startswith("chatcmpl-") and row["state"] == "decoding" and row["generated_tokens"] > 0
        assert row["prompt_tokens"] == row["done_tokens"] > row["cached_tokens"] and row["context_left"] > 0
    assert server.idle()
    assert until(lambda: change("requests_total", status="499", finished_reason="cancelled") == 1)
    assert change("request_success_total") == 0 and change("generation_tokens_total") > 0


def test_openmetrics_for_who_asks_for_it(http):
    answer = http.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


def test_status_tells_what_there_is_and_what_was(http):
    said = ask(http)
    assert until(lambda: http.get("/v1/status").json()["recent"][0]["id"] == said["id"])
    found = http.get("/v1/status").json()
    assert (found["status"], found["active"], found["queued"]) == ("ok", 0, 0)
    (model,) = found["models"]
    assert (model["name"], model["state"], model["health"]) == ("llama", "ready", "ok")
    assert model["info"]["context_length"] > 0 and "path" not in model["info"]
    engine = model["engine"]
    assert engine["memory"]["weights"] > 0 and engine["memory_limit"] > engine["memory"]["weights"]
    assert engine["store"]["written_bytes"] >= 0 and engine["store"]["stopped"] is None
    last = found["recent"][0]
    assert (last["route"], last["status"], last["finish"]) == ("/v1/chat/completions", 200, "length")
    assert last["prompt_tokens"] == said["usage"]["prompt_tokens"] and last["completion_tokens"] == 6
    assert found["totals"]["prompt_tokens"] >= last["prompt_tokens"]
    assert WORD not in json.dumps(found)


def test_explain_says_beforehand_what_a_request_would_report(http):
    told = [*MESSAGES, {"role": "assistant", "content": ask(http)["choices"][0]["message"]["content"]}]
    for last in ("And then?", f"{WORD} again"):
        messages = [*told, {"role": "user", "content": last}]
        body = {"model": "llama", "messages": messages}
        assert until(lambda body=body: http.post("/v1/cache/explain", json=body).json()["cached_tokens"] > 0)
        found = http.post("/v1/cache/explain", json=body).json()
        again = http.post("/v1/cache/explain", json=body).json()
        assert found == again  # nothing was stored by asking
        said = ask(http, messages)
        assert found["prompt_tokens"] == said["usage"]["prompt_tokens"]
        assert found["cached_tokens"] == said["usage"]["prompt_tokens_details"]["cached_tokens"]
        for name in ("source", "miss_reason", "miss_position"):
            assert found[name] == said["mlxkv"]["cache"][name], name


def test_explain_shows_where_a_prompt_parts_from_what_is_stored(http):
    ask(http)
    other = [MESSAGES[0], {"role": "user", "content": "Tell me of Timbuktu."}]
    found = http.post("/v1/cache/explain", json={"messages": other}).json()
    assert found["same_text_before"].endswith("Tell me of")
    assert found["stored_text"].startswith(f" {WORD}") and found["asked_text"].startswith(" Timbuktu")
    assert found["miss_reason"] == "different_tokens" and found["miss_position"] <= found["same_tokens"]


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, 400, "messages"),
        ({"prompt": "a", "tokens": [1]}, 400, "tokens"),
        ({"prompt": "a", "best": 1}, 400, "best"),
        ({"prompt": 3}, 400, "prompt"),
        ({"tokens": [999_999]}, 400, "tokens"),
        ({"messages": [{"role": "nobody", "content": "a"}]}, 400, "messages[0].role"),
        ({"prompt": "a", "chat_template_kwargs": {"tokenize": False}}, 400, "chat_template_kwargs.tokenize"),
        ({"prompt": "a", "tools": [{"type": "hammer"}]}, 400, "tools[0].type"),
        ({"prompt": "a", "model": "../llama"}, 404, None),
    ],
)
def test_explain_refuses_what_it_does_not_understand(http, body, code, param):
    answer = http.post("/v1/cache/explain", json=body)
    assert answer.status_code == code, answer.text
    assert answer.json()["error"]["param"] == param


def test_the_tree_has_what_was_asked(http):
    ask(http)
    ask(http, [{"role": "user", "content": "Something else altogether"}])
    assert until(lambda: WORD[:5] in http.get("/v1/cache/tree").text)
    found = http.get("/v1/cache/tree", params={"model": "llama"}).json()
    assert found["model"] == "llama" and found["off"] is None and not found["needs_state"]
    assert found["entries"] > 0 and found["folder"]["bytes"] > 0
    for number, stretch in enumerate(found["stretches"]):
        above = stretch["above"]
        assert above is None or (above < number and found["stretches"][above]["end"] == stretch["start"])
        assert stretch["start"] < stretch["end"]
    assert any(stretch["text"].startswith("<|im_start|>system\nBe brief.") for stretch in found["stretches"])
    few = http.get("/v1/cache/tree", params={"limit": 1}).json()
    assert len(few["stretches"]) == 1 and few["left_out"] > 0
    salted = http.get("/v1/cache/tree", params={"cache_salt": "somebody"}).json()
    assert salted["stretches"] == []
    for bad in ({"limit": 0}, {"limit": "many"}, {"limit": 10**9}):
        assert http.get("/v1/cache/tree", params=bad).status_code == 400
    assert http.get("/v1/cache/tree", params={"model": "none"}).status_code == 404
    wrong = http.get("/v1/cache/tree", params={"limit": "x"})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "limit"


def test_with_keys_nobody_reads_what_others_sent(http, server):
    ask(http)
    with running(server.engine, safety=Safety(Keys(["secret"]))) as guarded:
        for path in ("/v1/status", "/metrics", "/v1/cache/tree"):
            assert httpx.get(guarded.url + path).status_code == 401
        with httpx.Client(base_url=guarded.url, headers={"Authorization": "Bearer secret"}, timeout=30) as known:
            tree = known.get("/v1/cache/tree").json()
            assert tree["stretches"] and not any("text" in stretch for stretch in tree["stretches"])
            other = [MESSAGES[0], {"role": "user", "content": "Tell me of Timbuktu."}]
            found = known.post("/v1/cache/explain", json={"messages": other}).json()
            assert found["same_tokens"] > 0 and found["stored_text"] is None


def test_a_step_that_hangs_holds_nobody_up(http, server, monkeypatch):
    monkeypatch.setattr(status, "PATIENCE", 0.2)
    go = threading.Event()
    hung = threading.Thread(target=lambda: server.engine.inspect(lambda loop: go.wait(20)))
    hung.start()
    try:
        for path in ("/v1/status", "/metrics"):
            assert http.get(path).status_code == 200
        for answer in (http.get("/v1/cache/tree"), http.post("/v1/cache/explain", json={"prompt": "a"})):
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_busy"
            assert answer.headers["retry-after"]
    finally:
        go.set()
        hung.join()
    assert http.get("/v1/cache/tree").status_code == 200
