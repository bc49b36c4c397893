"""Work for a client that may leave, or has only so much time: what is done before an answer has begun, and what has no
answer of the model at all."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request as Http

from ..errors import ClientGone, RequestTimeout
from .bridge import hang_up

if TYPE_CHECKING:
    from .server import Server

T = TypeVar("T")


def time_limit(server: Server, asked: float | None) -> float | None:
    """Seconds that a request may take which asks for so many itself; None for any."""
    return min((s for s in (asked, server.limits.timeout_s) if s), default=None)


async def attended(http: Http, seconds: float | None, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` gives. It is cancelled where the client hangs up first, which raises ClientGone, and after
    ``seconds``, which raises RequestTimeout: nobody waits on for a model that nobody wants any more. The body of the
    request must have been read."""
    task = asyncio.create_task(work)

    def left() -> None:
        task.cancel()

    try:
        with hang_up(http, left):
            await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise late(seconds or 0.0)
        if task.cancelled():
            raise ClientGone("The client hung up.")
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


def late(seconds: float) -> RequestTimeout:
    """The error of a request whose time is up."""
    return RequestTimeout(f"The request was not answered within {seconds:g} s.", "Raise its timeout, or ask for less.")
