"""One sequence on its own caches: what they may take of the memory, and how it decodes as the only row of a group."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import mlx.core as mx

from .. import numerics
from ..cache.head import HeadCache, head_in
from ..cache.recorder import Recorder
from ..cache.state import SequenceState
from ..errors import EngineError
from ..models.journal import Journal
from .drafting import Drafting
from .memory import Memory
from .runtime import Runtime
from .sequence import Sequence


class MemoryFull(EngineError):
    """A running answer needs more memory than is left; the message has both numbers."""

    status = 503
    type = "overloaded_error"
    code = "memory_full"


class Allotment:
    """The rows that the solo caches of a sequence have, charged in its name; they grow in steps of ``rows``."""

    def __init__(self, rt: Runtime, sequence: Sequence, rows: int, name: str = "caches") -> None:
        """``name``: the ledger's entry that it is charged to at first."""
        self._rt, self._sequence, self._step, self._name = rt, sequence, rows, name
        self.rows = 0
        self.hold(rows)

    def fresh(self) -> SequenceState:
        """Caches with this room, at position 0."""
        rt = self._rt
        caches = rt.make_cache()
        # members that did not pass the probe are not asked: the model runs, nothing is kept
        state = SequenceState.new(caches) if rt.layout is not None else SequenceState(caches, None)
        state.reserve(self.rows)
        return state

    def hold(self, rows: int) -> None:
        memory = self._rt.memory
        self.rows = rows
        memory.charge(self._name, self._sequence, memory.sequence_bytes(rows, self._rt.chunk))

    def restored(self) -> None:
        """What was being filled is a running sequence's from now on."""
        self._rt.memory.move(self._sequence, self._name, "caches")
        self._name = "caches"

    def need(self, rows: int) -> int:
        """Its caches are about to have ``rows`` rows; how many they are to have room for. Raises MemoryFull."""
        memory = self._rt.memory
        while rows > self.rows:
            more = memory.sequence_bytes(self.rows + self._step) - memory.sequence_bytes(self.rows)
            fits(memory, self._sequence, more, rows)
            self.hold(self.rows + self._step)
        return self.rows

    def give_back(self) -> None:
        self.rows = 0
        self._rt.memory.release(self._sequence, "caches")


def fits(memory: Memory, owner: Hashable, need: int, rows: int) -> None:
    """Raises MemoryFull unless there is room for ``need`` bytes more of ``owner``, which runs already."""
    room = memory.room(need, owner)
    if not room.fits:  # as of the last turn: what its forwards needed may be free again
        memory.measure()
        room = memory.room(need, owner)
    if not room.fits:
        raise MemoryFull(
            f"The answer has come to {rows:,} tokens and needs {room.need:,} bytes more; {room.free:,} of "
            f"{room.limit:,} are free.",
            "Send it again later, ask for fewer tokens (max_tokens), or raise --memory-limit.",
        )


class At:
    """The state at one position inside a verified run (``cache.inside.Inside``)."""

    def __init__(self, journal: Journal, start: int, position: int) -> None:
        self.positions = (position,)
        self._journal, self._rows = journal, position - start

    def slots(self, cache: Any, position: int) -> dict[int, mx.array]:
        return self._journal.slots(cache, self._rows) if position in self.positions else {}


class Solo:
    """``room`` is told how many rows the caches need before they grow, says to how many they grow, and raises
    MemoryFull. Who stands at a rung keeps the state; of a rung inside a run of accepted tokens, the journal of its
    forward tells it.

    ``drafting``: of an engine that drafts; ``max_len``: rows that the caches may come to, None for any."""

    slots = 1
    batch = None

    def __init__(
        self,
        model: Any,
        state: SequenceState,
        room: Callable[[int], int],
        drafting: Drafting | None = None,
        max_len: int | None = None,
    ) -> None:
        self._model, self.state, self._room = model, state, room
        #: rows that it has, as far as was asked
        self._rows = 0
        self._drafting, self._max_len = drafting, max_len
        self._journal: Journal | None = None
        #: where layers write no journal: what they held before, and the tokens
        self._before: tuple[list[Any], mx.array] | None = None
        self._inside: At | None = None

    def forward(self, inputs: mx.array, rungs: Mapping[int, int]) -> mx.array:
        self._need(self.state.position + 1)
        logits = self._model(inputs[None], cache=self.state.caches)
        self.state.advance(1)
        return logits[:, -1, :]

    @property
    def heads(self) -> HeadCache | None:
        return head_in(self.state.caches)

    def widest(self) -> int:
        width = 1 + (self._drafting.most if self._drafting is not None else 0)
        if self._max_len is not None:
            width = min(width, self._max_len - self.state.position)
        return max(1, width)

    def make_room(self, width: int) -> int:
        try:
            self._need(self.state.position + width)
        except MemoryFull:
            return min(width, max(1, self._rows - self.state.position))
        return width

    def _need(self, rows: int) -> None:
        if rows > self._rows:
            self._rows = self._room(rows)
            self.state.reserve(self._rows)  # in a forward of several tokens they would grow to another length

    def verify(self, inputs: mx.array) -> mx.array:
        assert self._drafting is not None and self._inside is None
        width = inputs.shape[1]
        self._need(self.state.position + width)
        self.state.expect(width)
        if self._drafting.again:
            self._before = self.state.recurrent(), inputs
            return self._run(inputs)
        with self._drafting.journals.recording(width) as self._journal:
            return self._run(inputs)

    def _run(self, inputs: mx.array) -> mx.array:
        logits = self._model(inputs, cache=self.state.caches)
        self.state.advance(inputs.shape[1])
        return logits

    def commit(self, kept: list[int], wanted: Mapping[int, int]) -> None:
        if self._before is not None:
            self._run_again(kept[0])
            return
        journal, self._journal = self._journal, None
        assert journal is not None
        start = self.state.position - journal.width
        self.state.commit(kept[0], journal.width, journal)
        if start < wanted.get(0, 0) < self.state.position:
            self._inside = At(journal, start, wanted[0])

    def _run_again(self, kept: int) -> None:
        """Of the last forward nothing stays, if a part must go; what is kept is run once more: in ``exact`` as plain
        steps would. States at rungs under way are not told."""
        assert self._before is not None
        (before, inputs), self._before = self._before, None
        if kept == inputs.shape[1]:
            return
        self.state.undo(inputs.shape[1], before)
        step = 1 if numerics.mode() == "exact" else kept
        for i in range(0, kept, step):
            self._run(inputs[:, i : min(i + step, kept)])

    def hold(self) -> Any:
        return self.state.hold()

    def put_back(self, held: Any) -> None:
        self.state.put_back(held)

    def live(self) -> list[mx.array]:
        return self.state.live()

    def row(self, slot: int) -> SequenceState:
        return self.state

    def position(self, slot: int) -> int:
        return self.state.position

    def due(self, slot: int, rung: bool) -> bool:
        return rung or self._inside is not None

    def store(self, slot: int, recorder: Recorder, rung: bool) -> None:
        inside, self._inside = self._inside, None
        recorder.flush(inside, {p: "ladder" for p in inside.positions} if inside is not None else None)
        if rung:
            recorder.boundary(role="ladder")

    def leave(self, slot: int) -> None:
        """Its caches go with this object."""
