"""Explain: what a prompt would find in the store, without computing or keeping anything.

The prompt is tokenised and its records are looked up, read and verified by the code that a request runs. Then it
ends: no token is computed, nothing is stored, no use is noted, and a damaged record stays where it is, so that a
request that follows meets the very same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..cache.index import Entry
from ..cache.lookup import REASONS, Lookup
from ..cache.planner import Planner
from ..cache.restore import RestoreFailed
from ..cache.store import CLOSE_WITHIN, PrefixStore
from ..cache.unwritten import UnwrittenStore
from .generation import Generation
from .options import Options
from .request import Request
from .runtime import Runtime, open_runtime
from .text import decode

#: tokens of text on either side of the first one that is not covered
AROUND = 12
#: the cache budget of one who looks: nothing is evicted for it, and other stores keep theirs
UNBOUNDED = 1 << 60


class LookingStore(PrefixStore):
    """A store that is only asked: nothing is written to its index, and what fails a check is left in place."""

    keeps = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options, behind=False)
        self.index.freeze()

    def close(self, timeout: float = CLOSE_WITHIN) -> None:
        self.index.freeze(False)
        super().close(timeout)

    def _busy(self) -> bool:
        return True  # no pieces are merged

    def _adopt(self, entry: Entry, failed: str = "") -> bool:
        self.index.freeze(False)  # an index that is put right shows what a request would find
        try:
            return super()._adopt(entry, failed)
        finally:
            self.index.freeze()

    def _renew(self) -> None:
        pass  # it is asked once

    def _take_in(self, planner: Planner, tokens: list[int], limit: int) -> bool:
        self.index.freeze(False)  # what a request would take in to be found
        try:
            return super()._take_in(planner, tokens, limit)
        finally:
            self.index.freeze()

    def _note_use(self, key: bytes) -> None:
        pass

    def _discard(self, failed: RestoreFailed) -> None:
        self._fault(failed.error.reason, str(failed))


@dataclass(frozen=True)
class Explanation:
    """``lookup`` is what a request would report; ``before`` and ``after`` the ids on either side of its position, and
    ``text_before``, ``text_after`` what they say."""

    tokens: int
    lookup: Lookup
    why: str
    before: list[int]
    after: list[int]
    text_before: str
    text_after: str


class _Asking(Generation):
    """A request that ends where computing would begin."""

    def explain(self, store: PrefixStore | None, without: str, why: str) -> Explanation:
        prompt = self.sequence.prompt
        if store is not None:
            lookup = self.resume(store)[1]
        else:
            missed = without == "off" or len(prompt.tokens) > 1
            lookup = Lookup(0, "none", without if missed else None, 0 if missed else None)
        ids, at = prompt.tokens, lookup.tokens
        before, after = ids[max(0, at - AROUND) : at], ids[at : at + AROUND]
        return Explanation(
            tokens=len(ids),
            lookup=lookup,
            why=why or (REASONS[lookup.reason] if lookup.reason else ""),
            before=before,
            after=after,
            text_before=decode(self.rt.tokenizer, before),
            text_after=decode(self.rt.tokenizer, after),
        )


def explain(options: Options, request: Request, *, stored: bool) -> tuple[Explanation, str]:
    """(explanation, the model's name) of ``request`` under ``options``. ``stored`` says whether ``options.cache_dir``
    holds a store already; where it does not, none is made. Raises ModelError, ConfigError, RequestError."""
    on = options.cache_dir is not None and request.use_cache
    folder = options.cache_dir if on and stored else None
    runtime, info = open_runtime(replace(options, cache_dir=folder, cache_budget=UNBOUNDED))
    off = (info.store_off or "") if on and stored else ""
    store = None
    try:
        if runtime.store is not None:
            store = looking(runtime, options)
        asking = _Asking(replace(runtime, store=store), request)
        found = asking.explain(store, "off" if off or not on else "empty", off)
        if info.disk_off and found.lookup.reason not in (None, "off"):
            found = replace(found, why=f"{found.why}. Nothing is kept on disk: {info.disk_off}")
        return found, info.name
    finally:
        if store is not None:
            store.close()


def looking(runtime: Runtime, options: Options) -> PrefixStore:
    """The runtime's store opened anew, to look only."""
    own = runtime.store
    assert own is not None
    if isinstance(own, UnwrittenStore):  # which never does anything else
        return own
    asked, own.remote = own.remote, None  # it is asked as a request would; what comes from there is not kept
    own.close()
    store = LookingStore(
        Path(str(options.cache_dir)),
        own.identity,
        own.layout,
        block=own.block,
        budget=UNBOUNDED,
        allow_unprotected=options.allow_unprotected,
        software=own.software,
    )
    store.legacy, store.remote = own.legacy, asked
    return store
