"""What one request asks legacy folders for, in steps, so that the engine's thread need not wait for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..planner import Planner
from ..ram import Draft
from ..readers import Job
from .commit import there
from .convert import Target
from .prefix import Prefix
from .reasons import Refused

if TYPE_CHECKING:
    from ..store import PrefixStore
    from .tier import Folder, Found, LegacyTier

log = logging.getLogger("mlxkv.cache")


class Late(Exception):
    """The request's time is over, or nobody waits for it any more."""


@dataclass
class Fetch:
    """``look`` and ``read`` may run on any thread, one after the other, see host bytes only, and never raise; between
    and after them the engine's thread compares with what the store has (``choose``) and gives it the rest.
    ``until``: when it has to be done, ``time.monotonic()``; waiting for other requests counts."""

    tier: LegacyTier
    target: Target
    folders: list[Folder]
    tokens: list[int]
    position: int
    until: float
    #: nobody wants it any more; any thread may say so
    stopped: bool = False
    chain: Found | None = None
    prefix: Prefix | None = None
    #: what the prefix was read from, and what is made of all of it
    files: list[Path] = field(default_factory=list)
    records: dict[bytes, frozenset[str]] = field(default_factory=dict)
    groups: list[list[Draft]] = field(default_factory=list)
    whole: bool = False
    #: what was handed over
    keys: frozenset[bytes] = frozenset()
    _there: set[bytes] = field(default_factory=set)
    _chosen: bool = False

    def start(self) -> Job:
        """Have the first step done elsewhere."""
        return self._elsewhere(self.look)

    def go_on(self, store: PrefixStore) -> Job | None:
        """A step was done: what is to be done elsewhere next; None: all is done, as ``keys`` says."""
        if not self._chosen and self.choose(store):
            return self._elsewhere(self.read)
        if self._chosen:
            self.hand_over(store)
        return None

    def _elsewhere(self, step: Callable[[], None]) -> Job:
        job = Job([step])
        self.tier.readers.submit(job)
        return job

    def tick(self) -> None:
        """Raises Late."""
        if self.stopped or time.monotonic() > self.until:
            raise Late

    def look(self) -> None:
        with self.tier.lock:
            try:
                self.tick()
                self.tier.look(self)
            except Late:
                pass
            except Exception as e:
                self.tier.failed(e)

    def found(self, chain: Found, prefix: Prefix, files: list[Path]) -> None:
        self.chain, self.prefix, self.files = chain, prefix, files
        self.records = {key: frozenset(sizes) for key, sizes in self.target.outline(prefix)}

    def choose(self, store: PrefixStore) -> bool:
        """Leave out what the store has; False if nothing was found. Never raises."""
        if self.prefix is None:
            return False
        try:
            planner = Planner(store.view, self.target.space, store.layout)
            self._there = {key for key, kinds in self.records.items() if there(store, planner, key, kinds)}
        except Exception as e:
            self.tier.failed(e)
            return False
        self._chosen = True
        return True

    def read(self) -> None:
        assert self.chain is not None and self.prefix is not None
        left = self.tier.nbytes
        with self.tier.lock:
            try:
                for group in self.target.drafts(self.prefix, lambda key, kinds: key in self._there):
                    self.groups.append(group)
                    left -= sum(d.nbytes for d in group)
                    if left < 0 or self.stopped or time.monotonic() > self.until:
                        log.info("%s: the rest of this prompt is left for the next request", self.chain.folder.path)
                        return
                self.whole = True
            except Refused as e:  # rows that are not what they seemed to be: what came before them stays
                self.tier.counters.refused += 1
                self.tier.remember(self.chain.mark, 0)
                log.info("legacy rows are not served: %s", e)
            except Exception as e:
                self.tier.failed(e)

    def hand_over(self, store: PrefixStore) -> None:
        """Never raises."""
        try:
            self.keys = self.tier.hand_over(store, self)
        except Exception as e:
            self.tier.failed(e)
