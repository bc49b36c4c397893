"""The batch form of recurrent states (``ArraysCache``): nothing of it depends on how long a row is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from ..kinds import Recurrent
from ..layout import MLX_DTYPE, MemberSpec, tensor_name
from ..member import Arrays, Member
from .form import BatchError, Form, NotYet, moved, put_row
from .journal import Journal
from .place import Place, Seat

if TYPE_CHECKING:
    from ..inside import Inside


class BatchRecurrent(Form, ArraysCache):
    """``cache[i]``: [slots, …], None where the layout has nothing.

    A verify step leaves it as it was before: what the step's tokens made of it, its journal knows.
    """

    replays = True

    def __init__(self, place: Place, spec: MemberSpec, slots: int) -> None:
        ArraysCache.__init__(self, dict(spec.params)["slots"])
        self.place = place
        #: numbers of the places that hold something, in the layout's order
        self.used = [int(t.name.removeprefix(tensor_name(spec, "slot"))) for t in spec.tensors]
        for i, tensor in zip(self.used, spec.tensors, strict=True):
            self.cache[i] = mx.zeros((slots, *tensor.shape[1:]), MLX_DTYPE[tensor.dtype])

    def arrays(self) -> list[mx.array]:
        return [self._at(i) for i in self.used]

    def bind(self, arrays: list[mx.array]) -> None:
        cache: list[Any] = [None] * len(self.cache)
        for i, array in zip(self.used, arrays, strict=True):
            cache[i] = array
        self.cache = cache

    def _at(self, i: int) -> mx.array:
        array = self.cache[i]
        assert array is not None
        return array

    def states_at(self, rows: mx.array, journal: Journal) -> list[mx.array]:
        """``arrays()`` after the first rows[r] ([slots] int32) tokens of row r in the step of ``journal``."""
        slots = journal.slots_by_row(self, rows)
        return [slots[i] for i in self.used]

    def replay(self, kept: mx.array, journal: Journal | None) -> None:
        if journal is None:
            raise BatchError("A recurrent state cannot be taken back without a journal.")
        self.bind(self.states_at(kept, journal))

    def check(self, cache: Any, position: int) -> None:
        theirs = Recurrent(cache, ()).arrays()
        mine = {f"slot{i}": self._at(i) for i in self.used}
        if theirs.keys() < mine.keys() or any(
            theirs[k].shape[1:] != a.shape[1:] for k, a in mine.items() if k in theirs
        ):
            raise NotYet("A slot of this sequence's recurrent state fills with its next tokens.")
        if theirs.keys() != mine.keys() or any(theirs[k].dtype != a.dtype for k, a in mine.items()):
            raise BatchError("The recurrent state of this sequence has other slots or dtypes than the batch's.")

    def join(self, slot: int, cache: Any, position: int) -> None:
        self.bind([put_row(self._at(i), slot, cache[i]) for i in self.used])

    def resize(self, slots: int, capacity: int, keep: dict[int, int], positions: dict[int, int]) -> None:
        self.bind([moved(a, (slots, *a.shape[1:]), keep, None) for a in self.arrays()])

    def row(self, seat: Seat, path: tuple[int, ...]) -> list[Member]:
        return [_RowState(self, seat, path)]

    def take(self, slot: int, cache: Any) -> None:
        cache.cache = [None if a is None else mx.contiguous(a[slot : slot + 1]) for a in self.cache]


class _Row:
    """One row as the ``ArraysCache`` that ``kinds.Recurrent`` reads; slices are made when asked for."""

    left_padding = lengths = None

    def __init__(self, form: BatchRecurrent, seat: Seat) -> None:
        self._form, self._seat = form, seat

    @property
    def cache(self) -> list[mx.array | None]:
        slot = self._seat.slot
        return [None if a is None else a[slot : slot + 1] for a in self._form.cache]


class _RowState(Recurrent):
    """States at boundaries are asked of the batch's own cache object: that is what a step left them under."""

    def __init__(self, form: BatchRecurrent, seat: Seat, path: tuple[int, ...]) -> None:
        super().__init__(_Row(form, seat), path)
        self._form = form

    def state_at(self, position: int, inside: Inside) -> Arrays:
        return {f"slot{i}": a for i, a in sorted(inside.slots(self._form, position).items())}
