from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlxkv.cache.store import PrefixStore
from tests.cache.objects.machines import machines
from tests.cache.objects.server import Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.stop()


@pytest.fixture
def bucket(server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty bucket of a real server, which the environment leads to."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server.bucket()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Callable[..., PrefixStore]]:
    with machines(tmp_path) as make:
        yield make
