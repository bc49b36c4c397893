"""A batch form: what one mlx-lm cache object becomes when several sequences are decoded together.

To a model it looks like the cache it stands for. Arrays have one more meaning on axis 0: the *slot*. A slot holds one
row (sequence) or is free; free slots are computed too, at position 0, and nobody reads what comes of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import mlx.core as mx

from ...errors import MlxkvError
from ..member import Member
from .journal import Journal
from .place import Seat


class BatchError(MlxkvError):
    """A batch was asked for what it cannot do; nothing has changed."""


class NoBatchForm(BatchError):
    """A member of this class cannot be decoded beside others; the message names it and where it stands."""


class NotYet(BatchError):
    """This sequence cannot join yet: a slot of its state fills with its next tokens."""


class Form(ABC):
    """The batch form of one cache object."""

    #: whether ``replay`` changes its arrays; rows that stand by position are taken back by counting alone
    replays: ClassVar[bool] = False

    @abstractmethod
    def arrays(self) -> list[mx.array]:
        """All arrays, in a fixed order: what a step takes and gives back."""

    @abstractmethod
    def bind(self, arrays: list[mx.array]) -> None:
        """Take over arrays in the order of ``arrays()``."""

    def begin(self) -> None:  # noqa: B027 - a recurrent state does not know where it stands
        """A step is about to be built; ``Place`` knows where."""

    def end(self) -> None:  # noqa: B027
        """The step was built: keep no array of it but the state."""

    def replay(self, kept: mx.array, journal: Journal | None) -> None:  # noqa: B027
        """After a verify step: the arrays as they are when row r keeps the first kept[r] of its ``Place.width`` tokens.
        kept: [slots] int32, 0 for a free slot. ``Place`` knows where the rows stood before that step."""

    def committed(self, kept: list[int]) -> None:  # noqa: B027
        """The same on the host, once ``replay`` was built."""

    def built(self, width: int) -> None:  # noqa: B027
        """A step of ``width`` tokens a row was built; ``Place.positions`` are those before it."""

    def hold(self) -> Any:  # noqa: B027
        """What ``put_back`` needs, beyond arrays."""

    def put_back(self, held: Any) -> None:  # noqa: B027
        """Undo the step that was built since ``hold()``."""

    @abstractmethod
    def check(self, cache: Any, position: int) -> None:
        """Raises NotYet or BatchError if the solo ``cache`` cannot join."""

    @abstractmethod
    def join(self, slot: int, cache: Any, position: int) -> None:
        """Copy the state of the solo ``cache`` into ``slot``, all of it overwritten."""

    def leave(self, slot: int) -> None:  # noqa: B027 - the next join overwrites the slot
        """The row in ``slot`` is gone."""

    @abstractmethod
    def resize(self, slots: int, capacity: int, keep: dict[int, int], positions: dict[int, int]) -> None:
        """Make new arrays. ``keep``: old slot -> new slot. ``positions`` by old slot."""

    @abstractmethod
    def row(self, seat: Seat, path: tuple[int, ...]) -> list[Member]:
        """Members that read the row that sits there: lazily, and as it is when they are asked."""

    @abstractmethod
    def take(self, slot: int, cache: Any) -> None:
        """Bring a fresh solo ``cache`` to the state of the row in ``slot``, lazily, by one copy."""


def put_row(array: mx.array, slot: int, row: mx.array) -> mx.array:
    """``array`` [slots, ...] with ``row`` [1, ...] in ``slot``; in place once nobody else holds it."""
    return mx.slice_update(array, row.astype(array.dtype), mx.array([slot], mx.int32), axes=[0])


def moved(array: mx.array, shape: tuple[int, ...], keep: dict[int, int], rows: dict[int, int] | None) -> mx.array:
    """A new array of ``shape`` with the slots that are kept. ``rows``: how many columns (axis 2) by old slot, None
    for arrays without columns. The rest is zero."""
    new = mx.zeros(shape, array.dtype)
    for old, slot in keep.items():
        row = array[old : old + 1]
        if rows is None:
            new = put_row(new, slot, row)
        elif rows[old]:
            new = mx.slice_update(new, row[:, :, : rows[old]], mx.array([slot], mx.int32), axes=[0])
    return new
