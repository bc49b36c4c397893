"""Faults below the store: calls of ``os`` that touch one folder fail at their n-th turn, or do half of what was asked.

pathlib, ``glob`` and ``os.walk`` end in the same functions. What SQLite does is not seen here: it has its own tests.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import mlxkv.cache.folder
from mlxkv.cache.folder import FolderRefused
from tests.cache.synthetic import MODELS, ask, verify

#: what the store calls, and an error that each may really give
CALLS = {
    "open": (errno.EACCES, errno.EMFILE, errno.ELOOP, errno.EIO),
    "preadv": (errno.EIO,),
    "fstat": (errno.EIO,),
    "write": (errno.ENOSPC, errno.EIO),
    "fsync": (errno.EIO, errno.ENOSPC),
    "replace": (errno.EIO, errno.ENOSPC, errno.EACCES),
    "unlink": (errno.EIO, errno.EACCES),
    "mkdir": (errno.ENOSPC, errno.EACCES),
    "chmod": (errno.EPERM,),
    "stat": (errno.EIO, errno.EACCES),
    "scandir": (errno.EIO, errno.EMFILE),
    "listdir": (errno.EIO,),
    "statvfs": (errno.EIO,),
}


class Faults(AbstractContextManager):
    """``fail`` the calls of one function from the ``first`` to the ``last`` (counted from 1) with ``code``; without a
    code, reads and writes are cut in half instead."""

    def __init__(self, folder: Path, call: str, first: int, last: int, code: int | None) -> None:
        self.folder, self.call, self.first, self.last, self.code = str(folder), call, first, last, code
        self.seen = self.hit = 0
        self._ours: set[int] = set()
        self._lock = threading.Lock()
        self._patches: list[Any] = []

    def _touches(self, what: Any) -> bool:
        if isinstance(what, int):
            return what in self._ours
        try:
            return os.fspath(what).startswith(self.folder)  # type: ignore[union-attr]
        except TypeError:
            return False

    def __enter__(self) -> Faults:
        for name in {self.call, "open", "close"}:
            patch = mock.patch.object(os, name, self._around(name, getattr(os, name)))
            patch.start()
            self._patches.append(patch)
        return self

    def __exit__(self, *exc: object) -> None:
        for patch in self._patches:
            patch.stop()

    def _around(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            ours = bool(args) and self._touches(args[0])
            if name == self.call and ours:
                with self._lock:
                    self.seen += 1
                    struck = self.first <= self.seen <= self.last
                    self.hit += struck
                if struck and self.code is not None:
                    raise OSError(self.code, os.strerror(self.code), str(args[0]))
                if struck and name == "write":
                    return real(args[0], args[1][: max(1, len(args[1]) // 2)])
                if struck and name == "preadv":
                    return real(args[0], [args[1][0][: max(1, len(args[1][0]) // 2)]], *args[2:])
            out = real(*args, **kwargs)
            if name == "open" and ours:
                self._ours.add(out)
            elif name == "close":
                self._ours.discard(args[0])
            return out

        return call


@contextmanager
def heard() -> Iterator[list[str]]:
    """What the store says to its log, which nobody else hears."""
    lines: list[str] = []
    log = logging.getLogger("mlxkv.cache")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    level, log.propagate = log.level, False
    log.setLevel(logging.WARNING)  # a soak turns it off
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = True


OLD, NEW = [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 9, 9, 9, 9, 9]
MODEL = MODELS["mixed"]


def make_sound(folder: Path) -> Path:
    """``folder / "c"``, in which OLD is durable."""
    store = MODEL.open(folder / "c")
    ask(MODEL, store, OLD, ends=(5,))
    store.close()
    return folder


def tried(sound: Path, call: str, first: int, last: int, code: int | None) -> Faults:
    """Open a copy of ``sound / "c"``, restore and store under a fault, then without it, as after a restart. The fault
    cost misses at most, each with a reason, a log line and a count; what was durable is there; the folder is whole."""
    what = f"{call} {first}-{last} {errno.errorcode.get(code or 0, 'halved')}"
    folder = sound / "try"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(sound / "c", folder)
    with Faults(folder, call, first, last, code) as faults, heard() as lines:
        try:
            store = MODEL.open(folder)
        except FolderRefused:
            store = None
        if store is not None:
            asked = [ask(MODEL, store, prompt, ends=(5,)) for prompt in (OLD, NEW)]
            assert store.writer.flush(20), what
            counted = sum(store.faults.values()) + sum(store.writer.counters.faults.values())
            said = sum("cache miss" in line for line in lines)
            assert said == sum(store.faults.values()), what
            if asked[0].reason is not None:
                assert said or asked[0].reason in ("evicted", "no_state", "empty"), (what, asked)
            if code is None:
                assert asked[0].reason is None and not counted, what
            store.close()
    with mock.patch.object(mlxkv.cache.folder, "_PREFIX", "1-00000000-"):  # a new process: leftovers are nobody's
        store = MODEL.open(folder)
    assert ask(MODEL, store, OLD, keep=False).reason is None, f"{what}: what was durable is lost"
    verify(folder, store)
    ask(MODEL, store, NEW, ends=(5,))
    assert store.writer.flush(20)
    assert ask(MODEL, store, NEW, keep=False).reason is None, what
    assert not list((folder / "quarantine").iterdir()), what
    store.close()
    return faults


def each_turn(sound: Path, call: str, step: Callable[[int], int] = lambda n: 1) -> int:
    """Every ``step``-th call fails alone; how many turns there were."""
    n = 1
    while any([tried(sound, call, n, n, code).hit for code in CALLS[call][: None if n < 3 else 1]]):
        n += step(n)
    return n - 1
