"""Prompt-cache files as mlx-lm writes them (its own functions) and wrote them (by hand, from what is known of each
form), and their import into a store of their own."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache
from mlx_lm.utils import load

from mlxkv.cache.legacy.importing import Importer, Report, target
from mlxkv.cache.legacy.journal import Journal
from mlxkv.cache.legacy.prompt_cache import PromptCacheSource
from mlxkv.cache.legacy.source import Context
from mlxkv.decode.runtime import Runtime
from tests import tiny
from tests.cache.stores import reopened
from tests.probe import runtime

LENGTH = 37
_MADE: dict[str, Saved] = {}
ALL = 1 << 40


def prompt(length: int = LENGTH) -> list[int]:
    return tiny.ids(length, seed=3)


def prefilled(model: Any, tokens: list[int], cache: list[Any] | None = None, step: int = 16) -> list[Any]:
    """The caches of a plain mlx-lm prefill: in steps, the last token alone."""
    cache = make_prompt_cache(model) if cache is None else cache
    for _ in generate_step(mx.array(tokens), model, max_tokens=0, prompt_cache=cache, prefill_step_size=step):
        pass
    return cache


class Saved:
    """An architecture with a prompt prefilled by mlx-lm itself, and a runtime of the same folder."""

    def __init__(self, folder: Path, home: Path, **options: Any) -> None:
        self.folder, self.home = folder, home
        self.tokens = prompt()
        self.plain, _ = load(str(folder))
        self.caches = prefilled(self.plain, self.tokens)
        self.rt = runtime(folder, home / "none", **{"prefill_chunk": 10} | options)
        assert self.rt.store is not None
        self.rt.store.close()
        self._stores = 0

    def save(self, path: Path, caches: list[Any] | None = None) -> Path:
        save_prompt_cache(str(path), self.caches if caches is None else caches, {"model": "some/model"})
        return path

    @contextmanager
    def store(self, folder: Path | None = None):
        """The runtime with an empty store, or the one in ``folder``."""
        self._stores += 1
        rt = reopened(self.rt, folder or self.home / str(self._stores))
        try:
            yield rt
        finally:
            rt.store.close()


def imported(rt: Runtime, path: Path, tokens: list[int] | None, *, dry_run: bool = False, **options: Any) -> Report:
    """What ``mlxkv cache import`` does with a file and token ids."""
    assert rt.store is not None
    journal = Journal(rt.store.folder.path, None if dry_run else rt.store.ledger)
    try:
        given = tuple(tokens) if tokens is not None else None
        context = Context(target(rt.store), rt, journal, prompt=given, **options)
        source = PromptCacheSource(path, context)
        return Importer(rt.store, journal, source, path, daily=ALL).run(dry_run=dry_run)
    finally:
        journal.close()


def refusal(report: Report) -> tuple[str, str]:
    """(code, detail) of the one file, which was refused."""
    assert report.files == 1 and not report.imported.files, report
    ((code, part),) = report.refused.items()
    return code, part.examples[0][1]


@pytest.fixture(scope="session")
def saved(tiny_model, tmp_path_factory):
    """``saved("llama")``: made once for all modules that import this fixture."""

    def get(arch: str) -> Saved:
        if arch not in _MADE:
            _MADE[arch] = Saved(tiny_model(arch), tmp_path_factory.mktemp(arch))
        return _MADE[arch]

    return get


def with_model(rt: Runtime, model: Any) -> Runtime:
    return dataclasses.replace(rt, model=model)


def write_older(path: Path, caches: list[Any], version: str, names: dict[str, str] | None = None) -> Path:
    """A file as a release before 0.32 wrote it. ``names``: what classes were called then, where it is another name."""
    if version == "0.18":
        arrays = {
            f"{i}_{n}": getattr(c, n)[..., : c.offset, :] for i, c in enumerate(caches) for n in ("keys", "values")
        }
        metadata = {"model": "some/model", "chat_template": "{{ x }}", "tokenizer_config": "{}", "max_kv_size": "None"}
    else:
        states, infos, classes = [], [], []
        for c in caches:
            states.append(_state(c, version))
            infos.append(_info(c, version))
            classes.append((names or {}).get(type(c).__name__, type(c).__name__))
        arrays = dict(_flat(states))
        metadata = dict(_flat([infos, {"model": "some/model", "a.b": "2.0"}, classes]))
    mx.save_safetensors(str(path), arrays, metadata)
    return path


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _state(cache: Any, version: str) -> Any:
    kind = type(cache).__name__
    if kind == "CacheList":
        states = [_state(c, version) for c in cache.caches]
        return states if _number(version) >= (0, 31) else [part for state in states for part in state]
    if kind == "ArraysCache":
        return list(cache.cache)
    if kind == "QuantizedKVCache":
        return [[part[..., : cache.offset, :] for part in side] for side in (cache.keys, cache.values)]
    if cache.offset < cache.keys.shape[2]:
        return [cache.keys[..., : cache.offset, :], cache.values[..., : cache.offset, :]]
    return [cache.keys, cache.values]


def _info(cache: Any, version: str) -> Any:
    kind = type(cache).__name__
    step = [] if _number(version) >= (0, 28, 1) else [256]
    if kind == "CacheList" and _number(version) >= (0, 31):
        return [[type(c).__name__ for c in cache.caches], [_info(c, version) for c in cache.caches]]
    numbers = {
        "RotatingKVCache": lambda: [cache.keep, cache.max_size, *step, cache.offset, cache._idx],
        "QuantizedKVCache": lambda: [*step, cache.offset, cache.group_size, cache.bits],
        "ChunkedKVCache": lambda: [cache.chunk_size, cache.start_position],
    }
    return [str(n) for n in numbers[kind]()] if kind in numbers else ""


def _flat(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else None
    if items is None:
        return [(prefix[:-1], tree)]
    return [leaf for key, value in items for leaf in _flat(value, f"{prefix}{key}.")]
