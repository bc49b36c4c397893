"""Cycles that are only there to be timed, made on a thread of their own: see ``threads.elsewhere``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from ..errors import EngineClosed, EngineError, MlxkvError
from .depth import Depth
from .loop import Loop
from .request import Request
from .threads import elsewhere
from .ticket import Ticket

#: what a turn is made in: somebody sees when one hangs
Watch = Callable[[], AbstractContextManager[None]]


def rehearse(loop: Loop, asked: Sequence[Sequence[Request]], stopped: Callable[[], bool], watch: Watch) -> None:
    """Have a loop like ``loop``, which has made steps, answer these requests, those of a list together, by cycles of
    every depth, and tell ``loop`` what they cost. Returns when all is over, for nobody else uses the model meanwhile:
    at once where ``loop`` has something to do, whose requests would wait. ``stopped``: whether it is to be given up.
    Raises EngineError."""
    speculation = loop.seats.speculation
    if speculation is None or speculation.depth.fixed is not None or not loop.idle:
        return
    try:
        depth = elsewhere(lambda: _rehearsed(loop.understudy(), asked, stopped, watch), "mlxkv-rehearsal")
        speculation.depth.learn(depth)
    except MlxkvError:
        raise
    except Exception as e:
        raise EngineError(f"Cycles cannot be timed: {type(e).__name__}: {e}.") from e


def _rehearsed(loop: Loop, asked: Sequence[Sequence[Request]], stopped: Callable[[], bool], watch: Watch) -> Depth:
    assert loop.seats.speculation is not None
    depth = loop.seats.speculation.depth
    depth.rehearse(True)
    try:
        for requests in asked:
            tickets = [Ticket(request) for request in requests]
            loop.tickets.extend(tickets)
            while not (loop.idle or stopped()):
                with watch():
                    loop.turn()
                if not loop.active and loop.waiting:  # there is no memory for it, and nobody here gives any back
                    return depth
            if stopped():
                raise EngineClosed("The engine was closed while it warmed up.")
            for ticket in tickets:
                ticket.result()
    finally:
        loop.close()
    return depth
