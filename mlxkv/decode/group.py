"""Decoding steps of a group of sequences that run together: one on its own caches, or the rows of a batch.

The graph of step t+1 is built while t runs; then the tokens of t are read, the kept references are let go of, and only
then is t+1 submitted (DESIGN §6): a second reference to a cache buffer would cost a copy of it each step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from ..cache.batch import Batch
from ..cache.recorder import Followed, Recorder
from .request import FinishReason, TokenLogprob
from .sampling import Sampled, sample
from .sequence import Sequence

#: a sequence, the text that may be shown, the token that it came with, and its report
Said = tuple[Sequence, str, int, TokenLogprob | None]


class Executor(Protocol):
    """What runs the forwards of a group, and has the state of its rows."""

    @property
    def batch(self) -> Batch | None:
        """The caches of its rows; None where it is one sequence on its own."""
        ...

    @property
    def slots(self) -> int:
        """Rows of a forward; some may be free."""
        ...

    def forward(self, inputs: mx.array, rungs: Mapping[int, int]) -> mx.array:
        """Logits [slots, V] after ``inputs`` [slots] int32, lazily; all rows stand one further. ``rungs``: slot ->
        position after this step at which its recurrent state is to be captured, as far as there is room for it."""
        ...

    def hold(self) -> Any:
        """Second handles on all that the next forward rebinds."""
        ...

    def put_back(self, held: Any) -> None: ...

    def live(self) -> list[mx.array]:
        """All arrays that a step must evaluate."""
        ...

    def row(self, slot: int) -> Followed:
        """The state of a row: its own, or a view of it."""
        ...

    def position(self, slot: int) -> int:
        """Tokens that the state of a row has processed."""
        ...

    def due(self, slot: int, rung: bool) -> bool:
        """Whether a state of the row should be stored now: one that was captured before, or the one it stands at, a
        ``rung``, where nothing is captured under way."""
        ...

    def store(self, slot: int, recorder: Recorder, rung: bool) -> None:
        """Give ``recorder`` the row's rows up to here, and that state. Call while all is evaluated."""
        ...

    def leave(self, slot: int) -> None:
        """The row's sequence has ended, or is elsewhere now."""
        ...


@dataclass
class Row:
    """A sequence's place in a group."""

    sequence: Sequence
    #: up to here rows were copied out for the store
    flushed: int


@dataclass(frozen=True)
class Ended:
    """A sequence that left its group: it came to its end, or failed alone. With a ``reason`` what it has come to is
    stored, also where there is an ``error``."""

    sequence: Sequence
    reason: FinishReason | None = None
    error: BaseException | None = None


class Group:
    """``rows`` by slot. After a step the tokens that it samples are in flight; once ``settle`` has read them, rows may
    come and go."""

    def __init__(self, executor: Executor, early: int = 0, ended: list[Ended] | None = None) -> None:
        """``early``: bytes of live state up to which a step is submitted before the last one's tokens are read.
        ``ended`` is told of all who leave at their end, at once: what fails afterwards in the same step is not
        theirs."""
        self.executor, self._early = executor, early
        self._ended = ended if ended is not None else []
        self.rows: dict[int, Row] = {}
        self._sampled: Sampled | None = None
        #: steps made since its rows or slots last changed
        self.rested = 0

    def add(self, slot: int, row: Row) -> None:
        """A row whose state the executor has in ``slot``, before its sequence's next token. The group is settled."""
        assert self._sampled is None
        self.rows[slot] = row
        row.sequence.moved(self.executor.row(slot))
        self.rested = 0

    def leave(self, slot: int) -> None:
        del self.rows[slot]
        self.executor.leave(slot)
        self.rested = 0

    def renumber(self, slots: dict[int, int]) -> None:
        """The executor has moved the rows of this settled group: old slot -> new one, for all of them."""
        assert self._sampled is None
        self.rows = {new: self.rows[old] for old, new in slots.items()}
        for slot, row in self.rows.items():
            row.sequence.moved(self.executor.row(slot))
        self.rested = 0

    @property
    def batch(self) -> Batch | None:
        """The caches of its rows; None where it is one sequence on its own."""
        return self.executor.batch

    def positions(self) -> dict[int, int]:
        """Where its rows stand, by slot."""
        return {slot: self.executor.position(slot) for slot in self.rows}

    @property
    def speculates(self) -> bool:
        """Its next step may be a cycle."""
        return False

    def drain(self) -> list[Ended]:
        """Nothing is drafted or in flight afterwards, and the state of each row stands at committed − 1; who ended."""
        return self.settle()

    def settle(self) -> list[Ended]:
        """Read the tokens in flight and submit nothing; who ended."""
        self._remember()
        said, ended = self._read()
        try:
            self._close(ended)
        finally:
            self._say(said)
        return list(ended.values())

    def step(self, cycle: bool = True) -> list[Ended]:
        """Read the tokens in flight and submit the next step; who ended. Their states stood at committed − 1 when they
        were stored: a last token is not processed. Raises what a forward or a barrier raises: all rows failed then."""
        run = self.executor
        self._remember()
        held = ahead = following = None
        if self._sampled is not None and not any(row.sequence.last_possible for row in self.rows.values()):
            held = run.hold()
            ahead = self._forward(self._sampled.tokens)
            if self._submits_early():
                following = self._submit(ahead)
        said, ended = self._read()
        try:
            if ended:
                if held is not None:
                    run.put_back(held)  # step t+1 never was: drop its graph
                held = ahead = following = None
                self._close(ended)
            held = None
            if self.rows:
                if following is None:
                    following = self._submit(ahead if ahead is not None else self._forward(self._inputs()))
                self._sampled = following
        finally:  # who came to an end just now has it, whatever happened to the others
            self._say(said)
        self.rested += 1
        return list(ended.values())

    def _inputs(self) -> mx.array:
        tokens = [0] * self.executor.slots
        for slot, row in self.rows.items():
            tokens[slot] = row.sequence.next_token
        return mx.array(tokens, mx.int32)

    def _submits_early(self) -> bool:
        plain = all(row.sequence.sampler.plain for row in self.rows.values())
        return bool(self._early) and plain and sum(a.nbytes for a in self.executor.live()) <= self._early

    def _read(self) -> tuple[list[Said], dict[int, Ended]]:
        """What there is to say, and who ends with it, by slot."""
        said: list[Said] = []
        ended: dict[int, Ended] = {}
        if self._sampled is None:
            return said, ended
        read, self._sampled = self._sampled.read(), None
        for slot, row in self.rows.items():
            sequence = row.sequence
            token, logprob = read[slot]
            try:
                piece, reason = sequence.accept(token, logprob)
            except BaseException as e:  # this sequence's own: its tokenizer, its grammar; in Rust some panic
                ended[slot] = Ended(sequence, error=e)
                continue
            said.append((sequence, piece, token, logprob))
            if reason is not None:
                ended[slot] = Ended(sequence, reason)
        return said, ended

    def _say(self, said: list[Said]) -> None:
        for sequence, piece, token, logprob in said:
            sequence.say(piece, token, logprob)

    def _forward(self, inputs: mx.array) -> mx.array:
        rungs = {}
        for slot, position in self.positions().items():
            if self.rows[slot].sequence.is_rung(position + 1):
                rungs[slot] = position + 1
        return self.executor.forward(inputs, rungs)

    def _submit(self, logits: mx.array) -> Sampled:
        """Sample from ``logits`` and have the device begin."""
        samplers = [
            self.rows[slot].sequence.sampler if slot in self.rows else None for slot in range(self.executor.slots)
        ]
        sampled = sample(samplers, logits)
        mx.async_eval(*sampled.live(), *self.executor.live())
        return sampled

    # what the store is given

    def _remember(self) -> None:
        """Copy rows out before a window forgets them, and states at rungs. No newer step is built now."""
        due = [slot for slot in self.rows if self._due(slot)]
        if due:
            mx.eval(self.executor.live())
        for slot in due:
            self.flush(slot)

    def _due(self, slot: int) -> bool:
        row, position = self.rows[slot], self.executor.position(slot)
        recorder = row.sequence.recorder
        if recorder is None or position <= row.flushed:
            return False
        return position - row.flushed >= recorder.reach - 1 or self.executor.due(slot, row.sequence.is_rung(position))

    def flush(self, slot: int) -> None:
        """Copy out what the store has not been given of a row, a state at a rung too. All is evaluated."""
        row, position = self.rows[slot], self.executor.position(slot)
        recorder = row.sequence.recorder
        if recorder is not None and position > row.flushed:
            self.executor.store(slot, recorder, row.sequence.is_rung(position))
            recorder.commit()
            row.flushed = position

    def end(self, slot: int, end: Ended) -> None:
        """A row comes to its end: what it leaves for the store is stored. The group is settled."""
        self._close({slot: end})

    def _close(self, ended: dict[int, Ended]) -> None:
        if ended:
            mx.eval(self.executor.live())
        for slot, end in ended.items():
            if end.reason is not None:
                self.flush(slot)
                end.sequence.keep(self.executor.row(slot), end.reason)
            else:
                end.sequence.drop()
            self._ended.append(end)
            self.leave(slot)
