"""Removing entries: in an order in which nothing is left that hangs on what is gone, while others use the folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .catalogue import Catalogue, Item
from .eviction import Unit, choose, give_up
from .folder import CacheFolder, weight
from .index import FILE, PAGES_A_ROW

#: entries, or parts of them, in one transaction: between two of them other processes get their turn, Ctrl-C is heard
BATCH = 32

Progress = Callable[[int, int], None]


def remove(folder: CacheFolder, index: Catalogue, items: list[Item], *, progress: Progress | None = None) -> list[Item]:
    """Remove whole entries in the given order; returns those that are gone. Safe while other processes use the folder.

    Files go first, and their rows with them in one transaction: a row without a file is a miss (``evicted``) and is
    dropped when a run opens the folder, while a file without a row would be taken in again. What something hangs on
    stays: another process may have added it meanwhile. ``progress`` is told (entries done, of how many) between
    transactions and may raise to stop. Raises OSError, sqlite3.Error.
    """
    gone: list[Item] = []
    step = max(1, min(BATCH, index.pages() // (2 * PAGES_A_ROW)))
    try:
        for i in range(0, len(items), step):
            if progress is not None:
                progress(i, len(items))
            with index.transaction():
                for item in items[i : i + step]:
                    if index.last_used(item.key) is None or index.grown(item):
                        continue
                    for kind in (*item.sizes, ""):  # the last one is for a row that has no records
                        if kind:
                            folder.remove(item.key, kind)
                        index.drop_record(item.key, kind)
                    gone.append(item)
        if progress is not None:
            progress(len(items), len(items))
    finally:
        with index.transaction():
            index.forget_leftovers()
    return gone


@dataclass(frozen=True)
class Pruning:
    """What a clean-up would remove, or has removed: files that serve nobody, and units in the order of eviction.
    ``entries`` are those of which nothing is left, ``states`` the keys of those that lose their state alone; ``kept``
    counts the units that stayed because they were used, or grew, in the meantime."""

    files: list[Path]
    units: list[Unit]
    entries: list[Item]
    states: list[bytes]
    bytes: int
    kept: int = 0


def plan_pruning(
    folder: CacheFolder,
    index: Catalogue,
    *,
    to: int | None,
    before: float | None,
    model: str | None,
    with_log: bool = True,
) -> Pruning:
    """What to remove, in the order in which the store itself evicts. ``to``: bytes that the folder may have afterwards.
    ``before``: remove what was last used before this moment (seconds since the epoch). ``model``: only entries of this
    model. Without ``to`` and ``before``: all. ``with_log``: the index's log counts; it does not before ``prune`` has
    cut it."""
    roots = None if model is None else [key for key, space in index.spaces().items() if space.model == model]
    if to is None:
        units = choose(index, 0, before=float("inf") if before is None else before, roots=roots)
        return _planned(index, [], units)
    log = 0 if with_log else weight(folder.path / f"{FILE}-wal")
    over = folder.size() - log - to
    files: list[Path] = []
    spare = sum(unit.bytes for unit in choose(index, 0, before=before, roots=roots)) if before is not None else 0
    for path in [*folder.leftovers(), *folder.set_aside_files()] if model is None else []:
        if over > spare:
            files.append(path)
            over -= weight(path)
    return _planned(index, files, choose(index, over, before=float("-inf") if before is None else before, roots=roots))


def _planned(index: Catalogue, files: list[Path], units: list[Unit]) -> Pruning:
    items = {item.key: item for item in index.items()}
    entries, states = _parts(items, units)
    return Pruning(files, units, entries, states, sum(map(weight, files)) + sum(unit.bytes for unit in units))


def _parts(items: dict[bytes, Item], units: list[Unit]) -> tuple[list[Item], list[bytes]]:
    """(entries that go with these units, keys of entries that lose their state alone)."""
    whole = [unit.key for unit in units if not unit.state]
    states = [unit.key for unit in units if unit.state]
    return [items[key] for key in whole if key in items], [key for key in states if key not in {*whole}]


def prune(
    folder: CacheFolder, index: Catalogue, plan: Callable[[], Pruning], *, progress: Progress | None = None
) -> Pruning:
    """Carry out ``plan()``, again as long as it finds something: the index's log grows while entries are removed, and
    counts. Returns what is gone. ``progress`` is told (bytes done, of how many) between transactions and may raise to
    stop. Raises OSError, sqlite3.Error."""
    files: list[Path] = []
    units: list[Unit] = []
    items: dict[bytes, Item] = {}
    freed = kept = 0
    index.settle()
    try:
        while not kept and ((todo := plan()).files or todo.units):
            for path in todo.files:
                freed += weight(path)
                path.unlink(missing_ok=True)
            files += todo.files
            items |= {item.key: item for item in index.items()}
            total = sum(unit.bytes for unit in todo.units)
            told = None if progress is None else lambda size, total=total: progress(min(size, total), total)
            gone = give_up(folder, index, todo.units, step=BATCH, progress=told)
            units += [unit for unit, *_ in gone]
            freed += sum(size for *_, size in gone)
            kept = len(todo.units) - len(gone)
            index.settle()
    finally:
        with index.transaction():
            index.forget_leftovers()
    entries, states = _parts(items, units)
    return Pruning(files, units, entries, states, freed, kept)
