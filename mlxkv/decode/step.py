"""The steps of a batch, plain or compiled: every row's next token through the model; or several tokens of each row, to
verify drafts, and the commit that follows.

Both kinds are the same Python function of explicit arrays: ids, where the rows stand, which rows are tracked, the
state, the pool. It gives back the logits and all that changed; nothing else is kept of a step, so that MLX can write
into the old arrays' memory once the caller has let go of them too. Tracking is always part of a trace, with inert lanes
when nobody tracks: what a trace lacks once, it lacks for ever. A verify step leaves recurrent states as they were and
gives back a journal of them; the commit makes of it each row's state after the tokens it keeps, and those that are
tracked.

A compiled step reads all columns of a batch (shapes are frozen), a plain one only as many as the longest row has.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx

from .. import numerics
from ..cache.batch import Batch
from ..cache.batch.journal import Journal, Journals, Outline
from .pool import Pool
from .traced import Out, Traced, same_bits
from .tracking import Track, scatter

log = logging.getLogger("mlxkv.engine")

Compile = Literal["auto", "on", "off"]
#: capacity, slots, rows of the pool, what is done, tokens a row
What = Literal["step", "verify", "commit"]
Key = tuple[int, int, int, What, int]

#: compiled functions that live; a trace is never dropped but with its function
MOST = 16


@dataclass(frozen=True)
class _Job:
    """One thing to do, in both kinds."""

    plain: Callable[[], Out]
    compiled: Callable[[], Out]


class Steps:
    """The steps of one engine. ``compile``: on, off, or auto, which on a GPU times both with the first steps of each
    shape and keeps the faster. ``journals``: what the model's recurrent layers write down of a verify step.

    On a CPU auto never compiles: measured, a compiled step takes up to a quarter less (the demo model alone, 528
    tokens/s against 396), but the first of its kind waits up to half a minute for its kernels to be built. In ``exact``
    a compiled step is used only where its results have the bits of a plain one.
    """

    def __init__(
        self, model: Callable[..., mx.array], *, compile: Compile = "auto", journals: Journals | None = None
    ) -> None:
        self._model = model
        self._compile = compile
        self._journals = journals
        #: how often a function was traced
        self.traces = 0
        #: so many verify steps of a shape are made before it is traced, unless a row was admitted for them
        self.rare = 0
        self._shapes: OrderedDict[Key, Traced] = OrderedDict()
        #: what journals of verify steps are like, by key
        self._outlines: dict[Key, Outline] = {}
        self._last: Traced | None = None
        #: what is tracked where nothing is, by slots and rows of the pool
        self._nothing: dict[tuple[int, int], list[mx.array]] = {}

    def admit(self, batch: Batch, pool: Pool | None = None, widths: Iterable[int] = ()) -> None:
        """Rows of ``batch`` are about to be stepped, or verified at some of ``widths``: trace what is missing for its
        shape. Nothing is evaluated."""
        step = self._shape(batch, pool, "step", 1)
        if step.wants_compiled and not step.traced:
            self._trace(step, self._step(step, batch, mx.zeros((batch.slots,), mx.int32), batch.where(), None, pool))
        for width in widths:
            self._admit(batch, pool, width)

    def _admit(self, batch: Batch, pool: Pool | None, width: int) -> None:
        verify = self._shape(batch, pool, "verify", width)
        commit = self._shape(batch, pool, "commit", width)
        if not verify.wants_compiled or (verify.traced and commit.traced):
            return
        ids, where = mx.zeros((batch.slots, width), mx.int32), batch.where()
        out = self._trace(verify, self._verify(verify, batch, ids, where, pool))
        if out is None or not commit.wants_compiled or not batch.replayed():
            commit.traced = True
            return
        journal = self._journal(batch, pool, width, out[3])
        kept = mx.zeros((batch.slots,), mx.int32)
        self._trace(commit, self._commit(commit, batch, journal, width, kept, where, None, pool))

    def knows(self, slots: int, capacity: int, widths: Iterable[int] = ()) -> bool:
        """Whether steps of this shape need no trace, verify steps of ``widths`` included: they were traced, or would
        not be compiled."""
        wanted: set[tuple[What, int]] = {("step", 1)}
        for width in widths:
            wanted |= {("verify", width), ("commit", width)}
        known = {(key[3], key[4]): s for key, s in self._shapes.items() if key[:2] == (capacity, slots)}
        if not known.keys() >= wanted:
            return not self._wants_compiled()
        return all(known[key].traced or not known[key].wants_compiled for key in wanted)

    def run(self, batch: Batch, ids: mx.array, track: Track | None = None, pool: Pool | None = None) -> mx.array:
        """Lazy logits [slots, V] of the tokens ``ids`` [slots] int32; what a free slot is given does not matter.
        ``track``: None where no row captures.

        ``batch`` and ``pool.arrays`` are rebound and every row stands one further. Keep no reference to their old
        arrays (``Batch.hold``) when the result is evaluated, and evaluate ``batch.live()`` and ``pool.arrays`` with it.
        Raises BatchError if a row has no column left.
        """
        shape = self._shape(batch, pool, "step", 1)
        job = self._step(shape, batch, ids, batch.where(), track, pool)
        logits, emitted, arrays, pooled = self._done(shape, job, self._choose)
        batch.bind(arrays)
        batch.shown(ids, emitted)
        batch.advance()
        if pool is not None:
            pool.arrays = pooled
        return logits

    def verify(self, batch: Batch, ids: mx.array, pool: Pool | None = None) -> mx.array:
        """Lazy logits [slots, D, V] of the next D tokens of each row, ``ids`` [slots, D] int32: its unprocessed token,
        then drafts. ``commit`` must follow. ``pool``: that of the commit.

        ``batch`` is rebound as in ``run``, and every row stands D further. Raises BatchError, with the batch as it was,
        if a row has too few columns left or a layer keeps no journal.
        """
        width = ids.shape[1]
        shape = self._shape(batch, pool, "verify", width)
        job = self._verify(shape, batch, ids, batch.where(width), pool)
        logits, emitted, arrays, written = self._done(shape, job, self._choose)
        batch.bind(arrays)
        batch.shown(ids, emitted)
        batch.hold_open(width, self._journal(batch, pool, width, written))
        return logits

    def commit(self, batch: Batch, kept: list[int], track: Track | None = None, pool: Pool | None = None) -> None:
        """Row r of the verify step keeps the first kept[r] of its D tokens, 0 for a free slot; the others never were.
        Nothing is evaluated. ``track``: states to capture, each at a position inside what its row keeps or at the end
        of it; None for none.

        ``batch`` and ``pool.arrays`` are rebound as in ``run``. Raises BatchError, with the batch as it was, for other
        numbers.
        """
        verified = batch.check_kept(kept)
        width, journal = verified.width, verified.journal
        if batch.replayed():
            shape = self._shape(batch, pool, "commit", width)
            counts = mx.array(kept, mx.int32)
            job = self._commit(shape, batch, journal, width, counts, batch.before(), track, pool)
            verify = self._shapes.get(self._key(batch, pool, "verify", width))
            shape.chosen = verify is not None and verify.chosen
            arrays, pooled = self._done(shape, job, lambda _: True) if shape.chosen else job.plain()
            batch.bind_replayed(arrays)
            if pool is not None:
                pool.arrays = pooled
        batch.commit(kept)

    def interrupt(self) -> None:
        """Something else was done since the last step: the time until the next one says nothing."""
        self._last = None

    # which of the two

    def _key(self, batch: Batch, pool: Pool | None, what: What, width: int) -> Key:
        return batch.capacity, batch.slots, pool.dummy + 1 if pool else 0, what, width

    def _shape(self, batch: Batch, pool: Pool | None, what: What, width: int) -> Traced:
        key = self._key(batch, pool, what, width)
        if key not in self._shapes:
            self._shapes[key] = Traced(self._wants_compiled(), self.rare if what == "verify" else 0)
        self._shapes.move_to_end(key)
        while len(self._shapes) > MOST:
            gone, _ = self._shapes.popitem(last=False)
            self._outlines.pop(gone, None)
        return self._shapes[key]

    def _wants_compiled(self) -> bool:
        cpu = mx.default_device().type == mx.DeviceType.cpu
        return self._compile == "on" or (self._compile == "auto" and not cpu)

    def _choose(self, shape: Traced) -> bool:
        """Whether this step is compiled. A commit follows its verify step: both are timed as one."""
        if self._compile == "on":
            return True
        if self._last is not shape:
            shape.race.interrupt()  # a step of another batch came between
        self._last = shape
        return shape.race.next(time.perf_counter())

    def _done(self, shape: Traced, job: _Job, choose: Callable[[Traced], bool]) -> Out:
        if shape.wants_compiled and shape.rare:
            shape.rare, shape.chosen = shape.rare - 1, False
            self.interrupt()
            return job.plain()
        if shape.wants_compiled and not shape.checked:
            self._check(shape, job)
        shape.chosen = shape.wants_compiled and choose(shape)
        return job.compiled() if shape.chosen else job.plain()

    def _trace(self, shape: Traced, job: _Job) -> Out | None:
        """What is compiled; None where the model cannot be traced, and is stepped plainly from now on."""
        try:
            return job.compiled()
        except Exception as e:
            log.info("steps of this model are not compiled: %s: %s", type(e).__name__, e)
            shape.wants_compiled = False
            return None

    def _check(self, shape: Traced, job: _Job) -> None:
        """Before the first compiled step: whether there can be one; in ``exact``, whether its bits are the plain
        one's."""
        shape.checked = True
        out = self._trace(shape, job)
        if out is not None and numerics.mode() == "exact":
            shape.wants_compiled = same_bits(out, job.plain())

    # what is done

    def _step(
        self, shape: Traced, batch: Batch, ids: mx.array, where: mx.array, track: Track | None, pool: Pool | None
    ) -> _Job:
        def body(
            batch: Batch,
            columns: int | None,
            ids: mx.array,
            where: mx.array,
            track: list[mx.array],
            arrays: list[mx.array],
            pool: list[mx.array],
        ) -> Out:
            batch.bind(arrays)
            logits, emitted = batch.forward(self._model, ids, where, columns)
            pooled = scatter(pool, batch.states(), Track.bind(track)) if track and pool else pool
            return logits, emitted, batch.arrays(), pooled

        def plain() -> Out:
            with _as_it_was(batch) as arrays:
                return body(batch, batch.columns(), ids, where, _arrays(track), arrays, _pooled(pool))

        def compiled() -> Out:
            with _as_it_was(batch) as arrays:
                # another dtype of ids would be another trace
                args = ids.astype(mx.int32), where, self._always(track, batch, pool), arrays, _pooled(pool)
                return shape.compiled(self._counted(lambda b, *args: body(b, None, *args)), batch, args)

        return _Job(plain, compiled)

    def _verify(self, shape: Traced, batch: Batch, ids: mx.array, where: mx.array, pool: Pool | None) -> _Job:
        width = ids.shape[1]
        key = self._key(batch, pool, "verify", width)

        def body(batch: Batch, columns: int | None, ids: mx.array, where: mx.array, arrays: list[mx.array]) -> Out:
            batch.bind(arrays)
            logits, emitted, journal = batch.verify(self._model, ids, where, columns, self._journals)
            if journal is None:
                return logits, emitted, batch.arrays(), []
            self._outlines[key] = journal.outline(batch.recurrent)  # of shapes alone
            return logits, emitted, batch.arrays(), journal.arrays()

        def plain() -> Out:
            with _as_it_was(batch) as arrays:
                return body(batch, batch.columns(width), ids, where, arrays)

        def compiled() -> Out:
            with _as_it_was(batch) as arrays:
                args = ids.astype(mx.int32), where, arrays
                return shape.compiled(self._counted(lambda b, *args: body(b, None, *args)), batch, args)

        return _Job(plain, compiled)

    def _journal(self, batch: Batch, pool: Pool | None, width: int, written: list[mx.array]) -> Journal | None:
        """The journal of a verify step that gave back ``written``."""
        if not batch.recurrent:
            return None
        return self._outlines[self._key(batch, pool, "verify", width)].journal(written, batch.recurrent)

    def _commit(
        self,
        shape: Traced,
        batch: Batch,
        journal: Journal | None,
        width: int,
        kept: mx.array,
        where: mx.array,
        track: Track | None,
        pool: Pool | None,
    ) -> _Job:
        def body(
            subject: tuple[Batch, Journal | None],
            kept: mx.array,
            where: mx.array,
            track: list[mx.array],
            arrays: list[mx.array],
            written: list[mx.array],
            pool: list[mx.array],
        ) -> Out:
            batch, journal = subject
            batch.bind_replayed(arrays)
            if journal is not None:
                journal.bind(written)
            if track and pool:
                wanted = Track.bind(track)
                rows = mx.where(wanted.mask, wanted.length - where[0], 0)
                pool = scatter(pool, batch.states_at(rows, journal), wanted)
            batch.replay(kept, where, width, journal)
            return batch.replayed(), pool

        def plain() -> Out:
            with _as_it_was(batch), _written(journal) as written:
                args = kept, where, _arrays(track), batch.replayed(), written, _pooled(pool)
                return body((batch, journal), *args)

        def compiled() -> Out:
            with _as_it_was(batch), _written(journal) as written:
                tracked = self._always(track, batch, pool)
                args = kept, where, tracked, batch.replayed(), written, _pooled(pool)
                return shape.compiled(self._counted(body), (batch, journal), args)

        return _Job(plain, compiled)

    def _always(self, track: Track | None, batch: Batch, pool: Pool | None) -> list[mx.array]:
        """Always there: a trace without it would never track."""
        if track is not None:
            return track.arrays()
        key = batch.slots, pool.dummy if pool else 0
        if key not in self._nothing:
            self._nothing[key] = Track.of(*key).arrays()
        return self._nothing[key]

    def _counted(self, body: Callable[..., Out]) -> Callable[..., Out]:
        def traced(*args: Any) -> Out:
            self.traces += 1
            return body(*args)

        return traced


def _arrays(track: Track | None) -> list[mx.array]:
    return track.arrays() if track is not None else []


def _pooled(pool: Pool | None) -> list[mx.array]:
    return pool.arrays if pool is not None else []


@contextmanager
def _as_it_was(batch: Batch) -> Iterator[list[mx.array]]:
    """The batch's arrays, to which it is bound again afterwards: a trace leaves its own placeholders in the caches."""
    arrays = batch.arrays()
    try:
        yield arrays
    finally:
        batch.bind(arrays)


@contextmanager
def _written(journal: Journal | None) -> Iterator[list[mx.array]]:
    """The same for what a journal keeps."""
    arrays = journal.arrays() if journal is not None else []
    try:
        yield arrays
    finally:
        if journal is not None:
            journal.bind(arrays)
