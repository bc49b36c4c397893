"""How far blocks reach that a place has to be asked for: one verdict a block and record, and some are not known yet.

Members that need all rows are looked up from the first block on, windows, attention chunks and states from the last.
What is needed is counted where the look-up stands at the time, not at the prompt's end: as other members lower that,
it is counted again (reference/state-handoff.md, D). The fixed point of all is ``hits.common``. This module does not
own: which blocks a kind needs (``rules``), nor how a verdict is come by (``verdicts``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .hits import common
from .rules import Ruled, required_blocks, window_blocks
from .verdicts import Verdict


class Asked:
    """One member, or several that need the same: a ``hits.Group``. ``verdict(i)`` is that of block i, which has tokens
    [i·block, (i+1)·block); blocks before ``first`` are here already and not asked for. ``deferred``: the answer hangs
    on a verdict that is not known yet, or on a load of another request's."""

    def __init__(self, member: Ruled, block: int, verdict: Callable[[int], Verdict], first: int = 0) -> None:
        self.member, self.block, self.first = member, block, first
        self._verdict, self._windows = verdict, window_blocks(member, block)
        self._known: dict[int, Verdict] = {}
        self.deferred = False

    @property
    def whole(self) -> bool:
        return self._windows is None

    @property
    def recurrent(self) -> bool:
        return not self.whole and self.member.window is None

    def deepest(self, limit: int) -> int:
        """The last place, at most ``limit``, where it can stand; 0 if there is none."""
        if self.recurrent:  # only at the end of a block
            limit = limit // self.block * self.block
        last = -(-limit // self.block)
        end = self._prefix(last) if self.whole else self._suffix(last, limit)
        return min(limit, end * self.block) if end > self.first else min(limit, self.first * self.block)

    def need(self, position: int) -> int:
        """How many of the blocks before ``position`` must be there."""
        return required_blocks(self.member, self.block, position)

    def wanted(self, position: int) -> range:
        """The blocks that must be loaded to stand at ``position``: those that are needed there and are not here."""
        last = -(-position // self.block)
        return range(max(self.first, last - self.need(position)), last)

    def _prefix(self, last: int) -> int:
        """The end of the run of blocks from the first on."""
        end = self.first
        for i in range(self.first, last):
            if not self._held(i) and self._known[i] is Verdict.MISS:
                break
            end += end == i and self._known[i] is not Verdict.RETRY
        return end

    def _suffix(self, last: int, limit: int) -> int:
        """The last end of which the blocks that are needed there are there. A run that touches the first block is
        enough however short it is: nothing lies before it, or what does is here."""
        low = last
        for end in range(last, self.first, -1):
            low = min(low, end)  # [low, end) are there
            start = max(self.first, end - self.need(min(limit, end * self.block)))
            while low > start and self._held(low - 1):
                low -= 1
            if low <= start:
                return end
        return self.first

    def _held(self, i: int) -> bool:
        if i not in self._known:
            self._known[i] = self._verdict(i)
        verdict = self._known[i]
        self.deferred = self.deferred or verdict in (Verdict.PENDING, Verdict.RETRY)
        return verdict in (Verdict.HIT, Verdict.PENDING)


def reach(groups: Sequence[Asked], tokens: int, computed: int = 0) -> int | None:
    """How many tokens after ``computed`` the blocks lead to where every group can stand, of a prompt of ``tokens``; 0
    for less than a block, None as long as it cannot be said. Where a group stands at some places only, the last token
    is left to be read."""
    if not groups:
        return 0
    limit = tokens if all(g.whole for g in groups) else tokens - 1
    hit = common(groups, limit).hit - computed
    if any(g.deferred for g in groups):
        return None
    return hit if hit >= min(g.block for g in groups) else 0
