"""Cycles that are only there to be timed, made on a thread of their own: see ``threads.elsewhere``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import EngineClosed, EngineError, MlxkvError
from .depth import Depth
from .loop import Loop
from .request import Request
from .threads import elsewhere
from .ticket import Ticket


def rehearse(loop: Loop, asked: Sequence[Sequence[Request]], stopped: Callable[[], bool]) -> None:
    """Have a loop like ``loop``, which is idle and has made steps, answer these requests, those of a list together, by
    cycles of every depth, and tell ``loop`` what they cost. Returns when all is over; nobody else uses the model
    meanwhile. ``stopped``: whether it is to be given up. Raises EngineError."""
    drafting = loop.seats.speculation
    if drafting is None or drafting.depth.fixed is not None:
        return
    try:
        drafting.depth.learn(elsewhere(lambda: _rehearsed(loop.understudy(), asked, stopped), "mlxkv-rehearsal"))
    except MlxkvError:
        raise
    except Exception as e:
        raise EngineError(f"Cycles cannot be timed: {type(e).__name__}: {e}.") from e


def _rehearsed(loop: Loop, asked: Sequence[Sequence[Request]], stopped: Callable[[], bool]) -> Depth:
    assert loop.seats.speculation is not None
    depth = loop.seats.speculation.depth
    depth.rehearse(True)
    try:
        for requests in asked:
            tickets = [Ticket(request) for request in requests]
            loop.tickets.extend(tickets)
            while not (loop.idle or stopped()):
                loop.turn()
            if stopped():
                raise EngineClosed("The engine was closed while it warmed up.")
            for ticket in tickets:
                ticket.result()
    finally:
        loop.close()
    return depth
