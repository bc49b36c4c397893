"""Cycles that are only there to be timed, made on a thread of their own.

Measured on Linux: where a thread has made cycles of every depth, plain steps take it 3 to 4 % longer from then on, with
the same calls and allocations: what was built for the cycles lies between what steps take and give back in glibc's
heap. Each thread has a heap of its own there, and this one's goes unused with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from ..errors import EngineClosed, EngineError, MlxkvError
from .loop import Loop
from .request import Request
from .threads import join_fully, leave_device
from .ticket import Ticket


def rehearse(loop: Loop, asked: Sequence[Sequence[Request]], stopped: Callable[[], bool]) -> None:
    """Have a loop like ``loop``, which is idle and has made steps, answer these requests, those of a list together, by
    cycles of every depth, and tell ``loop`` what they cost. Returns when all is over; nobody else uses the model
    meanwhile. ``stopped``: whether it is to be given up. Raises what a request failed with."""
    drafting = loop.seats.speculation
    if drafting is None or drafting.depth.fixed is not None:
        return
    failure: list[BaseException] = []

    def run() -> None:
        try:
            other = loop.understudy()
            depth = other.seats.speculation.depth  # type: ignore[union-attr]
            depth.rehearse(True)
            try:
                for requests in asked:
                    tickets = [Ticket(request) for request in requests]
                    other.tickets.extend(tickets)
                    while not (other.idle or stopped()):
                        other.turn()
                    if stopped():
                        raise EngineClosed("The engine was closed while it warmed up.")
                    for ticket in tickets:
                        ticket.result()
            finally:
                other.close()
            drafting.depth.learn(depth)
        except MlxkvError as e:
            failure.append(e)
        except BaseException as e:
            error = EngineError(f"Cycles cannot be timed: {type(e).__name__}: {e}.")
            error.__cause__ = e
            failure.append(error)
        finally:
            leave_device()

    thread = threading.Thread(target=run, name="mlxkv-rehearsal", daemon=True)
    thread.start()
    join_fully(thread)
    if failure:
        raise failure[0]
