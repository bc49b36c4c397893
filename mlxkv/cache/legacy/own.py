"""What older versions of mlxkv stored, and bringing a folder to what this version writes.

A record says its schema, an index its version. So far:

| version | records | index |
| --- | --- | --- |
| index 1 | schema 1, without ``role`` | ``user_version`` 0, with a table ``meta`` |
| index 2 | schema 1, without ``role``, later with | roots have their block size |
| index 3 | schema 1 | with the ledger of the folder |
| index 4 | schema 1; ``store_bits`` where rows are quantised; blocks whose pieces were merged | files that wait |

Every schema-1 record is read as it is: what has no role counts as the end of a message, and no key has changed, since
neither the fingerprint, nor the compute identity, nor the layout's digest of what was stored ever did
(``tests/cache/legacy/fixtures`` has a frozen folder of each). An index of another version is built again from the
records: lazily, when a run opens the folder, or eagerly, here. Records of a later schema stay for that version.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from ..adoption import take_in_all
from ..catalogue import holds_something, take
from ..folder import CacheFolder
from ..index import FILE
from ..record import is_newer
from ..tables import SUFFIX, VERSION

#: told (records done, of how many); may raise to stop
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Outdated:
    """What is not as this version would have it. ``index``: the version of the index, None where there is none or it
    cannot be read; ``unknown``: records that have no row in it; ``gone``: records that have one and are not there;
    ``newer``: records of a later version, which stay as they are (told from the others once they were read)."""

    index: int | None
    unknown: int
    gone: int
    newer: int

    @property
    def nothing_to_do(self) -> bool:
        return self.index == VERSION and not self.unknown and not self.gone


@dataclass(frozen=True)
class Upgraded:
    """``before`` and ``after`` of a folder; ``records`` that its index knows now, and their ``bytes``; ``set_aside``:
    files that turned out damaged: they are in quarantine now, or removed."""

    before: Outdated
    after: Outdated
    records: int
    bytes: int
    set_aside: int


def survey(path: Path) -> Outdated | None:
    """Look at a folder and change nothing; None where nothing has been stored. Raises CacheError."""
    if not holds_something(path):
        return None
    folder = CacheFolder(path)
    files = _files(folder)
    version, known, waiting = _index(path)
    if os.path.lexists(folder.suspicion):
        version, known = None, set()
    unknown = files.keys() - known
    newer = {name for name in unknown - waiting if is_newer(files[name])} if version == VERSION else set()
    return Outdated(version, len(unknown - newer), len(known - files.keys()), len(newer))


def upgrade(path: Path, progress: Progress | None = None) -> Upgraded | None:
    """Bring a folder up to date; None where nothing has been stored. May be stopped at any time, and done again. Raises
    CacheError, and what ``progress`` raises."""
    before = survey(path)
    if before is None:
        return None
    files = _files(CacheFolder(path))
    with take(path, progress) as index:
        if index is not None:
            take_in_all(CacheFolder(path), index, progress)
        sizes = index.names() if index is not None else {}
    after = survey(path) or Outdated(None, 0, 0, 0)
    gone = files.keys() - _files(CacheFolder(path)).keys()
    return Upgraded(before, after, len(sizes), sum(sizes.values()), len(gone))


def _files(folder: CacheFolder) -> dict[str, Path]:
    return {file.name: file for _, _, file in folder.scan()}


def _index(path: Path) -> tuple[int | None, set[str], set[str]]:
    """(version, names of the records that have a row, names of those that wait for one) of a folder's index, read
    without a change."""
    file = path / FILE
    if file.is_symlink() or not file.exists():
        return None, set(), set()
    try:
        with closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True, timeout=10)) as db:
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
                return (1 if "records" in tables else None), set(), set()
            if version != VERSION:
                return version, set(), set()
            names = db.execute("SELECT lower(hex(key)), kind FROM records").fetchall()
            waiting = {name for (name,) in db.execute("SELECT name FROM waiting")}
            return version, {f"{key}.{kind}{SUFFIX}" for key, kind in names}, waiting
    except sqlite3.Error:
        return None, set(), set()
