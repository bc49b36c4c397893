"""What a look-up wants of the files that wait to be taken into the index (``adoption``): asked for by name."""

from __future__ import annotations

from collections.abc import Callable, Collection

from .adoption import step, take_in
from .folder import CacheFolder, link
from .index import Index
from .keys import KeySpace, pack
from .tiers import View


def take_in_prompt(
    folder: CacheFolder,
    view: View,
    space: KeySpace,
    tokens: list[int],
    position: Callable[[], int],
    kinds: Collection[str],
) -> bool:
    """Adopt what waits of a prompt, as far as a look-up needs it: full blocks, the leaves of the last one that are a
    prefix of the prompt, the pieces that these name; then leaves further back until ``position()``, where a plan would
    stand now, lies behind them. A key is the hash of its tokens: all that could be there can be asked for, but for
    a full block of another continuation that the rows of a leaf were merged into. False if such a one is missing.
    ``kinds``: the layout's records of rows. Raises OverBudget, sqlite3.Error."""
    packed, size = pack(tokens), 4 * space.block
    parents = [space.root]
    while len(packed) >= size * len(parents):
        key = space.key_packed(parents[-1], packed[size * (len(parents) - 1) : size * len(parents)])
        _take_in_chains(folder, view.index, [key], kinds)
        if view.entry(key) is None:
            break
        parents.append(key)
    found = True
    for depth in range(len(parents) - 1, -1, -1):
        span = packed[size * depth : size * (depth + 1)]
        keys = [space.key_packed(parents[depth], span[:end]) for end in range(4, len(span) + 1, 4)]
        found = _take_in_chains(folder, view.index, keys, kinds) and found
        if position() >= depth * space.block:
            break
    return found


def _take_in_chains(folder: CacheFolder, index: Index, keys: list[bytes], kinds: Collection[str]) -> bool:
    """Adopt what waits of these entries, and of the pieces that have the rows before theirs. False if the rows of one
    were merged into a block that still waits, as it seems."""
    todo, seen, most = keys, set(keys), step(index)
    while todo:  # a base may wait where nothing else does
        files = [file for key in todo for file in index.waiting_of(key)]
        for i in range(0, len(files), most):
            take_in(folder, index, files[i : i + most])
        bases = {entry.base for key in todo if (entry := index.entry(key)) is not None and entry.base is not None}
        todo = list(bases - seen)
        seen |= bases
    lost = [key for key in seen if _lacks_rows(index, key, kinds)]
    for i in range(0, len(lost), most):
        with index.transaction(checked=False):  # it only gives back
            for key in lost[i : i + most]:
                link(folder, index, key)
    return not any(_lacks_rows(index, key, kinds) for key in lost)


def _lacks_rows(index: Index, key: bytes, kinds: Collection[str]) -> bool:
    """Whether an entry has a state, but not all its records of rows."""
    entry = index.entry(key)
    return entry is not None and "state" in entry.kinds and entry.row_start < entry.end and not entry.kinds >= {*kinds}
