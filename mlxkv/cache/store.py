"""The prefix store: look up, restore, record. One store belongs to the engine's thread; its writer has its own."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError
from .adoption import AT_ONCE, Adopter, Progress
from .folder import NONSENSE, CacheFolder, FolderRefused, adopt, link, only_writing_failed
from .index import Entry, Index, damaged
from .inspect import stats as stats  # part of the store's interface
from .keeper import Keeper
from .keys import Identity, KeySpace, answer_digest, pack, root_key, unpack
from .layout import Layout
from .ledger import SHARE, Ledger, default_budget, minimum
from .lock import FolderLock, LockRefused
from .lookup import Lookup
from .merging import Merger
from .opening import open_index
from .planner import Plan, Planner
from .policy import Policy
from .ram import Ram
from .record import MissingRecord
from .recorder import Recorder
from .restore import RestoreFailed
from .restoring import Restores, Restoring
from .state import SequenceState
from .tiers import Handover, Ssd, View
from .wanted import take_in_prompt
from .writer import Writer

if TYPE_CHECKING:
    from .exchange import RemoteTier
    from .legacy.tier import LegacyTier
    from .objects.shared import Shared

log = logging.getLogger("mlxkv.cache")

BLOCK = 256
#: how long closing may go on writing what waits, seconds
CLOSE_WITHIN = 10.0
#: seconds between attempts to open a folder again that was removed or replaced under way
REOPEN = 30.0
#: how long the engine waits to note a use while another process writes the index, seconds
INDEX_WAIT = 0.5


class PrefixStore:
    """Restores and keeps the state of token prefixes under one folder, for one model identity and layout.

    ``folder`` is created (0700). ``block`` is the grid in tokens. ``budget`` bounds what all files in the folder weigh,
    bytes (None: a tenth of the free disk, at most 32 GB); where several stores have it open, the smallest counts.
    ``share`` is the part of it that one model may have when space is short and others have entries. ``queue_limit``
    bounds bytes waiting to be written, ``disk_floor`` the bytes of free disk below which nothing is written,
    ``ram_budget`` the bytes of records kept in RAM (0: none, and tips are written at once). ``policy`` says which
    states are kept and how much is written a day. ``store_bits`` (4 or 8) has rows stored quantised, under keys of
    their own; None: as the layout says, which is exact for one that was probed. ``progress`` is told (records done,
    of how many) while the index is built again. ``at_once``: so many files that the index does not know are taken into
    it now; the others when they are asked for, and ``behind`` (``adoption``). Raises FolderRefused, and ConfigError for
    a budget in which nothing would fit.
    """

    #: whether what it is handed is written
    keeps = True
    #: where tokens are looked for that neither RAM nor disk has
    legacy: LegacyTier | None = None
    #: and before that, on other machines perhaps
    remote: RemoteTier | None = None
    #: the object store that ``remote`` asks, and to which is sent what becomes durable here
    shared: Shared | None = None
    #: bytes that this store lets the folder weigh; None where it writes nothing
    budget: int | None = None

    def __init__(
        self,
        folder: Path,
        identity: Identity,
        layout: Layout,
        *,
        block: int = BLOCK,
        budget: int | None = None,
        share: float = SHARE,
        queue_limit: int = 2 << 30,
        disk_floor: int = 256 << 20,
        ram_budget: int = 0,
        store_bits: int | None = None,
        policy: Policy | None = None,
        allow_unprotected: bool = False,
        software: str = "",
        progress: Progress | None = None,
        at_once: int = AT_ONCE,
        behind: bool = True,
    ) -> None:
        if store_bits is not None:
            layout = layout.packed(store_bits)
            identity = replace(identity, layout=layout.digest)
        self.folder = CacheFolder(folder)
        self.identity, self.layout, self.block, self.software = identity, layout, block, software
        least = minimum(layout, block)
        if budget is not None and budget < least:
            raise ConfigError(
                f"The cache budget is {budget:,} bytes; one block of {block} tokens of this model and the index need "
                f"{least:,}.",
                f"Give --cache-budget at least {-(-least // 10**6)}MB, or --no-cache.",
            )
        self.faults: dict[str, int] = {}
        self._wanted, self._least, self._allow_unprotected = budget, least, allow_unprotected
        self._at_once, self._behind = at_once, behind
        self._open(progress)
        self._again = float("-inf")
        self._spaces: dict[str, KeySpace] = {}
        self.restores = Restores()
        self.ram = Ram(ram_budget, lambda key, kind: self.writer.evicted(key, kind))
        self.view = View(self.ram, Ssd(self.folder, self.index), layout.kinds)
        self._running: Callable[[], Handover | None] = lambda: None
        self._handovers: list[weakref.ref[Handover]] = []
        policy = policy or Policy()
        self.writer = Writer(
            self.folder,
            lambda index, root: Planner(index, KeySpace(root, block), layout),
            ram=self.ram,
            keeper=Keeper(self.folder, layout, self.ram, policy),
            store=self._store_id(),
            stopped=self._stopped(),
            pinned=lambda: self.restores.pinned,
            share=share,
            limit=queue_limit,
            floor=disk_floor,
            idle_s=policy.idle_s,
            name="mlxkv-writer",
            merger=lambda commit, interrupted: Merger(
                self.folder,
                commit,
                lambda root: Planner(commit.index, KeySpace(root, block), layout),
                layout,
                block,
                self.ram,
                daily=policy.daily,
                pinned=lambda: self.restores.pinned,
                interrupted=interrupted,
            ),
            busy=self._busy,
            stored=self._send,
        )
        self.adopter = self._adopt_behind()
        self._count_unseen()

    def _send(self, key: bytes) -> None:
        """An entry has become durable. On the writer's thread."""
        if self.shared is not None:
            self.shared.send(key)

    def _busy(self) -> bool:
        """A request that may store something is running, or restoring."""
        running = self._running()
        return bool(self.restores.pinned) or (running is not None and not running.done)

    def _count_unseen(self) -> None:
        """Count folders of records that could not be listed; opening the index has said which."""
        for begin, error in self.folder.unseen.items():
            self.writer.counters.fault("open", f"{self.folder.records / begin}: {error.strerror or error}")

    def _adopt_behind(self) -> Adopter | None:
        return Adopter(self.folder, self._busy) if self._behind and self.index.any_waiting() else None

    def _store_id(self) -> int:
        """The store's id in the ledger."""
        return self.ledger.store

    def _stopped(self) -> str:
        """Why nothing can be written from the start, or ''."""
        return ""

    def _open(self, progress: Progress | None = None) -> None:
        """Lock the folder, bring its index in step, take part in its ledger, and evict what is over the budget. Raises
        FolderRefused; nothing is changed in this object then."""
        self.folder.prepare(allow_unprotected=self._allow_unprotected)
        path = self.folder.path
        try:
            lock = FolderLock(path)
        except (LockRefused, OSError) as e:
            why = f"The cache folder {path} cannot be locked: {e}. Choose another --cache-dir."
            raise FolderRefused(why, readable=only_writing_failed(e)) from e
        try:
            self.folder.clear_leftovers()
            try:
                index, ledger, mine = self._join(lock, progress)
            except (sqlite3.DatabaseError, *NONSENSE) as e:  # what the ledger and eviction look at shows it later
                if not self.folder.suspect(damaged(str(e)) if isinstance(e, NONSENSE) else e):
                    raise
                index, ledger, mine = self._join(lock, progress)
        except (OSError, sqlite3.Error, LockRefused) as e:
            lock.close()
            readable = only_writing_failed(e)
            raise FolderRefused(f"The index of {path} cannot be opened: {e}.", readable=readable) from e
        except BaseException:
            lock.close()
            raise
        self._lock, self.index, self.ledger, self.budget = lock, index, ledger, mine

    def _join(self, lock: FolderLock, progress: Progress | None) -> tuple[Index, Ledger, int]:
        """Open the index, take part in the ledger and bring the folder down to its budget; returns index, ledger and
        that budget, bytes. Raises sqlite3.Error, FolderRefused; the index is closed then."""
        path, least = self.folder.path, self._least

        def allowed(size: int) -> int:
            return default_budget(path, size) if self._wanted is None else self._wanted

        index = open_index(self.folder, lock, budget=allowed, progress=progress, at_once=self._at_once)
        try:
            mine = allowed(index.charge())
            if mine < least:
                raise FolderRefused(
                    f"The disk of {path} is too full: a tenth of what is free is {mine:,} bytes, and "
                    f"{least:,} are needed. Free some space, or say with --cache-budget how much may be used."
                )
            self.folder.quarantine_limit = min(self.folder.quarantine_limit, mine // 8)
            ledger = Ledger.join(index, self.folder, mine)
            self._enforce(ledger, mine)
            lock.share()
            index.wait_at_most(INDEX_WAIT)
        except BaseException:
            index.close()
            raise
        return index, ledger, mine

    def _renew(self) -> None:
        """If the folder, its lock or its index was removed or replaced under way, open it again. Called where no record
        is being read: nothing of this store is in the old one then but groups that the writer has given up. Where
        that fails, nothing is written until the next attempt."""
        if self.restores.under_way:
            return
        lost = self.writer.lost or self.index.replaced() or self._lock.lost()
        if not lost or time.monotonic() < self._again or not self.writer.pause(INDEX_WAIT):
            return
        if self.adopter is not None and not self.adopter.close(INDEX_WAIT):
            return
        self._again = time.monotonic() + REOPEN
        with contextlib.suppress(Exception):  # where the index is still the one that was opened
            self.ledger.leave()
        self._lock.close()  # or a folder that must be had alone would be refused to ourselves
        old = self.index
        try:
            self._open()
        except FolderRefused as e:
            log.warning("the prefix store writes nothing: %s It is tried again later.", e)
            return
        old.close()
        self.view.ssd.index = self.index
        self.writer.renew(self.ledger.store)
        self.adopter = self._adopt_behind()
        self._count_unseen()
        log.warning("the cache folder %s was removed or replaced under way: it was opened again", self.folder.path)

    def _enforce(self, ledger: Ledger, mine: int) -> None:
        ledger.reclaim()
        budget = ledger.index.budget() or mine
        for _ in range(4):
            if (over := ledger.index.charge() - budget) <= 0:
                return
            if not ledger.make_room(over).bytes:
                break
        if (over := ledger.index.charge() - budget) > 0:
            ledger.leave()
            raise FolderRefused(
                f"Files that are not the store's, or the index, take up the cache budget of {budget:,} bytes in "
                f"{self.folder.path}: {over:,} too many. Remove them, or raise --cache-budget."
            )

    def space(self, salt: str = "") -> KeySpace:
        if salt not in self._spaces:
            if len(self._spaces) > 64:
                self._spaces.clear()
            self._spaces[salt] = KeySpace.of(self.identity, self.block, salt)
        return self._spaces[salt]

    def lookup(self, tokens: list[int], salt: str = "", *, legacy: bool = True) -> Plan:
        """The plan that covers most of ``tokens`` but the last, from what RAM and disk hold together. Legacy folders
        are asked where these know nothing further, which may take long: with ``legacy=False``, only once the plan is
        executed (``begin``), on another thread."""
        self.restores.tidy()
        self._renew()
        space = self.space(salt)
        limit = len(tokens) - 1
        self.view.error = None
        try:
            planner = Planner(self.view, space, self.layout)
            known = self._take_in(planner, tokens, limit)
            plan = planner.plan(tokens, limit)
            if self.legacy is not None and not salt and plan.position < limit and self.view.error is None:
                if not legacy:
                    plan.unasked = True
                elif keys := self.legacy.extend(self, tokens, plan.position):
                    plan = planner.plan(tokens, limit)
                    plan.legacy = keys
            if self.view.error is not None:  # what RAM holds is still good
                self.folder.suspect(self.view.error)
                reason = self._fault("io_error", f"the index: {self.view.error}")
                plan.reason = reason if plan.position < limit else None
            elif plan.reason == "empty" and plan.position == 0:
                plan.reason = self._elsewhere(space, tokens, salt) or "empty"
            if not known and plan.reason in ("empty", "different_tokens", "no_state"):
                plan.reason = "pending"
            return plan
        except Exception as e:  # whatever an index may hold: a miss, never the request's failure
            self.folder.suspect(e)
            return Plan(parent=space.root, reason=self._fault("io_error", f"the index: {e}"))

    def _take_in(self, planner: Planner, tokens: list[int], limit: int) -> bool:
        """Take into the index what waits of a prompt. False if something may be stored that no look-up can find yet."""
        try:
            if not self.index.any_waiting():
                return True
            found = take_in_prompt(
                self.folder,
                self.view,
                planner.space,
                tokens,
                lambda: planner.plan(tokens, limit).position,
                self.layout.row_kinds,
            )
        except (sqlite3.Error, OSError) as e:  # another process writes: what waits is a miss
            self.folder.suspect(e)
            return False
        # who shares the first tokens of a block only cannot be asked for
        return found and not self.layout.growing_only

    def restore(
        self, plan: Plan, tokens: list[int], new_state: Callable[[], SequenceState], capacity: int, salt: str = ""
    ) -> tuple[SequenceState, Lookup, Plan]:
        """Execute ``plan`` on a fresh state. A record that fails is a miss from there on: its verdict is kept, the
        plan is made again without it, and the reason is the failure's. Never raises for a store fault."""
        return self.begin(plan, tokens, new_state, capacity, salt).finish()

    def begin(
        self, plan: Plan, tokens: list[int], new_state: Callable[[], SequenceState], capacity: int, salt: str = ""
    ) -> Restoring:
        """The same in steps: while other threads read, this one does what it likes. Whoever does not want the result
        any more says so with ``cancel()``. Raises what ``new_state`` raises."""
        return Restoring(self, plan, tokens, new_state, capacity, salt)

    def _note_use(self, key: bytes) -> None:
        self.writer.touch(key)

    def recorder(
        self,
        state: SequenceState,
        tokens: list[int],
        plan: Plan,
        barrier: Callable[[], None],
        salt: str = "",
        *,
        roles: dict[int, str] | None = None,
        turn: int = 0,
    ) -> Recorder:
        """A recorder that goes on where ``plan`` was restored. ``barrier`` returns once the device is known to have
        done all its work without an error, and raises otherwise. ``roles``: what the boundaries of the prompt are
        (position -> one of ``policy.ROLES``); ``turn``: where the last message before the newest user message ends."""
        space = self.space(salt)
        planner = Planner(self.view, space, self.layout)
        handover = Handover(self.ram, self.writer, space, plan, tokens, roles or {}, turn)
        alive = [ref for ref in self._handovers if (h := ref()) is not None and not h.done]
        self._handovers = refs = [*alive, weakref.ref(handover)]
        self._running = lambda: next((h for ref in refs if (h := ref()) is not None and not h.done), None)

        def stored(key: bytes) -> tuple[bool, bool]:
            entry = self.view.entry(key)
            return (entry is not None and planner.whole(key), entry is not None and "state" in entry.kinds)

        return Recorder(
            state=state,
            tokens=tokens,
            space=space,
            layout=self.layout,
            identity=self.identity,
            software=self.software,
            handover=handover,
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
            found = self.view.answer(digest)
            if found is None:
                return None
            key, first, last = found
            if first != len(prompt):
                return None
            ids: list[int] = [] if last is None else [last]
            at: int | None = None
            while (entry := self.view.entry(key)) is not None and entry.end > first and at in (None, entry.end):
                ids[:0] = unpack(entry.tokens)[max(0, first - entry.start) :]
                if entry.start <= first:
                    known = entry.tokens.startswith(pack(prompt[entry.start :]))
                    return ids if known and all(0 <= i < 1 << 32 for i in ids) else None
                key, at = entry.parent, entry.start
        except Exception as e:
            self._fault("io_error", f"the index: {e}")
        return None

    def close(self, timeout: float = CLOSE_WITHIN) -> None:
        """Give up what is being restored and write what waits, tips too, for at most so many seconds; then release the
        folder."""
        self.restores.close(timeout)
        adopted = self.adopter is None or self.adopter.close(timeout)
        written = self.writer.close(timeout)
        if self.shared is not None:
            self.shared.close(timeout)
        if self.remote is not None:
            self.remote.close(timeout)
        if not written or not adopted:
            # a write that the disk does not answer may still put its files there: what it reserved stays, and the lock
            # with it, until this process ends
            self.index.close()
            return
        if self.legacy is not None:
            self.legacy.close(self)
        with contextlib.suppress(Exception):  # what is left open is settled by whoever opens the folder next
            self.ledger.leave()
        self.index.close()
        self._lock.close()

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

    def _adopt(self, entry: Entry, failed: str = "") -> bool:
        """Have the index say of an entry's rows what its files say; last the one of the kind that ``failed``."""
        key = entry.key
        log.info("the index is corrected: the rows of %s start elsewhere than it says", key.hex()[:12])
        try:
            with self.index.transaction(checked=False):  # the files are there, whatever they weigh
                for kind in sorted(entry.kinds - {"state"}, key=lambda k: k == failed):
                    adopt(self.folder, self.index, key, kind, self.folder.file(key, kind))
                self.ledger.count()  # what failed is in quarantine now
        except (sqlite3.Error, OSError):
            return False
        return True

    def _merged(self, failed: RestoreFailed) -> bool:
        """Whether a leaf's rows are gone because they were merged into a block after the plan was made."""
        if failed.kind == "state" or not isinstance(failed.error, MissingRecord):
            return False
        # who merges removes files before the index says so: behind its transaction, not before
        with contextlib.suppress(sqlite3.Error, OSError), self.index.transaction(checked=False):
            now = self.index.entry(failed.entry.key)
            return now is not None and now.row_start == now.end != failed.entry.row_start
        return False

    def _discard(self, failed: RestoreFailed) -> None:
        entry, kind, error = failed.entry, failed.kind, failed.error
        self._fault(error.reason, str(failed))
        self.folder.set_aside(self.folder.file(entry.key, kind), error.action)
        if error.action in ("quarantine", "delete", "forget", "adopt"):
            with contextlib.suppress(sqlite3.Error, OSError), self.index.transaction(checked=False):
                if error.action == "adopt":  # files that disagree: this one would be nobody's, and not counted
                    self.folder.remove(entry.key, kind)
                self.index.drop_record(entry.key, kind)
                link(self.folder, self.index, entry.key)  # they may have been merged
                self.ledger.count()

    def _fault(self, reason: str, detail: str) -> str:
        self.faults[reason] = self.faults.get(reason, 0) + 1
        log.warning("cache miss (%s): %s", reason, detail)
        return reason
