"""Random schedules of a batch: rows join, leave, move and are taken out, each of them compared with its solo run.

A row's twin is a sequence on its own caches that is fed the same tokens. After each step logits, and every so often
all arrays of the state, must be the twin's: the same bits in ``exact``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlxkv import numerics
from mlxkv.cache.batch import Batch, NotYet
from mlxkv.cache.layout import Layout, probe
from mlxkv.cache.state import SequenceState
from mlxkv.decode.pool import Pool
from mlxkv.decode.step import Steps
from mlxkv.decode.tracking import Track
from tests import tiny

#: largest |Δ| / largest |value| of logits and state in ``fast``: a faster BLAS sums otherwise for several rows
FAST = 1e-4


def tolerance() -> float:
    return 0.0 if numerics.mode() == "exact" and mx.default_device().type == mx.DeviceType.cpu else FAST


def apart(a: mx.array, b: mx.array) -> float:
    """largest |Δ| / largest |value|; infinite where either is not finite."""
    assert a.shape == b.shape and a.dtype == b.dtype, (a.shape, b.shape, a.dtype, b.dtype)
    if a.size == 0 or mx.array_equal(a, b).item():
        return 0.0
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    if not (mx.isfinite(a).all() & mx.isfinite(b).all()).item():
        return float("inf")
    return float(np.array(mx.abs(a - b).max() / mx.maximum(mx.abs(b).max(), 1e-30)))


@dataclass
class Twin:
    """A sequence on its own: what the batch is measured against."""

    model: Callable[..., mx.array]
    state: SequenceState
    token: int = 0

    @classmethod
    def start(cls, model: Any, make_cache: Callable[[], list[Any]], tokens: list[int], chunk: int, settled: bool):
        """Read ``tokens`` in chunks; ``settled``: as after a boundary before the last token."""
        made = cls(model, SequenceState.new(make_cache()))
        while made.state.position < len(tokens) - 1:
            made.feed(tokens[made.state.position : min(len(tokens) - 1, made.state.position + chunk)])
        if settled:
            made.state.settle()
        made.feed(tokens[-1:])
        return made

    def feed(self, tokens: list[int]) -> mx.array:
        """Logits [V] after ``tokens``; the likeliest one is the next."""
        logits = self.model(mx.array([tokens], mx.int32), cache=self.state.caches)[0, -1]
        self.state.advance(len(tokens))
        mx.eval(logits, self.state.live())
        self.token = int(logits.argmax())
        return logits

    def copy(self, make_cache: Callable[[], list[Any]]) -> SequenceState:
        """The same state in other caches, in memory of its own: what joins is let go of."""
        other = SequenceState.new(make_cache())
        for member, mine in zip(other.members or (), self.state.members or (), strict=True):
            held = mine.hold()
            member.put_back(copied(held))
        other.position = self.state.position
        mx.eval(other.live())
        return other


def first_row(mine: Any, theirs: Any, position: int) -> int:
    """The first of the last rows of two members of rows that the store may ask either for."""
    window, keep = theirs.window(), theirs.keep()
    first = 0 if window is None or position <= window + keep else position - window
    if (
        theirs.kind == "chunked" and window
    ):  # where it was settled, rows before its chunk went, which had been copied out
        first = max(first, mine.cache.start_position, theirs.cache.start_position)
        assert first <= position // window * window
    return first


def farthest(mine: Any, theirs: SequenceState) -> float:
    """The largest difference of any array that the store may ask of either state, which have the same members."""
    worst = 0.0
    mine.catch_up()
    theirs.catch_up()
    for a, b in zip(mine.members, theirs.members or (), strict=True):
        assert (a.path, a.kind, a.record, a.params()) == (b.path, b.kind, b.record, b.params())
        assert (a.window(), a.keep(), a.packable) == (b.window(), b.keep(), b.packable)
        assert a.position in (None, theirs.position)
        if a.record == "state":
            mine_arrays, their_arrays = a.arrays(), b.arrays()
        else:
            p = theirs.position
            first = first_row(a, b, p)
            mine_arrays, their_arrays = a.rows(first, p), b.rows(first, p)
        assert mine_arrays.keys() == their_arrays.keys()
        worst = max([worst, *(apart(mine_arrays[name], array) for name, array in their_arrays.items())])
    return worst


def copied(held: Any) -> Any:
    """The same tree with other arrays."""
    if isinstance(held, mx.array):
        return held + mx.zeros((), held.dtype)
    if isinstance(held, dict):
        return {k: copied(v) for k, v in held.items()}
    return type(held)(copied(v) for v in held) if isinstance(held, (list, tuple)) else held


class Schedule:
    """``run(n)`` makes n random moves. ``worst`` is the largest difference of a row from its twin, which ``run`` also
    gives back; ``moves`` counts what was done."""

    def __init__(
        self,
        model: Any,
        make_cache: Callable[[], list[Any]],
        seed: int,
        live: Layout | None = None,
        *,
        slots: int = 2,
        capacity: int = 48,
        longest: int = 40,
        compile: str = "off",
        journals: Any = None,
        drafts: int = 0,
    ) -> None:
        """``drafts``: how many there are of a row in a cycle at most; 0: no cycles are made."""
        self.model, self.make_cache = model, make_cache
        self.live = live or probe(model, make_cache)
        self.random = random.Random(seed)
        self.longest = longest
        self.drafts = drafts
        self.batch = Batch(make_cache, self.live, slots, capacity, spare=drafts)
        self.pool = Pool.of(self.live, 2)
        self.steps = Steps(model, compile=compile, journals=journals)  # type: ignore[arg-type]
        self.twins: dict[int, Twin] = {}
        self.worst = 0.0
        self.moves: dict[str, int] = {}

    def run(self, n: int) -> float:
        for _ in range(n):
            free = [s for s in range(self.batch.slots) if s not in self.twins]
            moves = ["step"] * 6 + ["resize"] + ["join"] * 3 * bool(free) + ["leave", "take"] * bool(self.twins)
            moves += ["cycle"] * 6 * bool(self.drafts)
            move = self.random.choice(moves)
            self.moves[move] = self.moves.get(move, 0) + 1
            getattr(self, move)()
        for slot in self.twins:
            self.compare(slot)
        return self.worst

    def join(self) -> None:
        slot = self.random.choice([s for s in range(self.batch.slots) if s not in self.twins])
        n = self.random.randint(2, self.longest)
        if n + 1 > self.batch.capacity:
            self.resize(n + 8)
            slot = next(s for s in range(self.batch.slots) if s not in self.twins)
        tokens = tiny.ids(n, self.random.randrange(1 << 30))
        chunk, settled = self.random.choice([3, 7, 16, n]), self.random.random() < 0.5
        twin = Twin.start(self.model, self.make_cache, tokens, chunk, settled)
        while True:
            try:
                self.batch.join(slot, twin.copy(self.make_cache))
                break
            except NotYet:
                twin.feed([twin.token])
        self.twins[slot] = twin
        self.compare(slot)

    def leave(self) -> None:
        slot = self.random.choice(list(self.twins))
        self.compare(slot)
        self.batch.leave(slot)
        del self.twins[slot]

    def take(self) -> None:
        """A row goes on alone for some tokens, and comes back."""
        slot = self.random.choice(list(self.twins))
        if self.twins[slot].state.position >= self.batch.capacity:
            return self.resize()
        alone, twin = Twin(self.model, self.batch.take(slot)), self.twins[slot]
        mx.eval(alone.state.live())
        self.batch.leave(slot)
        room = self.batch.capacity - twin.state.position - 1
        for _ in range(min(room, self.random.randint(0, 3))):
            token = twin.token
            self._seen(alone.feed([token]), twin.feed([token]))
        self._states(alone.state, twin.state)
        self.batch.join(slot, alone.state)
        return None

    def resize(self, capacity: int = 0) -> None:
        longest = max([0, *(t.state.position for t in self.twins.values())])
        slots = len(self.twins) + self.random.randint(1, 2)
        capacity = max(longest + self.random.choice([1, 2, 9, 40]), capacity)
        places = self.random.sample(range(slots), len(self.twins))
        keep = dict(zip(self.twins, places, strict=True))
        self.batch.resize(slots, capacity, keep)
        self.twins = {keep[old]: twin for old, twin in self.twins.items()}
        for slot in self.twins:
            self.compare(slot)

    def step(self) -> None:
        if any(t.state.position >= self.batch.capacity for t in self.twins.values()):
            return self.resize()
        ids = [self.twins[s].token if s in self.twins else 0 for s in range(self.batch.slots)]
        track = Track.of(self.batch.slots, self.pool.dummy)
        if self.random.random() < 0.2:  # built, and never was
            held, pooled = self.batch.hold(), self.pool.arrays
            self.steps.run(self.batch, mx.array(ids, mx.int32), track, self.pool)
            self.batch.put_back(held)
            self.pool.arrays = pooled
            del held, pooled
        logits = self.steps.run(self.batch, mx.array(ids, mx.int32), track, self.pool)
        mx.eval(logits, self.batch.live(), self.pool.arrays)
        for slot, twin in self.twins.items():
            self._seen(logits[slot], twin.feed([ids[slot]]))
        return None

    def cycle(self) -> None:
        """Several tokens of each row at once, of which each keeps its own number; one state inside may be captured."""
        width, before = self.random.randint(2, self.drafts + 1), list(self.batch.positions)
        longest = max([0, *(t.state.position for t in self.twins.values())])
        if longest + width > self.batch.capacity:
            return self.resize(longest + width)
        slots = range(self.batch.slots)
        ids = [[self.twins[s].token if s in self.twins else 0, *self._drafts(width - 1)] for s in slots]
        given, kept = mx.array(ids, mx.int32), self._kept(width)
        captures = {}
        for into, slot in enumerate(
            self.random.sample(list(self.twins), self.random.randint(0, len(self.twins)))[: self.pool.slots]
        ):
            captures[slot] = into, before[slot] + self.random.randint(1, kept[slot])
        track = Track.of(self.batch.slots, self.pool.dummy, captures) if captures else None
        if self.random.random() < 0.3:  # built, and never was
            held, pooled = self.batch.hold(), self.pool.arrays
            self.steps.verify(self.batch, given, self.pool)
            if self.random.random() < 0.5:
                self.steps.commit(self.batch, self._kept(width), None, self.pool)
            self.batch.put_back(held)
            self.pool.arrays = pooled
            del held, pooled
        logits = self.steps.verify(self.batch, given, self.pool)
        assert self.batch.positions == [at + width * (s in self.twins) for s, at in enumerate(before)]
        mx.eval(logits, self.batch.live())
        self.steps.commit(self.batch, kept, track, self.pool)
        assert self.batch.positions == [at + n for at, n in zip(before, kept, strict=True)]
        mx.eval(self.batch.live(), self.pool.arrays)
        for slot, twin in self.twins.items():
            for i in range(kept[slot]):
                self._seen(logits[slot, i], twin.feed([ids[slot][i]]))
                into, at = captures.get(slot, (0, 0))
                if at == twin.state.position:
                    self._captured(into, twin.state)
        return None

    def _drafts(self, n: int) -> list[int]:
        return tiny.ids(n, self.random.randrange(1 << 30))

    def _kept(self, width: int) -> list[int]:
        """By slot: all, the root alone, or any number."""
        some = [self.random.choice([1, width, self.random.randint(1, width)]) for _ in range(self.batch.slots)]
        return [n if s in self.twins else 0 for s, n in enumerate(some)]

    def _captured(self, into: int, state: SequenceState) -> None:
        wanted = [a for m in state.members or () if m.kind == "recurrent" for a in m.arrays().values()]
        for pooled, array in zip(self.pool.arrays, wanted, strict=True):
            self._seen(pooled[into : into + 1], array)

    def compare(self, slot: int) -> None:
        """All arrays of the row's state with its twin's."""
        row = self.batch.row(slot)
        assert row.position == self.batch.positions[slot] == self.twins[slot].state.position
        self._states(row, self.twins[slot].state)

    def _states(self, mine: Any, theirs: SequenceState) -> None:
        self.worst = max(self.worst, farthest(mine, theirs))

    def _seen(self, mine: mx.array, theirs: mx.array) -> None:
        self.worst = max(self.worst, apart(mine, theirs))


def holds(arch: str, seed: int, moves: int, **options: Any) -> Schedule:
    """A schedule of a tiny model of ``arch``, run; raises AssertionError if a row differs from its solo run."""
    from mlx_lm.models.cache import make_prompt_cache

    model, _ = tiny.build(arch)
    schedule = Schedule(model, lambda: make_prompt_cache(model), seed, **options)
    worst = schedule.run(moves)
    assert worst <= tolerance(), (arch, seed, worst, schedule.moves)
    return schedule
