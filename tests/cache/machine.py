"""A machine of random requests, evictions, damage and restarts on one cache folder, for hypothesis. What it holds the
store to: whatever is restored at p is bit for bit what the tokens before p make it."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from mlxkv.cache.adoption import AT_ONCE
from mlxkv.cache.eviction import free
from mlxkv.cache.folder import FolderRefused
from mlxkv.cache.record import LongRecord, Reader, RecordError
from mlxkv.cache.store import PrefixStore
from tests.cache.synthetic import MODELS, Model, ask, twin, verify

SALTS = ("", "a")
#: what a lying index may say; each is one statement, on rows chosen by the remainder of a drawn number
LIES = (
    "DELETE FROM entries WHERE {some}",
    "DELETE FROM records WHERE {some}",
    "DELETE FROM records WHERE kind = 'state' AND {some}",
    "UPDATE records SET kind = 'state' WHERE kind = 'rows' AND {some}",
    "INSERT OR IGNORE INTO records SELECT key, 'state', 100 FROM entries WHERE {some}",
    "UPDATE entries SET row_start = start, base = NULL WHERE {some}",
    "UPDATE entries SET base = (SELECT key FROM entries LIMIT 1) WHERE base IS NOT NULL AND {some}",
    "UPDATE entries SET parent = (SELECT key FROM entries ORDER BY tokens LIMIT 1) WHERE {some}",
    "UPDATE entries SET tokens = (SELECT tokens FROM entries ORDER BY tokens LIMIT 1) WHERE {some}",
    "UPDATE entries SET start = start + 4, end = end + 4, row_start = row_start + 4 WHERE {some}",
    "UPDATE entries SET end = end + 1 WHERE {some}",
    "UPDATE entries SET root = (SELECT root FROM roots ORDER BY root LIMIT 1) WHERE {some}",
    "UPDATE answers SET start = start + 1 WHERE {some}",
    "UPDATE answers SET last = 2 WHERE {some}",
    "UPDATE answers SET key = (SELECT key FROM entries ORDER BY tokens DESC LIMIT 1) WHERE {some}",
    "DELETE FROM roots WHERE {some}",
)


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder that costs no disk: syncs are counted elsewhere."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name)


class StoreMachine(RuleBasedStateMachine):
    """Up to two stores are open on one folder, each for a model or for its twin of the same layout."""

    def __init__(self) -> None:
        super().__init__()
        self._scratch = scratch()
        self.folder = self._scratch.__enter__() / "c"
        self.stores: list[tuple[Model, PrefixStore] | None] = [None, None]
        self.prompts: list[list[int]] = [[1, 2, 3]]
        self.pristine = True  # nothing was evicted or damaged: what was stored must be found
        self.intact = True  # nothing was damaged: whatever the index says is so
        self.older: dict[Path, bytes] = {}

    @initialize(name=st.sampled_from(sorted(MODELS)), block=st.sampled_from((4, 8)))
    def begin(self, name: str, block: int) -> None:
        self.model, self.block = MODELS[name], block
        self.reopen(0, False)

    # requests

    @rule(
        which=st.integers(0, 7),
        slot=st.integers(0, 1),
        cut=st.integers(0, 40),
        edit=st.none() | st.integers(0, 40),
        tail=st.lists(st.integers(1, 3), max_size=14),
        ends=st.lists(st.integers(1, 40), max_size=4),
        more=st.lists(st.integers(1, 3), min_size=1, max_size=12),
        chunk=st.sampled_from((2, 5, 16)),
        salt=st.sampled_from(SALTS),
        wait=st.booleans(),
    )
    def request(self, which, slot, cut, edit, tail, ends, more, chunk, salt, wait) -> None:
        """A prompt seen before, cut, edited in one place and continued; answered, stored, and asked for again."""
        if self.stores[slot] is None:
            slot = 0
        model, store = self.stores[slot]
        base = self.prompts[-1 - which % len(self.prompts)]
        prompt = [*base[: max(1, len(base) - cut)], *tail][-60:]
        if edit is not None:
            prompt[edit % len(prompt)] = 3
        note(f"prompt {prompt}")
        ask(
            model,
            store,
            prompt,
            ends=ends,
            more=more,
            chunk=chunk,
            salt=salt,
            capacity=8 + cut,
            lying=not self.intact,
        )
        self.prompts = [*self.prompts, [*prompt, *more]][-8:]
        if wait:
            assert store.writer.flush(20)
            again = ask(model, store, prompt, keep=False, salt=salt, lying=not self.intact)
            if self.pristine and len(prompt) > 2:  # a head has nothing to stand on before its second token
                assert again.reason is None, again
                assert not store.faults and not store.writer.counters.faults

    @rule(slot=st.integers(0, 1), cut=st.integers(0, 40))
    def merge(self, slot: int, cut: int) -> None:
        """The store has nothing else to do: the pieces of blocks are merged, and nothing is lost by it."""
        if (opened := self.stores[slot]) is None:
            return
        model, store = opened
        assert store.writer.flush(20)
        prompts = [p[: max(1, len(p) - cut % 7)] for p in self.prompts] if self.pristine else []
        before = [ask(model, store, p, keep=False) for p in prompts]
        store.writer.merge()
        assert store.writer.flush(20)
        for prompt, was in zip(prompts, before, strict=True):
            now = ask(model, store, prompt, keep=False)
            assert (now.tokens, now.reason) == (was.tokens, was.reason), f"{prompt}: {was}, merged {now}"
        if self.pristine:
            assert not store.faults and not store.writer.counters.faults
            verify(self.folder, store)

    # loss and damage

    @rule(slot=st.integers(0, 1), tenths=st.integers(1, 10))
    def evict(self, slot: int, tenths: int) -> None:
        """Space is short: a part of the records goes, as the store chooses. What is left agrees with the index."""
        if self.stores[slot] is None:
            slot = 0
        _, store = self.stores[slot]
        self.pristine = False
        with contextlib.nullcontext() if self.intact else contextlib.suppress(sqlite3.Error):
            (total,) = store.index.execute("SELECT coalesce(sum(bytes), 0) FROM records").fetchone()
            free(store.folder, store.index, total * tenths // 10)
        if self.intact and self.stores[1 - slot] is None:
            assert store.writer.flush(20)
            verify(self.folder, store)

    def files(self) -> list[Path]:
        return sorted((self.folder / "records").rglob("*.safetensors"))

    @rule(which=st.integers(0, 10**6), how=st.sampled_from(("remove", "cut", "flip", "swap", "lengthen", "set back")))
    def hurt(self, which: int, how: str) -> None:
        """Remove, cut, flip, swap, lengthen or set back one record."""
        if not (files := self.files()):
            return
        self.pristine = self.intact = False
        victim = files[which % len(files)]
        note(f"{how} {victim.name}")
        with contextlib.suppress(FileNotFoundError):  # a writer is at work
            HOW[how](self, victim, files[(which // 7) % len(files)], which)

    def _remove(self, victim: Path, other: Path, n: int) -> None:
        victim.unlink()

    def _cut(self, victim: Path, other: Path, n: int) -> None:
        data = victim.read_bytes()
        victim.write_bytes(data[: n % max(1, len(data))])

    def _flip(self, victim: Path, other: Path, n: int) -> None:
        data = bytearray(victim.read_bytes() or b"x")
        data[n % len(data)] ^= 1 << n % 8
        victim.write_bytes(data)

    def _swap(self, victim: Path, other: Path, n: int) -> None:
        a, b = victim.read_bytes(), other.read_bytes()
        victim.write_bytes(b)
        other.write_bytes(a)

    def _lengthen(self, victim: Path, other: Path, n: int) -> None:
        with open(victim, "ab") as out:
            out.write(bytes(1 + n % 5))

    def _set_back(self, victim: Path, other: Path, n: int) -> None:
        """What this file was some time ago."""
        now = victim.read_bytes()
        if (then := self.older.get(victim)) is not None:
            victim.write_bytes(then)
        self.older[victim] = now

    @rule(n=st.integers(0, 10**6), lie=st.sampled_from(LIES))
    def lie(self, n: int, lie: str) -> None:
        """The index says something that is not so, while stores have it open."""
        self.pristine = self.intact = False
        some = f"(length(hex(key)) + unicode(substr(hex(key), 1 + {n % 60}, 1))) % {1 + n % 3} = 0"
        if "roots" in lie and "entries" not in lie:
            some = "1"
        with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(self.index)) as db, db:
            db.execute("PRAGMA ignore_check_constraints=1")
            db.execute(lie.format(some=some))

    @rule(n=st.integers(0, 10**7), close=st.booleans())
    def flip_index(self, n: int, close: bool) -> None:
        """A byte of the index or its WAL flips, in use or not."""
        self.pristine = self.intact = False
        if close:
            for slot in (0, 1):
                self._close(slot)
        wal = self.index.with_name(self.index.name + "-wal")
        victim = wal if n % 2 and wal.exists() and wal.stat().st_size else self.index
        if victim.exists() and (size := victim.stat().st_size):
            with open(victim, "r+b") as out:
                out.seek(n % size)
                old = out.read(1)[0]
                out.seek(n % size)
                out.write(bytes([old ^ (1 << n % 8)]))
        self.reopen(0, False)

    @rule(how=st.sampled_from(("remove", "mark")))
    def lose_index(self, how: str) -> None:
        self.pristine = self.intact = False
        if how == "mark":
            (self.folder / "index.damaged").touch()
        else:
            for suffix in ("", "-wal", "-shm"):
                self.index.with_name(self.index.name + suffix).unlink(missing_ok=True)

    # restarts

    @property
    def index(self) -> Path:
        return self.folder / "index.sqlite"

    def _close(self, slot: int) -> None:
        if (old := self.stores[slot]) is not None:
            old[1].close()
            self.stores[slot] = None

    @rule(
        slot=st.integers(0, 1),
        other=st.booleans(),
        ram=st.sampled_from((0, 4000, 1 << 30)),
        at_once=st.sampled_from((0, 3, AT_ONCE)),
    )
    def reopen(self, slot: int, other: bool, ram: int = 0, at_once: int = AT_ONCE) -> None:
        """Another process's restart, as far as the folder can tell; the second slot is open besides the first. ``ram``:
        bytes of records that it keeps in RAM too. ``at_once``: records that it takes into its index before it goes on,
        where that does not know them."""
        self._close(slot)
        options = {"block": self.block, "ram_budget": ram, "at_once": at_once}
        model = twin(self.model) if other else self.model
        try:
            self.stores[slot] = (model, model.open(self.folder, **options))
        except FolderRefused:
            # two damaged openings at once may find each other's index locked; alone it must open
            for each in (0, 1):
                self._close(each)
            self.stores[0] = (model, model.open(self.folder, **options))
        if slot == 1 and self.stores[0] is None:
            self.reopen(0, False)

    def teardown(self) -> None:
        try:
            if hasattr(self, "model"):
                self._heals()
        finally:
            for slot in (0, 1):
                self._close(slot)
            self._scratch.__exit__(None, None, None)

    def _heals(self) -> None:
        """Whatever happened: once it ends, everything can be stored and found again, and the folder is sound."""
        for slot in (0, 1):
            self._close(slot)
        shutil.rmtree(self.folder / "quarantine")
        for path in self.files():  # kept, because it proves nothing: nobody but a person removes it
            if path in self.longer():
                path.unlink()
        prompt = [*self.prompts[-1], 1, 2]
        for _ in range(24):  # each round may find one more block that stands wrong
            self.reopen(0, False)
            model, store = self.stores[0]
            if ask(model, store, prompt, lying=True).reason is None:
                break
            assert store.writer.flush(20)
        assert ask(model, store, prompt, keep=False, lying=True).reason is None
        self.reopen(0, False)
        model, store = self.stores[0]
        assert ask(model, store, prompt, keep=False, lying=True).reason is None
        if self.pristine:
            verify(self.folder, store)

    def longer(self) -> set[Path]:
        out = set()
        for path in self.files():
            try:
                Reader.open(path).close()
            except LongRecord:
                out.add(path)
            except RecordError:
                pass
        return out


HOW = {
    "remove": StoreMachine._remove,
    "cut": StoreMachine._cut,
    "flip": StoreMachine._flip,
    "swap": StoreMachine._swap,
    "lengthen": StoreMachine._lengthen,
    "set back": StoreMachine._set_back,
}
