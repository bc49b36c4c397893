"""Speculation of one engine: who drafts for its groups and how deep, and what came of it.

A cycle is made in ``group``: drafts, one forward over [root, drafts] of each row, acceptance, commit. Here is what it
asks for before that forward and tells afterwards.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from .acceptance import Trial, Verdict, judge
from .depth import Depth, History
from .drafters import Asked, Drafter, Heads, Round
from .sequence import Sequence

#: tokens that a drafter may read between two steps to come up with a sequence
CATCH_UP = 512


class Drafted(Protocol):
    """A row of a group, as far as it matters here; ``history`` is kept with it wherever it moves."""

    sequence: Sequence
    history: History | None


class Drafts(Protocol):
    """The executor of a group, as far as it matters here."""

    @property
    def slots(self) -> int: ...

    @property
    def heads(self) -> Heads | None: ...


@dataclass(frozen=True)
class Counts:
    """Since the engine was opened. cycles: forwards that verified drafts. proposed, accepted: drafts, of all rows.
    tokens: what those cycles gave."""

    cycles: int = 0
    proposed: int = 0
    accepted: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Proposal:
    """``drafts``: [slots, k] int32, lazy. ``trials`` by slot."""

    drafts: mx.array
    trials: Mapping[int, Trial]
    round: Round

    @property
    def depth(self) -> int:
        return self.drafts.shape[1]

    def made(self, slot: int) -> int:
        """Drafts of this row: it may have fewer than others."""
        return min(self.depth, len(self.trials[slot]))

    def judge(self, logits: mx.array) -> dict[int, Verdict]:
        """``logits`` [slots, k + 1, V] of the forward over roots and drafts."""
        judged = judge([self.trials.get(slot) for slot in range(logits.shape[0])], logits)
        return {slot: judged[slot] for slot in self.trials}


class Speculation:
    def __init__(self, drafter: Drafter, depth: Depth) -> None:
        self.drafter, self.depth = drafter, depth
        self.counts = Counts()
        #: drafts of the last cycle; 0 where the last step was plain
        self.last = 0

    def next(self, rows: Mapping[int, Drafted], most: int) -> int:
        """Drafts for the next cycle, at most ``most``; 0: a plain step."""
        return self.depth.next(self._histories(rows), most)

    def sleeps(self, row: Drafted) -> bool:
        """Whether nothing is drafted for this new sequence: with those before it drafts were hopeless. To be asked
        once. A text that repeats itself is no news of a head, but all that there is to know of a look-up."""
        return self.depth.sleeps(self._histories({0: row})[0]) if self.drafter.steady else False

    def begin(self, rows: Mapping[int, Drafted], run: Drafts) -> bool:
        """The first tokens of these rows were submitted. Whether something is to be evaluated behind them."""
        if self.depth.hopeless(self._histories(rows)):
            return False
        self.drafter.begin(run.heads, list(rows))
        return True

    def propose(self, rows: Mapping[int, Drafted], run: Drafts, k: int) -> Proposal | None:
        """Drafts of these rows; None where there are none, or the drafter has to come up with them first."""
        trials = {slot: Trial(row.sequence.sampler, k) for slot, row in rows.items()}
        asked = {slot: Asked(rows[slot].sequence, trial) for slot, trial in trials.items()}
        round = Round(asked, run.slots, run.heads)
        if not self.drafter.ready(asked, CATCH_UP):
            return None
        drafts = self.drafter.propose(round, k)
        if drafts is None:
            self.depth.nothing(self._histories(rows))
            return None
        return Proposal(drafts, trials, round)

    def committed(self, rows: Mapping[int, Drafted], proposal: Proposal, kept: Mapping[int, int]) -> None:
        """By slot, how many rows of the forward were kept; 0 for all of them: it failed. ``rows``: all of the cycle."""
        self.drafter.committed(proposal.round, kept)
        for slot, n in kept.items():
            if n:
                rows[slot].sequence.drafted(proposal.made(slot), n - 1)

    def cycled(self, rows: Mapping[int, Drafted], proposal: Proposal, kept: Mapping[int, int], seconds: float) -> None:
        """A cycle was made in ``seconds``. ``rows``: those that go on; ``kept``: tokens of all that were part of it."""
        c, k = self.counts, proposal.depth
        drafted, tokens = sum(proposal.made(slot) for slot in kept), sum(kept.values())
        self.counts = Counts(c.cycles + 1, c.proposed + drafted, c.accepted + tokens - len(kept), c.tokens + tokens)
        self.last = k
        made = [proposal.made(slot) for slot in rows]
        self.depth.cycled(self._histories(rows), k, [kept[slot] for slot in rows], seconds, made)

    def rests(self, rows: Mapping[int, Drafted]) -> bool:
        """Whether a plain step of these rows is made next that nobody need measure; it has been counted then."""
        history = next(iter(rows.values())).history if len(rows) == 1 else None
        if history is None or not self.depth.rests(history):
            return False
        self.last = 0
        return True

    def stepped(self, rows: Mapping[int, Drafted], seconds: float) -> None:
        self.last = 0
        self.depth.stepped(self._histories(rows), seconds)

    def interrupt(self) -> None:
        """What comes next has waited for something else: its time is no measure."""
        self.depth.interrupt()

    def owners(self, sequences: Iterable[Sequence]) -> list[Hashable]:
        """Whom the drafter's own caches for these sequences are charged to."""
        return [(self.drafter.name, sequence) for sequence in sequences]

    def forget(self, sequence: Sequence) -> None:
        self.drafter.forget(sequence)

    def _histories(self, rows: Mapping[int, Drafted]) -> list[History]:
        found = []
        for row in rows.values():
            if row.history is None:
                row.history = self.depth.history(row.sequence.sampler.likeliest)
            found.append(row.history)
        return found
