"""A real server on a free port of 127.0.0.1, around a real engine with a tiny model."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import uvicorn
from openai import DefaultHttpxClient, OpenAI

from mlxkv.decode.engine import Engine
from mlxkv.serve import Limits, Server
from mlxkv.serve.life import uvicorn_config

#: reading the certificates of the system takes a client 0.1 s, and no test needs them
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

MAX_BODY = 200_000


@dataclass
class Running:
    engine: Engine
    port: int
    offered: Server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def idle(self, seconds: float = 5.0) -> bool:
        """Whether the engine becomes free within ``seconds``."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            health = self.engine.health()
            if health.active == health.queued == 0:
                return True
            time.sleep(0.01)
        return False

    def busy(self, seconds: float = 5.0) -> bool:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.engine.health().active:
                return True
            time.sleep(0.005)
        return False


@contextlib.contextmanager
def running(engine: Engine, **options) -> Iterator[Running]:
    listener = socket.create_server(("127.0.0.1", 0))
    options.setdefault("limits", Limits(max_body=MAX_BODY))
    offered = Server.around(engine, **options)
    server = uvicorn.Server(uvicorn_config(offered, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield Running(engine, listener.getsockname()[1], offered)
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()


@pytest.fixture(scope="package")
def server(tiny_model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    cache: Path = tmp_path_factory.mktemp("cache") / "mlxkv"
    with Engine(tiny_model("llama"), cache_dir=cache, prefill_chunk=64) as engine, running(engine) as found:
        yield found


@pytest.fixture
def client(server: Running) -> Iterator[OpenAI]:
    plain = DefaultHttpxClient(verify=NO_TLS)
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=plain) as made:
        yield made


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30, verify=NO_TLS) as made:
        yield made
