"""The prefix store: look up, restore, record. One store belongs to the engine's thread; its writer has its own."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path

from .folder import CacheFolder, FolderRefused, open_index
from .inspect import stats as stats  # part of the store's interface
from .keys import Identity, KeySpace, answer_digest, common, pack, root_key, unpack
from .layout import Layout
from .lookup import Lookup
from .planner import Plan, Planner
from .record import MissingRecord
from .recorder import Recorder
from .restore import RestoreFailed, Restorer
from .state import SequenceState
from .writer import Writer

log = logging.getLogger("mlxkv.cache")

BLOCK = 256
#: how long a look-up waits for records of a prefix that are being written this moment, seconds
PENDING_WAIT = 2.0
#: how long the engine waits to note a use while another process writes the index, seconds
INDEX_WAIT = 0.5


class PrefixStore:
    """Restores and keeps the state of token prefixes under one folder, for one model identity and layout.

    ``folder`` is created (0700). ``block`` is the grid in tokens. ``queue_limit`` bounds bytes waiting to be written,
    ``disk_floor`` the bytes of free disk below which nothing is written. Raises FolderRefused.
    """

    def __init__(
        self,
        folder: Path,
        identity: Identity,
        layout: Layout,
        *,
        block: int = BLOCK,
        queue_limit: int = 2 << 30,
        disk_floor: int = 256 << 20,
        allow_unprotected: bool = False,
        software: str = "",
    ) -> None:
        self.folder = CacheFolder(folder)
        self.folder.prepare(allow_unprotected=allow_unprotected)
        self.identity, self.layout, self.block, self.software = identity, layout, block, software
        try:
            self.folder.clear_leftovers()
            self.index = open_index(self.folder)
            self.index.wait_at_most(INDEX_WAIT)
        except (OSError, sqlite3.Error) as e:
            raise FolderRefused(f"The index of {folder} cannot be opened: {e}.") from e
        self.faults: dict[str, int] = {}
        self._spaces: dict[str, KeySpace] = {}
        self.writer = Writer(
            self.folder,
            lambda index, root: Planner(index, KeySpace(root, block), layout),
            limit=queue_limit,
            floor=disk_floor,
            name="mlxkv-writer",
        )

    def space(self, salt: str = "") -> KeySpace:
        if salt not in self._spaces:
            if len(self._spaces) > 64:
                self._spaces.clear()
            self._spaces[salt] = KeySpace.of(self.identity, self.block, salt)
        return self._spaces[salt]

    def lookup(self, tokens: list[int], salt: str = "") -> Plan:
        """The plan that covers most of ``tokens`` but the last. Waits briefly for records that are being written."""
        space = self.space(salt)
        limit = len(tokens) - 1
        planner = Planner(self.index, space, self.layout)
        try:
            coming = self._coming(space, tokens)  # before the plan: what is done in between is seen by it
            plan = planner.plan(tokens, limit)
            keys = {key for key, reach in coming.items() if reach > plan.position}
            late = bool(keys) and plan.position < limit and not self.writer.wait_for(keys, PENDING_WAIT)
            if keys and plan.position < limit:
                plan = planner.plan(tokens, limit)
            if plan.reason == "empty" and plan.position == 0:
                plan.reason = self._elsewhere(space, tokens, salt) or "empty"
            if plan.reason is not None and late:
                plan.reason = "pending"
            return plan
        except Exception as e:  # whatever an index may hold: a miss, never the request's failure
            self.folder.suspect(e)
            return Plan(parent=space.root, reason=self._fault("io_error", f"the index: {e}"))

    def restore(
        self, plan: Plan, tokens: list[int], new_state: Callable[[], SequenceState], capacity: int, salt: str = ""
    ) -> tuple[SequenceState, Lookup, Plan]:
        """Execute ``plan`` on a fresh state. A record that fails is a miss from there on: its verdict is kept, the
        plan is made again without it, and the reason is the failure's. Never raises for a store fault."""
        space = self.space(salt)
        limit = len(tokens) - 1
        planner = Planner(self.index, space, self.layout)
        bad: set[tuple[bytes, str]] = set()
        failure: str | None = None
        while plan.position > 0:
            state = new_state()
            try:
                Restorer(self.folder, space, self.layout, tokens).run(plan, state, capacity)
            except RestoreFailed as e:
                # rows without their state: said as a look-up after a restart would say it
                rows = self.folder.file(e.entry.key, "rows")
                gone = e.kind == "state" and isinstance(e.error, MissingRecord) and rows.exists()
                failure = failure or ("no_state" if gone else e.error.reason)
                bad.add((e.entry.key, e.kind))
                self._discard(e)
                try:
                    plan = planner.plan(tokens, limit, bad)
                except sqlite3.Error:
                    plan = Plan(parent=space.root)
                continue
            except Exception as e:
                failure = self._fault("corrupt", repr(e))
                plan = Plan(parent=space.root)
                continue
            with contextlib.suppress(sqlite3.Error):
                self.index.touch({p.entry.key for p in plan.pieces})
            reason = failure or plan.reason if plan.position < limit else None
            return state, Lookup(plan.position, "ssd", reason, None if reason is None else plan.position), plan
        reason = (failure or plan.reason or "empty") if limit > 0 else None
        return new_state(), Lookup(0, "none", reason, None if reason is None else 0), plan

    def recorder(
        self, state: SequenceState, tokens: list[int], plan: Plan, barrier: Callable[[], None], salt: str = ""
    ) -> Recorder:
        """A recorder that goes on where ``plan`` was restored. ``barrier`` returns once the device is known to have
        done all its work without an error, and raises otherwise."""
        space = self.space(salt)
        planner = Planner(self.index, space, self.layout)

        def stored(key: bytes) -> tuple[bool, bool]:
            try:
                entry = self.index.entry(key)
                return (entry is not None and planner.complete(key), entry is not None and "state" in entry.kinds)
            except sqlite3.Error:
                return (False, False)

        return Recorder(
            state=state,
            tokens=tokens,
            space=space,
            layout=self.layout,
            identity=self.identity,
            software=self.software,
            submit=self.writer.submit,
            stored=stored,
            plan=plan,
            barrier=barrier,
        )

    def answer_ids(self, prompt: list[int], text: str, salt: str = "") -> list[int] | None:
        """The ids that ``text`` was sampled as after ``prompt``, if this store remembers the answer.

        A hint: the caller must check that they decode to ``text``.
        """
        space = self.space(salt)
        digest = answer_digest(space.root, prompt, text)
        try:
            keys = {d.meta.key for d in self.writer.waiting() if d.answer is not None and d.answer[0] == digest}
            self.writer.wait_for(keys, PENDING_WAIT)
            found = self.index.answer(digest)
            if found is None:
                return None
            key, first, last = found
            if first != len(prompt):
                return None
            ids: list[int] = [] if last is None else [last]
            at: int | None = None
            while (entry := self.index.entry(key)) is not None and entry.end > first and at in (None, entry.end):
                ids[:0] = unpack(entry.tokens)[max(0, first - entry.start) :]
                if entry.start <= first:
                    known = entry.tokens.startswith(pack(prompt[entry.start :]))
                    return ids if known and all(0 <= i < 1 << 32 for i in ids) else None
                key, at = entry.parent, entry.start
        except Exception as e:
            self._fault("io_error", f"the index: {e}")
        return None

    def close(self) -> None:
        """Write what waits, then release the folder."""
        self.writer.close()
        self.index.close()

    def _coming(self, space: KeySpace, tokens: list[int]) -> dict[bytes, int]:
        """Keys of entries that are being written and could serve ``tokens``, and how far they reach."""
        waiting = [d.meta for d in self.writer.waiting() if d.meta.root == space.root]
        if not waiting:
            return {}
        packed, parent, parents = pack(tokens), space.root, {space.root: 0}
        for a in range(0, len(tokens) - self.block + 1, self.block):
            parent = space.key_packed(parent, packed[4 * a : 4 * (a + self.block)])
            parents[parent] = a + self.block
        out: dict[bytes, int] = {}
        for meta in waiting:
            if parents.get(meta.parent) == meta.start:
                shared = common(pack(meta.tokens), packed[4 * meta.start :])
                if shared == len(meta.tokens) or self.layout.growing_only:
                    out[meta.key] = meta.start + shared
        return out

    def _elsewhere(self, space: KeySpace, tokens: list[int], salt: str) -> str | None:
        """Whether the same tokens are stored under another identity, and what differs."""
        mine = (self.identity.fingerprint, self.identity.compute_json(), self.identity.layout)
        found: set[str] = set()
        for root, _, fingerprint, compute, layout, block in self.index.roots():
            if root == space.root or root_key(fingerprint, compute, layout, block, salt) != root:
                continue  # what is stored under another salt is nobody's business
            first = pack(tokens[:block])
            if not any(first.startswith(e.tokens) for e in self.index.children(root, first)):
                continue
            if fingerprint != mine[0]:
                found.add("other_model")
            elif compute != mine[1]:
                found.add("other_numerics")
            else:
                found.add("other_layout")  # or another block size
        # the nearest miss tells most: the same weights under other numerics, rather than some other model
        return next((r for r in ("other_numerics", "other_layout", "other_model") if r in found), None)

    def _discard(self, failed: RestoreFailed) -> None:
        entry, kind, error = failed.entry, failed.kind, failed.error
        self._fault(error.reason, str(failed))
        self.folder.set_aside(self.folder.file(entry.key, kind), error.action)
        if error.action in ("quarantine", "delete", "forget"):
            with contextlib.suppress(sqlite3.Error):
                self.index.drop_record(entry.key, kind)

    def _fault(self, reason: str, detail: str) -> str:
        self.faults[reason] = self.faults.get(reason, 0) + 1
        log.warning("cache miss (%s): %s", reason, detail)
        return reason
