"""An engine without a model: the loop's turns, driven by the scheduler's decisions, on a clock that only counts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from mlxkv.decode.grouping import Divide, Group, Grouping, Resize, Row, Unite, bucket
from mlxkv.decode.pace import Ladder, Pace
from mlxkv.decode.scheduler import Admission, Rounds, Turns, next_chunk
from mlxkv.decode.segments import Split


@dataclass(frozen=True)
class Machine:
    """What things cost, seconds: a chunk ``a + b·n + c·n·(p + n/2)``, a step ``step + cell·slots·columns``, each up to
    ``noise`` (a part) longer."""

    a: float
    b: float
    c: float
    step: float
    cell: float = 0.0
    noise: float = 0.1
    chunk: int = 512

    def reading(self, tokens: int, position: int = 0) -> float:
        return self.a + self.b * tokens + self.c * tokens * (position + tokens / 2)

    def alone(self, tokens: int) -> float:
        """Seconds that a prompt of so many takes in the largest chunks."""
        return sum(self.reading(min(self.chunk, tokens - p), p) for p in range(0, tokens, self.chunk))


@dataclass
class Asked:
    """A request, and what became of it: times by the clock, turns by number."""

    key: int
    prompt: int
    answer: int
    arrival: float = 0.0
    every: int = 0
    room: int = 1
    position: int = 0
    came: int = 0
    chunks: list[tuple[int, int, int, float]] = field(default_factory=list)  # turn, tokens, rung, seconds
    tokens: list[float] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)  # steps of anybody, chunks of anybody, before this token

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in pairwise(self.tokens)]

    @property
    def reading(self) -> float:
        return sum(seconds for *_, seconds in self.chunks)


class Clockwork:
    """Runs requests to their end. ``rows`` decode at a time; ``room``: what requests in the house take together."""

    def __init__(
        self,
        machine: Machine,
        *,
        gap: float = 0.5,
        rows: int = 16,
        room: int = 10**9,
        together: bool = True,
        seed: int = 0,
    ) -> None:
        self.machine, self.gap, self.rows, self.room = machine, gap, rows, room
        self.random = random.Random(seed)
        self.ladder, self.pace, self.split = Ladder.up_to(machine.chunk), Pace(), Split()
        self.turns, self.admission, self.rounds = Turns(), Admission(), Rounds()
        self.grouping = Grouping(rows, together=together)
        self.slower: Callable[[int], float] = lambda turn: 1.0
        self.now, self.turn, self.steps, self.chunks, self.names = 0.0, 0, 0, 0, 0
        self.coming: list[Asked] = []
        self.waiting: list[Asked] = []
        self.prefilling: dict[int, Asked] = {}
        self.running: dict[int, Asked] = {}
        self.groups: dict[int, Group] = {}
        self.changes: list[tuple[int, object]] = []
        self.waste: list[float] = []
        self.admitted: list[int] = []

    def run(self, requests: Sequence[Asked], turns: int = 100_000) -> None:
        self.coming = sorted(requests, key=lambda r: r.arrival)
        while self.coming or self.waiting or self.prefilling or self.running:
            self.one_turn()
            assert self.turn < turns, "somebody starves"

    def one_turn(self) -> None:
        self.turn += 1
        if not (self.waiting or self.prefilling or self.running):
            self.now = max(self.now, self.coming[0].arrival)
        while self.coming and self.coming[0].arrival <= self.now:
            self.coming[0].came = self.turn
            self.waiting.append(self.coming.pop(0))
        by_key = {r.key: r for r in self.waiting}
        key = self.admission.next(list(by_key), lambda key: self.fits(by_key[key]))
        if key is not None:
            request = by_key[key]
            self.waiting.remove(request)
            self.prefilling[request.key] = request
            self.admitted.append(request.key)
        self.change()
        step = self.rounds.next(list(self.groups)) if self.groups else None
        if self.prefilling and (step is None or step.first):
            self.read()
        if step is not None:
            self.decode(step.group)

    def fits(self, request: Asked) -> bool:
        inside = [*self.prefilling.values(), *self.running.values()]
        return len(inside) < self.rows and sum(r.room for r in inside) + request.room <= self.room

    def takes(self, seconds: float) -> float:
        seconds *= (1 + self.random.random() * self.machine.noise) * self.slower(self.turn)
        self.now += seconds
        return seconds

    def read(self) -> None:
        key = self.turns.next({k: r.prompt - r.position for k, r in self.prefilling.items()})
        request = self.prefilling[key]
        shapes = [(g.slots, self.columns(g)) for g in self.groups.values()]
        rung = next_chunk(
            self.ladder, self.pace, self.gap, request.position, prefilling=len(self.prefilling), groups=shapes
        )
        edges = [*range(request.every, request.prompt, request.every)] if request.every else []
        end, _ = self.split.segment(request.position, [*edges, request.prompt], rung)
        n = end - request.position
        seconds = self.takes(self.machine.reading(n, request.position))
        self.pace.chunk_took(n, request.position, seconds)
        self.chunks += 1
        request.chunks.append((self.turn, n, rung, seconds))
        request.position = end
        if end == request.prompt:
            del self.prefilling[key]
            self.token(request)
            if len(request.tokens) < request.answer:
                self.join(request)

    def columns(self, group: Group) -> int:
        return self.grouping.columns(max(row.length for row in group.rows))

    def name(self) -> int:
        self.names += 1
        return self.names

    def join(self, request: Asked) -> None:
        self.running[request.key] = request
        row = Row(request.key, request.position)
        place = self.grouping.place(row, list(self.groups.values()))
        if place is None:
            name = self.name()
            self.groups[name] = Group(name, 1, (row,))
        else:
            group = self.groups[place.group]
            self.groups[place.group] = Group(group.name, place.slots, (*group.rows, row))

    def change(self) -> None:
        while (change := self.grouping.regroup(list(self.groups.values()))) is not None:
            self.changes.append((self.steps, change))
            if isinstance(change, Resize):
                self.groups[change.group] = replace(self.groups[change.group], slots=change.slots, rested=0)
            elif isinstance(change, Unite):
                rows = (*self.groups[change.group].rows, *self.groups.pop(change.other).rows)
                self.groups[change.group] = Group(change.group, change.slots, rows)
            else:
                assert isinstance(change, Divide)
                rows = {row.key: row for row in self.groups.pop(change.group).rows}
                for i, part in enumerate(change.parts):
                    name = change.group if i == 0 else self.name()
                    self.groups[name] = Group(name, bucket(len(part)), tuple(rows[key] for key in part))

    def decode(self, name: int) -> None:
        group = self.groups[name]
        assert len(group.rows) <= group.slots
        self.waste.append(self.grouping.waste(group.slots, [row.length for row in group.rows]))
        columns = self.columns(group)
        seconds = self.takes(self.machine.step + self.machine.cell * group.slots * columns)
        self.pace.step_took(group.slots, columns, seconds)
        self.steps += 1
        rows = []
        for row in group.rows:
            request = self.running[row.key]
            self.token(request)
            if len(request.tokens) < request.answer:
                rows.append(Row(row.key, row.length + 1))
            else:
                del self.running[row.key]
        rested = group.rested + 1 if len(rows) == len(group.rows) else 0
        if rows:
            self.groups[name] = Group(name, group.slots, tuple(rows), rested)
        else:
            del self.groups[name]

    def token(self, request: Asked) -> None:
        request.tokens.append(self.now)
        request.steps.append((self.steps, self.chunks))
