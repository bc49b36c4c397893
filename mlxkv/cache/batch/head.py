"""The batch form of a prediction head's cache: the head never runs in a joint step, only between two.

Each slot keeps the solo ``HeadCache`` of its row, whose keys and values are a part of those of all slots. A step leaves
one pair of arrays (tokens, hidden states) for all rows; a row's own part is cut out of them when its head catches up,
or after ``MOST`` tokens. While all rows draft at every edge nothing is cut out: the pair of the last step is what waits
for all of them, and the head runs over all rows in one forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ..head import RECENT, HeadCache, HeadHidden, HeadRows
from ..layout import MemberSpec
from ..member import Arrays, Member
from .form import BatchError, Form
from .head_rows import SPARE, HeadRowsOfAll, SlotRows
from .place import Place, Seat

if TYPE_CHECKING:
    from ..inside import Inside

#: tokens of a row in joint steps that wait to be shown: live arrays are bounded, and every row of them stays while one
#: needs it
MOST = 64


@dataclass(frozen=True)
class Step:
    """What the body saw and gave in one step: tokens [slots, D], or [slots] of a plain one, hidden [slots, D, H].
    ``kept``: how many of the D tokens each row kept."""

    tokens: mx.array
    hidden: mx.array
    kept: tuple[int, ...]

    @property
    def width(self) -> int:
        return self.hidden.shape[1]

    def of(self, slot: int) -> tuple[mx.array, mx.array]:
        """What the row kept: [1, n] and [1, n, H]."""
        n = self.kept[slot]
        return self.tokens[slot : slot + 1].reshape(1, -1)[:, :n], self.hidden[slot : slot + 1, :n]


class BatchHead(Form):
    """Has no arrays of its own that a step changes: what the step shows is given to ``shown``."""

    def __init__(self, place: Place, spec: MemberSpec, slots: int, capacity: int) -> None:
        self.place = place
        self.rows = HeadRowsOfAll(spec, slots, capacity)
        self.heads: list[HeadCache | None] = [None] * slots
        self._ones = (1,) * slots
        #: whether any head is not deaf: if none is, a step leaves nothing
        self._heard = False
        self._parts: dict[int, SlotRows] = {}
        #: of the last steps, the first of them number ``_first``
        self._steps: tuple[Step, ...] = ()
        #: tokens of a row in these
        self._waits = 0
        #: of steps of one token, from number .. on to number .., tokens [slots, n] and hidden [slots, n, H]
        self._joined: tuple[int, int, mx.array, mx.array] | None = None
        #: (tokens, hidden) of a verify step that was not committed yet
        self._open: tuple[mx.array, mx.array] | None = None
        self._first = 0
        #: by slot, the number of the step its head was not shown yet, and of the first one since it is there
        self._next, self._since = [0] * slots, [0] * slots
        self.hidden: mx.array | None = None
        self._drafting: tuple[int, ...] = ()
        #: the number of the next step when a head last made, or was shown, anything by itself
        self._stirred = 0

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
        """``tokens`` [slots] and ``hidden`` [slots, 1, H] of a step that was built."""
        self._tidy()
        self._leave_behind(Step(tokens, hidden, self._ones))

    def verified(self, tokens: mx.array, hidden: mx.array) -> None:
        """``tokens`` [slots, D] and ``hidden`` [slots, D, H] of a verify step that was built."""
        self._tidy()
        self._open = (tokens, hidden)

    def committed(self, kept: list[int]) -> None:
        if self._open is not None:
            self._leave_behind(Step(*self._open, tuple(kept)))
            self._open = None

    def _leave_behind(self, step: Step) -> None:
        if not self._heard:
            self._first += 1
            return
        self._steps = (*self._steps, step)
        self._waits += step.width

    def _tidy(self) -> None:
        """Bound what waits. After ``hold`` there is nothing to do until the next step was built: what it says stays."""
        if self._waits >= MOST:
            for slot in range(len(self.heads)):
                self.feed(slot)
            self._drop()

    def feed(self, slot: int) -> None:
        """Show the slot's head all steps it has not seen."""
        steps = self._steps[self._next[slot] - self._first :] if self._listens(slot) else ()
        if steps:
            head = self._head(slot)
            if all(step.kept is self._ones for step in steps):
                tokens, hidden = self._together(steps)
                head.show(tokens[slot : slot + 1], hidden[slot : slot + 1])
            else:
                pairs = [step.of(slot) for step in steps]
                tokens, hidden = (mx.concatenate(list(part), axis=1) for part in zip(*pairs, strict=True))
                head.show(tokens, hidden)
            self.stir()
        self._next[slot] = self._end

    def _together(self, steps: tuple[Step, ...]) -> tuple[mx.array, mx.array]:
        """Tokens and hidden states of all slots in the last ``steps``, of one token each: rows that stand alike are
        parts of one pair."""
        start, end = self._end - len(steps), self._end
        if self._joined is None or self._joined[:2] != (start, end):
            tokens = mx.concatenate([step.tokens for step in steps]).reshape(len(steps), -1).T
            self._joined = start, end, tokens, mx.concatenate([step.hidden for step in steps], axis=1)
        return self._joined[2:]

    def stir(self) -> None:
        """A head makes something by itself, or is shown something: it is to be evaluated with the next step."""
        self._stirred = self._end

    @property
    def _end(self) -> int:
        """The number of the next step."""
        return self._first + len(self._steps)

    def _drop(self) -> None:
        seen = min((n for slot, n in enumerate(self._next) if self._listens(slot)), default=self._end)
        self._keep(self._steps[seen - self._first :])
        self._first = seen

    def _keep(self, steps: tuple[Step, ...]) -> None:
        self._steps, self._joined = steps, None
        self._waits = sum(step.width for step in steps)

    def arrays(self) -> list[mx.array]:
        return []

    def bind(self, arrays: list[mx.array]) -> None:
        pass

    def live(self) -> list[mx.array]:
        found = [step.hidden for step in self._steps[-RECENT:]]  # its tokens were evaluated with it
        if self._open is not None:
            found += self._open
        if self._end - self._stirred <= RECENT:
            found += self.rows.arrays()
            for head in self.heads:
                if head is not None:
                    found += (*head.recent(), *head.tokens[-1:])
        return found

    def hold(self) -> Any:
        self._tidy()  # here, where no newer step is built
        return self._steps, self._open

    def put_back(self, held: Any) -> None:
        steps, self._open = held
        if steps is not self._steps:
            self._keep(steps)

    def check(self, cache: Any, position: int) -> None:
        pass

    def join(self, slot: int, cache: Any, position: int) -> None:
        head = HeadCache(cache.run, cache.joint)
        _copied(cache, head)
        head.drop()
        self.rows.join(slot, head.kv)
        head.kv = self._parts[slot] = SlotRows(self.rows, slot)
        self.heads[slot] = head
        self._listen()
        self._next[slot] = self._since[slot] = self._stirred = self._end

    def leave(self, slot: int) -> None:
        self.heads[slot] = None
        del self._parts[slot]
        self.rows.leave(slot)
        self._listen()
        self._drop()

    def _listens(self, slot: int) -> bool:
        head = self.heads[slot]
        return head is not None and not head.deaf

    def _listen(self) -> None:
        self._heard = any(map(self._listens, range(len(self.heads))))

    def resize(self, slots: int, capacity: int, keep: dict[int, int], positions: dict[int, int]) -> None:
        for slot in range(len(self.heads)):
            self.feed(slot)
        heads: list[HeadCache | None] = [None] * slots
        for old, slot in keep.items():
            heads[slot] = self.heads[old]
            self._parts[old].slot = slot  # those who read the row hold it
        self._parts = {slot: self._parts[old] for old, slot in keep.items()}
        self.rows.resize(slots, capacity, keep)
        self._first = self._stirred = self._end
        self._keep(())
        self.heads, self._ones = heads, (1,) * slots
        self._next, self._since = [self._first] * slots, [self._first] * slots

    def row(self, seat: Seat, path: tuple[int, ...]) -> list[Member]:
        head = self.heads[seat.slot]
        assert head is not None
        return [_RowRows(head, (*path, 0), self, seat), _RowHidden(head, (*path, 1), self, seat)]

    def take(self, slot: int, cache: HeadCache) -> None:
        self.feed(slot)
        head = self._head(slot)
        _copied(head, cache)
        cache.kv = KVCache()
        self.rows.take(slot, cache.kv)
        if cache.deaf:  # nobody told it
            cache.seen = self.place.positions[slot]

    # drafting, at the edge of a step

    def prepare(self, slots: Sequence[int]) -> None:
        """The heads of these rows make what rows they can before the next root is known, lazily. A step was submitted,
        and no newer one is built."""
        self.stir()
        for slot in slots:
            self.feed(slot)
            self._head(slot).catch_up()

    def can_draft(self, slots: Sequence[int]) -> bool:
        """Whether the body has shown each of these rows a hidden state."""
        return all(self.place.positions[slot] > 0 and self._listens(slot) for slot in slots)

    def first(self, roots: Mapping[int, int]) -> mx.array:
        """The heads of these rows over all that waits, the root last: m [slots, 1, H], of which those of other rows
        mean nothing. States inside the last step can be read no more."""
        self.drop()
        self.stir()
        self._drafting = tuple(roots)
        if not self._head(self._drafting[0]).joint:
            for slot in roots:
                self.feed(slot)
            self._drop()
            return self._each({slot: self._head(slot).first({0: root}) for slot, root in roots.items()})
        step = self._waiting()
        m = self._behind(roots) if step is None else self._after(step, roots)
        for slot in roots:
            self.rows.made[slot] = self.place.positions[slot]
        return m

    def following(self, drafts: mx.array, m: mx.array, step: int) -> mx.array:
        """A speculative row each of those that ``first`` was called with: ``drafts`` [slots, 1], the last ``m``
        [slots, 1, H] -> the next m, of draft ``step``."""
        head = self._head(self._drafting[0])
        self.stir()
        if not head.joint:
            rows = {s: self._head(s).following(drafts[s : s + 1], m[s : s + 1], step) for s in self._drafting}
            return self._each(rows)
        m = self.rows.run(head.run, drafts, m, step)
        for slot in self._drafting:
            self.rows.made[slot] += 1
        return m

    def drop(self) -> None:
        """Forget the speculative rows of all heads."""
        for slot, position in enumerate(self.place.positions):
            self.rows.made[slot] = min(self.rows.made[slot], position)

    def _waiting(self) -> Step | None:
        """The last step, if what it left is all that waits for the rows that draft."""
        if not self._steps or self._steps[-1].width > SPARE:
            return None
        step = self._steps[-1]
        for slot in self._drafting:
            there = self._since[slot] < self._end
            if not there or self.rows.made[slot] != self.place.positions[slot] - step.kept[slot]:
                return None
        return step

    def _after(self, step: Step, roots: Mapping[int, int]) -> mx.array:
        """m of the roots, where ``step`` is all that waits."""
        kept, width = [0] * len(self.heads), max(step.kept[slot] for slot in roots)
        root = [0] * len(self.heads)
        for slot in roots:
            kept[slot], root[slot] = step.kept[slot], roots[slot]
            if self._next[slot] < self._end - 1:  # what was left before has its rows
                self._head(slot).skip(self.place.positions[slot] - step.kept[slot])
                self._next[slot] = self._end - 1
        self._drop()
        tokens = mx.array(root, mx.int32)[:, None]
        if width == 1:
            return self._run(tokens, step.hidden[:, :1])
        last = mx.maximum(mx.array(kept, mx.int32) - 1, 0)[:, None]
        following = mx.concatenate([step.tokens[:, 1:width].astype(mx.int32), tokens], axis=1)
        m = self._run(mx.where(mx.arange(width) == last, tokens, following), step.hidden[:, :width])
        return mx.take_along_axis(m, mx.broadcast_to(last[:, :, None], (*last.shape, m.shape[2])), axis=1)

    def _behind(self, roots: Mapping[int, int]) -> mx.array:
        """m of the roots, after each head made what rows it lacks before."""
        hidden: list[mx.array | None] = [None] * len(self.heads)
        root = [0] * len(self.heads)
        self.prepare(list(roots))
        for slot in roots:
            head = self._head(slot)
            hidden[slot], root[slot] = head.hidden[0], roots[slot]
            self.rows.made[slot] = head.seen - 1  # where drafts were void, the root has its row already
        self._drop()
        blank = mx.zeros_like(next(h for h in hidden if h is not None))
        rows = mx.concatenate([blank if h is None else h for h in hidden])
        return self._run(mx.array(root, mx.int32)[:, None], rows)

    def _run(self, tokens: mx.array, hidden: mx.array) -> mx.array:
        return self.rows.run(self._head(self._drafting[0]).run, tokens, hidden)

    def _each(self, made: dict[int, mx.array]) -> mx.array:
        blank = mx.zeros_like(next(iter(made.values())))
        return mx.concatenate([made.get(slot, blank) for slot in range(len(self.heads))])

    def _head(self, slot: int) -> HeadCache:
        head = self.heads[slot]
        assert head is not None
        return head


def _copied(head: HeadCache, into: HeadCache) -> None:
    """``into`` with what ``head`` holds, rows in place of which it has its own; either can go on without the other."""
    into.seen, into.start, into.tokens, into.hidden = head.seen, head.start, head.tokens, head.hidden
    into.kv, into.deaf = head.kv, head.deaf


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
        self._form.stir()


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
