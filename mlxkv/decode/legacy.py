"""Importing legacy entries: the runtime is opened as a run opens it, and its store takes what a source yields."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..cache.adoption import take_in_all
from ..cache.legacy.importing import target
from ..cache.legacy.journal import Journal
from ..cache.legacy.prompt_text import Candidate, candidates
from ..cache.legacy.source import Context, Source
from ..cache.legacy.sources import open_source
from ..cache.store import PrefixStore
from ..cache.unwritten import UnwrittenStore
from ..errors import ConfigError
from .explain import UNBOUNDED, looking
from .options import EngineInfo, Options
from .prompt import build
from .request import Request
from .runtime import Runtime, open_runtime


@dataclass(frozen=True)
class Asked:
    """``kind``: what ``path`` is (``recognise``). ``request``: the prompt that the user gave, if one.
    ``same_weights``: the user vouches for the files of ``path``. ``trust_prompt``: a prompt that nothing proves may be
    believed. ``source_model``: the name under which the other tool kept the model's files."""

    path: Path
    kind: str
    request: Request | None = None
    same_weights: bool = False
    trust_prompt: bool = False
    source_model: str | None = None


@dataclass(frozen=True)
class Opened:
    info: EngineInfo
    store: PrefixStore
    journal: Journal
    source: Source


@contextmanager
def opened(options: Options, asked: Asked, *, vouch: Callable[[EngineInfo], bool]) -> Iterator[Opened]:
    """A source, and the store that takes what it yields. ``vouch`` is asked, with what is loaded, where the user has
    not vouched for these files yet. Raises ModelError, ConfigError, RequestError."""
    runtime, info = open_runtime(replace(options, ram_budget=0))
    try:
        store = _store(runtime, info)
        target(store)  # a model for which nothing can be imported is told first
        journal = Journal(store.folder.path, store.ledger)
        try:
            fingerprint = store.identity.fingerprint
            vouched = asked.same_weights or journal.consent(asked.path, fingerprint)
            if asked.kind == "omlx":  # prompt caches are proven by computing: nobody is asked
                vouched = vouched or vouch(info)
            if vouched:
                journal.give_consent(asked.path, fingerprint)
            yield Opened(info, store, journal, _source(runtime, store, journal, asked, vouched))
        finally:
            journal.close()
    finally:
        if runtime.store is not None:
            runtime.store.close()


@contextmanager
def looked_at(options: Options, asked: Asked, *, stored: bool) -> Iterator[Opened]:
    """The same for a dry run: nothing is written into the cache folder, nobody is asked. ``stored``: whether
    ``options.cache_dir`` holds a store; where it does not, one in a temporary folder stands for it."""
    with tempfile.TemporaryDirectory(prefix="mlxkv-") as nowhere:
        folder = options.cache_dir if stored else Path(nowhere) / "cache"
        asking = replace(options, cache_dir=folder, cache_budget=UNBOUNDED, ram_budget=0)
        runtime, info = open_runtime(asking)
        _store(runtime, info)
        store = looking(runtime, asking)
        try:
            target(store)
            journal = Journal(store.folder.path, None)
            try:
                vouched = asked.same_weights or journal.consent(asked.path, store.identity.fingerprint)
                yield Opened(info, store, journal, _source(runtime, store, journal, asked, vouched))
            finally:
                journal.close()
        finally:
            store.close()


def _store(runtime: Runtime, info: EngineInfo) -> PrefixStore:
    """The runtime's store, with all that its folder holds in the index: what is there already is found. Raises
    ConfigError where nothing can be stored."""
    store, off = runtime.store, info.store_off or info.disk_off
    if store is None or isinstance(store, UnwrittenStore):
        why = (off or "the store is off").rstrip(".")
        raise ConfigError(f"Nothing can be imported, for nothing can be kept on disk: {why}.")
    take_in_all(store.folder, store.index)
    return store


def _readings(request: Request, tokenizer: Any) -> tuple[Candidate, ...]:
    """All that a file without tokens may have been made from, for what the user gave."""
    if request.tokens is not None:
        return (Candidate("the ids that were given", tuple(request.tokens)),)
    if request.messages is None:
        return tuple(candidates(tokenizer, text=request.prompt))
    others = [m for m in request.messages if m["role"] != "system"]
    alone = others[0]["content"] if len(others) == 1 and others[0]["role"] == "user" else None
    return tuple(
        candidates(tokenizer, prompt=alone if isinstance(alone, str) else None, messages=list(request.messages))
    )


def _source(runtime: Runtime, store: PrefixStore, journal: Journal, asked: Asked, vouched: bool) -> Source:
    tokens, readings = None, ()
    if asked.request is not None and asked.kind == "mlx-lm":
        readings = _readings(asked.request, runtime.tokenizer)
    if asked.request is not None and not readings:
        tokens = tuple(build(asked.request, runtime.tokenizer, runtime.eos, lambda ids, text: None).tokens)
    context = Context(
        target=target(store),
        running=runtime,
        journal=journal,
        prompt=tokens,
        readings=readings,
        source_model=asked.source_model,
        same_weights=vouched,
        trust_prompt=asked.trust_prompt,
    )
    return open_source(asked.kind, asked.path, context)
