"""The RAM tier: immutable host copies of records, above the SSD, one byte budget, the least recently used out first.

It also holds, *pinned*, what waits to be written, so that a look-up never waits for the writer. Any thread may call.
What is held is host bytes with the checksums taken at the hand-over, never MLX arrays; a reader gets a fresh copy and
the checksums are compared in it. This module does not own: what is on disk (``index``), when it gets there
(``writer``).
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from .connectors import Local
from .index import Entry
from .keys import pack
from .record import Body, Meta, RecordError, checksum
from .tensors import TensorSpec

#: how many entries that are no prefix of what is asked are looked at on each side: neighbours share most
_NEIGHBOURS = 8
#: bytes that a token costs besides the arrays: ids in the metadata and packed
_TOKEN_BYTES = 44

Answer = tuple[bytes, int, int | None]


@dataclass
class Draft:
    """An entry to be stored: ``meta`` (its ``kind`` is set for each record) and a body for each record kind.

    ``needs`` are keys that must be stored and complete, or be in the same group before this draft. ``answer`` is
    (digest, first token, last unprocessed id).
    """

    meta: Meta
    bodies: dict[str, Body]
    needs: tuple[bytes, ...]
    answer: Answer | None = None

    @property
    def nbytes(self) -> int:
        return sum(b.nbytes for b in self.bodies.values())


@dataclass
class _Held:
    """All that is held of one entry. Rows and windows bring the span that they cover, a state its role."""

    metas: dict[str, Meta] = field(default_factory=dict)
    bodies: dict[str, Body] = field(default_factory=dict)
    answers: dict[bytes, Answer] = field(default_factory=dict)
    pins: int = 0

    def entry(self) -> Entry:
        m = self.metas.get("rows") or next(iter(self.metas.values()))
        base = m.base if m.row_start > m.start else None
        return Entry(m.key, m.root, m.parent, m.start, m.end, m.row_start, base, pack(m.tokens), frozenset(self.bodies))


class Ram(Local):
    """``budget`` in bytes; 0 keeps nothing but what is pinned. ``on_evict`` is told the key and kind of what leaves,
    without a lock held."""

    source = "ram"

    def __init__(self, budget: int, on_evict: Callable[[bytes, str], None] = lambda key, kind: None) -> None:
        self._budget = budget
        self._lent = 0
        self._on_evict = on_evict
        self._held: dict[bytes, _Held] = {}
        self._recent: OrderedDict[tuple[bytes, str], int] = OrderedDict()  # -> bytes, least recently used first
        self._children: dict[bytes, list[tuple[bytes, bytes]]] = {}  # parent -> sorted (packed tokens, key)
        self._answers: dict[bytes, bytes] = {}
        self._bytes = self._pinned = 0
        self._lock = threading.Lock()

    @property
    def most(self) -> int:
        """The budget when nothing of it is lent, bytes."""
        return self._budget

    @property
    def budget(self) -> int:
        """Bytes that may be held now."""
        return max(0, self._budget - self._lent)

    @property
    def nbytes(self) -> int:
        """Bytes held, pinned ones too."""
        return self._bytes

    @property
    def pinned(self) -> int:
        """Bytes held that cannot leave yet, whatever the budget. Counted, since it is asked for every request that
        waits, however much is held."""
        return self._pinned

    def resize(self, budget: int) -> None:
        """Another budget, from now on; what is over it leaves."""
        with self._lock:
            self._budget = budget
            gone = self._shrink()
        self._tell(gone)

    def lend(self, nbytes: int) -> None:
        """Do without so many bytes of the budget until the next call; what is over the rest leaves."""
        with self._lock:
            self._lent = max(0, nbytes)
            gone = self._shrink()
        self._tell(gone)

    def put(self, draft: Draft, *, pin: bool = False) -> None:
        """Hold the bodies of a draft, in place of what was held of these kinds. With ``pin`` its entry stays,
        whatever the budget, until ``unpin``."""
        if not draft.bodies and draft.answer is None:
            return
        key = draft.meta.key
        with self._lock:
            if key not in self._held:
                if not draft.bodies and not pin:
                    return
                insort(self._children.setdefault(draft.meta.parent, []), (pack(draft.meta.tokens), key))
            held = self._held.setdefault(key, _Held())
            self._pinned -= self._pinned_of(key)
            held.pins += pin
            held.metas.setdefault("", replace(draft.meta, kind=""))
            for kind, body in draft.bodies.items():
                self._bytes -= self._recent.pop((key, kind), 0)
                held.metas[kind] = replace(draft.meta, kind=kind)
                held.bodies[kind] = body
                size = body.nbytes + _TOKEN_BYTES * len(draft.meta.tokens)
                self._recent[key, kind] = size
                self._bytes += size
            self._pinned += self._pinned_of(key)
            if draft.answer is not None:
                held.answers[draft.answer[0]] = draft.answer
                self._answers[draft.answer[0]] = key
            gone = self._shrink()
        self._tell(gone)

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Take back one pin a key; what no pin holds and is over the budget leaves."""
        with self._lock:
            for key in keys:
                held = self._held.get(key)
                if held is not None and held.pins:
                    self._pinned -= self._pinned_of(key)
                    held.pins -= 1
                    self._pinned += self._pinned_of(key)
                    self._forget_if_empty(key)
            gone = self._shrink()
        self._tell(gone)

    def touch(self, keys: Iterable[bytes]) -> None:
        """These were used, in this order: the last is the most recent. What others hang on belongs last."""
        with self._lock:
            for key in keys:
                for kind in self._held[key].bodies if key in self._held else ():
                    self._recent.move_to_end((key, kind))

    def drop(self, key: bytes, kind: str) -> None:
        """Forget a record, pinned or not: it failed a check."""
        with self._lock:
            self._remove(key, kind)

    def entry(self, key: bytes) -> Entry | None:
        with self._lock:
            held = self._held.get(key)
            return held.entry() if held is not None else None

    def children(self, parent: bytes, tokens: bytes) -> list[Entry]:
        """Entries that hang on ``parent`` and are a prefix of ``tokens``, and their neighbours; as ``Index`` does."""
        with self._lock:
            kin = self._children.get(parent, [])
            at = bisect_left(kin, (tokens, b""))
            near = {key for _, key in kin[max(0, at - _NEIGHBOURS) : at + _NEIGHBOURS]}
            near.update(key for packed, key in kin[:at] if tokens.startswith(packed))
            return sorted((self._held[key].entry() for key in near), key=lambda e: e.end, reverse=True)

    def recent(self, root: bytes, most: int) -> list[tuple[Entry, dict[str, int]]]:
        """Of a key space, the entries that were used last, most recent first: (entry, record kind -> bytes)."""
        with self._lock:
            keys = dict.fromkeys(key for key, _ in reversed(self._recent))
            held = (self._held[key] for key in keys)
            mine = islice((h for h in held if next(iter(h.metas.values())).root == root), most)
            return [(h.entry(), {kind: body.nbytes for kind, body in h.bodies.items()}) for h in mine]

    def answer(self, digest: bytes) -> tuple[bytes, int, int | None] | None:
        """(key of the leaf at its end, position of its first token, id of a last token that was not processed)."""
        with self._lock:
            key = self._answers.get(digest)
            if key is None:
                return None
            _, start, last = self._held[key].answers[digest]
            return key, start, last

    def draft(self, key: bytes) -> Draft | None:
        """The rows (and windows, state, answer) that are held of an entry, as they were handed over."""
        with self._lock:
            held = self._held.get(key)
            if held is None or "rows" not in held.bodies:
                return None
            meta = held.metas["rows"]
            state = held.metas.get("state")
            role = state.role if state is not None else meta.role
            needs = tuple(k for k in (meta.parent, meta.base) if k is not None)
            answer = next(iter(held.answers.values()), None)
            return Draft(replace(meta, kind="", role=role), dict(held.bodies), needs, answer)

    def open(self, key: bytes, kind: str) -> RamReader | None:
        """A reader of a record, or None. What it reads stays whole, whatever leaves meanwhile."""
        with self._lock:
            held = self._held.get(key)
            if held is None or kind not in held.bodies:
                return None
            return RamReader(held.metas[kind], held.bodies[kind])

    # with the lock held

    def _shrink(self) -> list[tuple[bytes, str]]:
        gone: list[tuple[bytes, str]] = []
        # never a look at all that is pinned: this is asked at every charge, and a writer may be far behind
        excess = min(self._bytes - self.budget, self._bytes - self._pinned)
        for (key, kind), size in self._recent.items() if excess > 0 else ():
            if not self._held[key].pins:
                gone.append((key, kind))
                excess -= size
                if excess <= 0:
                    break
        for key, kind in gone:
            self._remove(key, kind)
        return gone

    def _remove(self, key: bytes, kind: str) -> None:
        held = self._held.get(key)
        if held is None or kind not in held.bodies:
            return
        del held.bodies[kind], held.metas[kind]
        size = self._recent.pop((key, kind))
        self._bytes -= size
        self._pinned -= size if held.pins else 0
        self._forget_if_empty(key)

    def _pinned_of(self, key: bytes) -> int:
        held = self._held[key]
        return sum(self._recent[key, kind] for kind in held.bodies) if held.pins else 0

    def _forget_if_empty(self, key: bytes) -> None:
        held = self._held[key]
        if held.bodies or held.pins:
            return
        meta = held.metas[""]
        kin = self._children[meta.parent]
        kin.remove((pack(meta.tokens), key))
        if not kin:
            del self._children[meta.parent]
        for digest in held.answers:
            self._answers.pop(digest, None)
        del self._held[key]

    def _tell(self, gone: list[tuple[bytes, str]]) -> None:
        for key, kind in gone:
            self._on_evict(key, kind)


@dataclass(frozen=True)
class RamReader:
    """What ``record.Reader`` is for a file: the same checks, on a record that is held in RAM."""

    meta: Meta
    body: Body

    def require(self, specs: Sequence[TensorSpec], tokens: int) -> None:
        """Raises RecordError unless exactly these tensors are there, with the shapes and dtypes of ``tokens`` tokens
        from the first one with rows on."""
        want = {t.name: (t.dtype, t.sized(tokens, self.meta.row_start)) for t in specs}
        have = {name: (dtype, array.shape) for name, (dtype, array) in self.body.arrays.items()}
        if want != have or set(self.body.sums) != set(have):
            raise RecordError("tensors, shapes or dtypes are not those of the layout")

    def read_into(self, name: str, views: Sequence[memoryview]) -> None:
        """Copy one tensor into writable byte views, in order; the checksum is compared in the copy. Raises
        RecordError."""
        source = self.body.arrays[name][1].reshape(-1).view(np.uint8)
        if sum(len(v) for v in views) != len(source):
            raise RecordError(f"tensor {name} has {len(source)} bytes")
        at = 0
        for view in views:  # NumPy copies without holding up other threads, which an assignment to the view would
            np.copyto(np.frombuffer(view, np.uint8), source[at : at + len(view)])
            at += len(view)
        if checksum(views) != self.body.sums.get(name):
            raise RecordError(f"tensor {name} has a wrong checksum")

    def read(self, name: str) -> np.ndarray:
        """One tensor as a fresh host array (bfloat16 as uint16), verified."""
        out = np.empty_like(self.body.arrays[name][1])
        self.read_into(name, [out.reshape(-1).view(np.uint8).data] if out.size else [])
        return out

    def __enter__(self) -> RamReader:
        return self

    def __exit__(self, *exc: object) -> None:
        pass
