"""The safe drain handoff (DESIGN §6): how a stream that speculates lets others in. Plain Python: no MLX, no clock.

A *stream* is a group whose next step may be a cycle of drafts and their verification. Who comes while it runs is a
*newcomer*: it has its first chunk before the stream's next forward, reads the others between its steps, and enters by
one copy of its state once nothing of the stream is in flight. The loop says what happens, ``TABLE`` what follows.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from ..errors import EngineError

log = logging.getLogger("mlxkv.engine")


class State(StrEnum):
    #: nobody speculates
    IDLE = "idle"
    #: a stream alone: its steps are cycles
    SPECULATING = "speculating"
    #: somebody waits for a first chunk, or for the first step of its own: no cycle begins
    DRAINING = "draining"
    #: prompts are read, a chunk between two steps of the stream, which may be cycles
    SHARING = "sharing"
    #: the stream stands still at committed − 1, with nothing in flight, while a newcomer's state is copied in
    HANDOFF = "handoff"
    #: those who decode do so by plain steps
    BATCHED = "batched"
    #: somebody was cancelled or failed, or all are sent away: what is left is looked at before anything else is done
    RECOVERY = "recovery"


class Event(StrEnum):
    #: a group begins to decode that may speculate
    STARTED = "started"
    #: a request is queued, or was admitted and waits for its first chunk
    ARRIVED = "arrived"
    #: all who could have had their first chunk; prompts are still read
    CHUNKED = "chunked"
    #: a prompt was read to its end: its first joint step is due
    THROUGH = "through"
    #: nothing of the stream is in flight, what was verified is said
    DRAINED = "drained"
    #: the newcomer decodes
    JOINED = "joined"
    #: nobody comes, and the group that decodes may speculate
    ALONE = "alone"
    #: several decode, and no group of theirs may speculate
    TOGETHER = "together"
    #: nobody decodes who may speculate
    OVER = "over"
    CANCELLED = "cancelled"
    FAILED = "failed"
    SHUT_DOWN = "shut down"


#: (state, event) -> the next state. What is not here cannot happen: ``HandoffError``. While nobody speculates there is
#: nothing to recover.
TABLE: Mapping[tuple[State, Event], State] = {
    (State.IDLE, Event.STARTED): State.SPECULATING,
    (State.IDLE, Event.OVER): State.IDLE,
    (State.IDLE, Event.TOGETHER): State.IDLE,
    (State.IDLE, Event.CANCELLED): State.IDLE,
    (State.IDLE, Event.FAILED): State.IDLE,
    (State.IDLE, Event.SHUT_DOWN): State.IDLE,
    #
    (State.SPECULATING, Event.ALONE): State.SPECULATING,
    (State.SPECULATING, Event.ARRIVED): State.DRAINING,
    (State.SPECULATING, Event.CHUNKED): State.SHARING,
    (State.SPECULATING, Event.THROUGH): State.DRAINING,
    (State.SPECULATING, Event.TOGETHER): State.BATCHED,
    (State.SPECULATING, Event.OVER): State.IDLE,
    (State.SPECULATING, Event.CANCELLED): State.RECOVERY,
    (State.SPECULATING, Event.FAILED): State.RECOVERY,
    (State.SPECULATING, Event.SHUT_DOWN): State.RECOVERY,
    #
    (State.DRAINING, Event.ARRIVED): State.DRAINING,
    (State.DRAINING, Event.CHUNKED): State.SHARING,
    (State.DRAINING, Event.THROUGH): State.DRAINING,
    (State.DRAINING, Event.DRAINED): State.HANDOFF,
    (State.DRAINING, Event.ALONE): State.SPECULATING,
    (State.DRAINING, Event.TOGETHER): State.BATCHED,
    (State.DRAINING, Event.OVER): State.IDLE,
    (State.DRAINING, Event.CANCELLED): State.RECOVERY,
    (State.DRAINING, Event.FAILED): State.RECOVERY,
    (State.DRAINING, Event.SHUT_DOWN): State.RECOVERY,
    #
    (State.SHARING, Event.ARRIVED): State.DRAINING,
    (State.SHARING, Event.CHUNKED): State.SHARING,
    (State.SHARING, Event.THROUGH): State.DRAINING,
    (State.SHARING, Event.ALONE): State.SPECULATING,
    (State.SHARING, Event.TOGETHER): State.BATCHED,
    (State.SHARING, Event.OVER): State.IDLE,
    (State.SHARING, Event.CANCELLED): State.RECOVERY,
    (State.SHARING, Event.FAILED): State.RECOVERY,
    (State.SHARING, Event.SHUT_DOWN): State.RECOVERY,
    #
    (State.HANDOFF, Event.JOINED): State.BATCHED,
    (State.HANDOFF, Event.CANCELLED): State.RECOVERY,
    (State.HANDOFF, Event.FAILED): State.RECOVERY,
    (State.HANDOFF, Event.SHUT_DOWN): State.RECOVERY,
    #
    (State.BATCHED, Event.TOGETHER): State.BATCHED,
    (State.BATCHED, Event.ALONE): State.SPECULATING,
    (State.BATCHED, Event.ARRIVED): State.DRAINING,
    (State.BATCHED, Event.CHUNKED): State.SHARING,
    (State.BATCHED, Event.THROUGH): State.DRAINING,
    (State.BATCHED, Event.OVER): State.IDLE,
    (State.BATCHED, Event.CANCELLED): State.RECOVERY,
    (State.BATCHED, Event.FAILED): State.RECOVERY,
    (State.BATCHED, Event.SHUT_DOWN): State.RECOVERY,
    #
    (State.RECOVERY, Event.ALONE): State.SPECULATING,
    (State.RECOVERY, Event.ARRIVED): State.DRAINING,
    (State.RECOVERY, Event.CHUNKED): State.SHARING,
    (State.RECOVERY, Event.THROUGH): State.DRAINING,
    (State.RECOVERY, Event.TOGETHER): State.BATCHED,
    (State.RECOVERY, Event.OVER): State.IDLE,
    (State.RECOVERY, Event.CANCELLED): State.RECOVERY,
    (State.RECOVERY, Event.FAILED): State.RECOVERY,
    (State.RECOVERY, Event.SHUT_DOWN): State.RECOVERY,
}


class HandoffError(EngineError):
    """Something happened that cannot in this state: the loop and the table disagree."""


@dataclass(frozen=True)
class Picture:
    """What there is at a step edge. streams: groups that may speculate. rows: sequences that decode, in any group.
    newcomers: requests that are queued or wait for their first chunk, but none that waits for room or is being
    restored. reading: prompts that had their first chunk. through: prompts that were read to their end, whose sequences
    do not decode yet."""

    streams: int = 0
    rows: int = 0
    newcomers: int = 0
    reading: int = 0
    through: int = 0

    @property
    def event(self) -> Event:
        if not self.streams:
            return Event.TOGETHER if self.rows > 1 else Event.OVER
        if self.through:
            return Event.THROUGH
        if self.newcomers:
            return Event.ARRIVED
        return Event.CHUNKED if self.reading else Event.ALONE


class Handoff:
    """Where the handoff is. ``counts``: how often each change was made, by (from, to)."""

    def __init__(self) -> None:
        self.state = State.IDLE
        self.counts: Counter[tuple[State, State]] = Counter()

    @property
    def may_cycle(self) -> bool:
        """Whether a stream's next step may be a cycle."""
        return self.state in (State.SPECULATING, State.SHARING)

    def on(self, event: Event) -> None:
        """``event`` happened. Raises HandoffError where it cannot."""
        after = TABLE.get((self.state, event))
        if after is None:
            raise HandoffError(f"The handoff is {self.state}: {event!r} cannot happen.", "Report this.")
        if after is self.state:
            return
        # a failure is worth a line by itself; the others come with each request
        log.log(logging.INFO if after is State.RECOVERY else logging.DEBUG, "%s: %s, now %s", self.state, event, after)
        self.counts[self.state, after] += 1
        self.state = after

    def see(self, picture: Picture) -> None:
        """What there is at a step edge says what happened since the last one."""
        if self.state is State.IDLE and picture.streams:
            self.on(Event.STARTED)
        self.on(picture.event)

    def changes(self) -> dict[str, int]:
        """``counts``, by words."""
        return {f"{before} > {after}": n for (before, after), n in sorted(self.counts.items())}
