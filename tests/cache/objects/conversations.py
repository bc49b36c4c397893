"""Random conversations on two machines that share a store, whose objects vanish and are damaged: never a wrong hit."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from mlxkv.cache.lookup import REASONS
from mlxkv.cache.store import PrefixStore
from tests.cache.objects.machines import sent
from tests.cache.objects.server import objects, put
from tests.cache.stores import records
from tests.cache.synthetic import MODELS, ask, verify


def damage(rng: random.Random, url: str) -> None:
    """One object is removed, cut, flipped, or has another's bytes."""
    import obstore

    from mlxkv.cache.objects.place import open_store

    there = objects(url)
    if not there:
        return
    path = rng.choice(list(there))
    data = bytearray(there[path])
    match rng.randrange(4):
        case 0:
            obstore.delete(open_store(url), path)
        case 1:
            put(url, path, bytes(data[: rng.randrange(len(data) + 1)]))
        case 2:
            for _ in range(3):
                if data:
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            put(url, path, bytes(data))
        case _:
            put(url, path, there[rng.choice(list(there))])


def conversations(rng: random.Random, machine: Callable[..., PrefixStore], folder: Path) -> None:
    """Of two layouts, on machines (``machines``) under ``folder``. Raises AssertionError for what is wrong."""
    for i, name in enumerate(rng.sample(list(MODELS), 2)):
        url, model, block = f"file://{folder}/shared{i}", MODELS[name], rng.choice((4, 8, 16))
        secret = rng.choice((None, "a secret of some length"))
        ram = rng.choice((0, 1 << 20))
        stores = [
            machine(model, f"{n}{i}", url, secret, block=block, ram_budget=ram, rest=0.0, seconds=30.0) for n in "ab"
        ]
        stem = [rng.randrange(6) for _ in range(rng.randrange(20, 60))]
        for _ in range(8):
            prompt = stem[: rng.randrange(2, len(stem) + 1)] + [rng.randrange(6) for _ in range(rng.randrange(12))]
            ends = tuple(sorted(rng.sample(range(1, len(prompt)), min(2, len(prompt) - 1))))
            store = rng.choice(stores)
            found = ask(model, store, prompt, ends=ends, messages=True, more=[1] * rng.randrange(1, 4))
            assert found.reason in (None, *REASONS)
            if rng.random() < 0.6:
                sent(store)
            if rng.random() < 0.3:
                damage(rng, url)
            if rng.random() < 0.3 and (files := records(store.folder.path, "state")) and store.writer.flush(20):
                rng.choice(files).unlink()
            if rng.random() < 0.2:
                store.writer.merge()
        for store in stores:
            assert store.writer.flush(20)
            store.close()
            alone = model.open(store.folder.path, block=block)
            verify(store.folder.path, alone)
            alone.close()
