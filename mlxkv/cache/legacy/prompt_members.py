"""The cache objects of a prompt-cache file as the members of a model's layout: rows in order of position, states.

Everything is compared with the layout before any of it is used: classes, parameters, dtypes, shapes, positions. A ring
is read through the places where its rows lie; it is never turned round in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..layout import Layout, MemberSpec, tensor_name
from .header import HostileFile
from .prefix import HostArrays, Stand, Strip
from .prompt_file import Held, assign, read
from .reasons import Refused

#: kind of member -> what a file calls its class; the first stands for it where a file does not tell
CLASSES = {
    "growing": ("KVCache", "ConcatenateKVCache", "QuantizedKVCache"),
    "window": ("RotatingKVCache",),
    "chunked": ("ChunkedKVCache",),
    "recurrent": ("ArraysCache",),
}


@dataclass(frozen=True)
class Run:
    """Rows of positions [start, end) lie at ``at`` … on the row axis."""

    start: int
    end: int
    at: int


@dataclass(frozen=True)
class FileMember:
    """One member as a file holds it. ``position``: where it stands, None if its class does not count. ``runs``: the
    rows that it holds, in order of position."""

    spec: MemberSpec
    held: Held
    position: int | None
    runs: tuple[Run, ...]

    @property
    def label(self) -> str:
        return self.held.label

    def holds(self, a: int, b: int) -> bool:
        for run in self.runs:
            if run.start <= a < run.end:
                a = run.end
        return a >= b

    def rows(self, file: HostileFile, a: int, b: int) -> HostArrays:
        """Rows [a, b), which must be held, under the names of the layout."""
        out: HostArrays = {}
        for local, name in self.held.arrays.items():
            parts = [
                file.rows(name, run.at + max(a, run.start) - run.start, run.at + min(b, run.end) - run.start)
                for run in self.runs
                if run.start < b and a < run.end
            ]
            array = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=2)
            out[tensor_name(self.spec, local)] = file.tensors[name].dtype, np.ascontiguousarray(array)
        return out

    def state(self, file: HostileFile) -> HostArrays:
        """The arrays of a recurrent member, under the names of the layout."""
        return {
            tensor_name(self.spec, local): (file.tensors[name].dtype, file.read(name))
            for local, name in self.held.arrays.items()
        }


@dataclass(frozen=True)
class Contents:
    """A file that fits a layout. ``length``: how many tokens it was made of; None where nothing in it counts."""

    file: HostileFile
    members: tuple[FileMember, ...]
    length: int | None

    def rows(self, a: int, b: int) -> HostArrays:
        """Rows [a, b) of growing members."""
        out: HostArrays = {}
        for member in self._of("rows"):
            out |= member.rows(self.file, a, b)
        return out

    def state(self) -> HostArrays:
        out: HostArrays = {}
        for member in self._of("state"):
            out |= member.state(self.file)
        return out

    def stand(self, length: int) -> Stand:
        """The place behind all ``length`` tokens. Raises Refused (WINDOW)."""
        return Stand(length, self.state(), tuple(self._strips(length)))

    def _of(self, record: str) -> list[FileMember]:
        return [m for m in self.members if m.spec.record == record]

    def _strips(self, length: int) -> Iterator[Strip]:
        """What windowed members need at ``length``, in strips that all of them hold: the first rows that one keeps,
        and the last."""
        windowed = self._of("window")
        spans = [span for m in windowed for span in m.spec.needs(length)]
        firsts = [span for span in spans if span[1] < length]
        lasts = [span for span in spans if span[1] == length]
        for some in (firsts, lasts):
            if not some:
                continue
            a, b = min(s for s, _ in some), max(e for _, e in some)
            for member in windowed:
                if not member.holds(a, b):
                    raise Refused("WINDOW", f"layer {member.label} does not hold the rows [{a}, {b}) that others need")
            arrays: HostArrays = {}
            for member in windowed:
                arrays |= member.rows(self.file, a, b)
            yield Strip(a, b, arrays)


def fit(file: HostileFile, layout: Layout) -> Contents:
    """The file as members of ``layout``. Raises Refused: what ``prompt_file.read`` raises, and HEAD, LAYOUT, SLOTS,
    TENSORS, DTYPE, SHAPE, COUNTS, SHORT, WINDOW."""
    if any(m.kind in ("head", "hidden") for m in layout.members):
        raise Refused("HEAD", "", file.path)
    if odd := next((m for m in layout.members if m.kind not in CLASSES), None):
        raise Refused("LAYOUT", f"the model keeps a {odd.kind} member, which no such file holds", file.path)
    try:
        layers = read(file)
        last = max(m.path[0] for m in layout.members)
        if len(layers) != last + 1:
            raise Refused("LAYOUT", f"it holds {len(layers)} layers, the model {last + 1}")
        members = tuple(m for i, held in enumerate(layers) for m in _walk(file, layout, held, (i,)))
        counted = {m.position: m.label for m in members if m.position is not None}
        if len(counted) > 1:
            told = ", ".join(f"layer {label} at {position}" for position, label in sorted(counted.items())[:3])
            raise Refused("COUNTS", f"its layers stand at different tokens: {told}")
        length = next(iter(counted), None)
        if length == 0:
            raise Refused("SHORT", "it holds no tokens")
        return Contents(file, members, length)
    except Refused as e:
        raise Refused(e.code, e.detail, file.path) from None


def _walk(file: HostileFile, layout: Layout, held: Held, path: tuple[int, ...]) -> Iterator[FileMember]:
    specs = [m for m in layout.members if m.path[: len(path)] == path]
    if held.cls != "CacheList":
        if len(specs) != 1 or specs[0].path != path:
            raise Refused("LAYOUT", f"layer {held.label} is a {held.cls}, the model keeps a list there")
        yield _member(file, specs[0], held)
        return
    if any(m.path == path for m in specs):
        raise Refused("LAYOUT", f"layer {held.label} is a list, the model keeps a {specs[0].kind} member there")
    if held.loose:
        wanted = [
            (
                ".".join(map(str, m.path)),
                "QuantizedKVCache" if "bits" in dict(m.params) else CLASSES[m.kind][0],
                dict(m.params).get("slots", 0),
            )
            for m in specs
        ]
        held = assign(file, held, wanted)
        # what was nested is one behind the other as well
        for spec, inner in zip(specs, held.inner, strict=True):
            yield _member(file, spec, inner)
        return
    if {m.path[len(path)] for m in specs} != set(range(len(held.inner))):
        raise Refused("LAYOUT", f"layer {held.label} is a list of {len(held.inner)}, the model's another")
    for i, inner in enumerate(held.inner):
        yield from _walk(file, layout, inner, (*path, i))


def _member(file: HostileFile, spec: MemberSpec, held: Held) -> FileMember:
    params, numbers = dict(spec.params), held.numbers
    quantised = held.cls == "QuantizedKVCache"
    if held.cls not in CLASSES.get(spec.kind, ()) or quantised != ("bits" in params):
        raise Refused("LAYOUT", f"layer {held.label} is a {_described(held)}, the model keeps a {spec.kind} member")
    for mine, theirs in (
        ("window", "max_size"),
        ("keep", "keep"),
        ("chunk", "chunk"),
        ("group_size",) * 2,
        ("bits",) * 2,
    ):
        if mine in params and theirs in numbers and params[mine] != numbers[theirs]:
            raise Refused("LAYOUT", f"layer {held.label}: {theirs} is {numbers[theirs]}, the model's {params[mine]}")
    _compare(file, spec, held)
    if spec.record == "state":
        return FileMember(spec, held, None, ())
    position, runs = {"growing": _growing, "window": _ring, "chunked": _chunk}[spec.kind](file, spec, held)
    return FileMember(spec, held, position, runs)


def _described(held: Held) -> str:
    if held.cls == "RotatingKVCache" and "max_size" in held.numbers:
        return f"RotatingKVCache of {held.numbers['max_size']} rows (the first {held.numbers['keep']} kept)"
    return held.cls


def _compare(file: HostileFile, spec: MemberSpec, held: Held) -> None:
    prefix = tensor_name(spec, "")
    specs = {t.name.removeprefix(prefix): t for t in spec.tensors}
    if set(specs) != set(held.arrays):
        code = "SLOTS" if spec.record == "state" else "TENSORS"
        raise Refused(code, f"layer {held.label} holds {', '.join(held.arrays)[:80]}, the model {', '.join(specs)}")
    rows = {file.tensors[name].shape[2:3] for name in held.arrays.values()} if spec.record != "state" else set()
    if len(rows) > 1:
        raise Refused("SHAPE", f"layer {held.label} has another number of rows in each tensor")
    for local, t in specs.items():
        there = file.tensors[held.arrays[local]]
        if there.dtype != t.dtype:
            raise Refused("DTYPE", f"layer {held.label}: {local} is {there.dtype}, the model keeps {t.dtype}")
        want = t.sized(there.shape[2]) if spec.record != "state" and len(there.shape) > 2 else t.shape
        if there.shape != want:
            raise Refused(
                "SHAPE", f"layer {held.label}: {local} is {list(there.shape)}, the model keeps {list(t.shape)}"
            )


def _buffer(file: HostileFile, held: Held) -> int:
    """How many rows the tensors have room for."""
    return file.tensors[next(iter(held.arrays.values()))].shape[2]


def _growing(file: HostileFile, spec: MemberSpec, held: Held) -> tuple[int, tuple[Run, ...]]:
    offset, room = held.numbers["offset"], _buffer(file, held)
    if offset > room:
        raise Refused("SHORT", f"layer {held.label} holds {room} rows of {offset}")
    return offset, (Run(0, offset, 0),)


def _ring(file: HostileFile, spec: MemberSpec, held: Held) -> tuple[int | None, tuple[Run, ...]]:
    """A ring: the first ``keep`` rows, then the others, of which the oldest lies at the write index once that has come
    round."""
    room, keep = _buffer(file, held), spec.keep
    if "offset" not in held.numbers:
        # A list of 0.24 to 0.30 has lost its numbers. What is no longer than the window has not come round.
        if room > spec.keep + (spec.window or 0):
            raise Refused("WINDOW", f"layer {held.label}: where its ring begins was not written")
        return room, (Run(0, room, 0),)
    offset, index = held.numbers["offset"], held.numbers["index"]
    if index > room:
        raise Refused("WINDOW", f"layer {held.label}: the write index {index} of a ring of {room}")
    if index == room or index >= offset:  # in order
        used = index
        if used >= offset:
            if used > offset:
                raise Refused("COUNTS", f"layer {held.label} has {used} rows of {offset} tokens")
            return offset, (Run(0, offset, 0),)
        if used <= keep:
            raise Refused("WINDOW", f"layer {held.label} holds {used} rows, {keep} of them the first")
        return offset, (*([Run(0, keep, 0)] if keep else []), Run(offset - (used - keep), offset, keep))
    if index < keep or room >= offset:
        raise Refused("WINDOW", f"layer {held.label}: the write index {index} of a ring of {room} at {offset} tokens")
    middle = offset - (index - keep)
    runs = [Run(0, keep, 0), Run(middle - (room - index), middle, index), Run(middle, offset, keep)]
    return offset, tuple(run for run in runs if run.start < run.end)


def _chunk(file: HostileFile, spec: MemberSpec, held: Held) -> tuple[int | None, tuple[Run, ...]]:
    room = _buffer(file, held)
    start = held.numbers.get("start")
    offset = held.numbers.get("offset")
    if start is None:
        start, offset = 0, room  # a list of 0.24 to 0.30 has lost its numbers
        if room > (spec.window or 0):
            raise Refused("WINDOW", f"layer {held.label}: where its rows begin was not written")
    if offset is None:
        # Up to 0.31.3 rows were dropped by the length of the buffer, its spare room included: some were still
        # attended to, and what stands above them was computed without.
        raise Refused("TRIMMED", f"layer {held.label} begins at token {start}")
    if not start <= offset <= start + room:
        raise Refused("SHORT", f"layer {held.label} holds {room} rows from token {start} on, of {offset}")
    return offset, (Run(start, offset, 0),)
