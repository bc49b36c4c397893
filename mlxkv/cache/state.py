"""The state of one running sequence: all its members, held, put back and advanced together."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .kinds import members_of
from .member import Member, PositionError, Replay, UnknownCache

__all__ = ["Member", "PositionError", "SequenceState", "UnknownCache", "members_of"]


class SequenceState:
    """The state of one running sequence: the cache list a model is called with, and the one position of all of it."""

    def __init__(self, caches: list[Any], members: list[Member] | None) -> None:
        #: what the model is called with
        self.caches = caches
        #: None when a class is unknown: the sequence can run but not be stored, held or resumed
        self.members = members
        self.position = 0

    @classmethod
    def new(cls, caches: list[Any]) -> SequenceState:
        try:
            return cls(caches, members_of(caches))
        except UnknownCache:
            return cls(caches, None)

    def advance(self, n: int) -> None:
        """A forward over ``n`` tokens was built. Raises PositionError if a member disagrees."""
        self.position += n
        self._check()

    def expect(self, width: int) -> None:
        """A forward over ``width`` tokens is built next, of which ``commit`` will say how many are kept."""
        for member in self.members or ():
            member.expect(width)

    def commit(self, kept: int, width: int, replay: Replay | None = None) -> None:
        """Of the last forward over ``width`` tokens keep the first ``kept`` (1 … width), lazily. Raises PositionError
        where a member cannot, or stands elsewhere afterwards."""
        if self.members is None and kept < width:
            raise PositionError("Caches of unknown kinds cannot take tokens back.")
        if not 1 <= kept <= width:
            raise PositionError(f"{kept} of {width} tokens cannot be kept.")
        for member in self.members or ():
            member.commit(kept, width, replay)
        self.position -= width - kept
        self._check()

    def recurrent(self) -> list[Any]:
        """Handles on the recurrent states, for ``undo``."""
        return [m.hold() for m in self.members or () if m.kind == "recurrent"]

    def undo(self, width: int, recurrent: list[Any]) -> None:
        """The last forward, over ``width`` tokens, never was; ``recurrent``: what the method of that name gave before
        it. For states all of whose other members forget rows. Raises PositionError where one cannot."""
        held = iter(recurrent)
        for member in self.members or ():
            if member.kind == "recurrent":
                member.put_back(next(held))
            else:
                member.commit(0, width)
        self.position -= width
        self._check()

    def _check(self) -> None:
        for member in self.members or ():
            at = member.position
            if at is not None and at != self.position:
                raise PositionError(
                    f"Member {member.label} ({member.kind}) stands at {at}, the sequence at "
                    f"{self.position}. Its state cannot be trusted."
                )

    def live(self) -> list[mx.array]:
        """All arrays that a step must evaluate."""
        if self.members is None:
            return _arrays_in([c.state for c in self.caches])
        return [a for m in self.members for a in m.live()]

    def reserve(self, capacity: int) -> None:
        for member in self.members or ():
            member.reserve(capacity)

    def catch_up(self) -> None:
        for member in self.members or ():
            member.catch_up()

    def hold(self) -> tuple[int, list[Any]]:
        return self.position, [m.hold() for m in self.members or ()]

    def put_back(self, held: tuple[int, list[Any]]) -> None:
        self.position = held[0]
        for member, handle in zip(self.members or (), held[1], strict=True):
            member.put_back(handle)

    def settle(self) -> None:
        for member in self.members or ():
            member.settle()


def _arrays_in(tree: Any) -> list[mx.array]:
    if isinstance(tree, mx.array):
        return [tree]
    if isinstance(tree, (list, tuple)):
        return [a for item in tree for a in _arrays_in(item)]
    return []
