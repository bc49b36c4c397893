"""Removing legacy files whose every useful byte is in the store: the one thing that ever changes a legacy folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ..record import Reader, RecordError
from ..store import PrefixStore
from .commit import missing
from .header import Signature
from .journal import Journal, NoRoom, read_digest
from .reasons import Refused
from .source import relative_name

#: told (files done, of how many); may raise to stop
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Removable:
    path: Path
    signature: Signature


def removable(
    store: PrefixStore, journal: Journal, root: Path, paths: Iterable[Path], progress: Progress = lambda *_: None
) -> list[Removable]:
    """Those of ``paths`` that the journal says are imported, that are what they were then to the last byte, and whose
    records are all on disk and whole: everything is read again. Raises sqlite3.Error."""
    paths = list(paths)
    known: dict[tuple[bytes, str], bool] = {}
    before: dict[bytes, frozenset[str]] | None = None
    whole = False
    out = []
    for done, path in enumerate(paths):
        progress(done, len(paths))
        row = journal.imported(root, relative_name(root, path), store.space().root)
        if row is None:
            continue
        if row.records is not before:  # files that were imported together are asked about once
            before = row.records
            whole = not missing(store, before) and all(_whole(store, *name, known) for name in _names(before))
        if not whole:
            continue
        try:
            now = read_digest(path)
        except Refused:
            continue
        if now.digest == row.digest:
            out.append(Removable(path, now.signature))
    progress(len(paths), len(paths))
    return out


def remove(journal: Journal, root: Path, files: Iterable[Removable]) -> list[Removable]:
    """Remove them, unless they changed meanwhile; returns those that are gone. Raises OSError."""
    gone = []
    try:
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                if Signature.of(os.lstat(file.path)) == file.signature:
                    os.unlink(file.path)
                    gone.append(file)
    finally:
        with contextlib.suppress(NoRoom):  # a row too many says nothing wrong
            journal.forget(root, [relative_name(root, file.path) for file in gone])
    return gone


def _names(records: dict[bytes, frozenset[str]]) -> list[tuple[bytes, str]]:
    return [(key, kind) for key, kinds in records.items() for kind in sorted(kinds)]


def _whole(store: PrefixStore, key: bytes, kind: str, known: dict[tuple[bytes, str], bool]) -> bool:
    """Whether a record can be read to the end and says that it is this one."""
    if (key, kind) not in known:
        try:
            with Reader.open(store.folder.file(key, kind)) as reader:
                for name in reader.tensors:
                    reader.read(name)
                known[key, kind] = (reader.meta.key, reader.meta.kind) == (key, kind)
        except (RecordError, KeyError, ValueError, TypeError):
            known[key, kind] = False
    return known[key, kind]
