"""Loss of power: the writer's calls are recorded, and folders are built that a disk may hold after any of them.

What a barrier has not confirmed may be there or not, in any combination: each write whole, in part, as zeros or not at
all; each name in a folder, added or removed. The index is lost, or as it was after any of its transactions: with
``synchronous=NORMAL`` SQLite keeps it whole, not recent.
"""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import mlxkv.cache.folder
from mlxkv.cache.index import FILE
from tests.cache.synthetic import Model, ask, verify


@dataclass
class Tape:
    """Operations in order: (name, what…). Paths are relative to the folder; files are numbered as they are created."""

    ops: list[tuple[Any, ...]] = field(default_factory=list)

    def mark(self, folder: Path, durable: list[list[int]]) -> None:
        """These prompts were reported to be stored; the index is as it is now."""
        with contextlib.closing(sqlite3.connect(folder / FILE)) as db:
            self.ops.append(("index", db.serialize()))
        self.ops.append(("durable", [list(p) for p in durable]))


@contextmanager
def recorded(folder: Path) -> Iterator[Tape]:
    """Record what is done to ``folder`` through ``os``; it must not exist yet."""
    tape, lock = Tape(), threading.Lock()
    names: dict[str, int] = {}  # what a path leads to now
    fds: dict[int, int | str] = {}  # a file's number, or a folder's path
    count = 0

    def rel(path: Any) -> str | None:
        text = os.fspath(path) if not isinstance(path, int) else ""
        if not text.startswith(str(folder)) or os.path.basename(text).startswith(FILE):
            return None
        return os.path.relpath(text, folder)

    def wrapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            with lock:
                there = name == "open" and os.path.lexists(args[0])
                out = real(*args, **kwargs)
                if name == "open" and (path := rel(args[0])) is not None:
                    if args[1] & os.O_DIRECTORY == os.O_DIRECTORY:
                        fds[out] = path
                    elif args[1] & os.O_CREAT and not there:
                        count += 1
                        names[path] = fds[out] = count
                        tape.ops.append(("create", path, count))
                    elif path in names:
                        fds[out] = names[path]
                elif name == "write" and args[0] in fds:
                    tape.ops.append(("write", fds[args[0]], bytes(args[1])[:out]))
                elif name == "fsync" and args[0] in fds:
                    tape.ops.append(("fsync", fds[args[0]]))
                elif name == "close":
                    fds.pop(args[0], None)
                elif name == "mkdir" and (path := rel(args[0])) is not None:
                    tape.ops.append(("mkdir", path))
                elif name == "unlink" and (path := rel(args[0])) is not None:
                    names.pop(path, None)
                    tape.ops.append(("unlink", path))
                elif name == "replace" and (path := rel(args[0])) is not None and (to := rel(args[1])) is not None:
                    if path in names:
                        names[to] = names.pop(path)
                    tape.ops.append(("rename", path, to))
                return out

        return call

    with contextlib.ExitStack() as stack:
        for name in ("open", "write", "fsync", "close", "mkdir", "unlink", "replace"):
            stack.enter_context(mock.patch.object(os, name, wrapped(name, getattr(os, name))))
        yield tape


class Disk:
    """What may be on disk after the first ``upto`` operations of a tape. An honest disk keeps what a barrier named."""

    def __init__(self, tape: Tape, upto: int, rng: random.Random, *, honest: bool = True) -> None:
        self.rng, self.honest = rng, honest
        self.data: dict[int, bytearray] = {}
        self.loose: dict[int, list[tuple[int, bytes]]] = {}  # writes that no barrier has confirmed
        self.length: dict[int, int] = {}
        self.entries: dict[str, int | None] = {".": None}  # durable names: a file's number, None for a folder
        self.pending: dict[str, list[tuple[str, int | None, bool]]] = {}  # folder -> (name, what, added)
        self.indexes: list[bytes | None] = [None]
        self.durable: list[list[int]] = []
        view: dict[str, int] = {}
        for op in tape.ops[:upto]:
            match op:
                case ("create", path, n):
                    view[path] = n
                    self.data[n], self.loose[n], self.length[n] = bytearray(), [], 0
                    self._name(path, n, True)
                case ("write", n, data):
                    self.loose[n].append((self.length[n], data))
                    self.length[n] += len(data)
                case ("fsync", int(n)):
                    if honest:
                        for at, data in self.loose[n]:
                            self._apply(n, at, data)
                        self.loose[n] = []
                case ("fsync", str(path)):
                    if honest:
                        for name, what, added in self.pending.pop(path, []):
                            self._keep(name, what, added)
                case ("mkdir", path):
                    self._name(path, None, True)
                case ("unlink", path):
                    self._name(path, view.pop(path, None), False)
                case ("rename", path, to):
                    if path in view:
                        self._name(to, view[path], True)
                        self._name(path, view[path], False)
                        view[to] = view.pop(path)
                case ("index", data):
                    self.indexes.append(data)
                case ("durable", prompts):
                    self.durable = prompts

    def _apply(self, n: int, at: int, data: bytes) -> None:
        held = self.data[n]
        held.extend(bytes(max(0, at + len(data) - len(held))))
        held[at : at + len(data)] = data

    def _name(self, path: str, what: int | None, added: bool) -> None:
        parent = os.path.dirname(path) or "."
        if path in (".", "records", "tmp", "quarantine"):
            self._keep(path, what, added)  # made when the store opened, long ago
        else:
            self.pending.setdefault(parent, []).append((path, what, added))

    def _keep(self, name: str, what: int | None, added: bool) -> None:
        if added:
            self.entries[name] = what
        elif self.entries.get(name) == what:
            self.entries.pop(name, None)

    def build(self, folder: Path) -> None:
        """One of the many folders that may be found."""
        rng = self.rng
        for pending in self.pending.values():
            for op in pending:
                if rng.random() < 0.5:
                    self._keep(*op)
        for n, writes in self.loose.items():
            for at, data in writes:
                match rng.randrange(4):
                    case 0:
                        self._apply(n, at, data)
                    case 1:
                        self._apply(n, at, data[: rng.randrange(len(data) + 1)])
                    case 2:
                        self._apply(n, at, bytes(len(data)))
        folder.mkdir()
        for path, what in sorted(self.entries.items()):
            where = folder / path
            if what is None:
                where.mkdir(exist_ok=True)
            elif where.parent.is_dir():
                where.write_bytes(self.data[what])
        if (index := rng.choice([*self.indexes[-3:], None])) is not None:
            (folder / FILE).write_bytes(index)


def found_after(disk: Disk, folder: Path, model: Model, prompts: list[list[int]]) -> None:
    """Open what is left: right values only, all that was reported durable, and a sound folder."""
    disk.build(folder)
    with mock.patch.object(mlxkv.cache.folder, "_PREFIX", "1-00000000-"):  # another process than the one that died
        store = model.open(folder)
    try:
        if disk.honest:
            verify(folder, store)
            for prompt in disk.durable:
                got = ask(model, store, prompt, keep=False)
                assert got.reason is None, f"{prompt} was reported durable: {got}"
        for prompt in prompts:
            ask(model, store, prompt, keep=False)
        if disk.honest:
            # rows and windows of one entry that was being written again may disagree; no file is called damaged
            assert not store.faults.keys() - {"evicted"} and not list((folder / "quarantine").iterdir()), store.faults
        for _ in range(1 if disk.honest else 4):
            ask(model, store, prompts[-1])
            assert store.writer.flush(20)
        assert ask(model, store, prompts[-1], keep=False).reason is None
    finally:
        store.close()
