"""What the store's tests share: a runtime with another store in it, and copies of a folder to do damage to."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlxkv.cache.layout import probe
from mlxkv.cache.store import PrefixStore
from mlxkv.decode.runtime import Runtime
from tests import tiny
from tests.probe import BLOCK, equal, run, runtime

LENGTH = 30


def prompt(seed: int = 1, length: int = LENGTH, ends: tuple[int, ...] = (10, 20)) -> list[int]:
    """Random ids whose messages end at ``ends``."""
    tokens = tiny.ids(length, seed)
    for end in ends:
        tokens[end - 1] = tiny.EOS
    return tokens


def reopened(rt: Runtime, folder: Path, **options) -> Runtime:
    """The same model with a store opened anew, as another process would open it."""
    old = rt.store
    assert old is not None
    store = PrefixStore(folder, old.identity, old.layout, **{"block": BLOCK} | options)
    return dataclasses.replace(rt, store=store)


def recached(rt: Runtime, folder: Path, make_cache: Callable[[], list[Any]], model: Any = None) -> Runtime:
    """The same weights with other cache objects, and a store for them."""
    model = model or rt.model
    layout, old = probe(model, make_cache), rt.store
    assert old is not None
    store = PrefixStore(folder, dataclasses.replace(old.identity, layout=layout.digest), layout, block=BLOCK)
    return dataclasses.replace(rt, model=model, make_cache=make_cache, layout=layout, store=store)


class Written:
    """One prompt, stored in ``folder`` for one architecture, and the logits of a cold run."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.tokens = prompt()
        self.folder = folder
        self.rt = runtime(model, folder)
        self.cold, _ = run(self.rt, self.tokens, use_cache=False)
        run(self.rt, self.tokens)
        self.rt.store.close()

    def copy(self, to: Path, **options) -> Runtime:
        """A runtime on a copy of the folder that can be damaged."""
        shutil.copytree(self.folder, to)
        return reopened(self.rt, to, **options)

    def at(self, folder: Path) -> Runtime:
        return reopened(self.rt, folder)

    def ask_anew(self, folder: Path, *, keep: bool = False):
        """Open ``folder`` anew, ask, close."""
        rt = self.at(folder)
        try:
            return self.ask(rt, keep=keep)
        finally:
            rt.store.close()

    def ask(self, rt: Runtime, *, keep: bool = False):
        """Ask again: the answer must be the cold one, whatever the store holds. Returns (cached tokens, reason)."""
        logits, completion = run(rt, self.tokens, keep=keep)
        assert equal(logits, self.cold)
        if keep:
            assert rt.store.writer.flush(10)
        return completion.usage.cached_tokens, completion.cache.miss_reason


def remove(folder: Path) -> None:
    """Remove a folder that a store has open and may be writing into: what came after the listing takes another try."""
    for last in [*[False] * 50, True]:
        with contextlib.suppress(*[] if last else [OSError]):
            shutil.rmtree(folder)
            return
        time.sleep(0.02)


def records(folder: Path, kind: str = "*") -> list[Path]:
    return sorted((folder / "records").rglob(f"*.{kind}.safetensors"))
