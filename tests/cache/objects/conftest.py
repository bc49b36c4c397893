from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxkv.cache.objects.shared import share
from mlxkv.cache.objects.tier import ObjectTier
from mlxkv.cache.store import PrefixStore
from tests.cache.objects.server import Server

BLOCK = 8


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
    """``machine(model, "a", url)``: the store of a machine with a folder of its own, which shares ``url``."""
    made: list[PrefixStore] = []

    def make(model: Any, name: str, url: str, secret: str | None = None, **options: Any) -> PrefixStore:
        mine = {key: options.pop(key) for key in ("seconds", "rest", "nbytes") if key in options}
        store = model.open(tmp_path / name, block=options.pop("block", BLOCK), **options)
        share(store, ObjectTier(url, store.block, secret, **mine))
        made.append(store)
        return store

    yield make
    for store in made:
        store.close()


def sent(store: PrefixStore) -> None:
    """Wait until what was stored is durable and in the object store."""
    store.writer.write_tips()
    assert store.writer.flush(20)
    assert store.shared is not None and store.shared.uploads is not None and store.shared.uploads.flush(20)
