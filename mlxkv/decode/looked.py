"""Explain, asked of an engine that runs: what a prompt would find in the store now, and where it parts from what is
stored. Nothing is read but the index and what RAM knows; ``explain`` reads and verifies the records too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..cache.keys import KeySpace, common, pack, unpack
from ..cache.lookup import REASONS, Lookup
from ..cache.planner import Entries, Plan
from ..cache.store import PrefixStore
from .request import Request
from .sequence import Sequence
from .ticket import Ticket

if TYPE_CHECKING:
    from .loop import Loop


@dataclass(frozen=True)
class Looked:
    """tokens: the prompt's ids. lookup: what a request would report if all records are whole. why: its reason in words.
    same: how many of the first tokens are those of something stored, resume point or not; stored: ids that are stored
    after these, where the prompt goes on differently."""

    tokens: list[int]
    lookup: Lookup
    why: str
    same: int = 0
    stored: list[int] = field(default_factory=list)


def look(loop: Loop, request: Request, most: int) -> Looked:
    """On the engine's thread. ``most``: ids of ``stored``. Raises RequestError."""
    sequence = Sequence(loop.rt, Ticket(request))
    tokens, store = sequence.prompt.tokens, sequence.store
    if store is None:
        return Looked(tokens, Lookup(0, "none", "off", 0), REASONS["off"])
    plan = store.lookup(tokens, request.salt, legacy=False)
    reason = plan.reason if plan.position < len(tokens) - 1 else None
    why = REASONS[reason] if reason else ""
    if plan.unasked:
        why += "; oMLX's folders would be asked for more"
    if reason and store.remote is not None:
        why += f"; the {store.remote.connector.source} store would be asked for more"
    lookup = Lookup(plan.position, _tier(store, plan), reason, None if reason is None else plan.position)
    same, stored = furthest(store.view, store.space(request.salt), tokens)
    return Looked(tokens, lookup, why, same, unpack(stored[: 4 * most]))


def _tier(store: PrefixStore, plan: Plan) -> str:
    """The slowest tier that a plan reads."""
    if plan.position == 0:
        return "none"
    wanted = {(p.entry.key, kind) for p in plan.pieces for kind in p.entry.kinds - {"state"}}
    if plan.state is not None:
        wanted.add((plan.state.key, "state"))
    held = {key: store.ram.entry(key) for key, _ in wanted}
    all_there = all((entry := held[key]) is not None and kind in entry.kinds for key, kind in wanted)
    return "ram" if all_there else "ssd"


def furthest(entries: Entries, space: KeySpace, tokens: list[int]) -> tuple[int, bytes]:
    """(how many first tokens are those of something stored, packed ids that are stored after them where ``tokens`` goes
    on differently)."""
    packed, step = pack(tokens), 4 * space.block
    parent, at = space.root, 0
    while at + step <= len(packed):
        key = space.key_packed(parent, packed[at : at + step])
        if entries.entry(key) is None:
            break
        parent, at = key, at + step
    rest = packed[at : at + step]
    best, after = 0, b""
    for entry in entries.children(parent, rest):
        n = common(entry.tokens, rest)
        if n > best or (n == best and not after):
            best, after = n, entry.tokens[4 * n :]
    ended = at + 4 * best == len(packed)
    return at // 4 + best, b"" if ended else after
