"""What a look-up wants of the files that wait to be taken into the index (``adoption``): asked for by name."""

from __future__ import annotations

from collections.abc import Callable

from .adoption import step, take_in
from .folder import CacheFolder
from .index import Index
from .keys import KeySpace, pack
from .tiers import View


def take_in_prompt(
    folder: CacheFolder, view: View, space: KeySpace, tokens: list[int], position: Callable[[], int]
) -> None:
    """Adopt what waits of a prompt, as far as a look-up needs it: full blocks, the leaves of the last one that are a
    prefix of the prompt, the pieces that these name; then leaves further back until ``position()``, where a plan would
    stand now, lies behind them. A key is the hash of its tokens: all that could be there can be asked for. Raises
    OverBudget, sqlite3.Error."""
    packed, size = pack(tokens), 4 * space.block
    parents = [space.root]
    while len(packed) >= size * len(parents):
        key = space.key_packed(parents[-1], packed[size * (len(parents) - 1) : size * len(parents)])
        _take_in_chains(folder, view.index, [key])
        if view.entry(key) is None:
            break
        parents.append(key)
    for depth in range(len(parents) - 1, -1, -1):
        span = packed[size * depth : size * (depth + 1)]
        keys = [space.key_packed(parents[depth], span[:end]) for end in range(4, len(span) + 1, 4)]
        _take_in_chains(folder, view.index, keys)
        if position() >= depth * space.block:
            return


def _take_in_chains(folder: CacheFolder, index: Index, keys: list[bytes]) -> None:
    """Adopt what waits of these entries, and of the pieces that have the rows before theirs."""
    todo, seen, most = keys, set(keys), step(index)
    while files := [file for key in todo for file in index.waiting_of(key)]:
        for i in range(0, len(files), most):
            take_in(folder, index, files[i : i + most])
        bases = {entry.base for key in todo if (entry := index.entry(key)) is not None and entry.base is not None}
        todo = list(bases - seen)
        seen |= bases
