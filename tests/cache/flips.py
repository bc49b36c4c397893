"""Flipped bytes of the index and its WAL: a miss or the right value, and no record is lost by it. For tests and soaks.

What stands in the WAL hides what the index has on the same page. So there are two folders: one that was closed, with
all in its index, and one that was left open, with its last requests in the WAL. A page of 512 bytes makes them small
enough that a soak can flip every byte; pages as the store makes them are mostly empty, there ``places`` leaves out the
middle of what is empty.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from unittest import mock

from mlx_lm.models.cache import ArraysCache, KVCache

from mlxkv.cache.keys import pack
from mlxkv.cache.store import PrefixStore
from tests.cache.synthetic import Model, ask, twin

SMALL = Model("small", lambda: [ArraysCache(1), KVCache()])
OWNERS = (SMALL, twin(SMALL))
EARLY, LATE = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [1, 2, 3, 4, 5, 6, 9, 9]
PROMPTS = (EARLY, LATE)
FILES = ("index.sqlite", "index.sqlite-wal")
Place = tuple[str, int]  # of these files; the byte

#: a run of zeros of which no more than its ends is worth a flip
_EMPTY = re.compile(rb"\0{48,}")


class Indexed:
    """``folder / "sound"``: EARLY and LATE of two models in the index; or with ``log`` EARLY there and LATE in its WAL,
    which a process that was killed left behind."""

    def __init__(self, folder: Path, page: int | None = None, *, log: bool) -> None:
        """``page``: bytes of the index's pages; as the store makes them unless given."""
        live, self.now = folder / "live", folder / "sound"
        with mock.patch("mlxkv.cache.index.PAGE", page) if page else mock.MagicMock():
            OWNERS[0].open(live).close()

        def stored(prompt: list[int]) -> list[PrefixStore]:
            stores = [model.open(live) for model in OWNERS]
            for model, store in zip(OWNERS, stores, strict=True):
                ask(model, store, prompt, ends=(6,), more=(1, 2), messages=True)
                assert store.writer.flush(20)
            return stores

        for store in stored(EARLY):
            store.close()
        late = stored(LATE)
        if not log:
            for store in late:
                store.close()
        shutil.copytree(live, self.now, ignore=shutil.ignore_patterns("*-shm"))
        if log:
            for store in late:
                store.close()
        self.files = {name: (self.now / name).read_bytes() for name in FILES if (self.now / name).exists()}
        assert len(self.files) == 1 + log
        self._all = self._listed()
        self._records = {path: size for path, size in self._all.items() if path.endswith(".safetensors")}
        for which in range(len(OWNERS)):
            assert self._asked(which) == [len(EARLY) - 1, len(LATE) - 1]
            self._put_back()

    @property
    def places(self) -> list[Place]:
        """Every byte, but the middles of long runs of zeros."""
        out = []
        for name, data in self.files.items():
            empty = {i for run in _EMPTY.finditer(data) for i in range(run.start() + 8, run.end() - 8)}
            out += [(name, i) for i in range(len(data)) if i not in empty]
        return out

    @property
    def every_place(self) -> list[Place]:
        return [(name, i) for name, data in self.files.items() for i in range(len(data))]

    def flip(
        self,
        places: Iterable[Place],
        bit: Callable[[int], int],
        *,
        both: bool = True,
        done: Callable[[int], None] = lambda n: None,
    ) -> int:
        """Flip ``bit(place)`` of each byte in its turn, open the folder as one of the models and ask for both prompts,
        or for one of them. How many times all was found; ``done`` is told how many flips are behind."""
        full = 0
        for n, (name, at) in enumerate(places):
            which, listed = bit(at), None
            self._write(name, at, self.files[name][at] ^ (1 << which))
            try:
                prompts = PROMPTS if both else PROMPTS[n // 2 % 2 :][:1]
                full += self._asked(n % 2, prompts) == [len(p) - 1 for p in prompts]
                listed = self._listed()
                lost = [path for path, size in self._records.items() if listed.get(path) != size]
                assert not lost, f"it cost sound records: {lost}"
            except Exception as e:
                raise AssertionError(f"bit {which} of byte {at} of {name}") from e
            finally:
                self._put_back(listed)
            done(n + 1)
        return full

    def likenesses(self) -> list[tuple[str, int, int, list[int]]]:
        """(file, byte, bit, prompt): flips that make tokens of EARLY in the index those of ``prompt``, which nobody has
        stored."""
        out = []
        for name, data in self.files.items():
            for i, token in enumerate(EARLY[:-1]):  # a token stands where it and its follower do
                pair = re.compile(re.escape(pack(EARLY[i : i + 2])))
                for bit in range(4):
                    prompt = [*EARLY[:i], token ^ (1 << bit), *EARLY[i + 1 :]]
                    out += [(name, found.start(), bit, prompt) for found in pair.finditer(data)]
        return out

    def flip_likenesses(self, places: Iterable[tuple[str, int, int, list[int]]]) -> None:
        """Do these flips in their turn and ask both models for the prompt."""
        for name, at, bit, prompt in places:
            for which in range(len(OWNERS)):
                self._write(name, at, self.files[name][at] ^ (1 << bit))
                try:
                    self._asked(which, [prompt])
                except Exception as e:
                    raise AssertionError(f"bit {bit} of byte {at} of {name} against {prompt}") from e
                finally:
                    self._put_back()

    def _write(self, name: str, at: int, value: int) -> None:
        fd = os.open(self.now / name, os.O_WRONLY)
        try:
            os.pwrite(fd, bytes([value]), at)
        finally:
            os.close(fd)

    def _asked(self, which: int, prompts: Iterable[list[int]] = PROMPTS) -> list[int]:
        """How much of each prompt is restored after a restart; ``ask`` compares every bit of it."""
        store = OWNERS[which].open(self.now)
        try:
            return [ask(OWNERS[which], store, p, keep=False, lying=True).tokens for p in prompts]
        finally:
            store.close()

    def _listed(self) -> dict[str, int]:
        """Path -> bytes of every file."""
        out, todo = {}, [str(self.now)]
        while todo:
            with os.scandir(todo.pop()) as items:
                for item in items:
                    if item.is_dir(follow_symlinks=False):
                        todo.append(item.path)
                    else:
                        out[item.path] = item.stat(follow_symlinks=False).st_size
        return out

    def _put_back(self, listed: dict[str, int] | None = None) -> None:
        """Nothing was stored: only the index may have changed. A record that is gone ends the sweep."""
        for path in (self._listed() if listed is None else listed).keys() - self._all.keys():
            os.unlink(path)
        for name, data in self.files.items():
            (self.now / name).write_bytes(data)
