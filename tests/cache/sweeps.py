"""Damage in every place of a small folder that several models share: truncations, swaps, flips. For tests and soaks."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

from mlxkv.cache.record import Reader, RecordError, ShortRecord
from mlxkv.cache.store import PrefixStore
from tests.cache.synthetic import MODELS, Model, ask, twin

PROMPTS = ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [1, 2, 3, 4, 5, 6, 9, 9, 9])
OWNERS = (MODELS["mixed"], twin(MODELS["mixed"]), MODELS["head"])
INDEX = ("index.sqlite", "index.sqlite-wal")


class Sample:
    """A folder with two prompts of three models, copied while it was open, so that its index has a WAL."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        stores = [m.open(folder / "live") for m in OWNERS]
        for model, store in zip(OWNERS, stores, strict=True):
            for prompt in PROMPTS:
                ask(model, store, prompt, ends=(3, 6), more=(1, 2))
                assert store.writer.flush(20)
        shutil.copytree(folder / "live", folder / "sound")
        for store in stores:
            store.close()
        self.sound = {p: p.read_bytes() for p in (folder / "sound").rglob("*") if p.is_file()}
        self.now = folder / "sound"  # work on this copy itself: it is put back after each damage
        self.records = [p for p in self.sound if p.name.endswith(".safetensors")]
        assert all((self.now / name).stat().st_size for name in INDEX)
        self.needed = self._needed()

    def _needed(self) -> dict[Path, set[tuple[int, int]]]:
        """Which (model, prompt) read which record to be restored in full."""
        out: dict[Path, set[tuple[int, int]]] = {path: set() for path in self.records}
        real = os.open
        for m, p in self.cases:
            store = OWNERS[m].open(self.now)

            def spy(path, *args, case=(m, p), **kwargs):
                if Path(path) in out:
                    out[Path(path)].add(case)
                return real(path, *args, **kwargs)

            with mock.patch.object(os, "open", spy):
                assert self._asked(OWNERS[m], store, PROMPTS[p]) == len(PROMPTS[p]) - 1
            store.close()
        self.put_back()
        return out

    def put_back(self) -> None:
        for path in self.now.rglob("*"):
            if path.is_file() and path not in self.sound:
                path.unlink()
        for path, data in self.sound.items():
            if not path.exists() or path.read_bytes() != data:
                path.write_bytes(data)

    cases = [(m, p) for m in range(len(OWNERS)) for p in range(len(PROMPTS))]

    def found(self, cases: Iterable[tuple[int, int]]) -> dict[tuple[int, int], int]:
        """Open anew and ask: how many tokens were restored in each case, each of them right."""
        out, todo = {}, sorted(cases)
        for m in sorted({m for m, _ in todo}):
            store = OWNERS[m].open(self.now)
            for case in todo:
                if case[0] == m:
                    out[case] = self._asked(OWNERS[m], store, PROMPTS[case[1]])
            store.close()
        return out

    @staticmethod
    def _asked(model: Model, store: PrefixStore, prompt: list[int]) -> int:
        return ask(model, store, prompt, keep=False, lying=True).tokens

    def one_of_each(self) -> list[Path]:
        """A record of every kind of every model, the largest."""
        best: dict[tuple[str, str], Path] = {}
        for path in sorted(self.records, key=lambda p: len(self.sound[p])):
            with Reader.open(path) as reader:
                best[reader.meta.model, reader.meta.kind] = path
        return list(best.values())

    def hurt(self, path: Path, data: bytes, what: str) -> None:
        """Put ``data`` in the place of a record: a miss for all that need it, nothing wrong, then all as before."""
        try:
            path.write_bytes(data)
            for case, tokens in self.found(self.needed[path] or self.cases[:1]).items():
                assert case not in self.needed[path] or tokens < len(PROMPTS[case[1]]) - 1, (what, path.name)
        finally:
            self.put_back()

    # sweeps

    def truncated_everywhere(self) -> int:
        """Every truncation of a record of each kind is seen when it is opened."""
        count = 0
        for path in self.one_of_each():
            for size in range(len(self.sound[path]) - 1, -1, -1):
                path.open("r+b").truncate(size)
                try:
                    Reader.open(path).close()
                    raise AssertionError(f"{path.name} cut to {size} bytes was taken")
                except ShortRecord:
                    count += 1
        self.put_back()
        return count

    def flipped_everywhere(self, step: int = 1) -> int:
        """A flip in any byte of a record of each kind is seen when it is read; only padding between tensors may be
        anything."""
        count = 0
        for path in self.one_of_each():
            data = bytearray(self.sound[path])
            for at in range(0, len(data), step):
                data[at] ^= 1 << at % 8
                path.write_bytes(data)
                try:
                    with Reader.open(path) as reader:
                        for name in reader.tensors:
                            reader.read(name)
                        spans = [(a, b) for _, _, a, b in reader.tensors.values()]
                        place = at - reader.data_start
                    assert place >= 0 and not any(a <= place < b for a, b in spans), f"{path.name} byte {at}"
                except RecordError:
                    count += 1
                data[at] ^= 1 << at % 8
        self.put_back()
        return count

    def truncations(self, rng: random.Random, count: int) -> None:
        places = [(p, n) for p in self.records for n in range(len(self.sound[p]))]
        for path, size in rng.sample(places, min(count, len(places))):
            self.hurt(path, self.sound[path][:size], f"cut to {size}")

    def swaps(self, rng: random.Random, count: int) -> None:
        """A record under the name of another: of another span, kind or model."""
        pairs = [(a, b) for a in self.records for b in self.records if a != b]
        for a, b in rng.sample(pairs, min(count, len(pairs))):
            self.hurt(a, self.sound[b], f"holds {b.name}")

    def index_flips(self, rng: random.Random, count: int) -> int:
        """A flipped byte of the index or its WAL: a miss or the right value, and no record is lost by it."""
        full = 0
        for _ in range(count):
            path = self.now / rng.choice(INDEX)
            data, at = bytearray(self.sound[path]), rng.randrange(len(self.sound[path]))
            data[at] ^= 1 << rng.randrange(8)
            try:
                path.write_bytes(data)
                case = rng.choice(self.cases)
                full += self.found([case])[case] == len(PROMPTS[case[1]]) - 1
                for record in self.records:
                    assert record.exists(), f"byte {at} of {path.name} cost a sound record"
            finally:
                self.put_back()
        return full
