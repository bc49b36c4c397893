"""Imports of folders into stores of stand-in models, and what came of them."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxkv.cache.keys import KeySpace
from mlxkv.cache.legacy.convert import Target
from mlxkv.cache.legacy.importing import Importer, Report, target
from mlxkv.cache.legacy.journal import Journal
from mlxkv.cache.legacy.omlx import OmlxSource
from mlxkv.cache.legacy.reasons import Refused
from mlxkv.cache.legacy.source import Context
from mlxkv.cache.ram import Draft
from mlxkv.cache.store import PrefixStore
from mlxkv.decode.runtime import Runtime
from tests.cache.synthetic import BLOCK, Model

NAME = "test-model"
DAILY = 1 << 40


@dataclass(frozen=True)
class Stood:
    """A stand-in for the runtime: oMLX files are told by their bytes alone, no model runs."""

    make_cache: Callable[[], list[Any]]
    model: Any = None
    tokenizer: Any = None
    vocab_size: int = 1 << 20
    chunk: int = 512


@contextmanager
def importer(
    model: Model | Runtime,
    folder: Path,
    store: PrefixStore,
    *,
    prompt: list[int] | None = None,
    consent: bool = True,
    source_model: str | None = NAME,
) -> Iterator[Importer]:
    """``model``: a stand-in, or a runtime."""
    with closing(Journal(store.folder.path, store.ledger)) as journal:
        context = Context(
            target=target(store),
            running=model if isinstance(model, Runtime) else Stood(model.make_cache),
            journal=journal,
            prompt=None if prompt is None else tuple(prompt),
            source_model=source_model,
            same_weights=consent,
        )
        yield Importer(store, journal, OmlxSource(folder, context), folder, daily=DAILY)


def converted(
    model: Model, folder: Path, journal: Journal, prompt: list[int] | None = None
) -> tuple[list[Draft], set[str]]:
    """What would be stored of a folder, and the codes of what would not."""
    made = Target(KeySpace.of(model.identity, BLOCK), model.layout, model.identity, "test")
    context = Context(
        target=made,
        running=Stood(model.make_cache),
        journal=journal,
        prompt=None if prompt is None else tuple(prompt),
        source_model=NAME,
        same_weights=True,
    )
    source, drafts, said = OmlxSource(folder, context), [], set()
    said |= {found.code for found in source.survey()}
    for prefix, _ in source.prefixes():
        try:
            for group in made.drafts(prefix):
                drafts += group
        except Refused as e:
            said.add(e.code)
    said |= {found.code for found in source.refused()}
    return drafts, {code for code in said if code is not None}


def taken_in(
    model: Model | Runtime, folder: Path, store: PrefixStore, *, dry_run: bool = False, **options: Any
) -> Report:
    with importer(model, folder, store, **options) as running:
        return running.run(dry_run=dry_run)


def codes(report: Report) -> dict[str, str]:
    """File -> why it was refused, of a folder with at most three files a reason."""
    assert all(part.files == len(part.examples) for part in report.refused.values()), report
    return {name: code for code, part in report.refused.items() for name, _ in part.examples}


def fingerprint(folder: Path) -> str:
    """All that can be seen of a tree without following links: names, kinds, times and content."""
    h = hashlib.sha256()
    for at, names, files in sorted(os.walk(folder)):
        for name in sorted([*names, *files, "."]):
            path = Path(at) / name
            info = path.lstat()
            h.update(
                f"{path} {info.st_mode} {info.st_ino} {info.st_size} {info.st_mtime_ns} {info.st_ctime_ns}".encode()
            )
            if stat.S_ISLNK(info.st_mode):
                h.update(os.readlink(path).encode())
            elif stat.S_ISREG(info.st_mode):
                h.update(path.read_bytes())
    return h.hexdigest()
