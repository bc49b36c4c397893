"""A chain of oMLX blocks over known tokens: which rows and which states of it can be believed, as a prefix.

Block i of size b covers tokens [i·b, (i+1)·b). A layer's rows are those of the block, or (legacy composites) of all
tokens so far: then one late block has them all. A state is believed only where something in the same file proves that
it stands at the end of the block; rows that go further than the chain, or less far, prove the contrary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import xxhash

from ..layout import Layout
from ..policy import Policy, State, thin
from ..tensors import HOST_DTYPE, finite
from .omlx_layers import Fitted, Path_, Ring, Rows, Source
from .prefix import HostArrays, Prefix, Stand, Strip
from .reasons import Refused


@dataclass
class Outcome:
    """``prefix``: what can be resumed, None if nothing can. ``used``: the blocks that it takes all from that is of use;
    ``refused``: why the others that are there are not, or not wholly. A block whose arrays turn out to be unusable when
    they are read is ``spoiled``."""

    prefix: Prefix | None
    used: list[int]
    refused: dict[int, Refused]


@dataclass
class _Chain:
    layout: Layout
    tokens: Sequence[int]
    block: int
    blocks: dict[int, Fitted] = field(default_factory=dict)
    #: whole blocks that are not used
    refused: dict[int, Refused] = field(default_factory=dict)
    #: why there is no state in a block
    stateless: dict[int, Refused] = field(default_factory=dict)
    spoiled: Callable[[int], None] = lambda i: None
    tick: Callable[[], None] = lambda: None
    _modes: dict[int, str] = field(default_factory=dict)
    _window: tuple[int, HostArrays | None] | None = None
    _digests: dict[tuple[int, int], bytes] = field(default_factory=dict)

    def end(self, i: int) -> int:
        return (i + 1) * self.block

    # check 6: roles; 7: one storage mode a layer

    def take(self, i: int, fitted: Fitted) -> None:
        """Raises Refused for a block of which nothing can be used."""
        said = fitted.block
        if said.block not in (None, self.block):
            raise Refused("BLOCK_SIZE", f"blocks of {said.block}, its chain has {self.block}")
        if said.tokens != self.block:
            raise Refused("COUNTS", f"{said.tokens} tokens, its chain has blocks of {self.block}")
        if any(self._modes.get(layer, mode) != mode for layer, mode in fitted.modes.items()):
            raise Refused("MIXED")
        for path, rows in fitted.rows.items():
            self._role(i, path, rows)
        self._modes |= fitted.modes
        self.blocks[i] = fitted
        if (why := self._no_state(i, fitted)) is not None:
            self.stateless[i] = why

    def _role(self, i: int, path: Path_, rows: Rows) -> None:
        want = self.end(i) if self._cumulative(path, rows) else self.block
        if rows.rows < want:
            raise Refused("SHORT", f"{rows.rows} rows in member {path}, not {want}")
        if rows.rows > want and not self._cumulative(path, rows):
            raise Refused("OVER_ADVANCED", f"{rows.rows} rows in member {path}, not {want}")

    def _cumulative(self, path: Path_, rows: Rows) -> bool:
        """Members of a CacheList without anything that cannot be cut were cut like plain layers."""
        if rows.mode != "legacy":
            return False
        return rows.rows != self.block or any(m.path[0] == path[0] and m.kind != "growing" for m in self.layout.members)

    # check 8: where a state stands; 9: windows

    def _no_state(self, i: int, fitted: Fitted) -> Refused | None:
        end = self.end(i)
        exact = False  # a member shows how many tokens had been processed
        for path, rows in fitted.rows.items():
            if self._cumulative(path, rows):
                if rows.rows != end:
                    return Refused("OVER_ADVANCED", f"{rows.rows} rows in member {path}, its chain has {end} tokens")
                exact = True
        for path, ring in fitted.rings.items():
            if (why := _window(ring, end)) is not None:
                return Refused("WINDOW", f"member {path}: {why}")
            exact = True
        for state in fitted.states.values():
            if state.refused is not None:
                return state.refused
        kinds = {"window": fitted.rings, "recurrent": fitted.states}
        if any(m.path not in kinds[m.kind] for m in self.layout.members if m.kind in kinds):
            return Refused("NO_STATE", "a placeholder")
        # per-member storage came with the rule that a state is stored at its boundary or not at all
        if fitted.states and not exact and "pm" not in fitted.modes.values():
            return Refused("NO_PROVENANCE")
        return None

    # check 7: composites agree on the rows that they share

    def compare(self) -> None:
        """Composites that contradict each other in rows that they share: one is not of these weights, or damaged, and
        nothing says which. None of them is believed. Each is compared with the one before, and the last, whose rows are
        the ones that are used, with each."""
        composites = [i for i in sorted(self.blocks) if self._composite(i)]
        pairs = [*zip(composites[1:], composites, strict=False), *((composites[-1], j) for j in composites[:-2])]
        if any(self._digest(i, j) != self._digest(j, j) for i, j in pairs):
            for i in composites:
                self._drop(i, "OTHER_ROWS")

    def _drop(self, i: int, code: str) -> None:
        self.refused[i] = Refused(code, path=self.blocks.pop(i).path)

    def _composite(self, i: int) -> list[Path_]:
        return [p for p, rows in self.blocks[i].rows.items() if self._cumulative(p, rows)]

    def _digest(self, i: int, j: int) -> bytes:
        """Of the rows of block j that block i holds."""
        if (i, j) not in self._digests:
            self.tick()
            h = xxhash.xxh3_128()
            fitted = self.blocks[i]
            with fitted.block.file as file:
                for path in sorted(self._composite(i)):
                    for source in fitted.rows[path].sources:
                        if source.tensor:
                            rows = file.rows(source.tensor, j * self.block, self.end(j))
                            h.update(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
            self._digests[i, j] = h.digest()
        return self._digests[i, j]

    # rows

    def sources(self, count: int) -> dict[Path_, list[int | None]]:
        """For each growing member and each of ``count`` blocks, the block that holds its rows."""
        out: dict[Path_, list[int | None]] = {}
        for path in [m.path for m in self.layout.members if m.kind == "growing"]:
            at: list[int | None] = [None] * count
            for i in sorted(self.blocks):
                if (rows := self.blocks[i].rows.get(path)) is not None:
                    for j in range(i + 1) if self._cumulative(path, rows) else (i,):
                        at[j] = i
            out[path] = at
        return out

    def read_rows(self, sources: dict[Path_, list[int | None]], a: int, b: int) -> HostArrays:
        out: HostArrays = {}
        for path, at in sources.items():
            parts: dict[Source, list[np.ndarray]] = {}
            start = a
            while start < b:
                j = start // self.block
                i = at[j]
                assert i is not None
                last = j
                rows = self.blocks[i].rows[path]
                whole = self._cumulative(path, rows)
                while whole and self.end(last) < b and at[last + 1] == i:
                    last += 1
                end, first = min(b, self.end(last)), 0 if whole else i * self.block
                with self.blocks[i].block.file as file:
                    for k, source in enumerate(rows.sources):
                        spec = source.spec
                        if source.tensor:
                            array = file.rows(source.tensor, start - first, end - first)
                            if not finite(spec.dtype, array):
                                raise Refused("NOT_FINITE", spec.name, file.path)
                        else:
                            array = _nothing(source, end - start)
                        parts.setdefault(Source(spec, str(k)), []).append(array)
                start = end
            for source, arrays in parts.items():
                joined = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=2)
                out[source.spec.name] = source.spec.dtype, np.ascontiguousarray(joined)
        return out

    # states and windows

    def stand(self, i: int) -> Stand:
        fitted = self.blocks[i]
        strips: list[Strip] = []
        if ring := next(iter(fitted.rings.values()), None):
            end = self.end(i)
            spans = [(0, end)] if end <= ring.keep + ring.window else [(0, ring.keep), (end - ring.window, end)]
            strips = [Strip(a, b, partial(self._cut, i, a, b, spans)) for a, b in spans if a < b]
        return Stand(self.end(i), partial(self._read, i, self._states, i), tuple(strips))

    def _read(self, i: int, read: Callable[[int], HostArrays], *args: int) -> HostArrays | None:
        """Arrays of block i; None, and a reason, where they cannot be used after all."""
        try:
            with self.blocks[i].block.file:
                arrays = read(*args)
            if bad := next((n for n, (dtype, a) in arrays.items() if not finite(dtype, a)), None):
                raise Refused("NOT_FINITE", bad)
            return arrays
        except Refused as e:
            self.refused[i] = Refused(e.code, e.detail, self.blocks[i].path)
            self.spoiled(i)
            return None

    def _states(self, i: int) -> HostArrays:
        fitted = self.blocks[i]
        read = fitted.block.file.read
        return {
            s.spec.name: (s.spec.dtype, read(s.tensor) if s.tensor else _nothing(s, 0))
            for state in fitted.states.values()
            for s in state.sources
        }

    def _cut(self, i: int, a: int, b: int, spans: list[tuple[int, int]]) -> HostArrays | None:
        """Rows [a, b) of block i's windows, which hold ``spans`` one after the other. Strips are asked for in order:
        what was read last is kept, and no more than that."""
        if self._window is None or self._window[0] != i:
            self._window = None  # before the next is read
            self._window = i, self._read(i, self._rings, i)
        arrays = self._window[1]
        if arrays is None:
            return None
        first = sum(d - c for c, d in spans if d <= a)
        return {name: (dtype, array[:, :, first : first + b - a]) for name, (dtype, array) in arrays.items()}

    def _rings(self, i: int) -> HostArrays:
        """The rows of windows, in order of their tokens."""
        fitted = self.blocks[i]
        out: HostArrays = {}
        for ring in fitted.rings.values():
            for s in ring.sources:
                rows = fitted.block.file.read(s.tensor) if s.tensor else _nothing(s, ring.rows)
                if ring.index < ring.rows and ring.offset > ring.rows:
                    parts = [rows[:, :, : ring.keep], rows[:, :, ring.index :], rows[:, :, ring.keep : ring.index]]
                    rows = np.concatenate(parts, axis=2)
                elif ring.offset < ring.rows:
                    rows = rows[:, :, : ring.offset]
                out[s.spec.name] = s.spec.dtype, rows
        return out


def _nothing(source: Source, rows: int) -> np.ndarray:
    """An array without elements, as the layout wants it."""
    return np.empty(source.spec.sized(rows), HOST_DTYPE[source.spec.dtype])


def _window(ring: Ring, end: int) -> str | None:
    """Why a ring does not hold the window of the ``end`` tokens so far."""
    size = ring.keep + ring.window
    if ring.offset != end:
        return f"it stands at {ring.offset}, its chain at {end}"
    if ring.rows > size or ring.index > ring.rows:
        return f"{ring.rows} rows and index {ring.index} in a window of {size}"
    if ring.rows < min(end, size):
        return f"{ring.rows} rows, not {min(end, size)}"
    turned = end > ring.rows  # then older rows were overwritten, but the first ones that are kept
    if turned and ring.index < ring.keep:
        return f"index {ring.index} among the {ring.keep} rows that are kept"
    if not turned and ring.index != end:
        return f"index {ring.index} after {end} rows"
    return None


def follow(
    layout: Layout,
    tokens: Sequence[int],
    block: int,
    find: Callable[[int], Fitted | None],
    spoiled: Callable[[int], None] = lambda i: None,
    tick: Callable[[], None] = lambda: None,
) -> Outcome:
    """What the chain over ``tokens`` gives. ``find(i)`` reads block i: None if it is not there; raises Refused.
    ``spoiled`` is told, while the prefix is read, which blocks turn out not to be usable after all. ``tick`` is called
    now and then, and may raise to stop."""
    chain = _Chain(layout, tokens, block, tick=tick)
    count = len(tokens) // block
    there: list[int] = []
    mixed = False
    for i in range(count):
        tick()
        try:
            if (fitted := find(i)) is None:
                continue
            there.append(i)
            if mixed:  # whatever comes behind it: nothing is joined over it
                raise Refused("CHAIN", "", fitted.path)
            chain.take(i, fitted)
        except Refused as e:
            mixed = mixed or e.code == "MIXED"
            chain.refused[i] = e
            there.append(i) if i not in there else None
    try:
        chain.compare()
    except Refused as e:  # a file changed, or cannot be read any more
        return Outcome(None, [], {i: chain.refused.get(i, e) for i in there})
    sources = chain.sources(count)
    reach = min((_reach(at) for at in sources.values()), default=count)
    stands = [i for i in sorted(chain.blocks) if i not in chain.stateless and i < reach]
    last = reach - 1 if layout.growing_only else max(stands, default=-1)
    needed = set(stands) | {i for at in sources.values() for i in at[: last + 1] if i is not None}
    used: list[int] = []
    for i in there:
        if i in chain.refused:
            continue
        why = chain.stateless.get(i)
        if i in needed and i <= last and (why is None or why.code == "NO_STATE"):
            used.append(i)
        elif why is not None:
            chain.refused[i] = why
        elif i > reach - 1:
            chain.refused[i] = Refused("CHAIN")
        else:
            chain.refused[i] = Refused("NO_STATE")
    chain.spoiled = spoiled
    if last < 0:
        return Outcome(None, [], chain.refused)
    end = chain.end(last)
    kept = [] if layout.growing_only else _kept(layout, [chain.end(i) for i in stands], end)
    prefix = Prefix(
        list(tokens[:end]),
        lambda a, b: chain.read_rows(sources, a, b),
        tuple(chain.stand(i) for i in stands if chain.end(i) in kept),
    )
    return Outcome(prefix, used, chain.refused)


def _reach(at: list[int | None]) -> int:
    """How many blocks have rows, from the first on."""
    return next((j for j, i in enumerate(at) if i is None), len(at))


def _kept(layout: Layout, positions: list[int], end: int) -> set[int]:
    """The positions whose states are worth their bytes, as the store itself would choose them."""
    size = sum(t.nbytes(0) for t in layout.tensors("state"))
    rows = sum(t.nbytes(end) for t in layout.tensors("rows", "window"))
    states = [State(p, "message", size) for p in positions]
    return set(positions) - thin(states, Policy().budget(rows), end, end)
