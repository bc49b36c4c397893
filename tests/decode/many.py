"""Many requests in one engine at once: when each comes and is given up, what it got, and what is wrong with that."""

from __future__ import annotations

import contextlib
import queue
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import mlxkv
from mlxkv import Engine
from mlxkv.decode import engine as engine_module
from mlxkv.decode import runtime as runtime_module
from mlxkv.decode.request import (
    Completion,
    Delta,
    Event,
    Finished,
    Progress,
    Request,
    SamplingParams,
    Started,
    TokenLogprob,
)
from mlxkv.decode.runtime import Runtime
from mlxkv.decode.ticket import Ticket
from mlxkv.errors import EngineError
from tests.probe import BLOCK

#: seconds without any event after which an engine hangs
PATIENCE = 120.0
#: characters that may be held back: of a stop string of the tests, or of one character
SLACK = 12
#: no logit of a tiny model is larger
LOGIT = 25.0


@dataclass(frozen=True)
class Planned:
    """A request that is submitted once another, ``after[0]``, has got ``after[1]`` tokens or has ended (None: at once),
    and given up once it has got ``cancel`` events (0: it was just queued; None: never)."""

    request: Request
    after: tuple[int, int] | None = None
    cancel: int | None = None


@dataclass
class Outcome:
    """What came of one request. ``at``: for each event, how many came before it, of all requests together."""

    events: list[Event] = field(default_factory=list)
    at: list[int] = field(default_factory=list)
    error: BaseException | None = None
    ended: bool = False

    @property
    def completion(self) -> Completion | None:
        return next((e.completion for e in self.events if isinstance(e, Finished)), None)

    @property
    def tokens(self) -> list[int]:
        return [t for e in self.events if isinstance(e, Delta) for t in e.token_ids]

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [each for e in self.events if isinstance(e, Delta) for each in e.logprobs]

    @property
    def done(self) -> int:
        """Prompt tokens that it was seen to have read or restored."""
        return max((e.done for e in self.events if isinstance(e, Progress)), default=0)

    @property
    def first_token(self) -> int:
        """How many events of all requests came before its first token."""
        return next(at for e, at in zip(self.events, self.at, strict=True) if isinstance(e, Delta))


class Seen(Ticket):
    """A ticket that tells ``told`` what it is given, on the engine's thread: of several tickets, in their true order.
    It gives itself up after ``cancel`` events."""

    def __init__(
        self, request: Request, told: Callable[[Event | BaseException | None], None], cancel: int | None
    ) -> None:
        super().__init__(request)
        self._watcher, self._left = told, cancel
        self._give_up()

    def _give_up(self) -> None:
        if self._left is not None and self._left <= 0:
            self.cancel()

    def put(self, event: Event) -> None:
        super().put(event)
        if self._left is not None:
            self._left -= 1
            self._give_up()
        self._watcher(event)
        if isinstance(event, Finished):
            self._watcher(None)

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        self._watcher(error)


class Crowd:
    """Requests of one engine, by a number that the caller gives them, and what they got so far. One thread uses it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.seen: dict[int, Outcome] = {}
        self.count = 0
        self._events: queue.SimpleQueue[tuple[int, Event | BaseException | None]] = queue.SimpleQueue()

    def submit(self, number: int, request: Request, cancel: int | None = None) -> Ticket:
        def told(event: Event | BaseException | None) -> None:
            self._events.put((number, event))

        self.seen[number] = Outcome()
        with mock.patch.object(engine_module, "Ticket", lambda request: Seen(request, told, cancel)):
            return self.engine.submit(request)

    def wait(self) -> None:
        """For one event more. Raises AssertionError if none comes: the engine hangs."""
        try:
            number, event = self._events.get(timeout=PATIENCE)
        except queue.Empty:
            raise AssertionError(f"nothing happens any more: {self.engine.health()}") from None
        outcome = self.seen[number]
        if event is None or isinstance(event, BaseException):
            outcome.ended, outcome.error = True, event
        else:
            outcome.events.append(event)
            outcome.at.append(self.count)
            self.count += 1

    def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self.wait()

    def reached(self, number: int, tokens: int) -> bool:
        """That request has got so many tokens, or has ended."""
        seen = self.seen.get(number)
        return seen is not None and (seen.ended or len(seen.tokens) >= tokens)

    def finish(self) -> dict[int, Outcome]:
        self.until(lambda: all(outcome.ended for outcome in self.seen.values()))
        return self.seen


def drive(engine: Engine, plan: Sequence[Planned], look: Callable[[], None] = lambda: None) -> list[Outcome]:
    """Carry out ``plan`` and give what came of each request; ``look`` is called after each event."""
    crowd, waiting = Crowd(engine), dict(enumerate(plan))
    while True:
        for number, planned in list(waiting.items()):
            if planned.after is None or crowd.reached(*planned.after):
                crowd.submit(number, planned.request, planned.cancel)
                del waiting[number]
        if not waiting and all(outcome.ended for outcome in crowd.seen.values()):
            return [crowd.seen[number] for number in range(len(plan))]
        crowd.wait()
        look()


def schedule(rng: random.Random, requests: Sequence[Request], *, cancelled: float = 0.0) -> list[Planned]:
    """The first four come at once, and stay; the others at a random token of one that came before; a share of them is
    given up."""
    plan = [Planned(request) for request in requests[:4]]
    for number, request in list(enumerate(requests))[4:]:
        after = (rng.randrange(number), rng.randrange(10)) if rng.random() < 0.8 else None
        plan.append(Planned(request, after, rng.randrange(16) if rng.random() < cancelled else None))
    return plan


def wrong_with(planned: Planned, got: Outcome, alone: Completion, bound: float = 0.0, step: int = 1) -> list[str]:
    """How ``got`` differs from what the same request got ``alone``; what was given up is a beginning of that.
    ``bound``: how far log-probabilities may be from it, relative. ``step``: tokens of one step at most."""
    if got.error is not None:
        in_queue = planned.cancel is not None and isinstance(got.error, EngineError) and not got.events
        return [] if in_queue else [f"failed: {got.error!r}"]
    if not got.events or not isinstance(got.events[0], Started) or not isinstance(got.events[-1], Finished):
        return [f"events are not in order: {[type(e).__name__ for e in got.events]}"]
    done = got.events[-1].completion
    progress = [e.done for e in got.events if isinstance(e, Progress)]
    n = len(done.token_ids)
    late = [] if planned.cancel is None else got.events[planned.cancel : -1]
    # a chunk or a step was under way
    steps = sum(isinstance(e, Delta) for e in late)
    begun = any(isinstance(e, Delta) for e in got.events[: planned.cancel])
    given_up = done.finish_reason == "cancelled" and planned.cancel is not None
    checks = {
        "other tokens": done.token_ids == alone.token_ids[: n if given_up else None],
        # what is given up says what it held back, which may begin a stop string or be a part of a character
        "another text": alone.text.startswith(done.text[:-SLACK]) if given_up else done.text == alone.text,
        f"ended by {done.finish_reason}": given_up or done.finish_reason == alone.finish_reason,
        "other log-probabilities": close(done.logprobs, given(alone.logprobs, n if given_up else None), bound),
        "deltas are not the tokens": got.tokens == done.token_ids,
        "deltas are not the text": "".join(e.text for e in got.events if isinstance(e, Delta)) == done.text,
        "deltas are not the log-probabilities": got.logprobs == (done.logprobs or []),
        "progress goes back": progress == sorted(progress),
        f"goes on after it was given up: {late}": steps <= begun * step or not given_up,
    }
    return [
        f"{what}: {done.token_ids} {done.text!r}, alone {alone.token_ids} {alone.text!r}"
        for what, holds in checks.items()
        if not holds
    ]


def given(logprobs: list[TokenLogprob] | None, n: int | None) -> list[TokenLogprob] | None:
    """Those of the first ``n`` tokens."""
    return None if logprobs is None else logprobs[:n]


def close(a: list[TokenLogprob] | None, b: list[TokenLogprob] | None, bound: float) -> bool:
    """The same tokens; log-probabilities may differ by ``bound`` of the largest logit, up or down."""
    if a is None or b is None or not bound:
        return a == b
    flat = [[(t.id, t.logprob), *t.top] for t in a], [[(t.id, t.logprob), *t.top] for t in b]
    return len(a) == len(b) and all(
        len(x) == len(y)
        and all(i == j and abs(p - q) <= 2 * LOGIT * bound for (i, p), (j, q) in zip(x, y, strict=True))
        for x, y in zip(*flat, strict=True)
    )


class Alone:
    """What a request gets on an engine of its own without a store; what was asked before is remembered."""

    def __init__(self, model: Path, **options: Any) -> None:
        self.engine = mlxkv.load(model, cache=False, block_size=BLOCK, **{"draft": "off"} | options)
        self.known: dict[str, Completion] = {}

    def __call__(self, request: Request) -> Completion:
        key = repr((request.tokens, request.messages, request.sampling, request.grammar))
        if key not in self.known:
            self.known[key] = self.engine.submit(request).result()
        return self.known[key]

    def close(self) -> None:
        self.engine.close()


def load(model: Path, cache_dir: Path | None, **options: Any) -> Engine:
    """An engine with blocks and chunks that are short beside a tiny model's prompts."""
    given = {"block_size": BLOCK, "prefill_chunk": 12, "ram_budget": 1 << 26} | options
    return mlxkv.load(model, **({"cache": False} if cache_dir is None else {"cache_dir": cache_dir}), **given)


@contextlib.contextmanager
def with_caches(make: Callable[[], list[Any]] | None) -> Iterator[None]:
    """Engines that are loaded and used inside have these cache objects in place of those of the model."""
    if make is None:
        yield
        return
    with mock.patch.object(runtime_module, "make_prompt_cache", lambda model: make()):
        yield


@contextlib.contextmanager
def changed(change: Callable[[Runtime], Runtime]) -> Iterator[None]:
    """Engines that are loaded inside have the runtime that ``change`` makes of theirs, on their own thread."""
    real = runtime_module.open_runtime

    def open_runtime(options: Any) -> Any:
        opened, info = real(options)
        return change(opened), info

    with mock.patch.object(runtime_module, "open_runtime", open_runtime):
        yield


def settled(engine: Engine, seconds: float = 20.0) -> dict[str, Any]:
    """What an idle engine says that it still holds, by name: empty once nothing is left of any request. Waits for what
    the writer has to take first."""
    until = time.monotonic() + seconds
    while left := holding(engine):
        if time.monotonic() > until:
            break
        time.sleep(0.002)
    return left


def holding(engine: Engine) -> dict[str, Any]:
    status = engine.status()
    names = ("running", "prefilling", "restoring", "waiting", "queued", "reserved_bytes", "reserved_rows", "pool_used")
    return {name: value for name in names if (value := getattr(status, name))}


def ask(tokens: Sequence[int], max_tokens: int = 8, **sampling: Any) -> Request:
    return Request(tokens=list(tokens), sampling=SamplingParams(max_tokens=max_tokens, **sampling))
