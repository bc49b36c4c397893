"""What a batch needs of a model whose recurrent layers keep a journal of a verify step (``models.journal``)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import mlx.core as mx


class Journal(Protocol):
    """What the recurrent layers kept of one forward over ``width`` tokens a row."""

    @property
    def width(self) -> int: ...

    def covers(self, cache: Any) -> bool:
        """Whether the layer of ``cache`` kept what a replay needs."""
        ...

    def slots_by_row(self, cache: Any, rows: mx.array) -> dict[int, mx.array]:
        """Slot number -> array [slots, …] of ``cache`` after the first rows[r] ([slots] int32, 0 to ``width``) tokens
        of each row r; lazily."""
        ...

    def arrays(self) -> list[mx.array]:
        """All arrays that it keeps, in a fixed order."""
        ...

    def bind(self, arrays: list[mx.array]) -> None:
        """Take over arrays in the order of ``arrays()``."""
        ...

    def outline(self, caches: list[Any]) -> Outline:
        """What stays the same of it in every forward of one shape. caches: all recurrent ones of the forward."""
        ...


class Outline(Protocol):
    """A journal without arrays and caches, which a trace may keep."""

    def journal(self, arrays: list[mx.array], caches: list[Any]) -> Journal:
        """The journal of another forward of this shape, over ``caches``, that gave back ``arrays``."""
        ...


class Journals(Protocol):
    """Shared by all layers of a model that can keep a journal."""

    def recording(self, width: int) -> AbstractContextManager[Journal]:
        """The forward that is built in this block runs over ``width`` tokens a row."""
        ...
