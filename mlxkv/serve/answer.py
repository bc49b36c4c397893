"""The life of a request: from what was asked to the parts of an answer, the same for every API.

A route makes an ``Asked``, and then

    answer = await Answer.begin(server, asked, http)       # refusals are raised here, before any header
    if asked.stream:
        return EventStream(answer, Printer(...))           # sse.py
    return JSONResponse(format(await collect(answer)))

``collect`` makes the whole of the same parts that a stream prints, so that the two cannot differ.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from starlette.requests import Request as Http

from ..decode.request import Completion, Delta, Event, Finished, Progress, Request, Started, TokenLogprob
from ..errors import ClientGone, DeviceError, EngineClosed, MlxkvError, QueueFull
from .asking import pipeline, prepared
from .attended import late, time_limit
from .bridge import Inbox, hang_up
from .parts import Arguments, Asked, Begun, Call, Ended, Part, Ping, Reading, Text, Thought
from .pipeline import Pipeline
from .record import Gaps, Outcome, Record

if TYPE_CHECKING:
    from ..decode.engine import Engine
    from ..decode.ticket import Item, Ticket
    from .server import Server

log = logging.getLogger("mlxkv.serve")

#: seconds that a stream's headers may wait for a model that is being loaded, so that what is wrong has its status
PATIENCE = 5.0
#: seconds between two attempts to queue another choice of a request that was taken
AGAIN = 0.1
#: seconds that cancelled choices have to say what they had made, for the books
LAST_WORDS = 5.0
#: what the id of a request begins with
_IDS = {"chat": "chatcmpl-", "completions": "cmpl-", "responses": "resp_", "messages": "msg_"}


class Answer:
    """The answer to one request: an async iterator of ``Part``, ending after the last choice's ``Ended``.

    id, created (seconds since 1970): as the client sees them. engine: the engine that answers; None while its model is
    being loaded. Raised from the iterator: what ended the request instead (``MlxkvError``), ``RequestTimeout`` after
    its time, ``ClientGone`` where nobody listens any more. To be used as an async context manager, or closed: leaving
    it cancels whatever still runs, gives the engine back, and writes the request into the books. Belongs to the event
    loop.

    Choice 0 is asked first, the others once its prompt is read, so that they find its prefix; the i-th has the seed
    ``seed + i``. ``Ping`` comes after each ``limits.ping_s`` seconds in which nothing came that a client sees, unless
    the engine hangs.
    """

    def __init__(self, server: Server, asked: Asked, http: Http) -> None:
        self.server, self.asked, self.http = server, asked, http
        self.id = _IDS.get(asked.kind, "") + secrets.token_hex(12)
        self.created = int(time.time())
        self.engine: Engine | None = None
        self._began = time.monotonic()
        self._parts: deque[Part] = deque()
        self._arrived = asyncio.Event()
        self._error: BaseException | None = None
        self._over = self._closed = self._told = False
        self._end: BaseException | None = None
        self._inbox = Inbox(self._take)
        self._stack = AsyncExitStack()
        self._tickets: dict[int, Ticket] = {}
        self._pipelines: dict[int, Pipeline] = {}
        self._ended: set[int] = set()
        self._outcomes: dict[int, Outcome] = {}  # of choices that ended, those that were cancelled too
        self._gaps: dict[int, Gaps] = {}
        self._running: set[int] = set()  # choices whose tickets have not come to their end
        self._request: Request | None = None
        self._opening: asyncio.Task[None] | None = None
        self._adding = False  # the other choices are being queued
        self._tasks: set[asyncio.Task[None]] = set()
        #: ends it when its time is up; looks for silence; ends the wait for last words
        self._clock: asyncio.TimerHandle | None = None
        self._silence: asyncio.TimerHandle | None = None
        self._last: asyncio.TimerHandle | None = None
        self._begun: float | None = None  # when the first choice left the queue
        self._shown = self._began  # when something came that a client sees

    @classmethod
    async def begin(cls, server: Server, asked: Asked, http: Http) -> Answer:
        """Check and queue. Raises what refuses the request; where a stream's model is still being loaded after
        ``PATIENCE`` seconds, such an error comes from the iterator instead, since headers are due."""
        answer = cls(server, asked, http)
        try:
            answer._stack.enter_context(hang_up(http, answer._gone))
            if (seconds := answer.time_limit) is not None:
                answer._clock = asyncio.get_running_loop().call_later(seconds, answer._late, seconds)
            answer._opening = asyncio.create_task(answer._open())
            await answer._opened(PATIENCE if asked.stream else None)
        except BaseException as error:
            await answer.close(error)
            raise
        answer._watch_silence()
        return answer

    @property
    def time_limit(self) -> float | None:
        """Seconds that this request may take; None for any."""
        return time_limit(self.server, self.asked.timeout)

    @property
    def tokenizer(self) -> Any:
        """That of the engine, once there is one."""
        return None if self.engine is None else self.engine.tokenizer

    # the reader's end

    def __aiter__(self) -> AsyncIterator[Part]:
        return self

    async def __anext__(self) -> Part:
        await self._wait()
        if self._parts:
            return self._parts.popleft()
        raise StopAsyncIteration

    async def some(self) -> list[Part]:
        """All parts that are there, at least one; none when the answer is over. Raises as the iterator does."""
        await self._wait()
        found = list(self._parts)
        self._parts.clear()
        return found

    async def _wait(self) -> None:
        while not self._parts and not self._over:
            if self._error is not None:
                raise self._error
            self._arrived.clear()
            await self._arrived.wait()

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        await self.close(error)

    async def close(self, error: BaseException | None = None) -> None:
        """It is over, by ``error`` if by one. Idempotent."""
        if self._closed:
            return
        self._closed = True
        error = error or self._error
        if not self._over and error is None:
            error = ClientGone("The answer was not read to its end.")
        for ticket in self._tickets.values():
            ticket.cancel()  # does nothing to one that is done
        for timer in (self._clock, self._silence):
            if timer is not None:
                timer.cancel()
        if running := {task for task in (self._opening, *self._tasks) if task is not None and not task.done()}:
            for task in running:
                task.cancel()
            await asyncio.wait(running)
        if isinstance(error, DeviceError) and self.server.on_device_error is not None:
            self.server.on_device_error(error)
        await self._stack.aclose()
        self._end = error
        if self._running:  # what they got to see goes into the books too
            self._last = asyncio.get_running_loop().call_later(LAST_WORDS, self._tell)
        else:
            self._tell()

    def _tell(self) -> None:
        """Write the request into the books, once."""
        if self._told:
            return
        self._told = True
        if self._last is not None:
            self._last.cancel()
        error = self._end
        left = isinstance(error, (ClientGone, asyncio.CancelledError))
        if error is not None and not left and not isinstance(error, MlxkvError):
            log.error("%s failed", self.id, exc_info=error)
        outcomes = [self._outcomes[i] for i in sorted(self._outcomes)]
        self.server.observe(
            Record.of(
                self.id,
                self.asked,
                outcomes,
                began=self._began,
                error=None if left else error,
                left=left,
                begun=self._begun,
                gaps=list(self._gaps.values()),
            )
        )

    # beginning

    async def _open(self) -> None:
        """Get the engine, check the request, queue its first choice."""
        engine = await self._stack.enter_async_context(self.server.lease(self.asked.model))
        self.engine = engine
        self._request = await asyncio.to_thread(prepared, engine, self.asked, self.id)
        for choice in range(self.asked.n):
            self._pipelines[choice] = pipeline(engine, self._request, self.asked, choice)
        self._submit(0)

    async def _opened(self, patience: float | None) -> None:
        assert self._opening is not None
        self._opening.add_done_callback(self._work_done)
        woken = asyncio.ensure_future(self._arrived.wait())
        try:
            await asyncio.wait({self._opening, woken}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        finally:
            woken.cancel()
        if self._opening.done():
            self._opening.result()  # raises what refuses the request
        if self._error is not None and not self._parts:  # else it comes behind them
            raise self._error

    def _submit(self, choice: int) -> None:
        assert self.engine is not None and self._request is not None
        request, sampling = self._request, self._request.sampling
        if choice and sampling.seed is not None:
            seed = sampling.seed + choice
            request = replace(request, sampling=replace(sampling, seed=seed if seed < 2**64 else seed - 2**64))
        ticket = self.engine.submit(request)
        self._tickets[choice] = ticket
        self._running.add(choice)
        if self._error is not None or self._closed:
            ticket.cancel()
        self._inbox.listen(choice, ticket)

    async def _add_others(self) -> None:
        for choice in range(1, self.asked.n):
            while True:
                try:
                    self._submit(choice)
                    break
                except QueueFull:  # the request as a whole was taken already
                    await asyncio.sleep(AGAIN)

    def _start_others(self) -> None:
        if self.asked.n > 1 and not self._adding:
            self._adding = True
            self._work(self._add_others())

    # the engine's end

    def _take(self, choice: int, item: Item) -> None:
        """Something came from the ticket of ``choice``."""
        if item is None:
            self._running.discard(choice)
            if self._closed and not self._running:
                self._tell()
            return
        if self._error is not None or self._closed:
            if isinstance(item, Finished):
                self._outcomes[choice] = Outcome.of(item.completion)
            return
        try:
            if isinstance(item, BaseException):
                raise item
            self._event(choice, item)
        except Exception as error:
            self._fail(error)
        if self._parts or self._over:
            self._arrived.set()

    def _event(self, choice: int, event: Event) -> None:
        if isinstance(event, Started):
            self._begun = self._begun or time.monotonic()
            self._put(Begun(choice, event.prompt_tokens, event.cached_tokens))
        elif isinstance(event, Progress):
            self._put(Reading(choice, event.done, event.total))
        elif isinstance(event, Delta):
            self._start_others()
            self._gaps.setdefault(choice, Gaps()).tick()
            made = self._pipelines[choice]
            for part in made.feed(event):
                self._put(part)
            if made.over:
                self._tickets[choice].cancel()
        elif isinstance(event, Finished):
            self._start_others()
            self._finish(choice, event.completion)

    def _finish(self, choice: int, completion: Completion) -> None:
        made, reason = self._pipelines[choice], completion.finish_reason
        if reason == "cancelled" and not made.over:
            self._outcomes[choice] = Outcome.of(completion)
            raise EngineClosed("The request was cancelled.", "Try again.")
        for part in made.finish(reason, completion.stop):
            self._put(part)
        ended = Ended(choice, made.finished(reason), completion, completion.stop)
        self._outcomes[choice] = Outcome.of(completion, ended.finish)
        if made.bound:
            self._work(self._verified(made, ended))
        else:
            self._close_choice(ended)

    async def _verified(self, made: Pipeline, ended: Ended) -> None:
        """The end of a choice that is held to a grammar comes once its text was looked at again."""
        await asyncio.to_thread(made.verify)
        self._close_choice(ended)

    def _close_choice(self, ended: Ended) -> None:
        self._ended.add(ended.choice)
        self._put(ended)
        self._over = len(self._ended) == self.asked.n
        self._arrived.set()

    def _work(self, work: Coroutine[Any, Any, None]) -> None:
        """Do ``work`` beside everything else; its failure is the answer's."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._work_done)

    def _work_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _put(self, part: Part) -> None:
        self._parts.append(part)
        if not isinstance(part, (Begun, Reading)) and not (isinstance(part, (Text, Thought)) and not part.text):
            self._shown = time.monotonic()

    def _fail(self, error: BaseException) -> None:
        """Nothing more will come; parts that came before are still read."""
        if self._error is None and not self._over:
            self._error = error
            for ticket in self._tickets.values():
                ticket.cancel()
            self._arrived.set()

    def _gone(self) -> None:
        self._parts.clear()
        self._fail(ClientGone("The client hung up."))

    def _late(self, seconds: float) -> None:
        self._fail(late(seconds))

    # silence

    def _watch_silence(self) -> None:
        limits = self.server.limits
        if limits.ping != "off" and limits.ping_s:
            self._next_look(limits.ping_s)

    def _next_look(self, interval: float) -> None:
        due = max(0.0, self._shown + interval - time.monotonic())
        self._silence = asyncio.get_running_loop().call_later(due, self._look, interval)

    def _look(self, interval: float) -> None:
        if self._closed or self._over or self._error is not None:
            return
        if time.monotonic() - self._shown >= interval:
            self._shown = time.monotonic()
            if self.engine is None or self.engine.health().ok:  # who says nothing more is known to be lost
                self._parts.append(Ping())
                self._arrived.set()
        self._next_look(interval)


@dataclass
class WholeCall:
    """A tool call: ``arguments`` is JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class WholeChoice:
    """One choice from its first part to its last. logprobs: of the tokens of its text; thought_logprobs: of its
    reasoning's. thought_tokens: how many tokens that was. ended: None where an error came first."""

    text: str = ""
    thought: str = ""
    calls: list[WholeCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    thought_logprobs: list[TokenLogprob] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    thought_tokens: int = 0
    ended: Ended | None = None

    @property
    def end(self) -> Ended:
        assert self.ended is not None
        return self.ended

    def add(self, part: Part) -> None:
        """The next part of this choice."""
        if isinstance(part, Text):
            self.text += part.text
            self.logprobs += part.logprobs
            self.token_ids += part.token_ids
        elif isinstance(part, Thought):
            self.thought += part.text
            self.thought_logprobs += part.logprobs
            self.thought_tokens += len(part.token_ids)
        elif isinstance(part, Call):
            self.calls.append(WholeCall(part.id, part.name))
        elif isinstance(part, Arguments):
            self.calls[part.index].arguments += part.text
        elif isinstance(part, Ended):
            self.ended = part


@dataclass(frozen=True)
class Tokens:
    """Token counts of a whole request: the prompt once, however many choices there are, and what was restored of it for
    the first; sampled tokens of all choices; those of them that were reasoning."""

    prompt: int
    cached: int
    completion: int
    thought: int


@dataclass
class Whole:
    """All choices of an answer, made part by part: ``add`` may be used by a stream too, for its books."""

    choices: list[WholeChoice]

    @classmethod
    def of(cls, n: int) -> Whole:
        return cls([WholeChoice() for _ in range(n)])

    def add(self, part: Part) -> None:
        """The next part of any choice."""
        if not isinstance(part, Ping):
            self.choices[part.choice].add(part)

    @property
    def tokens(self) -> Tokens:
        """Of all choices; they have ended."""
        usages = [choice.end.completion.usage for choice in self.choices]
        return Tokens(
            usages[0].prompt_tokens,
            usages[0].cached_tokens,
            sum(usage.completion_tokens for usage in usages),
            sum(choice.thought_tokens for choice in self.choices),
        )


async def collect(answer: Answer) -> Whole:
    """The whole answer, and its end. Raises what ended it instead."""
    whole = Whole.of(answer.asked.n)
    async with answer:
        async for part in answer:
            whole.add(part)
    return whole
