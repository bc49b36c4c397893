"""A real S3 server on loopback (moto's), and what may stand between it and who asks."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

from mlxkv.cache.objects.place import open_store

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}


class Server:
    """``environment`` is what a process needs to reach it."""

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        self.address: tuple[str, int] = self._server.get_host_and_port()
        self._buckets = 0

    @property
    def environment(self) -> dict[str, str]:
        return CREDENTIALS | {"AWS_ENDPOINT_URL": "http://{}:{}".format(*self.address)}

    def bucket(self) -> str:
        """The URL of a new one."""
        import urllib.request

        self._buckets += 1
        name = f"bucket-{os.getpid()}-{self._buckets}"
        request = urllib.request.Request("http://{}:{}/{}".format(*self.address, name), method="PUT")
        urllib.request.urlopen(request, timeout=10).close()
        return f"s3://{name}/some/prefix"

    def stop(self) -> None:
        self._server.stop()


def objects(url: str) -> dict[str, bytes]:
    """All that is in a store."""
    import obstore

    store = open_store(url)
    paths = [str(item["path"]) for page in obstore.list(store) for item in page]
    return {path: bytes(obstore.get(store, path).bytes()) for path in sorted(paths)}


def put(url: str, path: str, data: bytes) -> None:
    import obstore

    obstore.put(open_store(url), path, data)


class Between:
    """A port that leads to the server, or not: ``mode`` is pass, or silent (it takes connections and says nothing)."""

    def __init__(self, to: tuple[str, int]) -> None:
        self._to, self.mode = to, "pass"
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = "http://{}:{}".format(*self._listening.getsockname()[:2])
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listening.accept()
                self._open.append(here)
                if self.mode == "pass":
                    there = socket.create_connection(self._to, timeout=30)
                    self._open.append(there)
                    for a, b in ((here, there), (there, here)):
                        threading.Thread(target=self._copy, args=(a, b), daemon=True).start()

    def _copy(self, a: socket.socket, b: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := a.recv(1 << 16):
                while self.mode == "silent":
                    threading.Event().wait(0.02)
                b.sendall(data)
        with contextlib.suppress(OSError):
            b.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """From now on nobody listens there."""
        self.mode = "pass"
        self._listening.close()
        for each in self._open:
            with contextlib.suppress(OSError):
                each.close()


@contextlib.contextmanager
def between(server: Server, monkeypatch: Any) -> Iterator[Between]:
    port = Between(server.address)
    monkeypatch.setenv("AWS_ENDPOINT_URL", port.url)
    try:
        yield port
    finally:
        port.close()
