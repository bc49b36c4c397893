"""Requests that come while a stream speculates, at a chosen point of a cycle: what happened on the engine's thread, in
its order, and what is wrong with that."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx

from mlxkv import Engine
from mlxkv.decode import engine as engine_module
from mlxkv.decode.batched import Batched
from mlxkv.decode.drafters import Asked, Round
from mlxkv.decode.group import Group
from mlxkv.decode.handoff import Event, Handoff
from mlxkv.decode.loop import Loop
from mlxkv.decode.prefill import Prefill
from mlxkv.decode.request import Completion, Delta, Finished, Request
from mlxkv.decode.runtime import Runtime
from mlxkv.decode.seats import Seats
from mlxkv.decode.solo import Solo
from mlxkv.decode.ticket import Ticket
from tests import tiny
from tests.decode.many import Crowd, Outcome, Planned, Seen, ask, changed, load, settled, wrong_with

#: points of a cycle, in their order, and of what lies between cycles
POINTS = (
    "turn",  # it begins: the queue was looked at
    "received",
    "before the step",
    "before drafts",
    "drafts are there",
    "before the verification",
    "the verification runs",
    "before the commit",
    "a token is said",
    "after the commit",
    "after the step",
)
#: the stream's tokens before anything happens, and in all
BEGUN, LONG = 4, 70
STREAM = 0


class Oracle:
    """A drafter that knows what will be said, and is wrong where ``wrong`` says so."""

    name = "ngram"

    def __init__(self, depth: int, wrong: Callable[[], bool]) -> None:
        self.depth, self.wrong = depth, wrong
        #: a request's first tokens -> all of them, with its answer
        self.known: dict[tuple[int, ...], list[int]] = {}

    def ready(self, rows: Any, budget: int) -> bool:
        return True

    def _next(self, asked: Asked, k: int) -> list[int]:
        tokens = list(asked.sequence.tokens)
        for prompt, full in self.known.items():
            if tuple(tokens[: len(prompt)]) == prompt:
                ahead = [*full[len(tokens) : len(tokens) + k], *[9] * k][:k]
                return [(t + 1) % 256 if self.wrong() else t for t in ahead]
        return [9] * k

    def propose(self, round: Round, k: int) -> mx.array | None:
        drafts = [[0] * k for _ in range(round.slots)]
        for slot, asked in round.rows.items():
            drafts[slot] = self._next(asked, k)
            asked.trial.given(drafts[slot])
        return mx.array(drafts, mx.int32)

    def committed(self, round: Round, kept: Any) -> None: ...

    def forget(self, sequence: Any) -> None: ...


class Told(Seen):
    """``number``: as the test counts requests; its own hook is called on the engine's thread."""

    def __init__(self, number: int, house: House, request: Request) -> None:
        self.number, self.house = number, house
        super().__init__(request, lambda event: house.push(number, event), None)

    def put(self, event: Any) -> None:
        super().put(event)
        if isinstance(event, Delta):
            self.house.trace.append(("token", self.number))
            if self.number == STREAM:
                self.house.at("a token is said")
        elif isinstance(event, Finished):
            self.house.trace.append(("end", self.number))


@dataclass
class Due:
    """Something to be done at the ``skip``-th time that ``point`` is reached."""

    point: str
    act: Callable[[], None]
    skip: int = 0
    done: bool = False


@dataclass
class House(Crowd):
    """``trace``: what the engine's thread did, and for whom: forwards, cycles, chunks, what was said and queued."""

    engine: Engine
    seen: dict[int, Outcome] = field(default_factory=dict)
    tickets: dict[int, Ticket] = field(default_factory=dict)
    trace: list[tuple[str, int]] = field(default_factory=list)
    due: list[Due] = field(default_factory=list)
    #: raised by the next thing that is computed
    error: Exception | None = None

    def __post_init__(self) -> None:
        super().__init__(self.engine)

    def push(self, number: int, event: Any) -> None:
        self._events.put((number, event))

    def expect(self, numbers: Sequence[int]) -> None:
        """These will be queued in time: ``finish`` waits for them."""
        self.seen |= {number: Outcome() for number in numbers}

    def queue(self, number: int, request: Request) -> None:
        with mock.patch.object(engine_module, "Ticket", lambda request: Told(number, self, request)):
            self.tickets[number] = self.engine.submit(request)
        self.trace.append(("queued", number))

    def at(self, point: str) -> None:
        if self.tokens(STREAM) < BEGUN:
            return
        for due in self.due:
            if due.point == point and not due.done:
                due.skip -= 1
                if due.skip < 0:
                    due.done = True
                    due.act()

    def tokens(self, number: int) -> int:
        return sum(what == ("token", number) for what in self.trace)

    def computes(self) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error


@contextlib.contextmanager
def watched(house: House) -> Iterator[House]:
    """What is computed inside is written down, and points are told of."""
    number: Callable[[Any], int] = lambda sequence: getattr(sequence.ticket, "number", -1)  # noqa: E731
    real = {
        (owner, name): getattr(owner, name)
        for owner, name in (
            (Loop, "turn"), (Loop, "_receive"), (Group, "step"), (Group, "drain"), (Solo, "forward"), (Solo, "verify"),
            (Solo, "commit"), (Batched, "forward"), (Batched, "verify"), (Batched, "commit"), (Prefill, "chunk"),
            (Seats, "place"), (Handoff, "on"), (Oracle, "propose"),
        )
    }  # fmt: skip

    def wrap(owner: Any, name: str, before: str = "", after: str = "", kind: str = "") -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            if before:
                house.at(before)
            if kind:
                house.trace.append((kind, STREAM))
                house.computes()
            result = real[owner, name](*args, **more)
            if after:
                house.at(after)
            return result

        return call

    def chunk(prefill: Prefill, most: int) -> int:
        house.trace.append(("chunk", number(prefill.sequence)))
        house.at("a chunk is read")
        house.computes()
        return real[Prefill, "chunk"](prefill, most)

    def place(seats: Seats, sequence: Any, *more: Any) -> None:
        house.computes()
        real[Seats, "place"](seats, sequence, *more)
        house.trace.append(("joined", number(sequence)))

    def on(handoff: Handoff, event: Event) -> None:
        before = handoff.state
        real[Handoff, "on"](handoff, event)
        if handoff.state is not before:
            house.at(f"{handoff.state}")

    hooks = {
        (Loop, "turn"): wrap(Loop, "turn", "turn"),
        (Loop, "_receive"): wrap(Loop, "_receive", after="received"),
        (Group, "step"): wrap(Group, "step", "before the step", "after the step"),
        (Group, "drain"): wrap(Group, "drain", "before it drains"),
        (Solo, "forward"): wrap(Solo, "forward", kind="forward"),
        (Batched, "forward"): wrap(Batched, "forward", kind="forward"),
        (Solo, "verify"): wrap(Solo, "verify", "before the verification", "the verification runs", "cycle"),
        (Batched, "verify"): wrap(Batched, "verify", "before the verification", "the verification runs", "cycle"),
        (Solo, "commit"): wrap(Solo, "commit", "before the commit", "after the commit"),
        (Batched, "commit"): wrap(Batched, "commit", "before the commit", "after the commit"),
        (Oracle, "propose"): wrap(Oracle, "propose", "before drafts", "drafts are there"),
        (Prefill, "chunk"): chunk,
        (Seats, "place"): place,
        (Handoff, "on"): on,
    }
    with contextlib.ExitStack() as stack:
        for (owner, name), hook in hooks.items():
            stack.enter_context(mock.patch.object(owner, name, hook))
        yield house


@contextlib.contextmanager
def engine(model: Path, oracle: Oracle, cache_dir: Path | None = None, **options: Any) -> Iterator[Engine]:
    """One that drafts at the oracle's depth what the oracle says."""

    def into(runtime: Runtime) -> Runtime:
        assert runtime.drafting is not None
        return replace(runtime, drafting=replace(runtime.drafting, drafter=oracle))

    given = {"draft_depth": oracle.depth, "prefill_chunk": 16, "compile": "off"} | options
    with changed(into), load(model, cache_dir, **given) as made:
        yield made


def late_between(trace: Sequence[tuple[str, int]], number: int) -> tuple[Counter[str], bool]:
    """What was done between the queueing of ``number`` and its first chunk; whether it had one."""
    queued = trace.index(("queued", number))
    first = next((i for i in range(queued, len(trace)) if trace[i] == ("chunk", number)), None)
    between = trace[queued + 1 : first]
    return Counter(kind for kind, who in between if who == STREAM), first is not None


def wrong_order(trace: Sequence[tuple[str, int]], late: Sequence[int], depth: int) -> list[str]:
    """How the handoff of a stream with ``depth`` drafts a cycle to these newcomers broke its bounds."""
    wrong = []
    for number in late:
        between, had = late_between(trace, number)
        if not had:
            wrong.append(f"{number} had no chunk")
        if between["forward"] + between["cycle"] > 1:
            wrong.append(f"{number} waited for {between['forward'] + between['cycle']} forwards")
        if between["token"] > depth + 1:
            wrong.append(f"{number} waited for {between['token']} tokens")
    joined = {number: i for i, (kind, number) in enumerate(trace) if kind == "joined"}
    for i, (kind, number) in enumerate(trace):
        if kind == "chunk" and i > joined.get(number, len(trace)):
            wrong.append(f"{number} was read again after it had joined")
    return wrong


@dataclass
class Scene:
    """One stream, and newcomers by the point at which each is queued. ``wrong`` must stay empty."""

    stream: Request
    late: Sequence[tuple[str, int, Request]]  # point, how often it was passed before, request

    def play(self, house: House, alone: Callable[[Request], Completion], depth: int) -> list[str]:
        numbers = list(range(1, len(self.late) + 1))
        house.trace.clear()
        house.seen.clear()
        house.expect([STREAM, *numbers])
        house.due = [
            Due(point, lambda n=n, request=request: house.queue(n, request), skip)
            for n, (point, skip, request) in zip(numbers, self.late, strict=True)
        ]
        house.queue(STREAM, self.stream)
        house.finish()
        wrong = [f"{due.point} was never reached" for due in house.due if not due.done]
        wrong += wrong_order(house.trace, numbers, depth)
        for number, request in zip((STREAM, *numbers), (self.stream, *(r for *_, r in self.late)), strict=True):
            found = wrong_with(Planned(request), house.seen[number], alone(request))
            wrong += [f"request {number}: {what}" for what in found]
        if left := settled(house.engine):
            wrong.append(f"it still has {left}")
        if (state := house.engine.status().handoff) != "idle":
            wrong.append(f"the handoff is {state}")
        return wrong


def tell(oracle: Oracle, alone: Callable[[Request], Completion], request: Request) -> Request:
    """Have the oracle know the answer."""
    prompt = tuple(request.tokens or ())
    oracle.known[prompt] = [*prompt, *alone(request).token_ids]
    return request


def scene(
    rng: random.Random, oracle: Oracle, alone: Callable[[Request], Completion], points: Sequence[tuple[str, int]]
) -> Scene:
    """Prompts that are read in one chunk or in several, answers that are short or long, some with a seed."""

    def one(tokens: int, answer: int) -> Request:
        sampling = {"temperature": 0.8, "seed": rng.randrange(1 << 20)} if rng.random() < 0.3 else {}
        request = ask(tiny.ids(tokens, seed=rng.randrange(1 << 30)), answer, logit_bias={2: -100.0}, **sampling)
        return tell(oracle, alone, request)

    stream = one(rng.choice((5, 30)), LONG)
    late = [(point, skip, one(rng.choice((4, 14, 40, 70)), rng.choice((1, 2, 6, 14)))) for point, skip in points]
    return Scene(stream, late)
