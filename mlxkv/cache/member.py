"""A member: one piece of per-layer state, and what every kind of it must answer. The kinds are in ``kinds``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import mlx.core as mx

from ..errors import MlxkvError

if TYPE_CHECKING:
    from .compress.geometry import Geometry
    from .inside import Inside

Arrays = dict[str, mx.array]


class UnknownCache(MlxkvError):
    """A cache class that no state kind is written for; the message names it and where it stands."""


class PositionError(MlxkvError):
    """A member stands at another position than it should: its state must not be stored or used."""


class Replay(Protocol):
    """What recurrent layers kept of the inputs of a forward whose tokens may be taken back."""

    def covers(self, cache: Any) -> bool:
        """Whether the layer of ``cache`` kept what a replay needs."""
        ...

    def slots(self, cache: Any, rows: int) -> dict[int, mx.array]:
        """Slot number -> array, lazily, as ``cache`` had it after the first ``rows`` tokens of the forward."""
        ...


class Member(ABC):
    """One piece of per-layer state around one mlx-lm cache object.

    ``path`` is (layer, index inside a CacheList, …). Row arrays are ``[batch 1, heads, rows, head_dim]``; rows are
    numbered by absolute token position.
    """

    kind: ClassVar[str]
    #: which record holds this member's data: "rows", "window" or "state"
    record: ClassVar[str]
    #: whether its rows may be stored quantised, where the user asks for that
    packable: ClassVar[bool] = False

    def __init__(self, cache: Any, path: tuple[int, ...]) -> None:
        self.cache = cache
        self.path = path

    @property
    def label(self) -> str:
        return ".".join(map(str, self.path))

    @property
    def geometry(self) -> Geometry | None:
        """The numbers of the ring in which it keeps rows that later entries are made of; None where it keeps none."""
        return None

    @property
    def position(self) -> int | None:
        """Absolute position this member stands at; None where its class does not know."""
        return None

    def params(self) -> dict[str, int]:
        """Numbers that belong to the layout, a window's size for instance."""
        return {}

    @abstractmethod
    def arrays(self) -> Arrays:
        """The live arrays by name; a slot that holds nothing is left out."""

    @abstractmethod
    def hold(self) -> Any:
        """Second handles on all that the next step rebinds. While they live, MLX cannot donate the buffers."""

    @abstractmethod
    def put_back(self, held: Any) -> None:
        """Undo what was rebound since ``hold()``."""

    def rows(self, a: int, b: int) -> Arrays:
        """Rows [a, b) as lazy slices, in order of position. Raises PositionError for rows that are not held."""
        raise NotImplementedError(self.kind)

    def per(self) -> int:
        """Tokens a row: of tokens [a, b) there are rows [a // per, b // per)."""
        return 1

    def window(self) -> int | None:
        """How many of the last rows must survive to resume; None for all."""
        return None

    def keep(self) -> int:
        """How many of the first rows must survive too."""
        return 0

    @abstractmethod
    def rewindable(self) -> int:
        """How many of the last tokens ``rewind`` can take back."""

    @abstractmethod
    def rewind(self, n: int) -> None:
        """Take back the last ``n`` tokens. Raises PositionError beyond ``rewindable()``."""

    def most_drafts(self) -> int | None:
        """How many of the rows of one forward ``commit`` can take back; None for any number."""
        return 0

    def expect(self, width: int) -> None:  # noqa: B027 - most kinds need not know before
        """A forward over ``width`` tokens is built next, of which ``commit`` will say how many are kept."""

    def commit(self, kept: int, width: int, replay: Replay | None = None) -> None:
        """Keep the first ``kept`` (at least 1) of the ``width`` tokens of the last forward, lazily; ``replay``: what
        recurrent layers kept of it. Raises PositionError where that is not possible."""
        self.rewind(width - kept)

    def state_at(self, position: int, inside: Inside) -> Arrays:
        """What ``arrays()`` was at a boundary inside the last forward; empty where this member cannot tell, so that the
        forward must be split there. Asked of ``state`` members, before ``catch_up``."""
        return {}

    def live(self) -> list[mx.array]:
        """All arrays that a step must evaluate."""
        return list(self.arrays().values())

    def reserve(self, capacity: int) -> None:  # noqa: B027 - only rows grow
        """Buffers of rows have room for ``capacity`` rows: those that are there already at once (lazily), others from
        their first row on. Beyond that they grow by as many rows. Rows are never taken away."""

    def catch_up(self) -> None:  # noqa: B027 - most kinds are always up to date
        """Compute (lazily) what may wait until it is needed: before a capture, and before rows are read."""

    def settle(self) -> None:  # noqa: B027 - most kinds have one form only
        """Bring the arrays into the one form that a restore produces, so that both give the same bits."""

    @abstractmethod
    def resume(self, arrays: Arrays, position: int) -> None:
        """Take over evaluated arrays so that this member stands at ``position``."""


class OwnCache(ABC):
    """A cache class of mlxkv's own: it says itself which members it has."""

    @abstractmethod
    def members(self, path: tuple[int, ...]) -> list[Member]: ...
