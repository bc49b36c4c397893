"""Whether a model can be decoded as a batch, and verify drafts there: found by running two short sequences alone and
together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ... import numerics
from ..layout import MLX_DTYPE, Layout, tensor_name
from ..state import SequenceState
from .batch import Batch
from .form import BatchError, NoBatchForm, NotYet
from .journal import Journals
from .place import GRANULE

#: largest |Δ logit| / largest |logit| between alone and together, where bits are not promised: sums run in another
#: order. By the bytes of a logit: half precision keeps 8 or 11 bits of each sum
BOUND = {4: 1e-4, 2: 3e-2}
#: lengths of the two sequences
_LENGTHS = (3, 9)
#: lengths of two sequences beyond the length from which known models choose among their rows (2,048)
_LONG = (4300, 2500)

Model = Callable[..., mx.array]
MakeCache = Callable[[], list[Any]]


class _Alone:
    """A short sequence on its own caches, which the batch is compared with."""

    def __init__(self, model: Model, make_cache: MakeCache) -> None:
        self._model = model
        self.state = SequenceState.new(make_cache())
        self.token = 0

    @classmethod
    def ran(cls, model: Model, make_cache: MakeCache, n: int) -> _Alone:
        """A sequence that was really run, over ``n`` tokens and until its state has all its arrays."""
        made = cls(model, make_cache)
        made.run([(7 * i) % 11 for i in range(n)])
        return made

    @classmethod
    def made_up(cls, model: Model, make_cache: MakeCache, live: Layout, n: int) -> _Alone:
        """A sequence of ``n`` tokens with noise for a state: long, at the price of its memory."""
        made = cls(model, make_cache)
        for i, (member, spec) in enumerate(zip(made.state.members or (), live.members, strict=True)):
            held = n if spec.window is None else min(n, spec.window + spec.keep)
            arrays = {}
            for j, tensor in enumerate(spec.tensors):
                key = mx.random.key(n * 1009 + i * 31 + j)
                noise = mx.random.normal(tensor.sized(held), key=key)
                dtype = MLX_DTYPE[tensor.dtype]
                arrays[tensor.name.removeprefix(tensor_name(spec, ""))] = (
                    noise if mx.issubdtype(dtype, mx.floating) else mx.abs(noise * 3)
                ).astype(dtype)
            mx.eval(arrays)
            member.resume(arrays, n)
        made.state.position = n
        return made

    def run(self, tokens: list[int]) -> mx.array:
        logits = self._model(mx.array([tokens], mx.int32), cache=self.state.caches)[:, -1]
        self.state.advance(len(tokens))
        mx.eval(logits, self.state.live())
        self.token = int(logits.argmax())
        return logits


def obstacle(model: Model, make_cache: MakeCache, live: Layout) -> str | None:
    """Why rows of this model must take turns, or None if they can be decoded together.

    Two short sequences are run alone and as a batch; then the longer one leaves, the shorter takes its place too, and
    the batch is resized. Where one layer keeps several kinds of rows (an index that chooses which of them are read),
    two long sequences of noise follow: such a choice begins beyond some length only. Logits must be the same: bits in
    ``exact`` on a CPU, within ``BOUND`` elsewhere. A class without a form, an exception and another result are each a
    reason. Costs seven forwards of a few tokens; no class is trusted for its name.
    """
    try:
        return _short(model, make_cache, live) or (_long(model, make_cache, live) if _indexed(live) else None)
    except NoBatchForm as e:
        return e.message
    except Exception as e:  # whatever a model raises when it is called with a batch
        return f"it fails on several sequences at once: {type(e).__name__}: {e}"


def obstacle_of_drafts(
    model: Model, make_cache: MakeCache, live: Layout, journals: Journals | None, most: int
) -> str | None:
    """Why rows of this model that share a batch cannot draft there, up to ``most`` tokens each, or None. Asked where
    there is no ``obstacle``.

    Two short sequences take the widest verify step, of which each keeps another part, then a narrow one and a plain
    one, and are compared with single steps, as in ``obstacle``. Costs about fifteen forwards of a few tokens.
    """
    if most < 1:
        return "nothing is drafted"
    try:
        batch = Batch(make_cache, live, 2, 2 * GRANULE, spare=most)
        rows = {slot: _joined(batch, slot, _Alone.ran(model, make_cache, n)) for slot, n in enumerate(_LENGTHS)}
        for width, kept in ((most + 1, (min(2, most), min(4, most + 1))), (2, (2, 1))):
            if reason := _cycle(model, batch, rows, journals, width, kept):
                return reason
        reason = _step(model, batch, rows)
        return reason and reason + " after drafts were taken back"
    except BatchError as e:
        return e.message
    except Exception as e:
        return f"it fails on several tokens of several sequences: {type(e).__name__}: {e}"


def _cycle(
    model: Model,
    batch: Batch,
    rows: dict[int, _Alone],
    journals: Journals | None,
    width: int,
    kept: tuple[int, ...],
) -> str | None:
    """One verify step of all rows, of which row r keeps the first kept[r] tokens, and the same in single steps."""
    ids = [[rows[slot].token, *((5 * slot + 3 * i + 1) % 11 for i in range(1, width))] for slot in rows]
    given, where = mx.array(ids, mx.int32), batch.where(width)
    logits, emitted, journal = batch.verify(model, given, where, batch.columns(width), journals)
    batch.shown(given, emitted)
    batch.hold_open(width, journal)
    mx.eval(logits, batch.live())
    batch.replay(mx.array(kept, mx.int32), where, width, journal)
    batch.commit(list(kept))
    mx.eval(batch.live())
    for slot, row in rows.items():
        for i in range(kept[slot]):
            if reason := _apart(logits[slot, i], row.run([ids[slot][i]])[0]):
                return f"logits {reason} when {width} tokens are verified at once"
    return None


def _short(model: Model, make_cache: MakeCache, live: Layout) -> str | None:
    batch = Batch(make_cache, live, 2, 2 * GRANULE)
    rows = {slot: _joined(batch, slot, _Alone.ran(model, make_cache, n)) for slot, n in enumerate(_LENGTHS)}
    if reason := _step(model, batch, rows):
        return reason
    batch.leave(1)
    batch.join(1, rows[0].state)
    batch.resize(3, 3 * GRANULE, {0: 2, 1: 0})
    reason = _step(model, batch, {2: rows[0], 0: rows[0]})
    return reason and reason + " after a row came to another's place"


def _long(model: Model, make_cache: MakeCache, live: Layout) -> str | None:
    batch = Batch(make_cache, live, 2, _LONG[0] + GRANULE)
    rows = {}
    for slot, n in enumerate(_LONG):
        rows[slot] = _Alone.made_up(model, make_cache, live, n)
        batch.join(slot, rows[slot].state)
    reason = _step(model, batch, rows)
    return reason and reason + f" at {_LONG[0]:,} and {_LONG[1]:,} tokens"


def _indexed(live: Layout) -> bool:
    layers = [m.path[0] for m in live.members if m.record != "state"]
    return len(set(layers)) < len(layers)


def _joined(batch: Batch, slot: int, row: _Alone) -> _Alone:
    while True:
        try:
            batch.join(slot, row.state)
            return row
        except NotYet:
            if row.state.position >= GRANULE:
                raise
            row.run([row.token])


def _step(model: Model, batch: Batch, rows: dict[int, _Alone]) -> str | None:
    """One step of all rows, together and alone; a reason if the logits differ."""
    ids = [rows[slot].token if slot in rows else 0 for slot in range(batch.slots)]
    logits, emitted = batch.forward(model, mx.array(ids, mx.int32), batch.where(), batch.columns())
    batch.shown(mx.array(ids, mx.int32), emitted)
    batch.advance()
    mx.eval(logits, batch.live())
    alone = {row: row.run([row.token])[0] for row in dict.fromkeys(rows.values())}
    for slot, row in rows.items():
        if reason := _apart(logits[slot], alone[row]):
            return f"a row's logits {reason} beside another row"
    return None


def _apart(mine: mx.array, theirs: mx.array) -> str | None:
    """How far logits are apart, where that is further than is promised."""
    exact = numerics.mode() == "exact" and mx.default_device().type == mx.DeviceType.cpu
    a, b = mine.astype(mx.float32), theirs.astype(mx.float32)
    difference = float((mx.abs(a - b).max() / mx.abs(b).max()).item())  # type: ignore[arg-type]
    if difference <= (0.0 if exact else BOUND[mine.dtype.size]):
        return None  # NaN is a difference
    return f"differ by {difference:.1e}"
