"""A server that answers wrongly: an HTTP proxy on loopback, before the real one, that bends what this says."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.cache.objects.server import Server


@dataclass
class Answer:
    """``method`` and ``path`` of the request, and what is said to it. ``claims``: bytes that are announced, if they are
    not those that are sent. ``pause``: seconds before each ``portion`` of bytes; None: nothing is sent for ever."""

    method: str
    path: str
    query: dict[str, list[str]]
    status: int
    headers: dict[str, str]
    body: bytes
    claims: int | None = None
    pause: float | None = 0.0
    portion: int = 1 << 20

    @property
    def lists(self) -> bool:
        return self.method == "GET" and "list-type" in self.query


@dataclass
class Faulty:
    url: str = ""
    #: changes an answer
    bend: Callable[[Answer], None] = lambda answer: None
    #: which requests, by method and path, are refused before the real server hears of them
    refuse: Callable[[str, str], bool] = lambda method, path: False
    #: of each request, what it was
    seen: list[Answer] = field(default_factory=list)


def _handler(to: tuple[str, int], faulty: Faulty, over: threading.Event) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _do(self) -> None:
            sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = urlsplit(self.path)
            if faulty.refuse(self.command, parts.path):
                said = b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
                self.send_response(403)
                self.send_header("Content-Length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)
                return
            behind = http.client.HTTPConnection(*to, timeout=30)
            behind.request(self.command, self.path, sent, dict(self.headers.items()))
            got = behind.getresponse()
            body = got.read()
            skip = ("connection", "content-length", "transfer-encoding", "server", "date")
            headers = {k: v for k, v in got.getheaders() if k.lower() not in skip}
            length = got.getheader("Content-Length") if self.command == "HEAD" else None
            behind.close()
            answer = Answer(self.command, parts.path, parse_qs(parts.query, True), got.status, headers, body)
            answer.claims = int(length) if length is not None else None
            faulty.seen.append(answer)
            faulty.bend(answer)
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer.body) if answer.claims is None else answer.claims))
            self.end_headers()
            for i in range(0, len(answer.body), answer.portion):
                if answer.pause is None or answer.pause:
                    over.wait(answer.pause)
                self.wfile.write(answer.body[i : i + answer.portion])
                self.wfile.flush()
            if answer.claims is not None and self.command != "HEAD":
                self.close_connection = True

        def handle(self) -> None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                super().handle()

        def log_message(self, *_: Any) -> None: ...

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _do  # noqa: N815 - the names that the base class looks for

    return Handler


@contextlib.contextmanager
def faulty_server(server: Server, monkeypatch: Any) -> Iterator[Faulty]:
    """What the environment leads to from now on."""
    faulty, over = Faulty(), threading.Event()
    running = ThreadingHTTPServer(("127.0.0.1", 0), _handler(server.address, faulty, over))
    running.daemon_threads = True
    thread = threading.Thread(target=running.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    faulty.url = "http://{}:{}".format(*running.server_address[:2])
    monkeypatch.setenv("AWS_ENDPOINT_URL", faulty.url)
    try:
        yield faulty
    finally:
        over.set()
        running.shutdown()
        running.server_close()
        thread.join()
