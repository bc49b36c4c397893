"""Restore: execute a plan. Nothing reaches the sequence's state until every byte of every record has been verified."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from .folder import CacheFolder
from .host import Destination, from_host
from .index import Entry
from .keys import KeySpace, unpack
from .layout import Layout, MemberSpec, tensor_name
from .planner import Piece, Plan
from .record import OtherRows, Reader, RecordError
from .state import PositionError, SequenceState


class RestoreFailed(Exception):
    """One record of the plan failed; ``error`` says how. What was read is discarded."""

    def __init__(self, entry: Entry, kind: str, error: RecordError) -> None:
        super().__init__(f"{entry.key.hex()[:12]}.{kind}: {error}")
        self.entry, self.kind, self.error = entry, kind, error


class Restorer:
    """Reads for one plan into destinations that belong to nobody else yet."""

    def __init__(self, folder: CacheFolder, space: KeySpace, layout: Layout, tokens: list[int]) -> None:
        self.folder, self.space, self.layout, self.tokens = folder, space, layout, tokens

    def run(self, plan: Plan, state: SequenceState, capacity: int) -> int:
        """Bring a fresh ``state`` to ``plan.position``, growing buffers with room for ``capacity`` rows; returns the
        bytes read. Raises RestoreFailed; the state is as new then."""
        arrays: dict[str, mx.array] = {}
        read = 0
        position = plan.position
        if plan.state is not None:  # first: where it fails, an earlier state is next, and rows would be read again
            read += self._state(plan.state, position, arrays)
        if plan.pieces:
            read += self._rows(plan, max([capacity, *(p.end for p in plan.pieces)]), arrays)
        if "window" in self.layout.kinds:
            read += self._windows(plan, arrays)
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

    def _open(self, entry: Entry, kind: str, position: int) -> Reader:
        """Open and compare with the chain: the record must be exactly what the plan says. Raises RestoreFailed."""
        try:
            reader = Reader.open(self.folder.file(entry.key, kind))
        except RecordError as e:
            raise RestoreFailed(entry, kind, e) from e
        m = reader.meta
        expected = (
            (m.kind, m.key, m.root, m.parent) == (kind, entry.key, self.space.root, entry.parent)
            and (m.start, m.end, m.block, m.layout) == (entry.start, entry.end, self.space.block, self.layout.digest)
            and list(m.tokens) == unpack(entry.tokens)
        )
        if not expected:
            reader.close()
            raise RestoreFailed(entry, kind, RecordError("the file holds another record than its name says"))
        mine = self.tokens[m.start : min(m.end, position)]
        if list(m.tokens[: len(mine)]) != mine:  # the prompt, not the index, has the last word on tokens
            reader.close()
            raise RestoreFailed(entry, kind, RecordError("the record's tokens are not the prompt's"))
        if kind != "state" and (m.row_start, m.base) != (entry.row_start, entry.base):
            reader.close()
            raise RestoreFailed(entry, kind, OtherRows(f"its rows start at {m.row_start}, not {entry.row_start}"))
        return reader

    def _rows(self, plan: Plan, capacity: int, arrays: dict[str, mx.array]) -> int:
        specs = self.layout.tensors("rows")
        into = {t.name: Destination(t.sized(capacity), t.dtype) for t in specs}
        read = 0
        for piece in plan.pieces:
            with self._open(piece.entry, "rows", plan.position) as reader:
                try:
                    reader.require(specs, piece.end - piece.start)
                    for t in specs:
                        reader.read_into(t.name, into[t.name].row_views(piece.start, piece.end))
                        read += t.nbytes(piece.end - piece.start)
                except RecordError as e:
                    raise RestoreFailed(piece.entry, "rows", e) from e
        arrays.update({name: d.release() for name, d in into.items()})
        return read

    def _windows(self, plan: Plan, arrays: dict[str, mx.array]) -> int:
        position = plan.position
        specs = self.layout.tensors("window")
        tail = max(0, position - self.layout.windows[-1])
        parts: list[tuple[Piece, dict[str, np.ndarray]]] = []
        read = 0
        for piece in plan.pieces:
            if piece.end <= tail and piece.start >= self.layout.keep:
                continue
            with self._open(piece.entry, "window", position) as reader:
                try:
                    reader.require(specs, piece.end - piece.start)
                    parts.append((piece, {t.name: reader.read(t.name) for t in specs}))
                    read += sum(t.nbytes(piece.end - piece.start) for t in specs)
                except RecordError as e:
                    raise RestoreFailed(piece.entry, "window", e) from e
        for member in self.layout.members:
            if member.record != "window":
                continue
            for t in member.tensors:
                rows = [
                    data[t.name][:, :, a - piece.start : b - piece.start]
                    for piece, data in parts
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
        with self._open(entry, "state", position) as reader:
            try:
                reader.require(specs, 0)
                for t in specs:
                    reader.read_into(t.name, into[t.name].views())
            except RecordError as e:
                raise RestoreFailed(entry, "state", e) from e
        arrays.update({name: d.release() for name, d in into.items()})
        return sum(t.nbytes(0) for t in specs)


def _needed(member: MemberSpec, piece: Piece, position: int) -> list[tuple[int, int]]:
    """The parts of a piece that a window at ``position`` holds: the first ``keep`` rows and the last ``window``
    ones."""
    window, keep = member.window or 0, member.keep
    if position <= window + keep:
        wanted = [(0, position)]
    else:
        wanted = [(0, keep), (position - window, position)]
    spans = [(max(a, piece.start), min(b, piece.end)) for a, b in wanted]
    return [(a, b) for a, b in spans if a < b]
