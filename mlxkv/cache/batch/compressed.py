"""The batch form of compressed attention (``CompressedCache``): every row's window, pending rows and entries, each at
its own position.

What is remembered of a token stands where its position says, so that a commit has nothing to do: what was not kept is
written over before anybody reads it (``compress.geometry`` says how long the rings must be for that).
"""

from __future__ import annotations

from typing import TypeVar

import mlx.core as mx

from ..compress import arrays as planned
from ..compress.geometry import Geometry
from ..compressed import CompressedCache, Latents, Pending, Pool, PositionRing, Seen
from ..compressed_members import EntryRows, LatentWindow, PendingRows
from ..layout import MLX_DTYPE, MemberSpec
from ..member import Arrays, Member
from .form import BatchError, Form
from .place import Place, Seat
from .rolling import Numbered, Rolling

R = TypeVar("R", bound=PositionRing)


class Part:
    """Entries of one name, and the raw rows that those of later tokens are made of."""

    def __init__(
        self, place: Place, geometry: Geometry, pending: MemberSpec, entries: MemberSpec, slots: int, capacity: int
    ) -> None:
        self.place, self.geometry = place, geometry
        self.pending = Rolling(place, geometry.ring, slots, *_row(pending))
        self.entries = Numbered(place, geometry.ratio, slots, capacity, *_row(entries))

    def update(self, rows: mx.array, pool: Pool) -> mx.array:
        """``rows`` [slots, D, width]: all entries [slots, E, width] that there may be then."""
        number, closes, windows, there = (self._step if self.place.width == 1 else self._several)(rows)
        self.entries.write(number, closes, pool(windows, number * self.geometry.ratio, there))
        return self.entries.read()

    def _several(self, rows: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Windows are read before the ring is written into: drafts may take the places of rows that they need."""
        place, geometry = self.place, self.geometry

        def plan() -> planned.Plan:
            extend = mx.full(place.offsets.shape, place.width, mx.int32)
            return planned.plan(geometry, place.offsets, extend, place.width)

        step = place.once(("plan", geometry), plan)
        windows, there = planned.gather(geometry, step, self.pending.array[:, 0], rows)
        self.pending.write(rows)
        return step.end // geometry.ratio - 1, step.closes, windows, there

    def _step(self, rows: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """One row takes no place of another that its window needs: it is written first, and MLX copies no ring."""
        place, geometry = self.place, self.geometry
        self.pending.write(rows)
        _, closes, reads = place.once(("step", geometry), lambda: planned.decode(geometry, place.after))
        there = (reads < geometry.ring)[:, None]
        # whole rows are copied: faster than an index for each number
        flat = reads + (mx.arange(reads.shape[0]) * (geometry.ring + 1))[:, None]
        windows = mx.take(self.pending.array.reshape(-1, rows.shape[2]), flat, axis=0)[:, None]
        windows = mx.where(there[..., None], windows, mx.zeros((), windows.dtype))
        return (place.offsets // geometry.ratio)[:, None], closes[:, None], windows, there


class BatchCompressed(Form):
    """To a layer it is what its ``CompressedCache`` is, with an ``offset`` for each slot."""

    def __init__(
        self, place: Place, solo: CompressedCache, specs: list[MemberSpec], slots: int, capacity: int, spare: int
    ) -> None:
        """``solo``: fresh, of this layer. ``specs``: of its members. ``spare``: drafts that can be taken back."""
        self.place, self.window, self.spare, self.solo = place, solo.window, spare, solo
        window, *rest = specs
        self.latents = Rolling(place, solo.window + spare, slots, *_row(window))
        self.parts: dict[str, Part] = {}
        for name, pending, entries in zip(solo.parts, rest[::2], rest[1::2], strict=True):
            geometry = Geometry.serving(solo.ratio, solo.overlap, spare + 1)
            self.parts[name] = Part(place, geometry, pending, entries, slots, capacity)
        #: by slot, where the row joined (what it brought is all that is held of tokens before), and how far any step
        #: has written
        self._joined, self._written = [0] * slots, [0] * slots

    # a step

    @property
    def offset(self) -> mx.array:
        """[slots] int32: the position of the first new token of each row, in all of the step."""
        return self.place.offsets

    def update_window(self, kv: mx.array) -> Seen:
        """``kv`` [slots, D, head_dim]. Raises BatchError for more drafts than can be taken back."""
        place, size = self.place, self.latents.size
        if place.width - 1 > self.spare:
            raise BatchError(f"A window with {self.spare} spare rows cannot take {place.width - 1} drafts back.")
        if kv.shape[1] != place.width:
            raise BatchError(f"This step of a batch takes {place.width} tokens a row, not {kv.shape[1]}.")
        self.latents.write(kv)

        def seen() -> tuple[mx.array, mx.array]:
            own = place.at[:, :, None]
            positions = own - self.window + 1 + mx.arange(self.window)
            mask = positions >= 0
            return mx.where(mask, positions, own) % size, mask

        return Seen(self.latents.array[:, 0], *place.once(("seen", self.window, size), seen))

    def compress(self, name: str, rows: mx.array, pool: Pool) -> mx.array:
        """``rows`` [slots, D, width]: entries [slots, E, dim], of which a query at p sees those n < (p + 1) // ratio.
        Others mean nothing."""
        return self.parts[name].update(rows, pool)

    def entries(self, name: str) -> mx.array:
        return self.parts[name].entries.read()

    # arrays

    def _rolling(self) -> list[Rolling | Numbered]:
        return [self.latents, *(a for part in self.parts.values() for a in (part.pending, part.entries))]

    def arrays(self) -> list[mx.array]:
        return [each.array for each in self._rolling()]

    def bind(self, arrays: list[mx.array]) -> None:
        for each, array in zip(self._rolling(), arrays, strict=True):
            each.array = array

    def built(self, width: int) -> None:
        both = zip(self._written, self.place.positions, strict=True)
        self._written = [max(written, at + width) for written, at in both]

    def hold(self) -> list[int]:
        return self._written

    def put_back(self, held: list[int]) -> None:
        self._written = held

    # rows come and go

    def check(self, cache: CompressedCache, position: int) -> None:
        if cache.offset != position:
            raise BatchError(f"A cache stands at {cache.offset}, its sequence at {position}.")
        theirs = [t for member in cache.members(()) for t in member.arrays().values()]
        mine = self.arrays()
        if len(theirs) != len(mine) or any(
            (a.dtype, a.shape[3]) != (b.dtype, b.shape[3]) for a, b in zip(theirs, mine, strict=True)
        ):
            raise BatchError("The state of this sequence has other shapes or dtypes than the batch's.")

    def join(self, slot: int, cache: CompressedCache, position: int) -> None:
        window, *rest = cache.members(())
        first = max(0, position - self.window + 1)
        self.latents.put(slot, window.rows(first, position)["latents"], position)
        for part, pending, entries in zip(self.parts.values(), rest[::2], rest[1::2], strict=True):
            held = mx.arange(position - part.geometry.pending(position), position) % part.geometry.window
            part.pending.put(slot, pending.arrays()["pending"][:, :, held], position)
            part.entries.put(slot, entries.rows(0, position)["entries"])
        self._joined[slot] = self._written[slot] = position

    def resize(self, slots: int, capacity: int, keep: dict[int, int], positions: dict[int, int]) -> None:
        for each in self._rolling():
            each.resize(slots, capacity, keep, positions)
        joined, written = self._joined, self._written
        self._joined, self._written = [0] * slots, [0] * slots
        for old, new in keep.items():
            self._joined[new], self._written[new] = joined[old], written[old]

    def take(self, slot: int, cache: CompressedCache) -> None:
        position = self.place.positions[slot]
        for mine, member in zip(self.row(Seat(slot), ()), cache.members(()), strict=True):
            if member.record == "state":
                arrays = mine.arrays()
            else:
                first = 0 if member.record == "rows" else max(0, position - self.window + 1)
                arrays = {name: mx.contiguous(a) for name, a in mine.rows(first, position).items()}
            member.resume(arrays, position)

    def row(self, seat: Seat, path: tuple[int, ...]) -> list[Member]:
        out: list[Member] = [_RowWindow(self, seat, (*path, 0))]
        for part in self.parts.values():
            at = len(out)
            out += [_RowPending(self, part, seat, (*path, at)), _RowEntries(self, part, seat, (*path, at + 1))]
        return out

    def read(self, rolling: Rolling, ring: R, slot: int) -> R:
        """``ring``, fresh, as the ring of the row in ``slot``, to be read only."""
        position = self.place.positions[slot]
        ring.rows, ring.offset = rolling.array[slot : slot + 1, 0], position
        # drafts that were not kept may stand where older rows did
        ring.low = max(0, self._written[slot] - rolling.size, ring.need(self._joined[slot]))
        return ring


class _Row(Member):
    """A member that reads one row; nothing is changed through it."""

    _form: BatchCompressed
    _seat: Seat

    @property
    def position(self) -> int:
        return self._form.place.positions[self._seat.slot]


class _RowWindow(_Row, LatentWindow):
    def __init__(self, form: BatchCompressed, seat: Seat, path: tuple[int, ...]) -> None:
        Member.__init__(self, form.solo, path)
        self._form, self._seat = form, seat

    @property
    def ring(self) -> Latents:  # type: ignore[override]
        return self._form.read(self._form.latents, Latents(self._form.window, self._form.spare), self._seat.slot)


class _RowPending(_Row, PendingRows):
    def __init__(self, form: BatchCompressed, part: Part, seat: Seat, path: tuple[int, ...]) -> None:
        Member.__init__(self, part, path)
        self._form, self._part, self._seat = form, part, seat

    @property
    def ring(self) -> Pending:  # type: ignore[override]
        return self._form.read(self._part.pending, Pending(self._part.geometry), self._seat.slot)


class _RowEntries(_Row, EntryRows):
    def __init__(self, form: BatchCompressed, part: Part, seat: Seat, path: tuple[int, ...]) -> None:
        Member.__init__(self, part, path)
        self._form, self._part, self._seat = form, part, seat

    def arrays(self) -> Arrays:
        slot = self._seat.slot
        return {"entries": self._part.entries.array[slot : slot + 1]}


def _row(spec: MemberSpec) -> tuple[int, mx.Dtype]:
    """Width and dtype of a row of the member's one tensor."""
    (tensor,) = spec.tensors
    return tensor.shape[3], MLX_DTYPE[tensor.dtype]
