"""Prompts that are being read: whose turn it is, and how much of each fits between two steps of those who decode."""

from __future__ import annotations

import time
from collections.abc import Sequence as Several

from .pace import Ladder, Pace
from .prefill import Prefill
from .scheduler import Turns, next_chunk
from .sequence import Sequence


class Patience:
    """Cycles of a stream between the chunks of a newcomer's prompt take no more of its time than plain steps would: the
    stream saves up what those would have taken, and makes a cycle when it can pay for one."""

    def __init__(self) -> None:
        self._saved = 0.0

    def waits(self, plain: float, cycle: float) -> bool:
        """Whether a stream whose steps take ``plain`` seconds, and whose cycles ``cycle``, waits for another chunk."""
        self._saved += plain
        if self._saved < cycle:
            return True
        self._saved -= cycle
        return False

    def forget(self) -> None:
        self._saved = 0.0


class Reading:
    """``prefills`` by sequence, in the order in which they were admitted."""

    def __init__(self, ladder: Ladder, gap: float, together: bool) -> None:
        """``gap``: seconds between two tokens of those who decode. ``together``: all that have had no chunk get one in
        the same turn, within that time; otherwise one prompt a turn has a chunk."""
        self._ladder, self._gap, self._together = ladder, gap, together
        self.prefills: dict[Sequence, Prefill] = {}
        self._turns, self._pace = Turns(), Pace()
        #: seconds that chunks took since the latest token
        self._spent = 0.0

    @property
    def new(self) -> list[Sequence]:
        """Whose prompts wait for their first chunk."""
        return [s for s, p in self.prefills.items() if p.remaining and not p.chunks]

    @property
    def through(self) -> list[Sequence]:
        """Whose prompts were read, or restored, to their end."""
        return [s for s, p in self.prefills.items() if not p.remaining]

    def next(self) -> list[Sequence]:
        """Who has a chunk in this turn, in order: who has had one is not in the way of who has not. None is through,
        and there is one at least."""
        first = self._turns.next({s: p.remaining for s, p in self.prefills.items()})
        others = [s for s in self.new if s is not first] if self._together else []
        return self._in_order([first, *others])

    def besides(self) -> list[Sequence]:
        """Who is new now and has a chunk before anybody's next step, in order; empty if each has its turn."""
        return self._in_order(self.new) if self._together else []

    def _in_order(self, sequences: list[Sequence]) -> list[Sequence]:
        return sorted(sequences, key=lambda s: (self.prefills[s].chunks > 0, self.prefills[s].remaining))

    def chunk(self, sequence: Sequence, groups: Several[tuple[int, int]], among: int) -> None:
        """A chunk of a prompt, evaluated. groups: (slots, columns) of those that make a step before the next one;
        among: chunks that are read before that, this one counted. Raises what a forward raises."""
        prefill = self.prefills[sequence]
        position = prefill.state.position
        most = next_chunk(
            self._ladder,
            self._pace,
            self._gap,
            position,
            prefilling=len(self.prefills),
            groups=groups,
            among=among,
            spent=self._spent if self._together and groups else 0.0,
        )
        started = time.monotonic()
        tokens = prefill.chunk(most)
        seconds = time.monotonic() - started
        self._spent += seconds
        self._pace.chunk_took(tokens, position, seconds)
        self._turns.besides(sequence)

    @property
    def hurried(self) -> bool:
        """Those who decode have waited for half of what they may."""
        return self._spent > self._gap / 2

    def stepped(self, slots: int, columns: int, seconds: float, said: bool = True) -> None:
        """A group of this shape made a step; 0 seconds: none that says how long one takes. ``said``: it gave tokens;
        one that was only submitted leaves those who wait for a token waiting."""
        if said:
            self._spent = 0.0
        self._pace.step_took(slots, columns, seconds)

    def forget(self) -> None:
        """Whose turn it was is of no use where there is nobody."""
        if not self.prefills:
            self._turns = Turns()
