"""Decoding steps of a group of sequences that run together: one on its own caches, or the rows of a batch.

The graph of step t+1 is built while t runs; then the tokens of t are read, the kept references are let go of, and only
then is t+1 submitted (DESIGN §6): a second reference to a cache buffer would cost a copy of it each step.

Where something drafts, a step may be a *cycle* instead: drafts, one forward that verifies them, and as many tokens as
the rows' own samplers would have taken. Nothing is in flight between cycles.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from ..cache.batch import Batch
from ..cache.member import PositionError
from ..cache.recorder import Followed, Recorder
from .depth import History
from .drafters import Heads
from .request import FinishReason, TokenLogprob
from .sampling import Sampled, sample
from .sequence import Sequence
from .speculation import Speculation

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

    @property
    def heads(self) -> Heads | None:
        """The prediction heads of its rows, where the model has one."""
        ...

    def widest(self) -> int:
        """How many tokens of each row a forward may have now; 1 where nothing can be taken back."""
        ...

    def make_room(self, width: int) -> int:
        """Buffers grow for a forward of ``width`` tokens of each row, if they may; how many it may have then."""
        ...

    def verify(self, inputs: mx.array) -> mx.array:
        """Logits [slots, D, V] after ``inputs`` [slots, D] int32, each row's next token and D − 1 drafts, lazily.
        ``commit`` comes next, whatever happens in between."""
        ...

    def commit(self, kept: list[int], wanted: Mapping[int, int]) -> None:
        """Of the rows that were verified ``kept`` stay, by slot (0 for a free one), lazily. ``wanted``: slot ->
        position among them whose recurrent state is to be captured, as far as there is room for it."""
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
    #: how its drafts fared
    history: History | None = None
    #: nothing is drafted for it while it is among its like
    asleep: bool = False


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

    def __init__(
        self,
        executor: Executor,
        early: int = 0,
        ended: list[Ended] | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        """``early``: bytes of live state up to which a step is submitted before the last one's tokens are read.
        ``ended`` is told of all who leave at their end, at once: what fails afterwards in the same step is not
        theirs. ``speculation``: who drafts, if anybody does."""
        self.executor, self._early, self._speculation = executor, early, speculation
        #: forwards made
        self.forwards = 0
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

    def wake(self, speculation: Speculation) -> None:
        """From now on it drafts too."""
        self._speculation = speculation

    @property
    def speculates(self) -> bool:
        """Its next step may be a cycle."""
        return self._speculation is not None and self.executor.widest() > 1

    @property
    def flies(self) -> bool:
        """Tokens are in flight."""
        return self._sampled is not None

    def settle(self) -> list[Ended]:
        """Read the tokens in flight and submit nothing; who ended. All is evaluated then, and all rows' states stand
        at committed − 1."""
        if self._sampled is None:
            mx.eval(self.executor.live())  # what the last cycle left
        self._remember()
        said, ended = self._read()
        try:
            self._close(ended)
        finally:
            self._say(said)
        return list(ended.values())

    def step(self, cycle: bool = True) -> list[Ended]:
        """Read the tokens in flight and submit the next step, or where nothing is in flight make a ``cycle``; who
        ended. Their states stood at committed − 1 when they were stored: a last token is not processed. Raises what a
        forward or a barrier raises: all rows failed then."""
        if self._speculation is None or self._speculation.rests(self.rows):
            return self._plain()
        drafts = self._drafts() if cycle else 0
        if drafts and self._sampled is not None:
            return self.settle()  # what is drafted hangs on the tokens that are in flight
        if drafts:
            ended = self._cycle(drafts)
            if ended is not None:
                return ended
        rows, whole, started = dict(self.rows), self._sampled is not None, time.perf_counter()
        ended = self._plain()
        # a first one only submits, a last one only reads: neither is a measure
        self._speculation.stepped(rows, time.perf_counter() - started if whole and not ended else 0.0)
        return ended

    def _plain(self) -> list[Ended]:
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
                self._begin()
        finally:  # who came to an end just now has it, whatever happened to the others
            self._say(said)
        self.rested += 1
        return list(ended.values())

    # speculation

    def _begin(self) -> None:
        """Behind first tokens, which are in flight, the drafter's first work is done. Not for newcomers beside others:
        on a CPU their first tokens would wait for it."""
        new = all(not row.sequence.sampled for row in self.rows.values())
        if new and self._speculation is not None and self._speculation.begin(self.rows, self.executor):
            mx.async_eval(*self.executor.live())

    def _drafts(self) -> int:
        """How many tokens to draft for each row now; 0: a plain step is made. First tokens do not wait for drafts."""
        if not self.speculates:
            return 0
        if self._sampled is None and any(not row.sequence.sampled for row in self.rows.values()):
            return 0
        assert self._speculation is not None
        left = max(row.sequence.limit - len(row.sequence.sampled) for row in self.rows.values())
        room = min([self.executor.widest(), *(self._reach(slot) for slot in self.rows)])
        most = min(left, room) - 1
        drafts = self._speculation.next(self.rows, most) if most > 0 else 0
        return self.executor.make_room(drafts + 1) - 1 if drafts else 0

    def _reach(self, slot: int) -> int:
        """Tokens that the row may get in one forward before its rows must be copied out for the store, or it comes to
        the end of the model's context."""
        sequence = self.rows[slot].sequence
        reach = 2**31 if sequence.recorder is None else sequence.recorder.reach
        context = sequence.rt.context_length
        return reach if context is None else min(reach, context - self.executor.position(slot))

    def _cycle(self, most: int) -> list[Ended] | None:
        """Draft up to ``most`` tokens for each row, verify them in one forward, and accept what the rows' own samplers
        take; who ended. None where nothing was proposed, and nothing has changed."""
        run, speculation = self.executor, self._speculation
        assert speculation is not None
        self._remember(most + 1)
        started = time.perf_counter()
        proposal = speculation.propose(self.rows, run, most)
        if proposal is None:
            return None
        rows, before, kept = dict(self.rows), self.positions(), dict.fromkeys(self.rows, 0)
        try:
            logits = run.verify(mx.concatenate([self._inputs()[:, None], proposal.drafts], axis=1))
            self.forwards += 1
            verdicts = proposal.judge(logits)
            mx.async_eval(*(a for v in verdicts.values() for a in v.live()), *run.live())
            said, ended, kept = self._accept({slot: v.read() for slot, v in verdicts.items()})
        finally:
            speculation.committed(rows, proposal, kept)
        self._say(said)
        wanted = {slot: at for slot, n in before.items() if (at := self._rung_in(slot, n, kept[slot])) is not None}
        run.commit([kept.get(slot, 0) for slot in range(run.slots)], wanted)
        seconds = time.perf_counter() - started
        for slot, row in rows.items():
            at, tokens = run.position(slot), len(row.sequence.tokens)
            if at != before[slot] + kept[slot] or (slot not in ended and at != tokens - 1):
                raise PositionError(
                    f"A row stands at {at} after a cycle that began at {before[slot]}: {tokens} tokens."
                )
        for slot in wanted:
            if run.due(slot, False):  # before what the forward left for it is gone
                mx.eval(run.live())
                self.flush(slot)
        self._close(ended)
        self.rested += 1
        speculation.cycled({slot: row for slot, row in rows.items() if slot not in ended}, proposal, kept, seconds)
        return list(ended.values())

    def _rung_in(self, slot: int, position: int, kept: int) -> int | None:
        """The last rung that a row went past with ``kept`` tokens from ``position`` on."""
        sequence = self.rows[slot].sequence
        return next((at for at in range(position + kept, position, -1) if sequence.is_rung(at)), None)

    def _accept(
        self, read: dict[int, list[tuple[int, TokenLogprob | None]]]
    ) -> tuple[list[Said], dict[int, Ended], dict[int, int]]:
        """What there is to say, who ends with it, and by slot how many rows of the forward are kept: the last token of
        a run is not processed, whether the sequence goes on or ends there."""
        said: list[Said] = []
        ended: dict[int, Ended] = {}
        kept = dict.fromkeys(read, 0)
        for slot, tokens in read.items():
            sequence = self.rows[slot].sequence
            for token, logprob in tokens:
                try:
                    piece, reason = sequence.accept(token, logprob)
                except BaseException as e:  # this sequence's own: its tokenizer, its grammar; in Rust some panic
                    ended[slot] = Ended(sequence, error=e)
                    break
                kept[slot] += 1
                said.append((sequence, piece, token, logprob))
                if reason is not None:
                    ended[slot] = Ended(sequence, reason)
                    break
            kept[slot] = max(kept[slot], 1)
        return said, ended, kept

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
        if self._sampled is None:
            return [], {}
        read, self._sampled = self._sampled.read(), None
        said, ended, _ = self._accept({slot: [read[slot]] for slot in self.rows})
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
        self.forwards += 1
        samplers = [
            self.rows[slot].sequence.sampler if slot in self.rows else None for slot in range(self.executor.slots)
        ]
        sampled = sample(samplers, logits)
        mx.async_eval(*sampled.live(), *self.executor.live())
        return sampled

    # what the store is given

    def _remember(self, width: int = 1) -> None:
        """Copy rows out before a window forgets them in a forward of ``width`` tokens, and states at rungs. No newer
        step is built now."""
        due = [slot for slot in self.rows if self._due(slot, width)]
        if due:
            mx.eval(self.executor.live())
        for slot in due:
            self.flush(slot)

    def _due(self, slot: int, width: int) -> bool:
        row, position = self.rows[slot], self.executor.position(slot)
        recorder = row.sequence.recorder
        if recorder is None or position <= row.flushed:
            return False
        return position - row.flushed >= recorder.reach - width or self.executor.due(
            slot, row.sequence.is_rung(position)
        )

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
        if any(end.sequence.recorder is not None for end in ended.values()):  # else nobody reads its state
            mx.eval(self.executor.live())
        for slot, end in ended.items():
            if self._speculation is not None:
                self._speculation.forget(end.sequence)
            if end.reason is not None:
                self.flush(slot)
                end.sequence.keep(self.executor.row(slot), end.reason)
            else:
                end.sequence.drop()
            self._ended.append(end)
            self.leave(slot)
