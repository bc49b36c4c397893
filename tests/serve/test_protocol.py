"""Sockets have bounds: too many, too slow, and gone; each is told, and none is kept."""

from __future__ import annotations

import contextlib
import json
import time

import pytest

from mlxkv.serve import Limits
from tests.serve.conftest import Running, running
from tests.serve.raw import answer, connect, exchange, head
from tests.serve.test_bodies import CHAT, GOOD, refused

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def strict(server: Running):
    """The shared engine behind few sockets and little patience."""
    with running(server.engine, limits=Limits(max_connections=4, header_s=0.4, body_s=0.4, max_body=100_000)) as found:
        yield found


def gone(sock) -> bool:
    """Whether the server has closed a socket, within seconds."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def free(server: Running) -> None:
    """Wait until a connection is welcome again."""
    until = time.monotonic() + 5
    while (found := exchange(server.port, HEALTH)) is None or found.status != 200:
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_socket_too_many_is_told_so(strict):
    free(strict)
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(connect(strict.port)) for _ in range(4)]
        held[0].sendall(HEALTH)
        first = answer(held[0])
        assert first is not None and first.status == 200
        for pieces in ((), (HEALTH,), (head(CHAT, 5000) + b" " * 5000,)):
            found = exchange(strict.port, *pieces)
            assert refused(found, 503)["code"] == "too_many_connections"
            assert found is not None and found.headers["retry-after"] and found.headers["connection"] == "close"
    free(strict)


@pytest.mark.parametrize("sent", [b"", b"GET /health HTT", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "])
def test_headers_that_do_not_come(strict, sent):
    with connect(strict.port) as sock:
        sock.sendall(sent)
        found = answer(sock)
        if sent:
            refused(found, 408)
        assert found is not None or not sent
        assert gone(sock)


def test_headers_that_drip(strict):
    """A byte now and then does not buy more time."""
    with connect(strict.port, timeout=0.05) as sock:
        came = b""
        for byte in b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: " + b"a" * 200:
            with contextlib.suppress(TimeoutError):
                came = sock.recv(4096)
                break
            sock.sendall(bytes([byte]))
        assert came.startswith(b"HTTP/1.1 408 ")


def test_a_body_that_stops(strict):
    for path in (CHAT, "/v1/messages"):
        with connect(strict.port) as sock:
            sock.sendall(head(path, 500) + b'{"model": ')
            refused(answer(sock), 408)
            assert gone(sock)


def test_a_body_that_drips(strict):
    """A byte now and then does not buy more time."""
    with connect(strict.port, timeout=0.05) as sock:
        sock.sendall(head(CHAT, 500))
        came = b""
        for _ in range(200):
            with contextlib.suppress(TimeoutError):
                came = sock.recv(4096)
                break
            sock.sendall(b" ")
        assert came.startswith(b"HTTP/1.1 408 ")


def test_a_body_that_comes_in_pieces_for_longer_than_a_pause_may_take(strict):
    body = json.dumps(GOOD[CHAT]).encode()
    body += b" " * (40_000 - len(body))
    with connect(strict.port) as sock:
        sock.sendall(head(CHAT, len(body)))
        for at in range(0, len(body), 5_000):
            time.sleep(0.08)
            sock.sendall(body[at : at + 5_000])
        found = answer(sock)
        assert found is not None and found.status == 200


def test_a_body_that_is_too_large_is_not_read_for_ever(strict):
    with connect(strict.port) as sock:
        sock.sendall(head(CHAT, 10**9))
        refused(answer(sock), 413)
        until = time.monotonic() + 10
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            while time.monotonic() < until:
                sock.sendall(b" " * 1000)
                time.sleep(0.02)
    free(strict)


def test_requests_one_after_the_other(strict):
    free(strict)
    with connect(strict.port) as sock:
        body = json.dumps(GOOD[CHAT]).encode()
        for _ in range(3):
            sock.sendall(HEALTH)
            first = answer(sock)
            sock.sendall(head(CHAT, len(body)))
            sock.sendall(body)
            second = answer(sock)
            assert first is not None and second is not None and first.status == second.status == 200


def test_an_upgrade_is_not_taken(strict):
    free(strict)
    lines = (b"GET / HTTP/1.1", b"Host: localhost", b"Connection: Upgrade", b"Upgrade: websocket", b"", b"")
    found = exchange(strict.port, b"\r\n".join(lines))
    assert found is not None and found.status in (200, 404)
