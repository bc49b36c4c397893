"""The cache folder: where things are in it, what it must allow, and what its files weigh."""

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
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .index import FILE, Entry, Index
from .keys import pack
from .record import Meta, MissingRecord, Reader, RecordError
from .tables import SUFFIX
from .tensors import RECORD_KINDS, ROW_KINDS

TAG = "Signature: 8a477f597d28d172789f06886806bc55\n"  # bford.info/cachedir: backups pass the folder over
QUARANTINE_LIMIT = 64 << 20
#: names of temporaries begin with the process id and a word of this very process: ids come again, in containers at once
_PREFIX = f"{os.getpid()}-{secrets.token_hex(4)}-"
_TEMPORARY = re.compile(r"([1-9][0-9]{0,9})-[0-9a-f]{8}-")
#: what follows the two digits of the subfolder in a record's name
_REST = rf"[0-9a-f]{{62}}\.(?:{'|'.join(RECORD_KINDS)}){re.escape(SUFFIX)}"
_RECORD = re.compile(rf"[0-9a-f]{{2}}{_REST}")
_SUBFOLDER = re.compile(r"[0-9a-f]{2}")
_INDEX = {FILE, f"{FILE}-wal", f"{FILE}-shm", f"{FILE}-journal"}


class FolderRefused(Exception):
    """The folder cannot be used for the store; the message says why and what to do. ``readable``: only writing is
    refused."""

    def __init__(self, message: str, *, readable: bool = False) -> None:
        super().__init__(message)
        self.readable = readable


@dataclass
class Part:
    """One subfolder of ``records/``. ``known``: names that should be in it; ``names``: those that are, of files
    that are named like records and lie where they belong; ``foreign``: bytes of all else there."""

    begin: str
    known: set[str]
    names: set[str] = field(default_factory=set)
    foreign: int = 0


@dataclass
class Weighed:
    """Records' files, sorted by name: ``bytes`` and ``written`` (seconds) of each. Three lists: a hundred thousand rows
    would keep Python's collector busy."""

    names: list[str] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    written: list[float] = field(default_factory=list)

    def keep(self, places: list[int]) -> None:
        """Forget all others."""
        self.names = [self.names[i] for i in places]
        self.bytes = [self.bytes[i] for i in places]
        self.written = [self.written[i] for i in places]


#: what a value of another type or size than the index's columns should have makes Python say
NONSENSE = (TypeError, ValueError, OverflowError)


class CacheFolder:
    """``records/`` (two hex digits a subfolder), ``tmp/`` for what is being written, ``quarantine/``, and the index."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records = path / "records"
        self.tmp = path / "tmp"
        self.quarantine_dir = path / "quarantine"
        self.suspicion = path / "index.damaged"
        self.quarantine_limit = QUARANTINE_LIMIT
        #: subfolders of records that could not be listed the last time, and why
        self.unseen: dict[str, OSError] = {}

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
                made = not folder.exists()
                folder.mkdir(exist_ok=True, mode=0o700)
                # that its owner may not write to it is left as it is
                os.chmod(folder, 0o700 if made else stat.S_IMODE(folder.stat().st_mode) & 0o700)
            probe = self.temporary("probe")
            probe.unlink(missing_ok=True)  # one that could not be removed the last time
            os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            modes = [stat.S_IMODE(p.stat().st_mode) & 0o077 for p in (*ours, probe)]
            probe.unlink(missing_ok=True)
            for name, text in (("CACHEDIR.TAG", TAG), (".metadata_never_index", "")):
                with contextlib.suppress(FileExistsError):
                    fd = os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                    with open(fd, "w") as out:
                        out.write(text)
        except OSError as e:
            why = f"The cache folder {self.path} cannot be used: {e.strerror or e}."
            raise FolderRefused(why, readable=only_writing_failed(e)) from e
        if any(modes) and not allow_unprotected:
            raise FolderRefused(
                f"On the volume of {self.path} other users could read cached text: mode 0600 does not stick. "
                "Choose another --cache-dir, or pass --allow-unprotected."
            )

    def file(self, key: bytes, kind: str) -> Path:
        name = key.hex()
        return self.records / name[:2] / f"{name}.{kind}{SUFFIX}"

    def path_of(self, name: str) -> str:
        """Where a record's file of this name is."""
        return f"{self.records}/{name[:2]}/{name}"

    def holds(self, key: bytes, kind: str) -> bool:
        """Whether a record's file is there: a regular file, not behind a link."""
        path = self.file(key, kind)
        try:
            return stat.S_ISREG(os.lstat(path).st_mode) and not path.parent.is_symlink()
        except OSError:
            return False

    def lacks(self, key: bytes, kind: str) -> bool:
        """Whether a record's file is known not to be there; a folder that cannot be looked into proves nothing."""
        path = self.file(key, kind)
        try:
            return not stat.S_ISREG(os.lstat(path).st_mode) or path.parent.is_symlink()
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False

    def remove(self, key: bytes, kind: str) -> None:
        """Remove a record's file, if it is there; what a linked subfolder leads to is not ours. Raises OSError."""
        path = self.file(key, kind)
        if not path.parent.is_symlink():
            path.unlink(missing_ok=True)

    def temporary(self, name: str) -> Path:
        """Where this thread may write something that is not yet to be seen."""
        return self.tmp / f"{_PREFIX}{threading.get_ident()}-{name}"

    @property
    def temporaries(self) -> str:
        """What the names of this process's temporaries begin with."""
        return _PREFIX

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

    def set_aside_files(self) -> list[Path]:
        """What is in quarantine, oldest first."""
        held = self.quarantine_dir.iterdir() if self.quarantine_dir.is_dir() else ()
        return sorted(path for path in held if path.is_file() and not path.is_symlink())

    def _bound_quarantine(self) -> None:
        held = [(p.name, p.stat().st_size, p) for p in self.set_aside_files()]
        total = sum(size for _, size, _ in held)
        for _, size, path in held:
            if total <= self.quarantine_limit:
                break
            path.unlink(missing_ok=True)
            total -= size

    def suspect(self, error: Exception) -> bool:
        """If an error says that the index is damaged, not only busy or out of space, have it built again next time.
        False if it does not say so."""
        damaged = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
        if isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in damaged:
            with contextlib.suppress(OSError):
                self.doubt()
            return True
        return False

    def doubt(self) -> None:
        """Have the index built again by whoever opens it next. Raises OSError."""
        os.close(os.open(self.suspicion, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))

    def leftovers(self) -> Iterator[Path]:
        """Temporaries whose process is gone."""
        for path in self.tmp.iterdir() if self.tmp.is_dir() else ():
            named = _TEMPORARY.match(path.name)
            if named is None or path.name.startswith(_PREFIX):
                continue
            pid = int(named[1])
            if pid == os.getpid() or not _alive(pid):
                yield path

    def clear_leftovers(self) -> None:
        """Remove temporaries whose process is gone."""
        for path in self.leftovers():
            with contextlib.suppress(OSError):
                path.unlink()

    def remove_temporaries(self, prefix: str) -> None:
        """Remove what a process that is gone was writing."""
        for path in self.tmp.iterdir() if _TEMPORARY.fullmatch(prefix) else ():
            if path.name.startswith(prefix):
                path.unlink(missing_ok=True)

    def empty_quarantine(self) -> None:
        for path in self.quarantine_dir.iterdir():
            with contextlib.suppress(OSError):
                path.unlink()

    def parts(self, known: Callable[[str], set[str]]) -> Iterator[Part]:
        """Each subfolder of ``records/`` in turn. ``known(begin)``: the names that should be in it. Costs little more
        than listing the folders where those are what is there."""
        beside = 0
        there = set()
        self.unseen = {}
        with os.scandir(self.records) as items:
            for item in items:
                if item.is_dir(follow_symlinks=False) and _SUBFOLDER.fullmatch(item.name):
                    there.add(item.name)
                else:
                    beside += weight(item.path)
        for begin in map("{:02x}".format, range(256)):
            rows = known(begin)  # first: what is stored meanwhile is found to be new, not gone
            part = Part(begin, rows, foreign=beside)
            beside = 0
            if begin in there:
                self._list(part)
            if part.names or rows or part.foreign:
                yield part

    def _list(self, part: Part) -> None:
        path = f"{self.records}/{part.begin}"
        found, other = set(), []
        try:
            with os.scandir(path) as items:
                for item in items:
                    found.add(item.name) if item.is_file(follow_symlinks=False) else other.append(item.name)
        except FileNotFoundError:
            pass
        except OSError as e:  # proves nothing: they may all be there
            self.unseen[part.begin] = e
            part.names = part.known
            return
        new = found - part.known
        if new and not re.fullmatch(rf"(?:{part.begin}{_REST}/)*", "/".join((*new, ""))):  # all at once: far cheaper
            named = re.compile(f"{part.begin}{_REST}")
            strange = {name for name in new if not named.fullmatch(name)}
            found -= strange
            other += strange
        part.names = found
        part.foreign += sum(weight(os.path.join(path, name)) for name in other)

    def weigh(self, names: Iterable[str]) -> Weighed:
        """What these records weigh, as far as they are there."""
        out, begin, fd = Weighed(), "", -1
        found, sizes, written = out.names.append, out.bytes.append, out.written.append
        try:
            for name in sorted(names):
                try:
                    if name[:2] != begin:
                        if fd >= 0:
                            os.close(fd)
                        begin, fd = name[:2], -1
                        fd = os.open(f"{self.records}/{begin}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                    info = os.stat(name, dir_fd=fd, follow_symlinks=False)
                except OSError:
                    continue
                found(name)
                sizes(info.st_size)
                written(info.st_mtime)
        finally:
            if fd >= 0:
                os.close(fd)
        return out

    def outside(self, written: Collection[str] = ()) -> int:
        """``st_size`` of every regular file beside the records and the index, in bytes, without temporaries whose names
        begin with one of ``written``."""
        total = 0
        begins = tuple(written)
        for name in os.listdir(self.path):
            if name in _INDEX or name == self.records.name:
                continue
            if name != self.tmp.name:
                total += weight(self.path / name)
                continue
            for temporary in os.listdir(self.tmp):
                if not begins or not temporary.startswith(begins):
                    total += weight(self.tmp / temporary)
        return total

    def size(self) -> int:
        """``st_size`` of every regular file under the folder, in bytes."""
        return weight(self.path)


def only_writing_failed(error: Exception) -> bool:
    """Whether an error says that a volume, folder or file may not be written."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_READONLY
    return isinstance(error, OSError) and error.errno in (errno.EROFS, errno.EACCES, errno.EPERM)


def is_record(name: object) -> bool:
    """Whether this is the name of a record's file: what a damaged index says may lead anywhere."""
    return isinstance(name, str) and _RECORD.fullmatch(name) is not None


def parse(name: str) -> tuple[bytes, str]:
    """The key and kind that the name of a record's file says."""
    stem, _, kind = name.removesuffix(SUFFIX).partition(".")
    return bytes.fromhex(stem), kind


def weight(path: str | Path) -> int:
    """``st_size`` of a regular file, or of all regular files under a folder; links count nothing."""
    try:
        info = os.lstat(path)
        if stat.S_ISREG(info.st_mode):
            return info.st_size
        return sum(weight(item.path) for item in os.scandir(path)) if stat.S_ISDIR(info.st_mode) else 0
    except OSError:  # gone meanwhile, or not ours to look into
        return 0


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def adopt(
    folder: CacheFolder, index: Index, key: bytes, kind: str, path: Path | str, used: float | None = None
) -> None:
    """Enter a record without an index row after its header verifies; one that does not is set aside. ``used``: when
    it was used last, seconds; now, if nobody knows. Within a transaction.

    Where an entry's rows and windows do not start at the same token (a merge was cut short), the later start counts:
    a restore takes what it needs of a file that holds more."""
    try:
        with Reader.open(path) as reader:
            meta, size = reader.meta, reader.size
        if (meta.key, meta.kind) != (key, kind):
            raise RecordError("the file is named like another record")
    except RecordError as e:
        if not isinstance(e, MissingRecord):
            folder.set_aside(Path(path), e.action)
        if index.stop_waiting(os.path.basename(path)):  # what stays weighs all the same, and what was moved too
            index.add("inside", weight(path))
            index.count("outside", folder.outside(index.writing()))
        return
    cut = _latest_cut(folder, index, meta)
    index.add_root(meta.root, meta.model, meta.fingerprint, meta.compute, meta.layout, meta.block)
    packed = pack(meta.tokens)
    entry = Entry(meta.key, meta.root, meta.parent, meta.start, meta.end, *cut, packed, frozenset())
    index.add_entry(entry, {kind: size}, used)
    if meta.answer:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            answer = json.loads(meta.answer)
            last = None if answer["last"] is None else int(answer["last"])
            index.add_answer(bytes.fromhex(answer["digest"]), meta.key, int(answer["start"]), last)


def _latest_cut(folder: CacheFolder, index: Index, meta: Meta) -> tuple[int, bytes | None]:
    """Where the rows start that all records of an entry have, and what has those before: ``meta``'s own, or those of
    another record of it that the index knows."""
    cut = (meta.row_start, meta.base)
    others = {*ROW_KINDS} - {meta.kind} if meta.kind in ROW_KINDS else set()
    for kind in others & {kind for kind, _ in index.records_of(meta.key)}:
        with contextlib.suppress(RecordError), Reader.open(folder.file(meta.key, kind)) as other:
            if (other.meta.key, other.meta.kind) == (meta.key, kind) and other.meta.row_start > cut[0]:
                cut = (other.meta.row_start, other.meta.base)
    return cut


def link(folder: CacheFolder, index: Index, key: bytes) -> None:
    """Have a leaf whose state is here and whose rows are not hang on a full block that has them too, if there is one:
    they were merged into it, and files do not say so. Not while records of the leaf wait to be taken in. Within a
    transaction. Raises OSError."""
    leaf = index.entry(key)
    if leaf is None or "state" not in leaf.kinds or leaf.row_start == leaf.end or index.waiting_of(key):
        return
    for full in index.longer(leaf.parent, leaf.tokens):
        rows = full.kinds & {*ROW_KINDS}
        if full.root == leaf.root and "rows" in rows and rows - leaf.kinds and not _hangs_on(index, full, key):
            index.merged(key, full.key)
            for kind in sorted(rows & leaf.kinds):  # what is left of them is of no use
                folder.remove(key, kind)
                index.drop_record(key, kind)
            return


def _hangs_on(index: Index, entry: Entry, key: bytes) -> bool:
    """Whether the rows of an entry begin with those of ``key``, which has lost its window alone then."""
    at, seen = entry, {entry.key}
    while at.base is not None and at.base not in seen:
        if at.base == key:
            return True
        seen.add(at.base)
        if (base := index.entry(at.base)) is None:
            break
        at = base
    return False
