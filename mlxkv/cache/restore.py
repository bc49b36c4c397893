"""Restore: execute a plan. Nothing reaches the sequence's state until every byte of every record has been verified."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np

from .connectors import Local
from .host import Destination
from .index import Entry
from .keys import KeySpace, unpack
from .layout import Layout, MemberSpec, tensor_name
from .member import PositionError
from .packing import PARTS
from .planner import Piece, Plan
from .ram import Draft, Ram, RamReader
from .readers import bare
from .record import Body, Meta, MissingRecord, OtherRows, Reader, RecordError
from .state import SequenceState
from .tensors import TensorSpec, finite


class RestoreFailed(Exception):
    """One record of the plan failed; ``error`` says how, ``tier`` where it was read. The pieces of the plan that were
    read and verified before are not read again for the next plan that begins with them (``Restorer.num_succeeded``).
    """

    def __init__(self, entry: Entry, kind: str, error: RecordError, tier: str) -> None:
        super().__init__(f"{entry.key.hex()[:12]}.{kind} ({tier}): {error}")
        self.entry, self.kind, self.error, self.tier = entry, kind, error, tier


class Stopped(Exception):
    """Nobody wants what is being read any more."""


class Restorer:
    """Reads for one request into destinations that belong to nobody else yet, each record from the first of ``tiers``
    that has it: RAM, then disk.

    ``prepare`` says what is to be read, as tasks, and ``make`` makes the destinations: then the tasks may run, on other
    threads and several at once, and see host bytes only. Once none runs any more, ``attach`` gives the arrays to a
    state, or, where a task raised RestoreFailed, ``prepare`` goes on with the next plan after the pieces that both
    begin with, or ``discard`` lets go of all. All four belong to the engine's thread.

    What was read from disk is kept in RAM, as far as its budget goes. ``used`` are the tiers that were read. A file may
    hold more rows than the index says: others were merged into it. ``nbytes_read``: bytes of the records that were read
    and verified, by tier.
    """

    def __init__(self, tiers: Sequence[Local], ram: Ram, space: KeySpace, layout: Layout, tokens: list[int]) -> None:
        self.tiers, self.ram, self.space, self.layout, self.tokens = tiers, ram, space, layout, tokens
        self.used: set[str] = set()
        self.nbytes_read = {"ram": 0, "ssd": 0}
        #: entries whose files hold more rows than the index says
        self.other: dict[bytes, Entry] = {}
        #: tasks raise Stopped as soon as they see it
        self.stopped = False
        self._promoted = 0
        self._lock = threading.Lock()  # of all that tasks change
        self._plan = Plan()
        # rows: where they are read to, which pieces were read from which tier, and the end of what was touched
        self._rows: dict[str, Destination] = {}
        self._pieces: list[Piece] = []
        self._read: dict[int, str] = {}
        self._touched = 0
        # of this plan alone
        self._states: dict[str, Destination] = {}
        self._windows: dict[str, Destination] = {}
        self._unmade: list[_Unmade] = []

    @property
    def num_succeeded(self) -> int:
        """How many pieces, from the first on, have been read and verified."""
        return next(i for i in range(len(self._pieces) + 1) if i not in self._read)

    def nbytes(self, plan: Plan) -> int:
        """About how many bytes a plan reads."""
        near = 2 * self.space.block  # a window's first and last records are read whole
        return sum(
            t.nbytes(sum(b - a for a, b in m.needs(plan.position)) + (near if m.record == "window" else 0))
            for m in self.layout.members
            for t in m.stored
        )

    def prepare(self, plan: Plan, capacity: int) -> list[Callable[[], None]]:
        """What is to be read for ``plan``, growing buffers with room for ``capacity`` rows: each task does one record,
        and raises RestoreFailed. The state comes first: where it fails, an earlier one is next, and rows would be read
        for nothing."""
        self._plan, self._states, self._windows, self._unmade = plan, {}, {}, []
        tasks: list[Callable[[], None]] = []
        self.used.clear()
        if plan.state is not None:
            if plan.state.end != plan.position:
                raise PositionError(f"A state of position {plan.state.end} was planned for position {plan.position}.")
            self._unmade += [_Unmade(self._states, t.name, t.shape, t.dtype) for t in self.layout.tensors("state")]
            tasks.append(partial(self._read_state, plan.state, self._states))
        if plan.pieces:
            tasks += self._prepare_rows(plan, max([capacity, *(p.end for p in plan.pieces)]))
        if "window" in self.layout.kinds:
            tasks += self._prepare_windows(plan)
        return tasks

    def make(self, most: int | None = None) -> bool:
        """Make destinations, at most ``most`` bytes or one of them; whether all are there. That takes a while: fresh
        memory is filled."""
        made = 0
        while self._unmade:
            u = self._unmade[0]
            size = TensorSpec(u.tensor, u.dtype, u.shape).nbytes(0)
            if most is not None and made and made + size > most:
                return False
            u.into[u.tensor] = Destination(u.shape, u.dtype)
            del self._unmade[0]
            made += size
        return True

    def attach(self, state: SequenceState) -> None:
        """Bring a fresh ``state`` to the plan's position, once all its tasks are done. Whatever it raises, the arrays
        are gone."""
        position = self._plan.position
        into = {**self._states, **self._rows, **self._windows}
        self.discard()
        arrays = {name: destination.release() for name, destination in into.items()}
        for name, packing in self.layout.packings.items():
            stored = {part: arrays.pop(part) for part in (f"{name}.{p}" for p in PARTS)}
            arrays[name] = packing.unpack(name, stored)
        mx.eval(list(arrays.values()))
        members = state.members or []
        for member, spec in zip(members, self.layout.members, strict=True):
            prefix = tensor_name(spec, "")
            mine = {t.name.removeprefix(prefix): arrays[t.name] for t in spec.tensors}
            member.resume(mine, position)
            if member.position not in (None, position):
                raise PositionError(f"Member {member.label} does not stand at {position} after its restore.")
        state.position = position

    def discard(self) -> None:
        """Let go of all destinations. No task may run any more: it would write into memory that is not there."""
        self._rows, self._states, self._windows, self._unmade = {}, {}, {}, []
        self._pieces, self._read, self._touched = [], {}, 0

    # on any thread

    def _check(self) -> None:
        if self.stopped:
            raise Stopped

    @contextmanager
    def _open(self, piece: Piece, kind: str) -> Iterator[Reader | RamReader]:
        """Open and compare with the chain: the record must be what the plan says. Raises RestoreFailed, also for a
        RecordError of the caller."""
        self._check()
        entry, tier = piece.entry, ""
        try:
            reader: Reader | RamReader | None = None
            for place in self.tiers:
                tier = place.source
                reader = place.open(entry.key, kind)
                if tier == "ram" and reader is not None and kind != "state" and reader.meta.row_start > piece.start:
                    reader = None  # held for another cut of the same rows than the plan's, which means the one on disk
                if reader is not None:
                    break
            if reader is None:
                raise MissingRecord("no tier has it")
            with reader:
                self._compare(reader.meta, piece, kind)
                if tier == "ssd" and kind != "state" and reader.meta.row_start != entry.row_start:
                    with self._lock:
                        self.other[entry.key] = entry
                yield reader
        except RecordError as e:
            raise RestoreFailed(entry, kind, bare(e), tier) from None
        with self._lock:
            self.used.add(tier)
            self.nbytes_read[tier] += reader.body.nbytes if isinstance(reader, RamReader) else reader.size

    def _compare(self, m: Meta, piece: Piece, kind: str) -> None:
        entry = piece.entry
        expected = (
            (m.kind, m.key, m.root, m.parent) == (kind, entry.key, self.space.root, entry.parent)
            and (m.start, m.end, m.block, m.layout) == (entry.start, entry.end, self.space.block, self.layout.digest)
            and list(m.tokens) == unpack(entry.tokens)
        )
        if not expected:
            raise RecordError("the file holds another record than its name says")
        mine = self.tokens[m.start : piece.end]
        if list(m.tokens[: piece.end - m.start]) != mine:  # the prompt, not the index, has the last word on tokens
            raise RecordError("the record's tokens are not the prompt's")
        if kind != "state" and m.row_start > piece.start:
            raise OtherRows(f"its rows start at {m.row_start}, not {piece.start}")

    def _promote(self, reader: Reader | RamReader, arrays: Callable[[], dict[str, np.ndarray]]) -> None:
        """Keep a record that was read whole and verified from disk. ``arrays`` makes host arrays that nobody else
        has."""
        if isinstance(reader, RamReader):
            return
        size = sum(b - a for _, _, a, b in reader.tensors.values())
        with self._lock:
            if self._promoted + size > self.ram.budget:
                return
            self._promoted += size
        held = {name: (reader.tensors[name][0], array) for name, array in arrays().items()}
        self.ram.put(Draft(reader.meta, {reader.meta.kind: Body(held, dict(reader.sums))}, ()))

    def _whole(self, reader: Reader | RamReader, specs: Sequence[TensorSpec]) -> dict[str, np.ndarray]:
        """All tensors of a record, verified, in memory of their own."""
        out = {}
        for t in specs:
            self._check()
            out[t.name] = reader.read(t.name)
        return out

    # rows

    def _prepare_rows(self, plan: Plan, capacity: int) -> list[Callable[[], None]]:
        specs = [t for t in self.layout.tensors("rows") if t.name not in self._rows]
        self._unmade += [_Unmade(self._rows, t.name, t.sized(capacity), t.dtype) for t in specs]
        kept = min(self.num_succeeded, _shared(self._pieces, plan.pieces))
        self._pieces, self._read = plan.pieces, {i: self._read[i] for i in range(kept)}
        self.used.update(self._read.values())
        tasks: list[Callable[[], None]] = []
        if self._touched > plan.position:  # what an earlier plan left there: rows nobody has verified, NaN even
            tasks.append(partial(self._clear, plan.position, self._touched))
        return [*tasks, *(partial(self._read_rows, i, plan.pieces[i]) for i in range(kept, len(plan.pieces)))]

    def _clear(self, a: int, b: int) -> None:
        for t in self.layout.tensors("rows"):
            self._rows[t.name].clear_rows(a // t.per, b // t.per)
        self._touched = a

    def _read_rows(self, i: int, piece: Piece) -> None:
        specs, into = self.layout.tensors("rows"), self._rows
        factors = [t for name in self.layout.packings for t in specs if t.name in (f"{name}.scales", f"{name}.biases")]
        a, b = piece.start, piece.end
        with self._lock:
            self._touched = max(self._touched, b)
        with self._open(piece, "rows") as reader:
            held = range(reader.meta.row_start, reader.meta.end)
            reader.require(specs, len(held))
            if held == range(a, b):
                for t in specs:
                    self._check()
                    reader.read_into(t.name, into[t.name].row_views(a // t.per, b // t.per))
                _require_finite({t.name: into[t.name].rows(a // t.per, b // t.per) for t in factors}, factors)
                self._promote(reader, lambda: {t.name: into[t.name].copy_rows(a // t.per, b // t.per) for t in specs})
            else:  # a part of them: all are read and verified in memory of their own
                whole = self._whole(reader, specs)
                _require_finite(whole, factors)
                for t in specs:
                    into[t.name].put_rows(a // t.per, whole[t.name][:, :, t.part(a, b, held.start)])
                self._promote(reader, lambda: whole)
            tier = "ram" if isinstance(reader, RamReader) else "ssd"
        with self._lock:
            self._read[i] = tier

    # windows

    def _prepare_windows(self, plan: Plan) -> list[Callable[[], None]]:
        position = plan.position
        members = [m for m in self.layout.members if m.record == "window"]
        parts: dict[int, list[_Part]] = {}  # by piece
        for member in members:
            at = 0
            for i, piece in enumerate(plan.pieces):
                for a, b in _needed(member, piece, position):
                    parts.setdefault(i, []).extend(_Part(t.name, a, b, at) for t in member.tensors)
                    at += b - a
            if at != sum(b - a for a, b in member.needs(position)):
                raise PositionError(f"Window of member {member.path} is incomplete at {position}.")
            self._unmade += [_Unmade(self._windows, t.name, t.sized(at), t.dtype) for t in member.tensors]
        return [partial(self._read_window, plan.pieces[i], parts[i], self._windows) for i in sorted(parts)]

    def _read_window(self, piece: Piece, parts: list[_Part], into: dict[str, Destination]) -> None:
        specs = self.layout.tensors("window")
        with self._open(piece, "window") as reader:
            first = reader.meta.row_start
            reader.require(specs, reader.meta.end - first)
            whole = self._whole(reader, specs)
            for part in parts:
                into[part.tensor].put_rows(part.at, whole[part.tensor][:, :, part.start - first : part.end - first])
            self._promote(reader, lambda: whole)  # only read from here on

    # states

    def _read_state(self, entry: Entry, into: dict[str, Destination]) -> None:
        specs = self.layout.tensors("state")
        with self._open(Piece(entry, entry.end, entry.end), "state") as reader:
            reader.require(specs, 0)
            for t in specs:
                self._check()
                reader.read_into(t.name, into[t.name].views())
            self._promote(reader, lambda: {name: d.copy() for name, d in into.items()})


@dataclass(frozen=True)
class _Unmade:
    """A destination that is to be made, as ``into[tensor]``."""

    into: dict[str, Destination]
    tensor: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class _Part:
    """Rows [start, end) of a windowed tensor, of which the first is row ``at`` of its array."""

    tensor: str
    start: int
    end: int
    at: int


def _shared(a: list[Piece], b: list[Piece]) -> int:
    """How many pieces two plans have in common, from the first on."""
    same = ((x.entry.key, x.start, x.end) == (y.entry.key, y.start, y.end) for x, y in zip(a, b, strict=False))
    return next((i for i, equal in enumerate(same) if not equal), min(len(a), len(b)))


def _require_finite(arrays: Mapping[str, np.ndarray], factors: list[TensorSpec]) -> None:
    """Raises RecordError if a scale or bias of quantised rows is no number."""
    if not all(finite(t.dtype, arrays[t.name]) for t in factors):
        raise RecordError("a scale or bias is not finite")


def _needed(member: MemberSpec, piece: Piece, position: int) -> list[tuple[int, int]]:
    """The parts of a piece that a member at ``position`` needs."""
    spans = [(max(a, piece.start), min(b, piece.end)) for a, b in member.needs(position)]
    return [(a, b) for a, b in spans if a < b]
