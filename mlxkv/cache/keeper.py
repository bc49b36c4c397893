"""The keeper: applies the boundary policy to what is on disk. Runs on the writer's thread, with the writer's index.

Before a group is written it takes out states that the budget of their chain would remove at once, and what the day's
write budget has no room for; afterwards it deletes states that are superseded or over the budget. Rows are never
deleted here. What it takes out stays in RAM for as long as there is room.
"""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property

from .daily import Daily, today
from .folder import CacheFolder
from .index import PAGES_A_ROW, Entry, Index
from .keys import KeySpace, pack
from .layout import Layout
from .planner import Planner
from .policy import Policy, State, best_role, may_write, superseded, thin
from .ram import Draft, Ram
from .record import Reader, RecordError

log = logging.getLogger("mlxkv.cache")

#: how many chains' states, and how many states' roles, are remembered
_CHAINS, _ROLES = 64, 4096
#: a tip that was written so many times within so many seconds, and is gone again, is not worth it: the folder is too
#: small for what it is asked to keep
_TIMES, _WITHIN = 2, 3600.0


@dataclass(frozen=True)
class Chain:
    """The tokens (packed) that a request's state has processed, and what its places are. ``resumed``: where it was
    restored; ``roles``: of the prompt's boundaries; ``turn``: where the last message before the newest user message
    ends."""

    space: KeySpace
    packed: bytes
    resumed: int
    roles: dict[int, str]
    turn: int

    def __len__(self) -> int:
        return len(self.packed) // 4

    @cached_property
    def blocks(self) -> list[bytes]:
        """Keys of what the entries of each block hang on: the root, then the full blocks."""
        keys, step = [self.space.root], 4 * self.space.block
        for at in range(0, len(self.packed) - step + 1, step):
            keys.append(self.space.key_packed(keys[-1], self.packed[at : at + step]))
        return keys

    @property
    def prompt_end(self) -> int:
        """Where this turn's n−1 is, or where its prefill was cancelled."""
        tips = [p for p, role in self.roles.items() if role == "tip"]
        return min(max(tips, default=len(self)), len(self))

    def holds(self, draft: Draft) -> bool:
        """Whether an entry lies on this chain."""
        m = draft.meta
        depth, offset = divmod(m.start, self.space.block)
        return (
            (m.root, offset) == (self.space.root, 0)
            and depth < len(self.blocks)
            and self.blocks[depth] == m.parent
            and self.packed[4 * m.start : 4 * m.end] == pack(m.tokens)
        )


@dataclass
class Skipped:
    """Bytes that were not written, by what they are (``tip``, ``state``, ``rows``) and why: the day's write budget, or
    the chain's budget of states; tips that would have been written again and again; and states that were deleted."""

    daily: dict[str, int] = field(default_factory=dict)
    thinned: int = 0
    again: int = 0
    deleted_states: int = 0


class Keeper:
    def __init__(self, folder: CacheFolder, layout: Layout, ram: Ram, policy: Policy) -> None:
        self._folder, self._layout, self._ram, self._policy = folder, layout, ram, policy
        self.daily = Daily(folder.path)
        self.skipped = Skipped()
        self._chains: OrderedDict[bytes, list[State]] = OrderedDict()
        self._known: OrderedDict[bytes, tuple[str, int]] = OrderedDict()  # state -> role, bytes on disk
        self._said: set[tuple[str, str]] = set()
        self._tips: OrderedDict[bytes, list[float]] = OrderedDict()  # -> when each was written

    def admit(self, index: Index, group: list[Draft], chain: Chain | None, planner: Planner) -> list[Draft]:
        """What of a group is to be written, with what it hangs on where only RAM has that."""
        if self._ram.budget and self.daily.used() < self._policy.daily:
            group = self._with_ancestors(group, planner)
        if chain is not None:
            group = self._thinned(index, group, chain)
        return self._affordable([self._not_again(index, draft) for draft in group])

    def clean(self, index: Index, chain: Chain, pinned: Collection[bytes] = ()) -> None:
        """Delete states on disk that are superseded, or over the chain's budget; not those ``pinned`` now. Files go
        first, as in ``eviction``: the ledger counts a row without a file, but not a file without a row."""
        states = self._states(index, chain)
        where = (chain.prompt_end, chain.turn)
        gone = superseded(states, *where)
        gone |= thin([s for s in states if s.position not in gone], self._budget(chain), *where)
        if not gone:
            return
        names = [s.name for s in states if s.position in gone and s.name not in pinned]
        step = max(1, index.pages() // PAGES_A_ROW)
        for i in range(0, len(names), step):
            with index.transaction(checked=False):  # it only gives back
                for key in names[i : i + step]:
                    try:
                        self._folder.remove(key, "state")
                    except OSError:
                        continue  # it is still there, and counted
                    index.drop_record(key, "state")
                    self._known.pop(key, None)
                    self.skipped.deleted_states += 1

    def forget(self) -> None:
        """The folder is another one: what was in it is no longer known."""
        self._chains.clear()
        self._known.clear()

    def _budget(self, chain: Chain) -> int:
        rows = sum(t.nbytes(len(chain)) for kind in ("rows", "window") for t in self._layout.tensors(kind))
        return self._policy.budget(rows)

    def _with_ancestors(self, group: list[Draft], planner: Planner) -> list[Draft]:
        here = {d.meta.key for d in group}
        found: dict[bytes, Draft] = {}
        todo = [key for d in group for key in d.needs]
        while todo:
            key = todo.pop()
            if key in here or key in found or key == group[0].meta.root or planner.complete(key):
                continue
            draft = self._ram.draft(key)
            if draft is None:
                continue  # it is nowhere: what hangs on it will be passed over
            found[key] = without_state(draft) if draft.meta.role == "tip" else draft
            todo += draft.needs
        return [*sorted(found.values(), key=lambda d: d.meta.end), *group]

    def _thinned(self, index: Index, group: list[Draft], chain: Chain) -> list[Draft]:
        states = {s.position: s for s in self._states(index, chain)}
        new = {
            d.meta.end: State(d.meta.end, self._role(chain, d.meta.end, d.meta.role), d.bodies["state"].nbytes)
            for d in group
            if "state" in d.bodies and chain.holds(d)
        }
        gone = thin(list((states | new).values()), self._budget(chain), chain.prompt_end, chain.turn)
        out = []
        for draft in group:
            if draft.meta.end in gone and "state" in draft.bodies and chain.holds(draft):
                self.skipped.thinned += draft.bodies["state"].nbytes
                draft = without_state(draft)
            out.append(draft)
        return [d for d in out if d.bodies or d.answer is not None]

    def _affordable(self, group: list[Draft]) -> list[Draft]:
        """What the day's write budget has room for. Without its rows a draft is dropped whole, and by the writer what
        hangs on it."""
        used = self.daily.used()
        out = []
        for draft in group:
            rows = sum(b.nbytes for kind, b in draft.bodies.items() if kind != "state")
            if rows and not may_write("rows", rows, used, self._policy.daily):
                self._skip("rows", draft.nbytes)
                continue
            used += rows
            state = draft.bodies["state"].nbytes if "state" in draft.bodies else 0
            what = "tip" if draft.meta.role in ("tip", "ladder") else "state"
            if state and not may_write(what, state, used, self._policy.daily):
                self._skip(what, state)
                draft = without_state(draft)
            else:
                used += state
            if draft.bodies or draft.answer is not None:
                out.append(draft)
        return out

    def _not_again(self, index: Index, draft: Draft) -> Draft:
        """The draft, without a tip that has been written, and has gone, too often."""
        key = draft.meta.key
        if draft.meta.role not in ("tip", "ladder") or "state" not in draft.bodies:
            return draft
        if any(kind == "state" for kind, _ in index.records_of(key)):
            return draft
        now = time.monotonic()
        times = [t for t in self._tips.get(key, ()) if now - t < _WITHIN]
        if len(times) >= _TIMES:
            self.skipped.again += draft.bodies["state"].nbytes
            return without_state(draft)
        self._tips[key] = [*times, now]
        self._tips.move_to_end(key)
        while len(self._tips) > _ROLES:
            self._tips.popitem(last=False)
        return draft

    def _skip(self, what: str, nbytes: int) -> None:
        self.skipped.daily[what] = self.skipped.daily.get(what, 0) + nbytes
        if (today(), what) not in self._said:
            self._said.add((today(), what))
            name = {"tip": "tips", "state": "states", "rows": "rows"}[what]
            limit = self._policy.daily // 10**6
            log.warning("today's write budget of %d MB has no room for more %s: kept in RAM only", limit, name)

    def _states(self, index: Index, chain: Chain) -> list[State]:
        """The states on disk along a chain, oldest first. What lies before the place where the request was resumed is
        remembered from the turn before: a turn costs what it adds."""
        block, blocks = chain.space.block, chain.blocks
        names: list[tuple[int, bytes]] = []
        depth = 0
        for d in range(min(len(blocks) - 1, chain.resumed // block), 0, -1):
            if blocks[d] in self._chains:
                names, depth = [(s.position, s.name) for s in self._chains[blocks[d]]], d
                break
        found = [s for p, key in names if (s := self._state(chain, p, index.entry(key))) is not None]
        for d in range(depth, len(blocks)):
            start = d * block
            span = chain.packed[4 * start : 4 * (start + block)]
            entries = {e.end: e for e in index.children(blocks[d], span) if span.startswith(e.tokens)}
            for end in sorted(entries):
                if (s := self._state(chain, end, entries[end])) is not None:
                    found.append(s)
            if start + block not in entries:
                break
        end = block * (len(blocks) - 1)
        self._chains[blocks[-1]] = [s for s in found if s.position <= end]
        self._chains.move_to_end(blocks[-1])
        while len(self._chains) > _CHAINS:
            self._chains.popitem(last=False)
        return found

    def _state(self, chain: Chain, position: int, entry: Entry | None) -> State | None:
        if entry is None or "state" not in entry.kinds:
            return None
        if entry.key not in self._known:
            try:
                with Reader.open(self._folder.file(entry.key, "state")) as reader:
                    self._known[entry.key] = reader.meta.role, os.fstat(reader.fd).st_size
            except RecordError:
                return None  # a look-up will find out, and say so
        self._known.move_to_end(entry.key)
        while len(self._known) > _ROLES:
            self._known.popitem(last=False)
        role, size = self._known[entry.key]
        return State(position, self._role(chain, position, role), size, entry.key)

    @staticmethod
    def _role(chain: Chain, position: int, role: str) -> str:
        """A place may have become a message's end since its state was taken."""
        return best_role(role, chain.roles[position]) if position in chain.roles else best_role(role)


def without_state(draft: Draft) -> Draft:
    """The rest of a draft; it may have no body left."""
    return replace(draft, bodies={k: b for k, b in draft.bodies.items() if k != "state"})
