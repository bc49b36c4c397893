"""The batch form of a prediction head's cache: the head never runs in a joint step, only between two.

Each slot keeps the solo ``HeadCache`` of its row. A step leaves one pair of arrays (tokens, hidden states) for all
rows; a row's own part is cut out of them when its head catches up, or after ``MOST`` steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..head import HeadCache, HeadHidden, HeadRows
from ..member import Arrays, Member
from .form import BatchError, Form
from .place import Place, Seat

if TYPE_CHECKING:
    from ..inside import Inside

#: joint steps that wait to be shown: live arrays are bounded, and every row of them stays while one needs it
MOST = 64


@dataclass(frozen=True)
class Step:
    """What the body saw and gave in one step: tokens [slots, D], hidden [slots, D, H]. ``kept``: how many of the D
    tokens each row kept."""

    tokens: mx.array
    hidden: mx.array
    kept: tuple[int, ...]

    def arrays(self) -> tuple[mx.array, mx.array]:
        return self.tokens, self.hidden


class BatchHead(Form):
    """Has no arrays of its own that a step changes: what the step shows is given to ``shown``."""

    def __init__(self, place: Place, slots: int) -> None:
        self.place = place
        self.heads: list[HeadCache | None] = [None] * slots
        #: of the last steps, the first of them number ``_first``
        self._steps: tuple[Step, ...] = ()
        #: (tokens, hidden) of a verify step that was not committed yet
        self._open: tuple[mx.array, mx.array] | None = None
        self._first = 0
        #: by slot, the number of the step its head was not shown yet
        self._next = [0] * slots
        self.hidden: mx.array | None = None
        self._drafting: tuple[int, ...] = ()

    def observe(self, tokens: mx.array, hidden: mx.array) -> None:
        """The body ran over ``tokens`` [slots, D] and gave ``hidden`` [slots, D, H]."""
        self.hidden = hidden

    def emitted(self) -> list[mx.array]:
        """The hidden states of a step, for ``shown``."""
        hidden, self.hidden = self.hidden, None
        if hidden is None:
            raise BatchError("The model did not show its hidden states.")
        return [hidden]

    def shown(self, tokens: mx.array, hidden: mx.array) -> None:
        """``tokens`` [slots, 1] and ``hidden`` [slots, 1, H] of a step that was built."""
        self._steps = (*self._steps, Step(tokens, hidden, (1,) * tokens.shape[0]))

    def verified(self, tokens: mx.array, hidden: mx.array) -> None:
        """``tokens`` [slots, D] and ``hidden`` [slots, D, H] of a verify step that was built."""
        self._open = (tokens, hidden)

    def committed(self, kept: list[int]) -> None:
        if self._open is not None:
            self._steps, self._open = (*self._steps, Step(*self._open, tuple(kept))), None

    def _tidy(self) -> None:
        if len(self._steps) >= MOST:
            for slot in range(len(self.heads)):
                self.feed(slot)
        self._drop()

    def feed(self, slot: int) -> None:
        """Show the slot's head all steps it has not seen."""
        head = self.heads[slot]
        steps = self._steps[self._next[slot] - self._first :] if head is not None else ()
        if head is not None and steps:
            tokens = [step.tokens[slot : slot + 1, : step.kept[slot]] for step in steps]
            hidden = [step.hidden[slot : slot + 1, : step.kept[slot]] for step in steps]
            head.observe(mx.concatenate(tokens, axis=1), mx.concatenate(hidden, axis=1))
        self._next[slot] = self._first + len(self._steps)

    def _drop(self) -> None:
        seen = min((n for n, head in zip(self._next, self.heads, strict=True) if head is not None), default=None)
        if seen is None:
            seen = self._first + len(self._steps)
        self._steps = self._steps[seen - self._first :]
        self._first = seen

    def arrays(self) -> list[mx.array]:
        return []

    def bind(self, arrays: list[mx.array]) -> None:
        pass

    def live(self) -> list[mx.array]:
        mine = [a for step in self._steps for a in step.arrays()] + list(self._open or ())
        return mine + [a for h in self.heads if h is not None for m in h.members(()) for a in m.live()]

    def hold(self) -> Any:
        self._tidy()  # here, where no newer step is built
        return self._steps, self._open

    def put_back(self, held: Any) -> None:
        self._steps, self._open = held

    def check(self, cache: Any, position: int) -> None:
        pass

    def join(self, slot: int, cache: Any, position: int) -> None:
        self.heads[slot] = _copied(cache, HeadCache(cache.run))
        self._next[slot] = self._first + len(self._steps)

    def leave(self, slot: int) -> None:
        self.heads[slot] = None
        self._drop()

    def resize(self, slots: int, capacity: int, keep: dict[int, int], positions: dict[int, int]) -> None:
        for slot in range(len(self.heads)):
            self.feed(slot)
        heads: list[HeadCache | None] = [None] * slots
        for old, slot in keep.items():
            heads[slot] = self.heads[old]
        self._first += len(self._steps)
        self._steps, self._next, self.heads = (), [self._first] * slots, heads

    def row(self, seat: Seat, path: tuple[int, ...]) -> list[Member]:
        head = self.heads[seat.slot]
        assert head is not None
        return [_RowRows(head, (*path, 0), self, seat), _RowHidden(head, (*path, 1), self, seat)]

    def take(self, slot: int, cache: HeadCache) -> None:
        self.feed(slot)
        head = self.heads[slot]
        assert head is not None
        _copied(head, cache)

    # drafting: at the edge of a step, each row by its own head

    def can_draft(self, slots: Sequence[int]) -> bool:
        """Whether the body has shown each of these rows a hidden state."""
        return all(self.place.positions[slot] > 0 and self.heads[slot] is not None for slot in slots)

    def first(self, roots: Mapping[int, int]) -> mx.array:
        """The heads of these rows over all that waits, the root last: m [slots, 1, H]; 0 for other rows."""
        for slot in roots:
            self.feed(slot)
        self._drop()
        return self._each({slot: self._head(slot).first({0: root}) for slot, root in roots.items()})

    def following(self, drafts: mx.array, m: mx.array, step: int) -> mx.array:
        """A speculative row each of those that ``first`` was called with: ``drafts`` [slots, 1], the last ``m``
        [slots, 1, H] -> the next m, of draft ``step``."""
        return self._each({s: self._head(s).following(drafts[s : s + 1], m[s : s + 1], step) for s in self._drafting})

    def drop(self) -> None:
        """Forget the speculative rows of all heads."""
        for head in self.heads:
            if head is not None:
                head.drop()

    def _each(self, made: dict[int, mx.array]) -> mx.array:
        self._drafting = tuple(made)
        blank = mx.zeros_like(next(iter(made.values())))
        return mx.concatenate([made.get(slot, blank) for slot in range(len(self.heads))])

    def _head(self, slot: int) -> HeadCache:
        head = self.heads[slot]
        assert head is not None
        return head


def _copied(head: HeadCache, into: HeadCache) -> HeadCache:
    """``into`` with what ``head`` holds; either can go on without the other."""
    for mine, theirs in zip(into.members(()), head.members(()), strict=True):
        mine.put_back(theirs.hold())
    into.kv.step = head.kv.step
    return into


class _Fed:
    """A member of the slot's head that is shown the batch's last steps before anything is read."""

    def __init__(self, head: HeadCache, path: tuple[int, ...], form: BatchHead, seat: Seat) -> None:
        super().__init__(head, path)  # type: ignore[call-arg]
        self._form, self._seat = form, seat

    @property
    def position(self) -> int:
        return self._form.place.positions[self._seat.slot]

    def _feed(self) -> None:
        self._form.feed(self._seat.slot)


class _RowRows(_Fed, HeadRows):
    def catch_up(self) -> None:
        self._feed()
        super().catch_up()


class _RowHidden(_Fed, HeadHidden):
    def arrays(self) -> Arrays:
        self._feed()
        return super().arrays()

    def state_at(self, position: int, inside: Inside) -> Arrays:
        self._feed()
        return super().state_at(position, inside)
