"""What was restored of a prompt is told the same by every API, whole and streamed, alone and beside others, with drafts
and without."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import httpx
import pytest

from mlxkv.config import EMBEDDED
from mlxkv.decode.engine import Engine
from tests.serve.conftest import NO_TLS, running

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
EVERY = list(product(ROUTES, (False, True)))
STORY = [{"role": "user", "content": "The harbour was quiet that evening. " * 12}]


@pytest.fixture(scope="module", params=["off", "mtp"])
def http(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("usage") / "cache"
    fixed = {} if request.param == "off" else {"draft_depth": 2}  # or drafts would rest where they do not pay
    with Engine(EMBEDDED, cache_dir=folder, draft=request.param, **fixed) as engine, running(engine) as server:
        assert (engine.info.drafter is not None) == (request.param == "mtp")
        with httpx.Client(base_url=server.url, timeout=60, verify=NO_TLS) as made:
            yield made
        assert (engine.status().drafted > 0) == (request.param == "mtp")


def body(http, route, messages, stream, tokens):
    made = {"model": EMBEDDED.name, "stream": stream}
    limit = "max_output_tokens" if route == "/v1/responses" else "max_tokens"
    if route == "/v1/completions":
        made["prompt"] = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    else:
        made["input" if route == "/v1/responses" else "messages"] = messages
    if stream and route in ROUTES[:2]:
        made["stream_options"] = {"include_usage": True}
    return made | {limit: tokens, "temperature": 0}


def told(http, route, messages, stream=False, tokens=8):
    """(tokens of the prompt, those restored, why not more) as an answer tells them."""
    answer = http.post(route, json=body(http, route, messages, stream, tokens))
    assert answer.status_code == 200, answer.text
    objects = (
        [answer.json()]
        if not stream
        else [
            json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: {")
        ]
    )
    said = [made.get("response", made) for made in objects]
    usage = [made["usage"] for made in said if made.get("usage")][-1]
    own = [made["mlxkv"] for made in said if "cache" in made.get("mlxkv", {})][-1]
    if route == "/v1/messages":
        cached = usage["cache_read_input_tokens"]
        prompt = usage["input_tokens"] + cached
    else:
        kind = "input" if route == "/v1/responses" else "prompt"
        prompt, cached = usage[f"{kind}_tokens"], usage[f"{kind}_tokens_details"]["cached_tokens"]
    return prompt, cached, own["cache"]["miss_reason"]


def test_every_api_tells_the_same(http):
    cold = told(http, ROUTES[0], STORY)
    assert cold[1] < cold[0] - 1 and cold[2] is not None
    whole = {told(http, route, STORY, stream) for route, stream in EVERY}
    assert whole == {(cold[0], cold[0] - 1, None)}
    parting = [*STORY, {"role": "assistant", "content": "And then?"}]
    told(http, ROUTES[0], [*parting, {"role": "user", "content": "z " * 20}])  # what the others have in common is kept
    found = {}
    for i, (route, stream) in enumerate(EVERY):
        asked = [*parting, {"role": "user", "content": f"{'abcdefgh'[i]} " * 20}]
        found[route, stream] = told(http, route, asked, stream)
    assert len(set(found.values())) == 1, found
    prompt, cached, reason = next(iter(found.values()))
    assert 0 < cached < prompt - 1 and reason is not None


def test_beside_others(http):
    """Four at once beside a long answer."""
    alone = told(http, ROUTES[0], STORY, tokens=24)
    assert told(http, ROUTES[0], STORY, tokens=24) == (alone[0], alone[0] - 1, None)
    with ThreadPoolExecutor(9) as pool:
        other = [{"role": "user", "content": "Count all the ships of the world."}]
        company = pool.submit(told, http, ROUTES[0], other, True, 120)
        found = list(pool.map(lambda each: told(http, each[0], STORY, each[1], 24), EVERY))
        company.result()
    assert set(found) == {(alone[0], alone[0] - 1, None)}
