"""Real limits of the system, in a process of their own: ``python -m tests.cache.limits FOLDER NAME…``.

Prints nothing and ends with 0 if the store behaves: right values or misses, writing stopped once or a group lost, what
was durable still read, and the folder sound once the limit is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlxkv.cache.folder import FolderRefused
from mlxkv.cache.store import PrefixStore
from tests.cache.synthetic import MODELS, ask, verify

MODEL = MODELS["mixed"]
FULL = 1 << 40  # below any free space: the disk itself says when it is full
OLD, NEW, NEWER = [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 9, 9, 9, 9], [3] * 9


@contextmanager
def limit(what: int, soft: int) -> Iterator[None]:
    old, hard = resource.getrlimit(what)
    resource.setrlimit(what, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (old, hard))


def stops_writing(store: PrefixStore, why: str) -> None:
    """Under a limit that lasts: nothing new is stored, all that is stored is read."""
    for prompt in (NEW, NEWER):
        ask(MODEL, store, prompt, ends=(5,))
        assert store.writer.flush(20)
        assert ask(MODEL, store, prompt, keep=False).reason is not None
    assert why in store.writer.stopped_because, store.writer.stopped_because
    assert sum(store.writer.counters.faults.values()) == 1
    assert ask(MODEL, store, OLD, keep=False).reason is None


def file_size(folder: Path, store: PrefixStore) -> None:
    """No file may grow past 1,000 bytes (RLIMIT_FSIZE), neither a record nor the WAL, which takes the reservation
    and so fails first. SQLite does not tell more than this."""
    with limit(resource.RLIMIT_FSIZE, 1000):
        stops_writing(store, "the index in " + str(folder) + " takes nothing more: disk I/O error")


def open_files(folder: Path, store: PrefixStore) -> None:
    """No descriptor is left (RLIMIT_NOFILE): misses and a lost group, and it goes on as soon as there are some."""
    with limit(resource.RLIMIT_NOFILE, 64):
        taken = []
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        try:
            for prompt in (OLD, NEW):
                assert ask(MODEL, store, prompt, ends=(5,)).reason == "io_error"
                assert store.writer.flush(20)
        finally:
            for fd in taken:
                os.close(fd)
    assert store.faults["io_error"] and store.writer.counters.faults and not store.writer.stopped_because
    assert ask(MODEL, store, OLD).reason is None


def no_permission(folder: Path, store: PrefixStore) -> None:
    """The folders become read-only under a running store."""
    ours = [folder, *(p for p in folder.rglob("*") if p.is_dir())]
    for path in ours:
        path.chmod(0o500)
    stops_writing(store, os.strerror(errno.EACCES))
    for path in ours:
        path.chmod(0o700)


def full_disk(folder: Path, store: PrefixStore) -> None:
    """Needs a mount of its own of a few MB at ``folder.parent``. Other files fill it, then leave."""
    stuffing = folder.parent / "stuffing"
    with contextlib.suppress(OSError), open(stuffing, "wb", buffering=0) as out:
        while True:
            out.write(bytes(4096))
    stops_writing(store, "disk is full")  # the index takes the reservation, and so fails first
    store.close()
    with contextlib.suppress(FolderRefused):  # a restart on a full disk may do without
        again = MODEL.open(folder, disk_floor=-FULL, budget=FULL)
        for prompt in (OLD, NEW):
            ask(MODEL, again, prompt)
        again.close()
    stuffing.unlink()


LIMITS = {f.__name__: f for f in (file_size, open_files, no_permission)}
MOUNTS = {f.__name__: f for f in (full_disk,)}


def give_up_rights() -> None:
    """Root may write everywhere. This thread, and those it will start, may not any more."""
    if os.geteuid() == 0:
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        if ctypes.CDLL(None, use_errno=True).capset(header, (ctypes.c_uint32 * 6)()):
            raise OSError(ctypes.get_errno(), "capset")


def main(name: str, folder: Path) -> None:
    store = MODEL.open(folder, disk_floor=-FULL, budget=FULL)
    ask(MODEL, store, OLD, ends=(5,))
    assert store.writer.flush(20)
    (LIMITS | MOUNTS)[name](folder, store)
    store.close()
    store = MODEL.open(folder, disk_floor=-FULL, budget=FULL)
    assert ask(MODEL, store, OLD, keep=False).reason is None
    verify(folder, store)
    ask(MODEL, store, NEW, ends=(5,))
    assert store.writer.flush(20)
    assert ask(MODEL, store, NEW, keep=False).reason is None
    assert not list((folder / "quarantine").iterdir())
    store.close()


if __name__ == "__main__":
    for each in sys.argv[2:]:
        if each == "no_permission":
            give_up_rights()
        main(each, Path(sys.argv[1]) / each)
