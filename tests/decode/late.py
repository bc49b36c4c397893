"""Requests that come while a stream speculates, at chosen points of a cycle: what the engine's thread did, in its
order, and what is wrong with that."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from mlxkv import Engine
from mlxkv.decode import engine as engine_module
from mlxkv.decode.batched import Batched
from mlxkv.decode.group import Group
from mlxkv.decode.handoff import Event, Handoff
from mlxkv.decode.loop import Loop
from mlxkv.decode.prefill import Prefill
from mlxkv.decode.request import Completion, Delta, Finished, Request
from mlxkv.decode.seats import Seats
from mlxkv.decode.solo import Solo
from mlxkv.decode.speculation import Speculation
from mlxkv.decode.ticket import Ticket
from tests import architectures, tiny
from tests.decode.many import Crowd, Outcome, Planned, Seen, ask, changed, load, settled, wrong_with
from tests.decode.scripted import Scripted, drafted_by, pattern

#: points of a cycle in their order, then of what lies between cycles
POINTS = (
    "before drafts",
    "drafts are there",
    "before the verification",
    "the verification runs",
    "before the commit",
    "after the commit",
    "a token is said",
    "after the step",
    "a turn begins",
    "prompts were built",
    "before the step",
)
#: the number of the stream, and its tokens: before anything happens, and in all
STREAM, BEGUN, LONG = 0, 4, 48


class Told(Seen):
    """``number``: as the test counts requests. What it is given is written down on the engine's thread."""

    def __init__(self, number: int, house: House, request: Request) -> None:
        self.number, self.house = number, house
        super().__init__(request, lambda event: house.push(number, event), None)

    def put(self, event: Any) -> None:
        if isinstance(event, Delta):
            self.house.trace.append(("token", self.number))
        elif isinstance(event, Finished):
            self.house.trace.append(("end", self.number))
        super().put(event)
        if isinstance(event, Delta) and self.number == STREAM:
            self.house.at("a token is said")


@dataclass
class Due:
    """Done at one point, once that was passed ``skip`` times."""

    point: str
    act: Callable[[], Any]
    skip: int = 0
    done: bool = False


@dataclass
class House(Crowd):
    """``trace``: what the engine's thread did, and for whom: forwards and cycles (of anybody: ``STREAM``), chunks,
    joins, what was said, queued and ended. ``error`` is raised by what is computed next."""

    engine: Engine
    seen: dict[int, Outcome] = field(default_factory=dict)
    tickets: dict[int, Ticket] = field(default_factory=dict)
    trace: list[tuple[str, int]] = field(default_factory=list)
    due: list[Due] = field(default_factory=list)
    error: Exception | None = None

    def __post_init__(self) -> None:
        super().__init__(self.engine)

    def begin(self, stream: Request, coming: Sequence[int], due: Sequence[Due]) -> None:
        """Queue the stream; the others will be queued by what is ``due``, while it runs."""
        self.tickets.clear()
        self.trace.clear()
        self.seen.clear()
        self.seen.update({number: Outcome() for number in (STREAM, *coming)})
        self.due, self.error = list(due), None
        self.queue(STREAM, stream)

    def queue(self, number: int, request: Request) -> None:
        with mock.patch.object(engine_module, "Ticket", lambda request: Told(number, self, request)):
            self.tickets[number] = self.engine.submit(request)
        self.trace.append(("queued", number))

    def finish(self) -> dict[int, Outcome]:
        """The stream has ended, and whoever was queued."""
        self.until(lambda: all(outcome.ended for n, outcome in list(self.seen.items()) if n in self.tickets))
        return self.seen

    def push(self, number: int, event: Any) -> None:
        self._events.put((number, event))

    def at(self, point: str) -> None:
        if self.trace.count(("token", STREAM)) < BEGUN or ("end", STREAM) in self.trace:
            return
        for due in self.due:
            if due.point == point and not due.done:
                due.skip -= 1
                if due.skip < 0:
                    due.done = True
                    due.act()

    def computes(self, kind: str, number: int = STREAM) -> None:
        self.trace.append((kind, number))
        if self.error is not None:
            error, self.error = self.error, None
            raise error


@contextlib.contextmanager
def watched(engine: Engine) -> Iterator[House]:
    """Inside, what is computed is written down, and points are told of."""
    house = House(engine)

    def wrap(owner: Any, name: str, before: str = "", after: str = "", kind: str = "") -> tuple[Any, str, Any]:
        real = getattr(owner, name)

        def call(*args: Any, **more: Any) -> Any:
            if before:
                house.at(before)
            if kind:
                house.computes(kind)
            result = real(*args, **more)
            if after:
                house.at(after)
            return result

        return owner, name, call

    chunk, place, on = Prefill.chunk, Seats.place, Handoff.on

    def chunked(prefill: Prefill, most: int) -> int:
        house.computes("chunk", getattr(prefill.sequence.ticket, "number", -1))
        house.at("a chunk is read")
        return chunk(prefill, most)

    def placed(seats: Seats, sequence: Any, *more: Any) -> None:
        number = getattr(sequence.ticket, "number", -1)
        house.computes("joins", number)
        place(seats, sequence, *more)

    def changing(handoff: Handoff, event: Event) -> None:
        before = handoff.state
        on(handoff, event)
        if handoff.state is not before:
            house.at(f"{handoff.state}")

    hooks: list[tuple[Any, str, Any]] = [
        wrap(Loop, "turn", "a turn begins"),
        wrap(Loop, "_receive", after="prompts were built"),
        wrap(Group, "step", "before the step", "after the step"),
        wrap(Speculation, "propose", "before drafts", "drafts are there"),
        (Prefill, "chunk", chunked),
        (Seats, "place", placed),
        (Handoff, "on", changing),
    ]
    for run in (Solo, Batched):
        hooks += [
            wrap(run, "forward", kind="forward"),
            wrap(run, "verify", "before the verification", "the verification runs", "cycle"),
            wrap(run, "commit", "before the commit", "after the commit"),
        ]
    with contextlib.ExitStack() as stack:
        for owner, name, hook in hooks:
            stack.enter_context(mock.patch.object(owner, name, hook))
        yield house


def scripted(rng: random.Random, how: str = "random") -> Scripted:
    return Scripted(pattern(how, rng), architectures.VOCAB)


@contextlib.contextmanager
def engine(model: Path, drafter: Scripted | None, cache_dir: Path | None = None, **options: Any) -> Iterator[Engine]:
    """One that drafts what ``drafter`` says, or by its own head; without a head give ``draft``."""
    given = {"draft": "mtp", "draft_depth": 3, "prefill_chunk": 16, "compile": "off"} | options
    with contextlib.ExitStack() as stack:
        if drafter is not None:
            stack.enter_context(changed(drafted_by(drafter)))
        yield stack.enter_context(load(model, cache_dir, **given))


def waited(trace: Sequence[tuple[str, int]], number: int) -> Counter[str] | None:
    """What was done for the stream between the queueing of a request and its first chunk; None: it had none."""
    if ("queued", number) not in trace:
        return None
    queued = trace.index(("queued", number))
    first = next((i for i in range(queued, len(trace)) if trace[i] == ("chunk", number)), None)
    return None if first is None else Counter(kind for kind, who in trace[queued:first] if who == STREAM)


def wrong_order(trace: Sequence[tuple[str, int]], late: Sequence[int], depth: int) -> list[str]:
    """How a stream with ``depth`` drafts a cycle kept these newcomers waiting, or anybody was read twice."""
    wrong = []
    for number in late:
        between = waited(trace, number)
        if between is None:
            wrong.append(f"{number} had no chunk")
            continue
        if (forwards := between["forward"] + between["cycle"]) > 1:
            wrong.append(f"{number} waited for {forwards} forwards")
        if between["token"] > depth + 1:
            wrong.append(f"{number} waited for {between['token']} tokens")
    joined = {number: i for i, (kind, number) in enumerate(trace) if kind == "joins"}
    again = {number for i, (kind, number) in enumerate(trace) if kind == "chunk" and i > joined.get(number, len(trace))}
    return wrong + [f"{number} was read again after it had joined" for number in again]


@dataclass
class Scene:
    """One stream, and who comes: a point, how often that is passed before, the request."""

    stream: Request
    late: Sequence[tuple[str, int, Request]]

    @property
    def numbers(self) -> list[int]:
        return list(range(1, len(self.late) + 1))

    def due(self, house: House) -> list[Due]:
        def comes(number: int, request: Request) -> Callable[[], None]:
            return lambda: house.queue(number, request)

        return [
            Due(point, comes(number, request), skip)
            for number, (point, skip, request) in zip(self.numbers, self.late, strict=True)
        ]

    def play(
        self, house: House, alone: Callable[[Request], Completion], depth: int = 3, bound: float = 0.0
    ) -> list[str]:
        """What is wrong: it must be nothing. Whose point the stream never came to is not asked for."""
        house.begin(self.stream, self.numbers, self.due(house))
        house.finish()
        came = [number for number in self.numbers if number in house.tickets]
        wrong = wrong_order(house.trace, came, depth)
        asked = [self.stream, *(request for *_, request in self.late)]
        for number, request in ((number, asked[number]) for number in (STREAM, *came)):
            found = wrong_with(Planned(request), house.seen[number], alone(request), bound)
            wrong += [f"request {number}: {what}" for what in found]
        return wrong + left_behind(house)


def left_behind(house: House) -> list[str]:
    """What an engine that has nothing to do still holds, or where it still is."""
    left = settled(house.engine)
    state = house.engine.status().handoff
    return [f"it still has {left}"] * bool(left) + [f"the handoff is {state}"] * (state != "idle")


class Company:
    """Requests of every kind that may meet: read in one chunk or several, answered with few tokens or many, some with a
    seed. A few of each, so that ``alone`` answers each once; ``drafter`` knows the answers."""

    def __init__(
        self,
        rng: random.Random,
        alone: Callable[[Request], Completion],
        drafter: Scripted | None,
        few: int = 3,
        long: int = LONG,
    ) -> None:
        """``long``: tokens of a stream, enough for all that is to happen in it."""
        self.rng = rng
        self.streams = [self._one(n, long) for n in (5, 30, 18)[:few]]
        self.late = [
            self._one(n, answer) for n, answer in zip((40, 4, 14, 70, 5, 33), (6, 1, 12, 5, 9, 2), strict=True)
        ]
        if drafter is not None:
            drafter.learn([*(r.tokens or []), *alone(r).token_ids] for r in (*self.streams, *self.late))

    def _one(self, tokens: int, answer: int) -> Request:
        rng = self.rng
        seeded = {"temperature": 0.8, "seed": rng.randrange(1 << 20)} if rng.random() < 0.4 else {}
        how = {"logit_bias": {tiny.EOS: -100.0}, **seeded}
        return ask(tiny.ids(tokens, seed=rng.randrange(1 << 30)), answer, **how)

    def scene(self, points: Sequence[tuple[str, int]]) -> Scene:
        """Who comes at these points, each passed so often before."""
        late = self.rng.sample(self.late, len(points))
        stream = self.rng.choice(self.streams)
        return Scene(stream, [(point, skip, request) for (point, skip), request in zip(points, late, strict=True)])

    def anywhere(self, most: int = 6) -> Scene:
        """Up to ``most``, at once or one after the other, at random points."""
        rng = self.rng
        point, skip = rng.choice(POINTS), rng.randrange(4)
        places = [
            (point, skip) if rng.random() < 0.5 else (rng.choice(POINTS), rng.randrange(5))
            for _ in range(rng.randint(1, most))
        ]
        return self.scene(places)
