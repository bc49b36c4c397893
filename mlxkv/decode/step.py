"""One decoding step of a batch: every row's next token through the model, plain or compiled.

Both are the same Python function of explicit arrays: ids, where the rows stand, which rows are tracked, the state, the
pool. It gives back the logits and all that changed; nothing else is kept of a step, so that MLX can write into the old
arrays' memory once the caller has let go of them too. Tracking is always part of a trace, with inert lanes when nobody
tracks: what a trace lacks once, it lacks for ever.

A compiled step reads all columns of a batch (shapes are frozen), a plain one only as many as the longest row has.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import mlx.core as mx

from .. import numerics
from ..cache.batch import Batch
from .pool import Pool
from .tracking import Track, scatter

log = logging.getLogger("mlxkv.engine")

Compile = Literal["auto", "on", "off"]
Key = tuple[int, int, int]
#: logits, what heads are shown, the state, the pool
_Out = tuple[mx.array, list[mx.array], list[mx.array], list[mx.array]]

#: compiled functions that live; a trace is never dropped but with its function
MOST = 16
#: steps of one kind in a row while both are timed, and how many of them at the start are not counted
_RUN, _SKIP = 8, 2
#: how often both kinds get their turn
_TURNS = 2
#: a compiled step must be this much faster to be used
_GAIN = 0.98


class Steps:
    """The steps of one engine. ``compile``: on, off, or auto, which on a GPU times both with the first steps of each
    shape and keeps the faster.

    On a CPU auto never compiles: measured, a compiled step takes up to 16 % less (at 100 tokens of a capacity of 256),
    but the first of its kind waits up to half a minute for its kernels to be built. In ``exact`` a compiled step is
    used only where its results have the bits of a plain one.
    """

    def __init__(self, model: Callable[..., mx.array], *, compile: Compile = "auto") -> None:
        self._model = model
        self._compile = compile
        #: how often a step was traced
        self.traces = 0
        self._shapes: OrderedDict[Key, _Shape] = OrderedDict()
        self._last: _Shape | None = None

    def admit(self, batch: Batch, pool: Pool | None = None) -> None:
        """Rows of ``batch`` are about to be stepped: trace what is missing for its shape. Nothing is evaluated."""
        shape = self._shape(batch, pool)
        if shape.wants_compiled and not shape.traced:
            self._trace(shape, batch, mx.zeros((batch.slots,), mx.int32), batch.where(), None, pool)

    def knows(self, slots: int, capacity: int) -> bool:
        """Whether a step of this shape needs no trace: it was traced, or would not be compiled."""
        shape = next((s for key, s in self._shapes.items() if key[:2] == (capacity, slots)), None)
        if shape is None:
            return not self._wants_compiled()
        return shape.traced or not shape.wants_compiled

    def run(self, batch: Batch, ids: mx.array, track: Track | None = None, pool: Pool | None = None) -> mx.array:
        """Lazy logits [slots, V] of the tokens ``ids`` [slots] int32; what a free slot is given does not matter.
        ``track``: None where no row captures.

        ``batch`` and ``pool.arrays`` are rebound and every row stands one further. Keep no reference to their old
        arrays (``Batch.hold``) when the result is evaluated, and evaluate ``batch.live()`` and ``pool.arrays`` with it.
        Raises BatchError if a row has no column left.
        """
        shape = self._shape(batch, pool)
        where = batch.where()
        if shape.wants_compiled and not shape.checked:
            self._check(shape, batch, ids, where, track, pool)
        compiled = self._choose(shape)
        step = self._compiled if compiled else self._plain
        logits, emitted, arrays, pooled = step(shape, batch, ids, where, track, pool)
        batch.bind(arrays)
        batch.shown(ids, emitted)
        batch.advance()
        if pool is not None:
            pool.arrays = pooled
        return logits

    def interrupt(self) -> None:
        """Something else was done since the last step: the time until the next one says nothing."""
        self._last = None

    # which of the two

    def _shape(self, batch: Batch, pool: Pool | None) -> _Shape:
        key = (batch.capacity, batch.slots, pool.dummy + 1 if pool else 0)
        if key not in self._shapes:
            cpu = mx.default_device().type == mx.DeviceType.cpu
            wanted = self._compile == "on" or (self._compile == "auto" and not cpu)
            self._shapes[key] = _Shape(wanted)
        self._shapes.move_to_end(key)
        while len(self._shapes) > MOST:
            self._shapes.popitem(last=False)
        return self._shapes[key]

    def _wants_compiled(self) -> bool:
        cpu = mx.default_device().type == mx.DeviceType.cpu
        return self._compile == "on" or (self._compile == "auto" and not cpu)

    def _choose(self, shape: _Shape) -> bool:
        """Whether this step is compiled."""
        if not shape.wants_compiled:
            return False
        if self._compile == "on":
            return True
        if self._last is not shape:
            shape.race.interrupt()  # a step of another batch came between
        self._last = shape
        return shape.race.next(time.perf_counter())

    def _trace(
        self, shape: _Shape, batch: Batch, ids: mx.array, where: mx.array, track: Track | None, pool: Pool | None
    ) -> _Out | None:
        """A compiled step; None where the model cannot be traced, and is stepped plainly from now on."""
        try:
            return self._compiled(shape, batch, ids, where, track, pool)
        except Exception as e:
            log.info("steps of this model are not compiled: %s: %s", type(e).__name__, e)
            shape.wants_compiled = False
            return None

    def _check(
        self, shape: _Shape, batch: Batch, ids: mx.array, where: mx.array, track: Track | None, pool: Pool | None
    ) -> None:
        """Before the first compiled step: whether there can be one; in ``exact``, whether its bits are the plain
        one's."""
        shape.checked = True
        out = self._trace(shape, batch, ids, where, track, pool)
        if out is not None and numerics.mode() == "exact":
            plain = self._plain(shape, batch, ids, where, track, pool)
            shape.wants_compiled = _same_bits(out, plain)

    # the step

    def _plain(
        self, shape: _Shape, batch: Batch, ids: mx.array, where: mx.array, track: Track | None, pool: Pool | None
    ) -> _Out:
        arrays = batch.arrays()
        try:
            tracked = track.arrays() if track is not None else []
            return self._step(batch, batch.columns(), ids, where, tracked, arrays, pool.arrays if pool else [])
        finally:
            batch.bind(arrays)

    def _compiled(
        self, shape: _Shape, batch: Batch, ids: mx.array, where: mx.array, track: Track | None, pool: Pool | None
    ) -> _Out:
        if shape.function is None:
            cell: list[Batch] = []  # a trace is of shapes: it keeps no batch

            def step(*args: Any) -> _Out:
                self.traces += 1
                return self._step(cell[0], None, *args)

            shape.function, shape.cell = mx.compile(step), cell
        if track is None:  # always there: a trace without it would never track
            track = Track.of(batch.slots, pool.dummy if pool else 0)
        arrays = batch.arrays()
        shape.cell.append(batch)
        try:
            # another dtype of ids would be another trace
            out = shape.function(ids.astype(mx.int32), where, track.arrays(), arrays, pool.arrays if pool else [])
            shape.traced = True
            return out
        finally:
            shape.cell.clear()
            batch.bind(arrays)  # a trace leaves its own placeholders in the caches

    def _step(
        self,
        batch: Batch,
        columns: int | None,
        ids: mx.array,
        where: mx.array,
        track: list[mx.array],
        arrays: list[mx.array],
        pool: list[mx.array],
    ) -> _Out:
        batch.bind(arrays)
        logits, emitted = batch.forward(self._model, ids, where, columns)
        pooled = scatter(pool, batch.states(), Track.bind(track)) if track and pool else pool
        return logits, emitted, batch.arrays(), pooled


class Race:
    """Which kind of step is faster, found with steps that are made anyway: runs of either kind in turn. The time of a
    step is that until the next one; the first ones of a run, and those something came between, do not count."""

    def __init__(self) -> None:
        #: whether compiled steps won; None while both are timed
        self.winner: bool | None = None
        self._seconds: tuple[list[float], list[float]] = ([], [])
        self._taken = 0
        self._before: float | None = None

    def interrupt(self) -> None:
        """Something else is done before the next step."""
        self._before = None

    def next(self, now: float) -> bool:
        """Whether the step that begins ``now`` (seconds) is to be compiled."""
        if self.winner is not None:
            return self.winner
        run, place = divmod(self._taken - 1, _RUN)  # of the step that ends now
        if self._before is not None and place >= _SKIP:
            self._seconds[run % 2].append(now - self._before)
        self._before = now
        if self._taken >= 2 * _TURNS * _RUN and all(self._seconds):
            plain, compiled = (sorted(s)[len(s) // 4] for s in self._seconds)
            self.winner = compiled < _GAIN * plain
            return self.winner
        self._taken += 1
        return (self._taken - 1) // _RUN % 2 == 1


@dataclass
class _Shape:
    """What is known of one (capacity, slots, pool)."""

    wants_compiled: bool
    function: Any = None
    cell: list[Batch] = field(default_factory=list)
    traced: bool = False
    checked: bool = False
    race: Race = field(default_factory=Race)


def _same_bits(a: _Out, b: _Out) -> bool:
    flat = [[x for part in out for x in (part if isinstance(part, list) else [part])] for out in (a, b)]
    same = [mx.array_equal(x, y, equal_nan=True) for x, y in zip(*flat, strict=True)]
    return all(s.item() for s in same)
