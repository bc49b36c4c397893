"""The commit of a group: its bytes are reserved in the ledger, written to temporary names, made durable, renamed, and
entered in the index, which ends the reservation. Whatever goes wrong leaves nothing that is not accounted for.

Belongs to the writer's thread. This module does not own: what is worth writing (``keeper``), when (``writer``), what is
given up for it (``eviction``).
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from .daily import Daily
from .durable import sync_folder, sync_group
from .folder import CacheFolder
from .index import PAGE, PAGES_A_ROW, Entry, Index, OverBudget
from .keeper import Skipped
from .keys import pack
from .ledger import Ledger, growth
from .planner import Planner
from .ram import Draft
from .record import Meta, size, write
from .tensors import ROW_KINDS

T = TypeVar("T")

#: seconds to try to make room for one portion, while other processes take it or have reserved it
_PATIENCE, _PAUSE = 5.0, 0.05
#: at most so many bytes, and this part of the budget, are reserved at once
_PORTION, _PORTION_PART = 64 << 20, 8


@dataclass
class Counters:
    """What happened since the store was opened. Bytes are record bytes."""

    skipped: Skipped
    written_records: int = 0
    written_bytes: int = 0
    dropped_groups: int = 0
    skipped_drafts: int = 0
    refused_bytes: int = 0
    last_fault: str = ""
    faults: dict[str, int] = field(default_factory=dict)
    #: full blocks whose pieces were merged, the bytes written for it (not in ``written_bytes``), the files that went
    merged_blocks: int = 0
    merged_bytes: int = 0
    merged_files: int = 0
    #: what was given up to make room
    evicted_records: int = 0
    evicted_bytes: int = 0

    def fault(self, kind: str, detail: str) -> None:
        self.faults[kind] = self.faults.get(kind, 0) + 1
        self.last_fault = f"{kind}: {detail}"


class Commit:
    """``pinned`` says what must not be evicted now, ``share`` which part of the budget one model may have when space is
    short, ``floor`` the bytes of free disk below which nothing is written. ``daily`` is told what reached the disk,
    ``stored`` which entries have become durable."""

    def __init__(
        self,
        folder: CacheFolder,
        index: Index,
        ledger: Ledger,
        planner: Callable[[Index, bytes], Planner],
        *,
        counters: Counters,
        daily: Daily,
        pinned: Callable[[], Collection[bytes]],
        share: float,
        floor: int,
        stored: Callable[[bytes], None] = lambda key: None,
    ) -> None:
        self.index, self.counters, self._stored = index, counters, stored
        self._folder, self._ledger, self._planner, self._daily = folder, ledger, planner, daily
        self._pinned, self._share, self._floor = pinned, share, floor

    def store(self, group: list[Draft]) -> None:
        """Store a group, in portions that the budget has room for. Raises OverBudget, OSError, sqlite3.Error,
        RecordError."""
        own = [key for draft in group for key in (*draft.needs, draft.meta.key)]
        most = min(_PORTION, (self.index.budget() or _PORTION) // _PORTION_PART)
        for portion in _portions(group, most, lambda draft: draft.nbytes):
            todo = self._missing(portion)
            if todo:
                self._store_files(todo, own)

    def _missing(self, group: list[Draft]) -> list[tuple[Draft, list[str]]]:
        """Drafts that can be stored, each with the kinds of records that are not there yet."""
        index = self.index
        here: set[bytes] = set()
        taken: set[tuple[bytes, str]] = set()
        todo: list[tuple[Draft, list[str]]] = []
        for draft in group:
            planner = self._planner(index, draft.meta.root)
            draft = self._rebased(draft, planner, here)
            if not all(key in here or key == draft.meta.root or planner.complete(key) for key in draft.needs):
                self.counters.skipped_drafts += 1
                continue
            stored = index.entry(draft.meta.key)
            have = stored.kinds if stored is not None else frozenset()
            # rows of an incomplete entry are written again, with the base that this draft brings
            again = stored is None or not planner.complete(draft.meta.key) or self._lacks_window(draft, stored, planner)
            kinds = [k for k in draft.bodies if k not in have or (k in ROW_KINDS and again)]
            kinds = [k for k in kinds if (draft.meta.key, k) not in taken]
            taken.update((draft.meta.key, k) for k in kinds)
            here.add(draft.meta.key)
            if kinds or draft.answer is not None:
                todo.append((draft, kinds))
        return todo

    @staticmethod
    def _lacks_window(draft: Draft, stored: Entry, planner: Planner) -> bool:
        """Whether a draft brings a window to rows that have none, and are cut elsewhere: one cut holds for both."""
        brings = "window" in draft.bodies and "window" not in stored.kinds and not planner.whole(stored.key)
        return brings and (draft.meta.row_start, draft.meta.base) != (stored.row_start, stored.base)

    def _rebased(self, draft: Draft, planner: Planner, here: Collection[bytes]) -> Draft:
        """Where another process has merged the rows that a draft hangs on, it hangs on the block that has them now."""
        m, rows = draft.meta, any(kind in ROW_KINDS for kind in draft.bodies)
        on = m.base if rows else m.key
        if on is None or on in here or not draft.bodies:
            return draft
        entry = self.index.entry(on)
        if planner.complete(on) and not (rows and entry is not None and entry.row_start == entry.end):
            return draft
        for full in self.index.longer(m.parent, pack(m.tokens)[: 4 * ((m.row_start if rows else m.end) - m.start)]):
            if full.root == m.root and full.key not in (m.key, *here) and planner.complete(full.key):
                meta = replace(m, row_start=m.row_start if rows else m.end, base=full.key)
                return replace(draft, meta=meta, needs=(m.parent, full.key))
        return draft

    def _store_files(self, todo: list[tuple[Draft, list[str]]], own: list[bytes]) -> None:
        written = self._write(todo, self._reserve(todo, own), self._enter)
        self.counters.written_records += sum(len(kinds) for _, kinds in todo)
        self.counters.written_bytes += written
        for draft, _ in todo:
            self._stored(draft.meta.key)

    def used_today(self) -> int:
        """Bytes that were written today."""
        return self._daily.used()

    def merge(self, draft: Draft, enter: Callable[[], int]) -> bool:
        """Write the records of a draft in place of those that are there; False if the budget has no room for both at
        once: nothing is evicted for it. ``enter`` brings the index up to date, in one transaction, and returns the
        bytes of the files that are entered. Raises as ``store`` does."""
        todo = [(draft, list(draft.bodies))]
        files = self._files(todo)
        total = sum(files.values())
        if self._free_disk() - total < self._floor:
            return False
        try:
            hold = self._ledger.reserve(total, [len(draft.meta.tokens)], list(files))
        except OverBudget:
            return False
        self.counters.merged_bytes += self._write(todo, hold, lambda draft, kinds: enter(), merging=True)
        return True

    def _write(
        self,
        todo: list[tuple[Draft, list[str]]],
        hold: int,
        enter: Callable[[Draft, list[str]], int],
        *,
        merging: bool = False,
    ) -> int:
        """Write records, make them durable, ``enter`` each draft in the index, and end the reservation; returns the
        bytes written."""
        index, ledger = self.index, self._ledger
        temporaries: list[tuple[Path, Path]] = []
        written = 0
        try:
            for draft, kinds in todo:
                for kind in kinds:
                    target = self._folder.file(draft.meta.key, kind)
                    temporary = self._folder.temporary(target.name)
                    temporary.unlink(missing_ok=True)
                    temporaries.append((temporary, target))
                    written += write(temporary, replace(draft.meta, kind=kind), draft.bodies[kind])
            sync_group(t for t, _ in temporaries)
            folders = set()
            for temporary, target in temporaries:
                target.parent.mkdir(mode=0o700, exist_ok=True)
                if target.parent.is_symlink():
                    raise OSError(errno.ELOOP, f"{target.parent} is a symbolic link")
                os.replace(temporary, target)
                folders.add(target.parent)
            for folder in (*folders, self._folder.records):
                sync_folder(folder)
            for part in _portions(todo, index.pages(), lambda item: PAGES_A_ROW + 8 * len(item[0].meta.tokens) // PAGE):
                with index.transaction():
                    ledger.release(hold, sum(enter(draft, kinds) for draft, kinds in part))
            with index.transaction():
                ledger.release(hold)
            return written
        except BaseException:
            for temporary, _ in temporaries:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
            ledger.abandon(hold)
            raise
        finally:
            if written:  # whether or not it could be entered
                self._daily.add(written, merging=merging)

    def _enter(self, draft: Draft, kinds: list[str]) -> int:
        """Enter a draft whose files are there; returns their bytes."""
        m, index = draft.meta, self.index
        index.add_root(m.root, m.model, m.fingerprint, m.compute, m.layout, m.block)
        sizes = {}
        for kind in kinds:
            with contextlib.suppress(FileNotFoundError):  # removed a moment ago
                # not what was written: another process may have put its own in this place
                sizes[kind] = os.lstat(self._folder.file(m.key, kind)).st_size
        if "rows" in sizes and "window" not in draft.bodies:
            self._leave_window(m)
        if sizes:
            packed = pack(m.tokens)
            index.add_entry(
                Entry(m.key, m.root, m.parent, m.start, m.end, m.row_start, m.base, packed, frozenset()), sizes
            )
        if draft.answer is not None:
            index.add_answer(draft.answer[0], m.key, draft.answer[1], draft.answer[2])
        return sum(sizes.values())

    def _leave_window(self, m: Meta) -> None:
        """Rows were stored again, cut elsewhere and without a window: the one that is there belongs to other rows."""
        stored = self.index.entry(m.key)
        if stored is not None and "window" in stored.kinds and (stored.row_start, stored.base) != (m.row_start, m.base):
            self._folder.remove(m.key, "window")
            self.index.drop_record(m.key, "window")

    def _files(self, todo: list[tuple[Draft, list[str]]]) -> dict[str, int]:
        """The names and bytes of the files to be written."""
        return {
            self._folder.file(draft.meta.key, kind).name: size(replace(draft.meta, kind=kind), draft.bodies[kind])
            for draft, kinds in todo
            for kind in kinds
        }

    def _reserve(self, todo: list[tuple[Draft, list[str]]], own: list[bytes]) -> int:
        """Reserve room for the records of ``todo``; what was used least recently goes for it, but nothing of ``own``.
        Raises OverBudget, OSError."""
        ledger = self._ledger
        files = self._files(todo)
        total, lengths = sum(files.values()), [len(draft.meta.tokens) for draft, _ in todo]
        root = todo[0][0].meta.root

        def make_room(short: int, within: float = float("inf")) -> int:
            pinned = {*own, *self._pinned()}
            done = ledger.make_room(short, pinned=pinned, root=root, incoming=total, share=self._share, within=within)
            self.counters.evicted_records += done.records
            self.counters.evicted_bytes += done.bytes
            return done.bytes

        ledger.rescan()
        missing = self._floor + total - self._free_disk()
        if missing > 0 and (not make_room(missing) or self._free_disk() - total < self._floor):
            raise OSError(errno.ENOSPC, f"less than {self._floor >> 20} MiB would be left on the disk")
        if (short := total + PAGE * growth(lengths) - ledger.room()) > 0:
            raise OverBudget(short)  # whatever goes: so nothing goes for it
        until = time.monotonic() + _PATIENCE
        while True:
            try:
                return ledger.reserve(total, lengths, list(files))
            except OverBudget as e:
                if not ledger.reclaim() and not make_room(e.short, _PATIENCE):
                    if not ledger.others() or time.monotonic() > until:
                        raise
                    time.sleep(_PAUSE)  # what other processes have reserved is given back soon

    def _free_disk(self) -> int:
        stat = os.statvfs(self._folder.path)
        return stat.f_bavail * stat.f_frsize


def _portions(items: Iterable[T], most: int, weight: Callable[[T], int]) -> Iterator[list[T]]:
    """Cut a sequence into parts of at most ``most``, or of one item."""
    part: list[T] = []
    total = 0
    for item in items:
        if part and total + weight(item) > most:
            yield part
            part, total = [], 0
        part.append(item)
        total += weight(item)
    if part:
        yield part
