"""Who may ask: hosts, origins and keys; and what a server that is stopping says."""

from __future__ import annotations

import httpx
import pytest

from mlxkv.serve.safety import Keys, Safety, own_names
from tests.serve.conftest import Running, running
from tests.serve.test_refusals import refused

BODY = {"model": "llama", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
APP = "https://app.example"
HTTP: httpx.Client


@pytest.fixture(scope="module")
def locked(server: Running):
    """The shared engine behind two keys, for pages of one other site."""
    safety = Safety(Keys(["first", "second"]), own_names("mac.local"), frozenset({APP}))
    with running(server.engine, safety=safety) as found:
        yield found


@pytest.fixture(scope="module", autouse=True)
def one_client():
    global HTTP  # a client for each request would cost more than the request
    with httpx.Client(timeout=30) as HTTP:
        yield


def ask(server: Running, path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    if path == "/v1/chat/completions":
        return HTTP.post(server.url + path, json=BODY, headers=named, timeout=30)
    return HTTP.get(server.url + path, headers=named, timeout=30)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer first"}, 200),
        ({"authorization": "bearer second"}, 200),
        ({"x_api_key": "second"}, 200),
        ({"authorization": "Bearer wrong", "x_api_key": "first"}, 200),
        ({"authorization": "Bearer firs"}, 401),
        ({"authorization": "Bearer firstt"}, 401),
        ({"authorization": "Bearer"}, 401),
        ({"authorization": "Basic first"}, 401),
        ({"authorization": "first"}, 401),
        ({"x_api_key": "\xe9"}, 401),
        ({"x_api_key": "first,second"}, 401),
    ],
)
def test_keys(locked, headers, status):
    headers = {name: value.encode("latin-1") for name, value in headers.items()}
    answer = ask(locked, **headers)
    assert answer.status_code == status, answer.text
    if status == 401:
        error = refused(answer, 401)
        assert error["code"] == "invalid_api_key" and answer.headers["www-authenticate"] == "Bearer"
        assert "first" not in answer.text


def test_what_needs_no_key(locked):
    for path in ("/health", "/ready"):
        assert ask(locked, path).status_code == 200
    for path in ("/v1/models", "/openapi.json", "/nothing", "/health/"):
        assert ask(locked, path).status_code == 401, path
    assert HTTP.post(f"{locked.url}/health").status_code == 401
    assert ask(locked, "/v1/models", x_api_key="first").status_code == 200


def test_the_anthropic_form(locked):
    answer = HTTP.post(f"{locked.url}/v1/messages", json={})
    assert answer.status_code == 401
    assert answer.json()["type"] == "error" and answer.json()["error"]["type"] == "authentication_error"


def test_an_origin_that_is_not_listed(server, locked):
    for running_server in (server, locked):
        for origin in ("https://evil.example", "null", "https://app.example.evil", "http://app.example", "", "]["):
            answer = ask(running_server, origin=origin, x_api_key="first")
            assert refused(answer, 403)["code"] == "origin_not_allowed"
            assert "access-control-allow-origin" not in answer.headers
            health = ask(running_server, "/health", origin=origin)
            assert health.status_code == 403


@pytest.mark.parametrize("host", ["localhost:1@evil.example", "[::1]evil.example", "127.0.0.1:evil", "[::1]80", "::1"])
def test_a_host_that_only_begins_like_this_one(server, host):
    assert refused(ask(server, host=host), 403)["code"] == "host_not_allowed"


@pytest.mark.parametrize("host", ["[::1]", "[::1]:8642", "127.0.0.1:", "LOCALHOST.:1"])
def test_a_host_that_is_this_one(server, host):
    assert ask(server, host=host).status_code == 200


def test_a_compressed_body_is_not_read_as_if_it_were_plain(server):
    for encoding, status in (("gzip", 415), ("identity", 200)):
        assert ask(server, content_encoding=encoding).status_code == status
    assert "Content-Encoding" in refused(ask(server, content_encoding="br, gzip"), 415)["message"]


def test_its_own_page_may_ask(server):
    answer = ask(server, origin=server.url)
    assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers
    assert ask(server, origin=server.url.replace("127.0.0.1", "localhost")).status_code == 403  # another origin


def test_a_listed_origin_may_ask_and_read_errors_too(locked):
    for headers, status in (({"x_api_key": "first"}, 200), ({}, 401)):
        answer = ask(locked, origin=APP, **headers)
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == APP and "origin" in answer.headers["vary"].lower()


def test_preflight(locked):
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}
    url = f"{locked.url}/v1/chat/completions"
    answer = HTTP.options(url, headers=asked | {"origin": APP, "access-control-request-private-network": "true"})
    assert answer.status_code == 204 and answer.headers["access-control-allow-origin"] == APP
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "authorization" in answer.headers["access-control-allow-headers"]
    assert answer.headers["access-control-allow-private-network"] == "true"
    assert HTTP.options(url, headers=asked | {"origin": "https://evil.example"}).status_code == 403
    assert HTTP.options(url, headers={"x-api-key": "first"}).status_code == 405


def test_every_origin(server):
    with running(server.engine, safety=Safety(origins=frozenset({"*"}))) as open_one:
        assert ask(open_one, origin="https://any.example").headers["access-control-allow-origin"] == (
            "https://any.example"
        )


def test_a_server_that_stops_takes_nothing_new(server):
    with running(server.engine) as found:
        found.offered.draining = True
        answer = ask(found)
        assert refused(answer, 503)["code"] == "engine_closed"
        assert answer.headers["retry-after"] and answer.headers["connection"] == "close"
        ready, health = ask(found, "/ready"), ask(found, "/health")
        assert (ready.status_code, ready.json()["status"]) == (503, "draining")
        assert (health.status_code, health.json()["status"]) == (200, "draining")
        assert ask(found, "/v1/models").status_code == 200


def test_it_says_when_it_loads(server):
    with running(server.engine) as found:
        found.offered.loading = "llama"
        ready, health = ask(found, "/ready"), ask(found, "/health")
        assert ready.status_code == 503 and "llama" in ready.json()["reason"]
        assert health.status_code == 200 and health.json()["status"] == "loading"


def test_keys_are_compared_whole():
    assert not Keys() and Keys(["a"])
    assert Keys(["a", "b"]).holds("b") and not Keys(["a", "b"]).holds("ab") and not Keys(["a"]).holds("")
    assert Safety().knows_key({})
