"""A store whose folder was refused: it serves from RAM, and reads the folder if only writing to it is refused.

What it cannot do is said once, where it is opened. Nothing is written: not a record, not the index, no lock is taken.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from pathlib import Path
from typing import Any

from .adoption import Progress
from .folder import CacheFolder, FolderRefused
from .index import FILE, Entry, Index
from .keys import Identity
from .layout import Layout
from .planner import Planner
from .restore import RestoreFailed
from .store import CLOSE_WITHIN, PrefixStore
from .tables import LOOK_UPS, TABLES, VERSION

log = logging.getLogger("mlxkv.cache")

#: a place in which no file can be: what was refused is not touched
NOWHERE = Path(os.devnull) / "refused"


class UnwrittenStore(PrefixStore):
    """``why``: the reason that is given for what is not written. ``folder``: where records are read, or None."""

    keeps = False

    def __init__(self, folder: Path | None, identity: Identity, layout: Layout, why: str, **options: Any) -> None:
        self.why = why
        super().__init__(folder or NOWHERE, identity, layout, **{**options, "behind": False})

    @property
    def reads(self) -> bool:
        """Whether it serves what is in the folder."""
        return self.folder.path != NOWHERE

    def _open(self, progress: Progress | None = None) -> None:
        found = None if self.folder.path == NOWHERE else _as_it_stands(self.folder)
        if found is None:
            self.folder = CacheFolder(NOWHERE)
        self.index = found or _Nothing()

    def _store_id(self) -> int:
        return -1

    def _stopped(self) -> str:
        return self.why

    def _renew(self) -> None:
        pass  # there is nothing to lose

    def _take_in(self, planner: Planner, tokens: list[int], limit: int) -> bool:
        return not self.index.any_waiting()

    def _adopt(self, entry: Entry, failed: str = "") -> bool:
        return False

    def _discard(self, failed: RestoreFailed) -> None:
        self._fault(failed.error.reason, str(failed))

    def close(self, timeout: float = CLOSE_WITHIN) -> None:
        self.restores.close(timeout)
        self.writer.close(timeout)
        if self.shared is not None:
            self.shared.close(timeout)
        if self.remote is not None:
            self.remote.close(timeout)
        if self.legacy is not None:
            self.legacy.close(self)
        self.index.close()


def open_store(
    folder: Path, identity: Identity, layout: Layout, **options: Any
) -> tuple[PrefixStore | None, FolderRefused | None]:
    """The store in ``folder``; if that is refused, why, and one that does without writing, if there is anything for it
    to serve from. ``options`` are those of ``PrefixStore``. Raises ConfigError."""
    try:
        return PrefixStore(folder, identity, layout, **options), None
    except FolderRefused as refused:
        store = UnwrittenStore(folder if refused.readable else None, identity, layout, str(refused), **options)
        if store.reads or store.ram.budget:
            return store, refused
        store.close()
        return None, refused


class _Nothing(Index):
    """An index without a file, of nothing."""

    def __init__(self) -> None:
        self._db = sqlite3.connect(":memory:", isolation_level=None)
        for statement in (*TABLES, *LOOK_UPS):
            self._db.execute(statement)
        self.freeze()


class _AsItStands(Index):
    """An index that is only read. ``immutable``: without its log, and without a look at whether others write."""

    def __init__(self, folder: Path, immutable: bool) -> None:
        uri = f"{(folder / FILE).resolve().as_uri()}?mode=ro{'&immutable=1' if immutable else ''}"
        self._db = self.connect(uri)
        try:
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version != VERSION:
                raise sqlite3.DatabaseError(f"it has version {version}, not {VERSION}")
            self.roots()
        except BaseException:
            self._db.close()
            raise


def _as_it_stands(folder: CacheFolder) -> Index | None:
    """The folder's index, or None if there is none that can be read. Without a log, or where that cannot be opened,
    SQLite is told that nobody writes: it would make one."""
    if (folder.path / FILE).is_symlink() or folder.records.is_symlink():
        return None
    in_use = all((folder.path / f"{FILE}{suffix}").is_file() for suffix in ("-wal", "-shm"))
    for immutable in (False, True) if in_use else (True,):
        with contextlib.suppress(sqlite3.Error, OSError):
            return _AsItStands(folder.path, immutable)
    return None
