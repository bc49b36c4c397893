"""Commit: drafts of a legacy prefix go the way of a request's records, through RAM and the writer, and are then looked
for: only what is stored with all its rows counts as imported."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from ..planner import Planner
from ..ram import Draft
from ..store import PrefixStore


@dataclass
class Taken:
    """``records`` (key -> kinds) were handed over or were there already, in order; ``nbytes`` of what was new.
    ``complete``: nothing was refused by the writer on the way."""

    records: dict[bytes, frozenset[str]] = field(default_factory=dict)
    nbytes: int = 0
    complete: bool = True


def take(store: PrefixStore, groups: Iterable[list[Draft]], salt: str = "", *, wait: bool) -> Taken:
    """Hand over ``groups``, but what is stored already. With ``wait`` each group is durable before the next is made,
    so that memory stays bounded; without, what the writer's queue has no room for is left out from there on. Raises
    what ``groups`` raises; what was handed over before stays."""
    taken = Taken()
    planner = Planner(store.view, store.space(salt), store.layout)
    for group in groups:
        todo = [d for d in group if not there(store, planner, d.meta.key, d.bodies)]
        taken.records.update((d.meta.key, frozenset(d.bodies)) for d in group)
        if not todo:
            continue
        for draft in reversed(todo):  # what others hang on is the last to leave RAM
            store.ram.put(draft, pin=True)
        if not store.writer.submit(todo):
            store.ram.unpin([d.meta.key for d in todo])
            taken.complete = False
            return taken
        taken.nbytes += sum(d.nbytes for d in todo)
        if wait:
            store.writer.flush()
    return taken


def missing(store: PrefixStore, records: Mapping[bytes, frozenset[str]], salt: str = "") -> dict[bytes, frozenset[str]]:
    """Those of these records that are not on disk, or hang on rows that are not."""
    planner = Planner(store.index, store.space(salt), store.layout)
    out = {}
    for key, kinds in records.items():
        entry = store.index.entry(key) if planner.complete(key) else None
        if lacking := kinds - (entry.kinds if entry is not None else frozenset()):
            out[key] = lacking
    return out


def there(store: PrefixStore, planner: Planner, key: bytes, kinds: Collection[str]) -> bool:
    """Whether RAM or disk has these records of an entry, and all rows that it needs."""
    entry = store.view.entry(key)
    return entry is not None and planner.complete(key) and {*kinds} <= entry.kinds
