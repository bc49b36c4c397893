"""Machines that share an object store: a store each, with a folder of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlxkv.cache.objects.shared import share
from mlxkv.cache.objects.tier import ObjectTier
from mlxkv.cache.store import PrefixStore

BLOCK = 8


@contextmanager
def machines(folder: Path) -> Iterator[Callable[..., PrefixStore]]:
    """``machine(model, "a", url)``: the store of a machine with a folder of its own under ``folder``, which shares
    ``url``. All are closed at the end."""
    made: list[PrefixStore] = []

    def make(model: Any, name: str, url: str, secret: str | None = None, **options: Any) -> PrefixStore:
        mine = {key: options.pop(key) for key in ("seconds", "rest", "nbytes") if key in options}
        store = model.open(folder / name, block=options.pop("block", BLOCK), **options)
        share(store, ObjectTier(url, store.block, secret, **mine))
        made.append(store)
        return store

    try:
        yield make
    finally:
        for store in made:
            store.close()


def sent(store: PrefixStore) -> None:
    """Wait until what was stored is durable and in the object store."""
    store.writer.write_tips()
    assert store.writer.flush(20)
    assert store.shared is not None and store.shared.uploads is not None and store.shared.uploads.flush(20)
