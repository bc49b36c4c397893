"""What the engine does next: who is admitted, whose prompt is read on, by how much, and which group makes a step.

Plain decisions: no MLX, no clock, no threads. The loop tells what it did and how long that took.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from .pace import GROWTH, Ladder, Pace

K = TypeVar("K", bound=Hashable)

#: milliseconds between two tokens of an answer, where nothing else is asked for
GPU_GAP_MS, CPU_GAP_MS = 250, 500
#: a turn is planned to take this part of the gap; the rest is for what cannot be foreseen
PART = 0.85
#: however slow the steps are, a chunk may take this part of their time: a prompt is read on all the same
SHARE = 0.2
#: times in a row that the prompt which has waited longest is passed over for a shorter one; twice that for a new one
PASSES = 3
#: requests that may pass one which waits for room
OVERTAKEN = 8


def max_gap(wanted_ms: float | None, device: str) -> float:
    """Seconds that two tokens of an answer should at most be apart. ``device``: ``cpu``, or a GPU's name."""
    if wanted_ms is None:
        wanted_ms = CPU_GAP_MS if device == "cpu" else GPU_GAP_MS
    return wanted_ms / 1000


def next_chunk(
    ladder: Ladder,
    pace: Pace,
    gap: float,
    position: int,
    *,
    prefilling: int,
    groups: Sequence[tuple[int, int]],
    among: int = 1,
    spent: float = 0.0,
) -> int:
    """Tokens, a rung, that may be read next of a prompt at ``position``; nearer boundaries cut it shorter.

    gap: seconds. prefilling: prompts that are being read, this one counted. groups: (slots, columns) of those that make
    a step before the next chunk. Alone, a prompt is read in the largest chunks. Beside others it is the largest for
    which chunk and steps are expected to take ``PART`` of the gap; where nothing was measured yet, the smallest.
    among: chunks that are read before the next step, this one counted, of which each has an equal share; spent: seconds
    that those before it took."""
    if not groups and prefilling <= 1:
        return ladder.largest
    steps = sum(pace.step(slots, columns) for slots, columns in groups)
    allowed = max(PART * gap - steps - spent, SHARE * steps) / among
    best = ladder.smallest
    for rung in ladder.rungs:
        seconds = pace.chunk(rung, position)
        if seconds is None or seconds > allowed or rung > max(GROWTH * pace.longest, best):
            break
        best = rung
    return best


class Turns:
    """Whose prompt is read on: the one with the fewest tokens to go, but nobody waits for ever.

    The prompt that has waited longest is passed over at most ``PASSES`` times in a row, for one that has not had a
    chunk yet at most twice as often. So a short prompt that comes has its chunk in the next turn, and where n prompts
    are read at a time, each has a chunk in any ``(2 · PASSES + 1) · n`` turns, whatever comes."""

    def __init__(self) -> None:
        self._last: dict[Hashable, int] = {}  # the turn of its latest chunk; of its arrival, before it had one
        self._begun: set[Hashable] = set()
        self._turn = 0
        self._passed = 0

    def next(self, left: Mapping[K, int]) -> K:
        """The prompt whose turn it is. ``left``: tokens to go by prompt, of at least one."""
        self._turn += 1
        self._last = {key: self._last.get(key, self._turn) for key in left}
        self._begun &= left.keys()
        longest = min(left, key=lambda key: self._last[key])
        shortest = min(left, key=lambda key: (left[key], self._last[key]))
        if self._passed >= (PASSES if shortest in self._begun else 2 * PASSES):
            shortest = longest
        self._passed = 0 if shortest == longest else self._passed + 1
        self._last[shortest] = self._turn
        self._begun.add(shortest)
        return shortest

    def besides(self, key: Hashable) -> None:
        """A prompt of those that ``next`` was last told of has a chunk in this turn too."""
        self._last[key] = self._turn
        self._begun.add(key)


class Admission:
    """Who comes in next: first come, first served. One that does not fit may be passed by ``OVERTAKEN`` smaller ones
    that came later; then the queue waits for it."""

    def __init__(self) -> None:
        self._first: Hashable = None
        self._passes = 0

    def next(self, waiting: Sequence[K], fits: Callable[[K], bool]) -> K | None:
        """Of ``waiting``, in the order in which they came, the one to admit now; None: nobody. It is taken as admitted.
        ``fits``: whether there is room for one now; who can never fit must have been refused before."""
        if not waiting:
            return None
        if waiting[0] != self._first:
            self._first, self._passes = waiting[0], 0
        if fits(waiting[0]):
            return waiting[0]
        if self._passes >= OVERTAKEN:
            return None
        for key in waiting[1:]:
            if fits(key):
                self._passes += 1
                return key
        return None


@dataclass(frozen=True)
class Step:
    """The group whose step is next. ``first``: a round begins with it, in which each group makes one step. A prompt is
    read on before those steps only: so one chunk lies between two tokens of any row, however many groups there are."""

    group: Any
    first: bool


class Rounds:
    """Groups take turns: one step each, in a round, so that rows get their tokens at the same rate in every group."""

    def __init__(self) -> None:
        self._last: dict[Hashable, int] = {}
        self._turn = 0
        self._made = 0

    def next(self, groups: Sequence[Hashable]) -> Step:
        """Whose step it is, of at least one group: the one whose latest step is longest ago; a new one first."""
        self._turn += 1
        self._last = {name: self._last.get(name, 0) for name in groups}
        first = self._made >= len(groups) or self._made == 0
        self._made = 1 if first else self._made + 1
        group = min(groups, key=lambda name: self._last[name])
        self._last[group] = self._turn
        return Step(group, first)
