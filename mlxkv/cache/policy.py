"""The boundary policy: which states of a chain are kept, where a long prefill leaves some, what may be written.

Pure functions over plain values: nothing here knows files, threads or models. A *chain* is the way from the root to
one sequence's end; its states stand at positions on it. Every state has a role: what the place is where it was taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: what a place is, least worth first. "tip": the last prompt token but one (n−1), or where a prefill was cancelled.
#: "ladder": a rung inside a long prefill. "answer", "message" and "system" are the ends of these.
ROLES = ("ladder", "tip", "answer", "message", "system")
#: the first rung of the ladder, in tokens; the others are at twice the distance each
LADDER = 4096
#: a rung is left out if a boundary is nearer than this, in tokens: it would serve the same prompts
LADDER_GAP = 512


@dataclass(frozen=True)
class Policy:
    """floor: bytes of states that a chain may have however few rows it has. idle_s: after how many idle seconds tips
    that wait are written. daily: bytes that may be written a day, all processes on the folder together."""

    floor: int = 64 << 20
    idle_s: float = 10.0
    daily: int = 100 * 10**9

    def budget(self, row_bytes: int) -> int:
        """How many bytes the states of a chain with so many bytes of rows may have."""
        return max(row_bytes, self.floor)


@dataclass(frozen=True)
class State:
    """A state on a chain. ``name`` is whatever the caller knows it by."""

    position: int
    role: str
    nbytes: int
    name: bytes = b""


def best_role(*roles: str) -> str:
    """What a place is that is several things at once. A record of before there were roles is a message's end."""
    return max((role if role in ROLES else "message" for role in roles), key=ROLES.index)


def ladder(first: int, upto: int, boundaries: Iterable[int] = ()) -> list[int]:
    """Rungs below ``upto``: first, 2·first, 4·first, … tokens, a function of tokens and configuration only.

    first: tokens, a multiple of the block (0: no ladder). boundaries: positions where a state is taken anyway.
    """
    near = [*boundaries, upto]
    rungs = []
    rung = first
    while 0 < rung < upto:
        if all(abs(rung - b) >= min(LADDER_GAP, first) for b in near):
            rungs.append(rung)
        rung *= 2
    return rungs


def superseded(states: Sequence[State], prompt_end: int, turn: int) -> set[int]:
    """Positions of tips that are of no use any more, given that ``states`` are all durable.

    With a state at ``prompt_end`` (this turn's n−1), an n−1 state of an earlier turn goes, and rungs before ``turn``,
    the end of the last message before the newest user message. The rungs of this turn stay: its prompt may yet be
    edited.
    """
    if not any(s.position == prompt_end for s in states):
        return set()
    return {
        s.position
        for s in states
        if (s.role == "tip" and s.position < prompt_end) or (s.role == "ladder" and s.position <= turn < prompt_end)
    }


def always_kept(states: Sequence[State], prompt_end: int, turn: int) -> set[int]:
    """At most four positions: the end of system and tools, of the last message before the newest user message, the
    newest n−1, the newest answer's end."""
    before = [s.position for s in states if s.position <= turn and s.role in ("answer", "message", "system")]
    newest = [s.position for s in states if s.role == "tip" or s.position == prompt_end]
    groups = [
        [s.position for s in states if s.role == "system"],
        before,
        newest,
        [s.position for s in states if s.role == "answer"],
    ]
    return {max(group) for group in groups if group}


def thin(states: Sequence[State], budget: int, prompt_end: int, turn: int) -> set[int]:
    """Positions to give up so that the rest weighs at most ``budget`` bytes, or only the four always kept are left.

    What goes first is the state whose neighbours, seen from the chain's end, are nearest to each other in proportion:
    what stays stands at about doubling distances. The oldest of equals goes.
    """
    kept = sorted(states, key=lambda s: s.position)
    fixed = always_kept(states, prompt_end, turn)
    total = sum(s.nbytes for s in kept)
    gone: set[int] = set()
    while total > budget:
        end = kept[-1].position + 1

        def closeness(i: int, end: int = end) -> float:
            older = kept[i - 1].position if i else 0
            newer = kept[i + 1].position if i + 1 < len(kept) else end - 1
            return (end - older) / (end - newer)

        free = [i for i, s in enumerate(kept) if s.position not in fixed]
        if not free:
            break
        away = kept.pop(min(free, key=closeness))
        total -= away.nbytes
        gone.add(away.position)
    return gone


#: which part of the daily write budget each kind of record may use up: merging gives way first, then tips, rows last
SHARES = {"merge": 2 / 3, "tip": 0.8, "state": 0.9, "rows": 1.0}


def may_write(what: str, nbytes: int, today: int, daily: int) -> bool:
    """Whether ``nbytes`` of ``what`` (a key of SHARES) may be written, after ``today`` bytes of a budget of
    ``daily``."""
    return today + nbytes <= SHARES[what] * daily
