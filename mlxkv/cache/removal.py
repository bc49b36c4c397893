"""Removing entries: in an order in which nothing is left that hangs on what is gone, while others use the folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .catalogue import Catalogue, Forest, Item
from .folder import CacheFolder, weight
from .index import FILE, PAGES_A_ROW

#: entries removed in one transaction: between two of them other processes get their turn, and Ctrl-C is heard
BATCH = 32

Progress = Callable[[int, int], None]


def remove(
    folder: CacheFolder, index: Catalogue, items: list[Item], *, even_used: bool, progress: Progress | None = None
) -> list[Item]:
    """Remove entries in the given order; returns those that are gone. Safe while other processes use the folder.

    Files go first, and their rows with them in one transaction: a row without a file is a miss (``evicted``) and is
    dropped when a run opens the folder, while a file without a row would be taken in again. What something hangs on
    stays (another process may have added it meanwhile), and so does what was used since ``items`` was read, unless
    ``even_used``. ``progress`` is told (entries done, of how many) between transactions and may raise to stop. Raises
    OSError, sqlite3.Error.
    """
    gone: list[Item] = []
    step = max(1, min(BATCH, index.pages() // (2 * PAGES_A_ROW)))
    try:
        for i in range(0, len(items), step):
            if progress is not None:
                progress(i, len(items))
            with index.transaction():
                for item in items[i : i + step]:
                    used = index.last_used(item.key)
                    if used is None or index.grown(item) or (used != item.used and not even_used):
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
    """What a clean-up would remove: files that serve nobody, then entries in this order."""

    files: list[Path]
    items: list[Item]
    bytes: int


def plan_pruning(
    folder: CacheFolder,
    index: Catalogue,
    *,
    to: int | None,
    before: float | None,
    model: str | None,
    with_log: bool = True,
) -> Pruning:
    """What to remove. ``to``: bytes that the folder may have afterwards. ``before``: remove what was last used before
    this moment (seconds since the epoch). ``model``: only entries of this model. Without ``to`` and ``before``: all.
    ``with_log``: the index's log counts; it does not before ``prune`` has cut it."""
    spaces = index.spaces()

    def root(key: bytes) -> bool:
        return model is None or (key in spaces and spaces[key].model == model)

    forest = Forest(index.items())
    files: list[Path] = []
    items: list[Item] = []
    if before is not None or to is None:
        items = forest.unused_since(float("inf") if before is None else before, root)
    if to is not None:
        log = 0 if with_log else weight(folder.path / f"{FILE}-wal")
        left = folder.size() - log - to - sum(item.bytes for item in items)
        useless = [*folder.leftovers(), *folder.set_aside_files()] if model is None else []
        for path in useless:
            if left > 0:
                files.append(path)
                left -= weight(path)
        going = {item.key for item in items}
        items += Forest(item for item in forest.items.values() if item.key not in going).least_used(left, root)
    return Pruning(files, items, sum(map(weight, files)) + sum(item.bytes for item in items))


def prune(
    folder: CacheFolder, index: Catalogue, plan: Callable[[], Pruning], *, progress: Progress | None = None
) -> tuple[list[Item], int, int, int]:
    """Carry out ``plan()``, again as long as it finds something: the index's log grows while entries are removed, and
    counts. Returns (entries that are gone, files removed, bytes of both, entries that stayed because they were used
    meanwhile). Raises as ``remove`` does."""
    gone: list[Item] = []
    files = freed = 0
    index.settle()
    while (todo := plan()).files or todo.items:
        for path in todo.files:
            freed += weight(path)
            path.unlink(missing_ok=True)
        files += len(todo.files)
        done = remove(folder, index, todo.items, even_used=False, progress=progress)
        gone += done
        freed += sum(item.bytes for item in done)
        index.settle()
        if len(done) < len(todo.items):
            return gone, files, freed, len(todo.items) - len(done)
    return gone, files, freed, 0
