"""The legacy tier: folders of oMLX's below the SSD, asked where everything else misses.

The tokens of a request are looked for by oMLX's own keys; what passes the checks of an import is converted, held in
RAM and handed to the writer, and the request resumes from it at once. Only folders that the user has vouched for
(``mlxkv cache import DIR --assume-same-weights``) are asked. Nothing is ever written there, every fault is a miss, and
one request spends at most ``SECONDS`` here: what is left is for the next one, or for the import. Looking and reading
may be done on another thread (``Fetch``); all else belongs to the engine's.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sqlite3
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from ..layout import Layout
from ..ram import Draft
from ..readers import Readers
from .commit import missing, take
from .convert import Target
from .fetch import Fetch, Late
from .header import HostileFile, Signature
from .journal import FileDigest, Journal, NoRoom
from .omlx_chain import Outcome, follow
from .omlx_file import read_block
from .omlx_keys import BLOCK_SIZES, MAX_BLOCK, SUFFIX, chains, file_of, same_model
from .omlx_layers import Fitted, fit, importable
from .prefix import Prefix
from .reasons import Refused
from .source import relative_name

if TYPE_CHECKING:
    from ..ledger import Ledger
    from ..store import PrefixStore

log = logging.getLogger("mlxkv.cache")

#: one request's share: seconds of looking, checking and converting, and bytes of records
SECONDS = 20.0
BYTES = 2 << 30
#: files looked at in each of a folder's sixteen, to learn model names and block sizes; names that are listed for it
_SAMPLE, _LISTED = 8, 1024
_NAMES, _SIZES = 8, 12
#: blocks that are looked for of one chain: where a folder says that they are of a token or two, not every request waits
_BLOCKS = 4096
#: chains and files that are remembered, and imports that wait to be noted
_CHAINS, _FILES, _PENDING = 1024, 65_536, 64


@dataclass
class Counters:
    """Of this process: requests that asked, those that were served, files refused, faults, bytes handed over."""

    asked: int = 0
    served: int = 0
    refused: int = 0
    faults: int = 0
    bytes: int = 0


@dataclass
class Folder:
    path: Path
    consent: bool = False
    said: bool = False
    #: model names and block sizes that were learned, and the files to learn more from
    learned: dict[str, None] = field(default_factory=dict)
    counts: dict[int, None] = field(default_factory=dict)
    sample: Iterator[Path] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.learned)[-_NAMES:]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys([*islice(self.counts, _SIZES - len(BLOCK_SIZES)), *BLOCK_SIZES]))


@dataclass(frozen=True)
class Found:
    """Blocks of a prompt in a folder, of the model ``name``: ``at`` says which of ``digests`` are there, in which
    state."""

    folder: Folder
    name: str
    size: int
    digests: list[bytes]
    at: dict[int, Signature]

    @property
    def reach(self) -> int:
        return (max(self.at) + 1) * self.size

    @property
    def mark(self) -> bytes:
        """Changes when anything about the chain does."""
        h = hashlib.sha256(os.fsencode(self.folder.path))
        for i, s in self.at.items():
            h.update(f"{self.digests[i].hex()} {s.device} {s.inode} {s.size} {s.mtime} {s.ctime}".encode())
        return h.digest()


@dataclass
class _Pending:
    """What was handed over whole, and waits to be durable: ``files`` by their names in the journal."""

    folder: Folder
    root: bytes
    files: dict[str, FileDigest]
    records: dict[bytes, frozenset[str]]


@dataclass
class LegacyTier:
    """``dirs``: folders of oMLX's. ``names``: what it may know the model by, the likeliest first."""

    dirs: Sequence[Path]
    names: tuple[str, ...]
    seconds: float = SECONDS
    nbytes: int = BYTES
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        self._folders: dict[Path, Folder] = {}  # by where they really are
        self._known: OrderedDict[bytes, int] = OrderedDict()  # a chain's mark -> how far it leads
        self._refused: OrderedDict[Path, Signature] = OrderedDict()
        self._pending: list[_Pending] = []
        self._held: list[bytes] = []  # pinned for the last request, of a store that writes nothing
        self._journal: tuple[Ledger | None, Journal] | None = None
        self._useless: bool | None = None
        #: of what is learned and remembered while one looks and reads
        self.lock = threading.Lock()
        self.readers = Readers(1, "mlxkv-legacy")

    def extend(self, store: PrefixStore, tokens: list[int], position: int) -> frozenset[bytes]:
        """Hand ``store`` what leads further along ``tokens`` than ``position``; the keys of what was handed over.
        Never raises."""
        fetch = self.begin(store, tokens, position)
        if fetch is None:
            return frozenset()
        fetch.look()
        if fetch.choose(store):
            fetch.read()
            fetch.hand_over(store)
        return fetch.keys

    def begin(self, store: PrefixStore, tokens: list[int], position: int) -> Fetch | None:
        """The same in steps; None if there is nobody to ask. Never raises."""
        if store.restores.under_way <= 1:  # else another request's may not have been read yet
            self._let_go(store)
        try:
            if self._off(store):
                return None
            self._settle_quietly(store)
            self.counters.asked += 1
            # a place to stand at the very end of the prompt is of no use: its last token is computed
            tokens = tokens[:] if store.layout.growing_only else tokens[:-1]
            target = Target(store.space(), store.layout, store.identity, store.software)
            folders = list(self._vouched(store))
            return Fetch(self, target, folders, tokens, position, time.monotonic() + self.seconds) if folders else None
        except Exception as e:
            self.failed(e)
            return None

    def failed(self, e: Exception) -> None:
        """Whatever stands in such a folder: a miss, never the request's failure."""
        self.counters.faults += 1
        log.warning("legacy folders give nothing for this request: %s: %s", type(e).__name__, e)

    def settle(self, store: PrefixStore) -> None:
        """Note in the journal what has become durable. Raises sqlite3.Error, OSError."""
        for pending in list(self._pending):
            if missing(store, pending.records):
                continue
            self._pending.remove(pending)
            with contextlib.suppress(NoRoom):  # then an import finds it stored, and notes it
                self._open_journal(store).note(pending.folder.path, pending.root, pending.files, pending.records)

    def _settle_quietly(self, store: PrefixStore) -> None:
        try:
            self.settle(store)
        except (sqlite3.Error, OSError) as e:  # an import finds it stored, and notes it
            log.info("imports were not noted in the journal: %s", e)

    def close(self, store: PrefixStore) -> None:
        """Once the writer is closed, while the index is open."""
        self._let_go(store)
        self._settle_quietly(store)
        if self._journal is not None:
            self._journal[1].close()
            self._journal = None

    # whether it may be asked

    def _off(self, store: PrefixStore) -> bool:
        if self._useless is None:
            why = importable(store.layout)
            self._useless = why is not None
            if why is not None:
                log.warning("legacy folders are not asked: %s: %s", why.code, why.detail)
        return self._useless

    def _vouched(self, store: PrefixStore) -> Iterator[Folder]:
        for path in self.dirs:
            # a link may lead elsewhere since the last request, where nobody has vouched for anything
            real = Path(os.path.realpath(path))
            folder = self._folders.setdefault(real, Folder(real))
            if not folder.path.is_dir():
                if not folder.said:
                    folder.said = True
                    log.warning("%s is not asked: there is no such folder (legacy_dirs)", folder.path)
                continue
            if not folder.consent:
                folder.consent = self._open_journal(store).consent(folder.path, store.identity.fingerprint)
            if folder.consent:
                yield folder
            elif not folder.said:
                folder.said = True
                log.warning(
                    "%s is not asked: nobody has said that its files were made by these weights. Say so once with: "
                    "mlxkv cache import %s --assume-same-weights",
                    folder.path,
                    folder.path,
                )

    def _open_journal(self, store: PrefixStore) -> Journal:
        ledger = store.ledger if store.keeps else None
        if self._journal is None or self._journal[0] is not ledger:  # the folder was opened again
            if self._journal is not None:
                self._journal[1].close()
            self._journal = ledger, Journal(store.folder.path, ledger)
        return self._journal[1]

    # looking

    def look(self, fetch: Fetch) -> None:
        """Find what leads furthest. Raises Late."""
        tokens, position = fetch.tokens, fetch.position
        try:
            found = [f for folder in fetch.folders for f in self._find(folder, tokens, fetch.tick)]
        except Late:
            if not fetch.stopped:
                log.warning("legacy folders take too long to look for this prompt in")
            raise
        for chain in sorted(found, key=lambda f: f.reach, reverse=True):
            mark = chain.mark
            if chain.reach <= position or self._known.get(mark, chain.reach) <= position:
                continue
            files: list[Path] = []
            try:
                outcome = self._follow(fetch.target.layout, chain, tokens, files, fetch.tick)
            except Late:
                if not fetch.stopped:
                    self.remember(mark, 0)
                    log.warning(
                        "the blocks of this prompt in %s take too long to check; mlxkv cache import has no limit",
                        chain.folder.path,
                    )
                raise
            for i, why in outcome.refused.items():
                if why.code == "OTHER_ROWS":  # a shorter prompt would not show it
                    self._refuse(file_of(chain.folder.path, chain.digests[i]), chain.at[i], why)
            lead = _leads(outcome.prefix)
            self.remember(mark, lead)
            if outcome.prefix is not None and lead > position:
                files += [file_of(chain.folder.path, chain.digests[i]) for i in outcome.used]
                fetch.found(chain, outcome.prefix, files)
                return

    def _find(self, folder: Folder, tokens: list[int], tick: Callable[[], None]) -> Iterator[Found]:
        """The chains of a prompt of which anything is there, under every name and block size. ``tick`` may raise."""
        self._learn(folder, tick)
        for size in folder.sizes:
            for name, digests in zip(folder.names, chains(folder.names, tokens[: size * _BLOCKS], size), strict=True):
                listed: list[bytes] = []
                at: dict[int, Signature] = {}
                for i, digest in enumerate(digests):
                    tick()
                    listed.append(digest)
                    with contextlib.suppress(OSError):
                        info = os.lstat(file_of(folder.path, digest))
                        if stat.S_ISREG(info.st_mode):
                            at[i] = Signature.of(info)
                if at:
                    yield Found(folder, name, size, listed, at)

    def _learn(self, folder: Folder, tick: Callable[[], None]) -> None:
        """Names and block sizes that a few of the folder's files say, beside those that are always tried. Where
        ``tick`` raises, the next request goes on."""
        if folder.sample is None:
            folder.learned = dict.fromkeys(self.names)
            shards = [folder.path / shard for shard in "0123456789abcdef"]
            folder.sample = (path for shard in shards for path in islice(_some(shard), _SAMPLE))
        for path in folder.sample:
            with contextlib.suppress(Refused), HostileFile.open(path) as file:
                meta = file.metadata
                if same_model(name := meta.get("model_name", ""), self.names):
                    folder.learned[name] = None
                    count = meta.get("token_count", "")
                    if count.isascii() and count.isdigit() and len(count) < 6 and 0 < int(count) <= MAX_BLOCK:
                        folder.counts[int(count)] = None
            tick()

    def _follow(
        self, layout: Layout, chain: Found, tokens: list[int], files: list[Path], tick: Callable[[], None]
    ) -> Outcome:
        def find(i: int) -> Fitted | None:
            path = file_of(chain.folder.path, chain.digests[i])
            if i not in chain.at or self._refused.get(path) == chain.at[i]:
                return None
            try:
                return fit(read_block(path, chain.name.__eq__), layout)
            except Refused as e:
                self._refuse(path, chain.at[i], e)
                return None

        def spoiled(i: int) -> None:
            path = file_of(chain.folder.path, chain.digests[i])
            with contextlib.suppress(ValueError):
                files.remove(path)
            self.counters.refused += 1

        looked_for = tokens[: chain.size * len(chain.digests)]
        return follow(layout, looked_for, chain.size, find, spoiled, tick)

    def _refuse(self, path: Path, signature: Signature, why: Refused) -> None:
        """It is not read again until it is another file."""
        self.counters.refused += 1
        log.info("%s is not served: %s", path, why)
        self._refused[path] = signature
        if len(self._refused) > _FILES:
            self._refused.popitem(last=False)

    def remember(self, mark: bytes, lead: int) -> None:
        self._known[mark] = lead
        self._known.move_to_end(mark)
        if len(self._known) > _CHAINS:
            self._known.popitem(last=False)

    # handing over

    def hand_over(self, store: PrefixStore, fetch: Fetch) -> frozenset[bytes]:
        """Give the store what was read; the keys of it."""
        handed: dict[bytes, frozenset[str]] = {}
        all_taken = False

        def groups() -> Iterator[list[Draft]]:
            nonlocal all_taken
            for group in fetch.groups:
                handed.update((d.meta.key, frozenset(d.bodies)) for d in group)
                self.counters.bytes += sum(d.nbytes for d in group)
                yield group
            all_taken = True

        if store.keeps:
            all_taken = take(store, groups(), wait=False).complete and all_taken
        else:
            self._hold(store, groups())
            all_taken = False
        chain, files = fetch.chain, fetch.files
        if chain is not None and fetch.whole and all_taken and files and len(self._pending) < _PENDING:
            signatures = {file_of(chain.folder.path, chain.digests[i]): s for i, s in chain.at.items()}
            names = {relative_name(chain.folder.path, p): FileDigest(signatures[p], b"") for p in files}
            records = {**fetch.records, **handed}
            self._pending.append(_Pending(chain.folder, fetch.target.space.root, names, records))
        self.counters.served += bool(handed)
        return frozenset(handed)

    def _hold(self, store: PrefixStore, groups: Iterable[list[Draft]]) -> None:
        """For a store that writes nothing: in RAM until the next request."""
        for group in groups:
            for draft in reversed(group):
                store.ram.put(draft, pin=True)
                self._held.append(draft.meta.key)

    def _let_go(self, store: PrefixStore) -> None:
        held, self._held = self._held, []
        store.ram.unpin(held)


def _leads(prefix: Prefix | None) -> int:
    """How far a prefix can be resumed."""
    if prefix is None:
        return 0
    return prefix.stands[-1].position if prefix.stands else len(prefix.tokens)


def _some(shard: Path) -> Iterator[Path]:
    """Block files of one of a folder's sixteen, of the first names that the system lists."""
    try:
        if not stat.S_ISDIR(os.lstat(shard).st_mode):
            return
        with os.scandir(shard) as items:
            for item in islice(items, _LISTED):
                if item.name.endswith(SUFFIX):
                    yield Path(item.path)
    except OSError:
        return
