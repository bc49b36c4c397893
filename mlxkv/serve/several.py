"""One request with several prompts: an answer to each, read as one answer whose choices are those of all prompts."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from starlette.requests import Request as Http

from ..errors import QueueFull
from .answer import AGAIN, Answer
from .asking import prepared
from .attended import attended, time_limit
from .parts import Asked, Part, Ping

if TYPE_CHECKING:
    from ..decode.engine import Engine
    from .server import Server

#: prompts of one request that are with the engine at the same time
AT_ONCE = 8


class Several:
    """Used as an ``Answer`` is; the i-th choice of prompt k is choice ``k * n + i``. The first answer gives the id.

    All prompts are checked before the first is begun. No more than ``AT_ONCE`` are begun at a time, so that a long list
    leaves room for others. The first error ends them all.
    """

    def __init__(self, server: Server, asked: Sequence[Asked], http: Http, first: Answer) -> None:
        self.server, self.http = server, http
        self.id, self.created, self.asked = first.id, first.created, first.asked
        self._all = asked
        self._began = time.monotonic()
        self._answers = {0: first}
        self._parts: deque[Part] = deque()
        self._arrived = asyncio.Event()
        self._left = len(asked)
        self._error: BaseException | None = None
        self._places = asyncio.Semaphore(AT_ONCE)
        self._tasks = [asyncio.create_task(self._run(k)) for k in range(len(asked))]

    @classmethod
    async def begin(cls, server: Server, asked: Sequence[Asked], http: Http) -> Several:
        """Check all, and queue the first. Raises what refuses the request."""
        began = time.monotonic()

        async def prepare() -> list[Asked]:
            async with server.lease(asked[0].model) as engine:
                return [replace(a, request=await asyncio.to_thread(prepared, engine, a)) for a in asked]

        limit = time_limit(server, asked[0].timeout)
        ready = await attended(http, limit, prepare())
        if limit is not None:
            ready = [replace(a, timeout=max(0.001, limit - (time.monotonic() - began))) for a in ready]
        first = await Answer.begin(server, ready[0], http)
        made = cls(server, ready, http, first)
        made._began = began
        return made

    @property
    def engine(self) -> Engine | None:
        """The engine that answers."""
        return self._answers[0].engine

    def __aiter__(self) -> AsyncIterator[Part]:
        return self

    async def __anext__(self) -> Part:
        await self._wait()
        if self._parts:
            return self._parts.popleft()
        raise StopAsyncIteration

    async def some(self) -> list[Part]:
        """All parts that are there, at least one; none when all answers are over. Raises what ended them."""
        await self._wait()
        found = list(self._parts)
        self._parts.clear()
        return found

    async def _wait(self) -> None:
        while not self._parts and self._left:
            if self._error is not None:
                raise self._error
            self._arrived.clear()
            await self._arrived.wait()

    async def __aenter__(self) -> Several:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self.close(error)

    async def close(self, error: BaseException | None = None) -> None:
        """It is over, by ``error`` if by one. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for answer in self._answers.values():
            await answer.close(error)

    async def _run(self, k: int) -> None:
        try:
            async with self._places, await self._begin(k) as answer:
                while parts := await answer.some():
                    for part in parts:
                        self._put(part, k * self.asked.n)
            self._left -= 1
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            if self._error is None:
                self._error = error
        self._arrived.set()

    async def _begin(self, k: int) -> Answer:
        while k not in self._answers:
            asked, limit = self._all[k], self._answers[0].time_limit
            if limit is not None:  # the request's, not each prompt's
                asked = replace(asked, timeout=max(0.001, limit - (time.monotonic() - self._began)))
            try:
                self._answers[k] = await Answer.begin(self.server, asked, self.http)
            except QueueFull:  # the request as a whole was taken already
                await asyncio.sleep(AGAIN)
        return self._answers[k]

    def _put(self, part: Part, first: int) -> None:
        if not isinstance(part, Ping):
            part = replace(part, choice=first + part.choice)
        elif self._parts:
            return
        self._parts.append(part)
        self._arrived.set()
