"""Verify: read every record of a folder as a restore would, and compare it with the index. No model, no MLX.

What a restore cannot know is not checked here either: whether the tensors are those of the model's layout.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .catalogue import CacheError, Catalogue, Forest, look, take
from .folder import CacheFolder, adopt, is_record, link, parse, weight
from .index import FILE, Entry
from .keys import pack
from .record import MissingRecord, NewerRecord, Reader, RecordError
from .tensors import ROW_KINDS

#: told (bytes read, of how many) between tensors; may raise to stop
Progress = Callable[[int, int], None]

#: action -> (what ``repair`` does, and what it has done), for people
ACTIONS = {
    "quarantine": ("moves it to quarantine/", "moved to quarantine/"),
    "delete": ("deletes it", "deleted"),
    "keep": ("leaves it", "left"),
    "forget": ("drops its row", "row dropped"),
    "adopt": ("takes it into the index", "taken into the index"),
    "rebuild": ("builds it again from the records", "built again from the records"),
}


class IndexDisagrees(RecordError):
    """A whole record of which the index says something else. The file is the truth: the index is put right."""

    reason = "not_indexed"
    action = "adopt"


@dataclass
class Finding:
    """One record that is not as it should be.

    ``file`` is relative to the folder. ``reason`` is the miss reason that a request would get, or ``not_indexed`` for a
    good file that the index does not know, or not as it is. ``done`` says whether ``action`` was carried out.
    """

    file: str
    key: bytes
    kind: str
    reason: str
    problem: str
    action: str
    done: bool = False
    #: identity of the file that was read: another one in its place is not touched
    stamp: tuple[int, int] | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "file": self.file,
            "key": self.key.hex(),
            "kind": self.kind,
            "reason": self.reason,
            "problem": self.problem,
            "action": self.action,
            "done": self.done,
        }


@dataclass
class Verified:
    """``unreachable``: entries that are whole themselves, but something that they hang on is gone. They are no damage:
    they are of use again once that is computed anew. ``newer``: records that a later version of mlxkv wrote, which are
    left to it."""

    records: int = 0
    bytes: int = 0
    findings: list[Finding] = field(default_factory=list)
    unreachable: int = 0
    newer: int = 0


def verify(path: Path, *, repair: bool = False, progress: Progress | None = None) -> Verified:
    """Read all records of a folder. Files that come and go meanwhile are no findings.

    ``repair``: do with each finding what a look-up that comes upon it does, and mark it; a file that is another one
    than was read stays. Without it nothing changes. Raises CacheError.
    """
    folder = CacheFolder(path)
    try:
        with look(path) as index:
            if index is None:
                return Verified()
            index.check()
            found = _read_all(folder, index, progress)
    except CacheError as error:
        cause = error.__cause__
        code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
        if not isinstance(cause, sqlite3.Error) or code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise
        found = _read_all(folder, None, progress)
        found.findings.append(Finding(FILE, b"", "index", "corrupt", str(cause), "rebuild"))
        if repair:
            try:
                folder.doubt()
            except OSError as e:
                raise CacheError(f"The cache folder {path} cannot be changed: {e}.", "Check whose it is.") from None
    if repair and found.findings:
        with take(path) as index:
            assert index is not None
            _repair(folder, index, found)
    return found


def _read_all(folder: CacheFolder, index: Catalogue | None, progress: Progress | None) -> Verified:
    found = Verified()
    files = {(key, kind): path for key, kind, path in folder.scan()}
    sizes = {name: weight(path) for name, path in files.items()}
    total, done = sum(sizes.values()), 0
    others: set[tuple[bytes, str]] = set()
    for (key, kind), path in sorted(files.items()):
        stamp = _stamp(path)
        try:
            if progress is not None:
                progress(done, total)
            with Reader.open(path) as reader:
                _compare(reader, key, kind, index.entry(key) if index else None)
                at = done
                for name, (_, _, a, b) in reader.tensors.items():
                    reader.read(name)
                    at += b - a
                    if progress is not None:
                        progress(at, total)
                if reader.sums.keys() != reader.tensors.keys():
                    raise RecordError("checksums and tensors do not belong together")
            found.records += 1
            found.bytes += sizes[key, kind]
        except MissingRecord:
            pass  # removed meanwhile; if its row stays, it is found below
        except NewerRecord:
            others.add((key, kind))
        except RecordError as e:
            found.findings.append(_finding(folder, path, key, kind, e.reason, str(e), e.action, stamp))
        except (KeyError, ValueError, TypeError, OverflowError, MemoryError) as e:
            problem = f"a tensor cannot be read: {e!r}"
            found.findings.append(_finding(folder, path, key, kind, "corrupt", problem, "quarantine", stamp))
        done += sizes[key, kind]
    if progress is not None:
        progress(total, total)
    found.newer = len(others)
    if index is None:
        return found
    waiting = {parse(name) for name, _ in index.all_waiting() if is_record(name)}  # known by name; taken in behind
    rows = index.names()  # read last: what was stored meanwhile has its row now
    damaged = {(f.key, f.kind) for f in found.findings}
    for key, kind in sorted(files.keys() - rows.keys() - waiting - damaged - others):
        if _stamp(files[key, kind]) is not None:
            problem = "the file has no row in the index"
            found.findings.append(
                _finding(folder, files[key, kind], key, kind, "not_indexed", problem, "adopt", _stamp(files[key, kind]))
            )
    for key, kind in sorted(rows.keys() - files.keys()):
        path = folder.file(key, kind)
        if not folder.holds(key, kind):
            problem = "the index has a row, the file is gone"
            found.findings.append(_finding(folder, path, key, kind, "evicted", problem, "forget", None))
    forest = Forest(index.items())
    found.unreachable = sum(forest.chain(item)[1] is not None for item in forest.items.values())
    return found


def _repair(folder: CacheFolder, index: Catalogue, found: Verified) -> None:
    for finding in found.findings:
        path = folder.path / finding.file
        if finding.action == "rebuild":
            finding.done = True  # by opening the index
        elif finding.action in ("quarantine", "delete") and not path.exists():
            finding.done = True  # by whoever came upon it too
        elif finding.action != "keep" and _stamp(path) == finding.stamp:
            # nobody stores this record anew between the two steps; a file weighs the same with and without its row
            with index.transaction(checked=False):
                if finding.action == "adopt":
                    adopt(folder, index, finding.key, finding.kind, path, index.last_used(finding.key))
                    _agree(folder, index, finding)
                    finding.done = True
                else:
                    folder.set_aside(path, finding.action)
                    if not path.exists():
                        index.drop_record(finding.key, finding.kind)
                        finding.done = True
                link(folder, index, finding.key)  # its rows may have been merged
    with index.transaction(checked=False):  # what was set aside lies elsewhere now
        index.count("outside", folder.outside(index.writing()))


def _agree(folder: CacheFolder, index: Catalogue, adopted: Finding) -> None:
    """Set aside the entry's other records of rows if they say something else than the one that was taken in: an entry
    has one span."""
    for kind in ROW_KINDS if adopted.kind in ROW_KINDS else ():
        path = folder.file(adopted.key, kind)
        try:
            with Reader.open(path) as reader:
                _compare(reader, adopted.key, kind, index.entry(adopted.key))
        except IndexDisagrees:
            folder.set_aside(path, "quarantine")
            index.drop_record(adopted.key, kind)
        except RecordError:
            pass  # a finding of its own


def _compare(reader: Reader, key: bytes, kind: str, entry: Entry | None) -> None:
    """Raises RecordError if the record is not the one that its name and the index say."""
    m = reader.meta
    if (m.key, m.kind) != (key, kind):
        raise RecordError("the file is named like another record")
    if entry is None or kind not in entry.kinds:
        return
    same = (m.root, m.parent, m.start, m.end) == (entry.root, entry.parent, entry.start, entry.end)
    # a file may hold more rows than the index says, until others are merged into those of the other kind too
    cut = (m.row_start, m.base) == (entry.row_start, entry.base)
    more = m.row_start < entry.row_start and len(entry.kinds & {*ROW_KINDS}) > 1
    rows = kind == "state" or cut or more
    if not same or not rows or pack(m.tokens) != entry.tokens:
        raise IndexDisagrees("the index says otherwise of its span or base")


def _finding(
    folder: CacheFolder,
    path: Path,
    key: bytes,
    kind: str,
    reason: str,
    problem: str,
    action: str,
    stamp: tuple[int, int] | None,
) -> Finding:
    return Finding(str(path.relative_to(folder.path)), key, kind, reason, problem, action, stamp=stamp)


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        info = os.lstat(path)
    except OSError:
        return None
    return info.st_ino, info.st_mtime_ns
