"""The cache folder: where things are in it, what it must allow, and how it is brought back in step with its index."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import sqlite3
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from .index import FILE, Entry, Index
from .keys import pack
from .layout import RECORD_KINDS
from .record import MissingRecord, Reader, RecordError

SUFFIX = ".safetensors"
TAG = "Signature: 8a477f597d28d172789f06886806bc55\n"  # bford.info/cachedir: backups pass the folder over
QUARANTINE_LIMIT = 64 << 20
_SUFFIXES = ("", "-wal", "-shm")  # of the index's files
#: names of temporaries begin with the process id and a word of this very process: ids come again, in containers at once
_PREFIX = f"{os.getpid()}-{secrets.token_hex(4)}-"
_TEMPORARY = re.compile(r"([1-9][0-9]{0,9})-[0-9a-f]{8}-")


class FolderRefused(Exception):
    """The folder cannot be used for the store; the message says why and what to do."""


class CacheFolder:
    """``records/`` (two hex digits a subfolder), ``tmp/`` for what is being written, ``quarantine/``, and the index."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records = path / "records"
        self.tmp = path / "tmp"
        self.quarantine_dir = path / "quarantine"
        self.suspicion = path / "index.damaged"

    def prepare(self, *, allow_unprotected: bool = False) -> None:
        """Create what is missing, private to the user. Raises FolderRefused."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            ours = [self.records, self.tmp, self.quarantine_dir]
            if self.records.is_dir() or not any(self.path.iterdir()):
                ours.append(self.path)  # a folder that holds other things keeps its mode
            for folder in ours:
                if folder != self.path and folder.is_symlink():  # what it leads to is not ours to change or clear
                    raise OSError(errno.ELOOP, f"{folder.name} is a symbolic link; put --cache-dir itself elsewhere")
                folder.mkdir(exist_ok=True, mode=0o700)
                os.chmod(folder, 0o700)
            probe = self.temporary("probe")
            probe.unlink(missing_ok=True)  # one that could not be removed the last time
            os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            modes = [stat.S_IMODE(p.stat().st_mode) & 0o077 for p in (*ours, probe)]
            probe.unlink()
            for name, text in (("CACHEDIR.TAG", TAG), (".metadata_never_index", "")):
                with contextlib.suppress(FileExistsError):
                    fd = os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                    with open(fd, "w") as out:
                        out.write(text)
        except OSError as e:
            raise FolderRefused(f"The cache folder {self.path} cannot be used: {e.strerror or e}.") from e
        if any(modes) and not allow_unprotected:
            raise FolderRefused(
                f"On the volume of {self.path} other users could read cached text: mode 0600 does not stick. "
                "Choose another --cache-dir, or pass --allow-unprotected."
            )

    def file(self, key: bytes, kind: str) -> Path:
        name = key.hex()
        return self.records / name[:2] / f"{name}.{kind}{SUFFIX}"

    def temporary(self, name: str) -> Path:
        """Where this thread may write something that is not yet to be seen."""
        return self.tmp / f"{_PREFIX}{threading.get_ident()}-{name}"

    def scan(self) -> Iterator[tuple[bytes, str, Path]]:
        """Every file that is named like a record; links and foreign files are passed over."""
        for sub in sorted(self.records.glob("[0-9a-f][0-9a-f]")):
            if sub.is_symlink():
                continue
            with contextlib.suppress(OSError), os.scandir(sub) as files:
                for item in files:
                    stem, dot, kind = item.name.removesuffix(SUFFIX).partition(".")
                    if not item.name.endswith(SUFFIX) or not dot or kind not in RECORD_KINDS or len(stem) != 64:
                        continue
                    with contextlib.suppress(ValueError):
                        key = bytes.fromhex(stem)
                        path = self.file(key, kind)
                        if path == Path(item.path) and item.is_file(follow_symlinks=False):
                            yield key, kind, path

    def set_aside(self, path: Path, action: str) -> None:
        """What becomes of a file that failed: quarantine | delete | keep | forget."""
        with contextlib.suppress(OSError):
            if action == "delete":
                path.unlink()
            elif action == "quarantine" and not self.quarantine_dir.is_symlink():
                os.replace(path, self.quarantine_dir / f"{time.time_ns()}-{path.name}")
                self._bound_quarantine()

    def _bound_quarantine(self) -> None:
        held = sorted((p.name, p.stat().st_size, p) for p in self.quarantine_dir.iterdir() if p.is_file())
        total = sum(size for _, size, _ in held)
        for _, size, path in held:
            if total <= QUARANTINE_LIMIT:
                break
            path.unlink()
            total -= size

    def suspect(self, error: Exception) -> None:
        """If an error says that the index is damaged, not only busy or out of space, have it built again next time."""
        damaged = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
        if isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in damaged:
            with contextlib.suppress(OSError):
                os.close(os.open(self.suspicion, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))

    def clear_leftovers(self) -> None:
        """Remove temporaries whose process is gone."""
        for path in self.tmp.iterdir():
            named = _TEMPORARY.match(path.name)
            if named is None or path.name.startswith(_PREFIX):
                continue
            if (pid := int(named[1])) == os.getpid() or not _alive(pid):
                with contextlib.suppress(OSError):
                    path.unlink()

    def size(self) -> int:
        """``st_size`` of every regular file under the folder, in bytes."""
        total = 0
        for base, _, files in os.walk(self.path):
            for name in files:
                with contextlib.suppress(OSError):
                    info = os.lstat(os.path.join(base, name))
                    total += info.st_size if stat.S_ISREG(info.st_mode) else 0
        return total


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def open_index(folder: CacheFolder) -> Index:
    """The folder's index, in step with its files: orphans are adopted, rows without a file dropped. A damaged index is
    set aside and built again from the files. Raises sqlite3.Error if even that fails, OSError."""
    try:
        if os.path.lexists(folder.suspicion):
            raise sqlite3.DatabaseError("an earlier run found it damaged")
        if any((folder.path / (FILE + suffix)).is_symlink() for suffix in _SUFFIXES):
            raise sqlite3.DatabaseError("it is a symbolic link")  # SQLite would write into whatever it leads to
        index = Index(folder.path)
        _reconcile(folder, index)
        return index
    except sqlite3.DatabaseError as e:
        if isinstance(e, sqlite3.OperationalError) and "locked" in str(e):
            raise  # busy, not damaged
        folder.suspicion.unlink(missing_ok=True)
        for suffix in _SUFFIXES:
            folder.set_aside(folder.path / (FILE + suffix), "quarantine")
        index = Index(folder.path)
        _reconcile(folder, index)
        return index


def _reconcile(folder: CacheFolder, index: Index) -> None:
    known = index.names()
    files = {(key, kind): path for key, kind, path in folder.scan()}
    gone, orphans = known.keys() - files.keys(), files.keys() - known.keys()
    # written again since, by whoever's line in the index was lost with the power: what the file says counts
    orphans |= {n for n in known.keys() & files.keys() if _other_size(files[n], known[n])}
    if not gone and not orphans:
        return
    with index.transaction():
        for key, kind in gone:
            index.drop_record(key, kind)
        for key, kind in sorted(orphans):
            adopt(folder, index, key, kind, files[key, kind])


def _other_size(path: Path, size: int) -> bool:
    """A whole record of another size than the index has; what is damaged is left for a restore to find."""
    try:
        if path.stat().st_size == size:
            return False
        Reader.open(path).close()
    except (OSError, RecordError):
        return False
    return True


def adopt(folder: CacheFolder, index: Index, key: bytes, kind: str, path: Path) -> None:
    """Enter a record without an index row after its header verifies; one that does not is set aside."""
    try:
        with Reader.open(path) as reader:
            meta, size = reader.meta, os.fstat(reader.fd).st_size
        if (meta.key, meta.kind) != (key, kind):
            raise RecordError("the file is named like another record")
    except MissingRecord:
        return
    except RecordError as e:
        folder.set_aside(path, e.action)
        return
    index.add_root(meta.root, meta.model, meta.fingerprint, meta.compute, meta.layout, meta.block)
    entry = Entry(
        meta.key,
        meta.root,
        meta.parent,
        meta.start,
        meta.end,
        meta.row_start,
        meta.base,
        pack(meta.tokens),
        frozenset(),
    )
    index.add_entry(entry, {kind: size})
    if meta.answer:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            answer = json.loads(meta.answer)
            last = None if answer["last"] is None else int(answer["last"])
            index.add_answer(bytes.fromhex(answer["digest"]), meta.key, int(answer["start"]), last)
