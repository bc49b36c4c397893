"""Damage in every place of the records of a small folder that two models share: truncations, flips, swaps. For tests
and soaks. What happens to the index is in ``flips``.

A place is checked in one of two ways: ``Reader`` must refuse the file, which is how a restore reads it; or, slower, the
folder is opened and asked. ``hurt`` does the latter: a miss for everything that needs the file, nothing wrong.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from unittest import mock

from mlxkv.cache.record import Reader, RecordError, ShortRecord
from mlxkv.cache.store import PrefixStore
from tests.cache.synthetic import MODELS, Model, ask, twin

#: two full blocks with a leaf, and a branch
PROMPTS = ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [1, 2, 3, 4, 5, 9, 9])
OWNERS = (MODELS["mixed"], twin(MODELS["mixed"]), MODELS["head"])
Case = tuple[int, int]  # of OWNERS, of PROMPTS
Damage = dict[Path, bytes]  # what stands in the place of which record


class Sample:
    """A folder with the prompts of the models, closed in good order."""

    def __init__(self, folder: Path, owners: tuple[Model, ...] = OWNERS, prompts: int = len(PROMPTS)) -> None:
        self.owners, self.now = owners, folder / "now"
        self.cases = [(m, p) for m in range(len(owners)) for p in range(prompts)]
        for model in owners:
            store = model.open(self.now)
            for prompt in PROMPTS[:prompts]:
                ask(model, store, prompt, ends=(5,), more=(1, 2))
                assert store.writer.flush(20)
            store.close()
        self.sound = {p: p.read_bytes() for p in self.now.rglob("*") if p.is_file()}
        self.records = sorted(p for p in self.sound if p.name.endswith(".safetensors"))
        self._stamps = {p: self._stamp(p) for p in self.sound}
        self.needed = self._needed()

    def _needed(self) -> dict[Path, set[Case]]:
        """Which record is read to restore which prompt in full."""
        out: dict[Path, set[Case]] = {path: set() for path in self.records}
        real = os.open
        for m, p in self.cases:
            store = self.owners[m].open(self.now)

            def spy(path, *args, case=(m, p), **kwargs):
                if Path(path) in out:
                    out[Path(path)].add(case)
                return real(path, *args, **kwargs)

            with mock.patch.object(os, "open", spy):
                assert self._asked(self.owners[m], store, PROMPTS[p]) == len(PROMPTS[p]) - 1
            store.close()
        self.put_back()
        return out

    @staticmethod
    def _stamp(path: Path) -> tuple[int, int, int] | None:
        try:
            info = os.lstat(path)
        except FileNotFoundError:
            return None
        return info.st_ino, info.st_size, info.st_mtime_ns

    def put_back(self) -> None:
        for base, _, names in os.walk(self.now):
            for name in names:
                if (path := Path(base, name)) not in self.sound:
                    path.unlink()
        for path, data in self.sound.items():
            if self._stamp(path) != self._stamps[path]:
                path.unlink(missing_ok=True)  # a new file has a new inode, and so a stamp of its own
                path.write_bytes(data)
                self._stamps[path] = self._stamp(path)

    def found(self, cases: Iterable[Case]) -> dict[Case, int]:
        """Open anew and ask: how many tokens were restored in each case, each of them right."""
        out, todo = {}, sorted(cases)
        for m in sorted({m for m, _ in todo}):
            store = self.owners[m].open(self.now)
            for case in todo:
                if case[0] == m:
                    out[case] = self._asked(self.owners[m], store, PROMPTS[case[1]])
            store.close()
        return out

    @staticmethod
    def _asked(model: Model, store: PrefixStore, prompt: list[int]) -> int:
        return ask(model, store, prompt, keep=False, lying=True).tokens

    def hurt(self, damage: Damage, what: str) -> None:
        """A miss in each case that needs one of the records, nothing wrong in any, then all as before."""
        try:
            for path, data in damage.items():
                path.write_bytes(data)
            needing = set().union(*(self.needed[path] for path in damage))
            for case, tokens in self.found(needing or self.cases[:1]).items():
                assert case not in needing or tokens < len(PROMPTS[case[1]]) - 1, what
        except Exception as e:
            raise AssertionError(what) from e
        finally:
            self.put_back()

    # what ``Reader`` must refuse

    def refused_truncations(self) -> int:
        """Every truncation of every record."""
        count = 0
        for path in self.records:
            for size in range(len(self.sound[path]) - 1, -1, -1):
                os.truncate(path, size)
                try:
                    Reader.open(path).close()
                    raise AssertionError(f"{path.name} cut to {size} bytes was taken")
                except ShortRecord:
                    count += 1
        self.put_back()
        return count

    def refused_flips(self, rng: random.Random, part: float = 1.0) -> int:
        """A flip in any byte of any record, or in a ``part`` of them."""
        count = 0
        for path in self.records:
            fd = os.open(path, os.O_WRONLY)
            for at, old in enumerate(self.sound[path]):
                if rng.random() >= part:
                    continue
                os.pwrite(fd, bytes([old ^ (1 << rng.randrange(8))]), at)
                try:
                    with Reader.open(path) as reader:
                        for name in reader.tensors:
                            reader.read(name)
                    raise AssertionError(f"byte {at} of {path.name} was flipped, and it was taken")
                except RecordError:
                    count += 1
                os.pwrite(fd, bytes([old]), at)
            os.close(fd)
        self.put_back()
        return count

    # what must be a miss to who asks

    def swaps(self) -> Iterator[tuple[Damage, str]]:
        """Every pair of records in each other's place: of other spans, kinds and models."""
        for a, b in itertools.combinations(self.records, 2):
            yield {a: self.sound[b], b: self.sound[a]}, f"{a.name} and {b.name} swapped"

    @property
    def places(self) -> list[tuple[Path, int]]:
        """Every byte of every record."""
        return [(path, at) for path in self.records for at in range(len(self.sound[path]))]

    def truncation(self, path: Path, size: int) -> tuple[Damage, str]:
        return {path: self.sound[path][:size]}, f"{path.name} cut to {size}"

    def flip(self, path: Path, at: int, bit: int) -> tuple[Damage, str]:
        data = bytearray(self.sound[path])
        data[at] ^= 1 << bit
        return {path: bytes(data)}, f"bit {bit} of byte {at} of {path.name} flipped"
