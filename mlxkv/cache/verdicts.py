"""What is known of keys in a place that has to be asked: probed once, shared by the requests that want them.

A verdict lives exactly as long as some request holds its key. A load that fails turns it to MISS, and nobody probes
again while that request lives: else a key that is said to be there and cannot be loaded would be promoted for ever
(reference/state-handoff.md, E.1). This module does not own: what a probe is, nor what becomes of what failed.
"""

from __future__ import annotations

import enum
import itertools
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

#: seconds between looks at whether a request that waits is still wanted
_TICK = 0.05


class Verdict(enum.Enum):
    HIT = "hit"
    MISS = "miss"
    #: it is there, and another request is loading it: wait for that
    PENDING = "pending"
    #: it is being asked for: look again
    RETRY = "retry"


class _Phase(enum.Enum):
    PENDING = "to be asked for with the next flush"
    IN_FLIGHT = "being asked for"
    RESOLVED = "known"


@dataclass
class _Entry:
    generation: int
    phase: _Phase = _Phase.PENDING
    found: bool = False
    requests: set[Hashable] = field(default_factory=set)


class Verdicts(Generic[K]):
    """``probe`` says of a batch of keys which are there, as a mapping (keys that it lacks are not); if it raises, none
    is. ``submit`` has it done elsewhere, as one call a flush and request. Any thread may call; results are taken in
    where they are looked for."""

    def __init__(
        self, probe: Callable[[list[K]], Mapping[K, bool]], submit: Callable[[Callable[[], None]], object]
    ) -> None:
        self._probe, self._submit = probe, submit
        self._entries: dict[K, _Entry] = {}
        self._queue: dict[Hashable, dict[K, int]] = {}  # request -> key -> generation
        self._held: dict[Hashable, set[K]] = {}  # by request
        self._generations = itertools.count(1)
        self._changed = threading.Condition()
        #: keys that were asked for, since the beginning
        self.probed = 0

    def __len__(self) -> int:
        return len(self._entries)

    def lookup(self, key: K, request: Hashable) -> Verdict:
        """What is known of a key; the request holds it from now on, until ``cleanup``."""
        with self._changed:
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = _Entry(next(self._generations))
                self._queue.setdefault(request, {})[key] = entry.generation
            entry.requests.add(request)
            self._held.setdefault(request, set()).add(key)
            return _verdict(entry)

    def flush(self) -> None:
        """Have all keys that are new asked for, each once."""
        with self._changed:
            batches: list[dict[K, int]] = []
            for queued in self._queue.values():
                batch = {key: g for key, g in queued.items() if self._is(key, g, _Phase.PENDING)}
                for key in batch:
                    self._entries[key].phase = _Phase.IN_FLIGHT
                if batch:
                    batches.append(batch)
            self._queue.clear()
            self.probed += sum(map(len, batches))
        for batch in batches:
            try:
                self._submit(lambda batch=batch: self._ask(batch))
            except Exception:  # no thread is to be had: nobody will ask
                self._resolve(batch, {})

    def wait(self, keys: Collection[K], until: float, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Until all of ``keys`` are known; False at ``until`` (``time.monotonic()``), or once ``stopped()``."""
        with self._changed:
            while any(_verdict(e) is Verdict.RETRY for k in keys if (e := self._entries.get(k)) is not None):
                left = until - time.monotonic()
                if left <= 0 or stopped():
                    return False
                self._changed.wait(min(left, _TICK))
        return True

    def mark_miss(self, keys: Iterable[K]) -> None:
        """These could not be loaded, or were removed. What nobody holds is ignored; nothing is asked for."""
        with self._changed:
            for key in keys:
                entry = self._entries.get(key)
                if entry is None:
                    continue
                # a probe that is in flight comes too late: what it says is of another generation
                entry.generation = next(self._generations)
                entry.phase, entry.found = _Phase.RESOLVED, False
                if not entry.requests:
                    del self._entries[key]
            self._changed.notify_all()

    def loaded(self, keys: Iterable[K], successful: Collection[K] | int | None) -> list[K]:
        """A load of ``keys`` has ended: those of ``successful`` are there, or the first so many; None: nobody knows, so
        none is. The others are a miss from now on; returns them."""
        keys = list(keys)
        if isinstance(successful, int):
            failed = keys[successful:]
        else:
            failed = [key for key in keys if key not in (successful or ())]
        self.mark_miss(failed)
        return failed

    def cleanup(self, request: Hashable) -> None:
        """The request is over. What nobody else holds is forgotten, what is in flight once its result is there."""
        with self._changed:
            for key in self._held.pop(request, ()):
                if (entry := self._entries.get(key)) is None:
                    continue
                entry.requests.discard(request)
                if not entry.requests and entry.phase is not _Phase.IN_FLIGHT:
                    del self._entries[key]
            self._changed.notify_all()

    # with the lock held

    def _is(self, key: K, generation: int, phase: _Phase) -> bool:
        entry = self._entries.get(key)
        return entry is not None and (entry.generation, entry.phase) == (generation, phase)

    # on the thread that probes

    def _ask(self, batch: dict[K, int]) -> None:
        try:
            found = dict(self._probe(list(batch)))
        except Exception:  # what the place does not answer is a miss, and the next request asks again
            found = {}
        self._resolve(batch, found)

    def _resolve(self, batch: dict[K, int], found: Mapping[K, bool]) -> None:
        with self._changed:
            for key, generation in batch.items():
                entry = self._entries.get(key)
                if entry is None or entry.generation != generation:
                    continue
                assert entry.phase is _Phase.IN_FLIGHT, "a generation is probed once"
                entry.phase, entry.found = _Phase.RESOLVED, bool(found.get(key, False))
                if not entry.requests:
                    del self._entries[key]
            self._changed.notify_all()


def _verdict(entry: _Entry) -> Verdict:
    if entry.phase is not _Phase.RESOLVED:
        return Verdict.RETRY
    return Verdict.HIT if entry.found else Verdict.MISS
