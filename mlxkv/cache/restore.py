"""Restore: execute a plan. Nothing reaches the sequence's state until every byte of every record has been verified."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import mlx.core as mx
import numpy as np

from .folder import CacheFolder
from .host import Destination, from_host
from .index import Entry
from .keys import KeySpace, unpack
from .layout import Layout, MemberSpec, tensor_name
from .member import PositionError
from .packing import PARTS
from .planner import Piece, Plan
from .ram import Draft, Ram, RamReader
from .record import Body, Meta, OtherRows, Reader, RecordError
from .state import SequenceState
from .tensors import TensorSpec, finite


class RestoreFailed(Exception):
    """One record of the plan failed; ``error`` says how, ``tier`` where it was read. ``num_succeeded`` is how many
    pieces of the plan were read and verified before: they are not read again for the next plan that begins with them.
    """

    def __init__(self, entry: Entry, kind: str, error: RecordError, tier: str, num_succeeded: int = 0) -> None:
        super().__init__(f"{entry.key.hex()[:12]}.{kind} ({tier}): {error}")
        self.entry, self.kind, self.error, self.tier = entry, kind, error, tier
        self.num_succeeded = num_succeeded


class Restorer:
    """Reads for one request into destinations that belong to nobody else yet: from RAM what is there, else from disk.
    Where a record fails, ``run`` goes on with the next plan after the pieces that both begin with.

    What was read from disk is kept in RAM, as far as its budget goes. ``used`` are the tiers that were read. A file may
    hold more rows than the index says: others were merged into it.
    """

    def __init__(self, folder: CacheFolder, ram: Ram, space: KeySpace, layout: Layout, tokens: list[int]) -> None:
        self.folder, self.ram, self.space, self.layout, self.tokens = folder, ram, space, layout, tokens
        self.used: set[str] = set()
        #: entries whose files hold more rows than the index says
        self.other: dict[bytes, Entry] = {}
        self._promoted = 0
        # rows: where they are read to, which pieces (and tiers) were verified there, and the end of what was touched
        self._into: dict[str, Destination] = {}
        self._verified: list[tuple[Piece, str]] = []
        self._touched = 0

    def run(self, plan: Plan, state: SequenceState, capacity: int) -> int:
        """Bring a fresh ``state`` to ``plan.position``, growing buffers with room for ``capacity`` rows; returns the
        bytes read. Raises RestoreFailed; the state is as new then."""
        arrays: dict[str, mx.array] = {}
        read = 0
        position = plan.position
        self.used.clear()
        if plan.state is not None:  # first: where it fails, an earlier state is next, and rows would be read again
            read += self._state(plan.state, position, arrays)
        if plan.pieces:
            read += self._rows(plan, max([capacity, *(p.end for p in plan.pieces)]), arrays)
        if "window" in self.layout.kinds:
            read += self._windows(plan, arrays)
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
        return read

    @contextmanager
    def _open(self, piece: Piece, kind: str) -> Iterator[Reader | RamReader]:
        """Open and compare with the chain: the record must be what the plan says. Raises RestoreFailed, also for a
        RecordError of the caller."""
        entry, tier = piece.entry, "ram"
        try:
            reader: Reader | RamReader | None = self.ram.open(entry.key, kind)
            if reader is not None and kind != "state" and reader.meta.row_start > piece.start:
                reader = None  # held for another cut of the same rows than the plan's: the plan means the one on disk
            if reader is None:
                tier = "ssd"
                reader = Reader.open(self.folder.file(entry.key, kind))
            with reader:
                self._compare(reader.meta, piece, kind)
                if tier == "ssd" and kind != "state" and reader.meta.row_start != entry.row_start:
                    self.other[entry.key] = entry
                yield reader
        except RecordError as e:
            raise RestoreFailed(entry, kind, e, tier, len(self._verified)) from e
        self.used.add(tier)

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
        if self._promoted + size > self.ram.budget:
            return
        self._promoted += size
        held = {name: (reader.tensors[name][0], array) for name, array in arrays().items()}
        self.ram.put(Draft(reader.meta, {reader.meta.kind: Body(held, dict(reader.sums))}, ()))

    def _rows(self, plan: Plan, capacity: int, arrays: dict[str, mx.array]) -> int:
        specs = self.layout.tensors("rows")
        into = self._into or {t.name: Destination(t.sized(capacity), t.dtype) for t in specs}
        self._into = into
        self._verified = self._verified[: _shared([piece for piece, _ in self._verified], plan.pieces)]
        self.used.update(tier for _, tier in self._verified)
        factors = [t for name in self.layout.packings for t in specs if t.name in (f"{name}.scales", f"{name}.biases")]
        read = 0
        for piece in plan.pieces[len(self._verified) :]:
            a, b = piece.start, piece.end
            self._touched = max(self._touched, b)
            with self._open(piece, "rows") as reader:
                held = range(reader.meta.row_start, reader.meta.end)
                reader.require(specs, len(held))
                read += sum(t.nbytes(len(held)) for t in specs)
                if held == range(a, b):
                    for t in specs:
                        reader.read_into(t.name, into[t.name].row_views(a, b))
                    _require_finite({t.name: into[t.name].rows(a, b) for t in factors}, factors)
                    self._promote(reader, lambda a=a, b=b: {name: d.copy_rows(a, b) for name, d in into.items()})
                else:  # a part of them: all are read and verified in memory of their own
                    whole = {t.name: reader.read(t.name) for t in specs}
                    _require_finite(whole, factors)
                    for name, rows in whole.items():
                        into[name].put_rows(a, rows[:, :, a - held.start : b - held.start])
                    self._promote(reader, lambda whole=whole: whole)
                tier = "ram" if isinstance(reader, RamReader) else "ssd"
            self._verified.append((piece, tier))
        for destination in into.values():  # what an earlier plan left there: rows that nobody has verified, NaN even
            destination.clear_rows(plan.position, self._touched)
        arrays.update({name: d.release() for name, d in into.items()})
        self._into, self._verified, self._touched = {}, [], 0
        return read

    def _windows(self, plan: Plan, arrays: dict[str, mx.array]) -> int:
        position = plan.position
        specs = self.layout.tensors("window")
        members = [m for m in self.layout.members if m.record == "window"]
        parts: list[tuple[Piece, int, dict[str, np.ndarray]]] = []  # the second: position of the first row
        read = 0
        for piece in plan.pieces:
            if not any(_needed(m, piece, position) for m in members):
                continue
            with self._open(piece, "window") as reader:
                first = reader.meta.row_start
                reader.require(specs, reader.meta.end - first)
                parts.append((piece, first, {t.name: reader.read(t.name) for t in specs}))
                read += sum(t.nbytes(reader.meta.end - first) for t in specs)
                self._promote(reader, lambda: parts[-1][2])  # only read from here on
        for member in members:
            for t in member.tensors:
                rows = [
                    data[t.name][:, :, a - first : b - first]
                    for piece, first, data in parts
                    for a, b in _needed(member, piece, position)
                ]
                arrays[t.name] = from_host(np.ascontiguousarray(np.concatenate(rows, axis=2)), t.dtype)
                if arrays[t.name].shape[2] != min(position, (member.window or 0) + member.keep):
                    raise PositionError(f"Window of member {member.path} is incomplete at {position}.")
        return read

    def _state(self, entry: Entry, position: int, arrays: dict[str, mx.array]) -> int:
        specs = self.layout.tensors("state")
        if entry.end != position:
            raise PositionError(f"A state of position {entry.end} was planned for position {position}.")
        into = {t.name: Destination(t.shape, t.dtype) for t in specs}
        with self._open(Piece(entry, position, position), "state") as reader:
            reader.require(specs, 0)
            for t in specs:
                reader.read_into(t.name, into[t.name].views())
            self._promote(reader, lambda: {name: d.copy() for name, d in into.items()})
        arrays.update({name: d.release() for name, d in into.items()})
        return sum(t.nbytes(0) for t in specs)


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
