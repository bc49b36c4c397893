"""Drafts from the text itself: where its latest words stood before, what followed them then is proposed.

Of the places where the last ``min_n`` tokens stood earlier, in prompt or answer, that one is taken which agrees with
most tokens before them too, up to ``max_n`` in all; of those that agree equally the latest. The latest ``LOOKS`` places
are looked at, so that a look costs the same however long the text is.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import ClassVar

import mlx.core as mx

from . import Asked, Drafted, DrafterName, Heads, Round

#: tokens that must agree, at least and at most
MIN_N, MAX_N = 2, 8
#: earlier places of the last tokens that are compared
LOOKS = 128
#: tokens that are entered in the time in which a forward reads one
READ = 8


class Index:
    """Where each run of ``min_n`` tokens ended, in a sequence of tokens that only grows.

    The places of a run are a chain, the latest one first: 4 bytes a token, and an entry for each different run.
    """

    def __init__(self, min_n: int = MIN_N, max_n: int = MAX_N, looks: int = LOOKS) -> None:
        """Raises ValueError for runs of no tokens."""
        if not 1 <= min_n <= max_n or looks < 1:
            raise ValueError(f"runs of {min_n} to {max_n} tokens cannot be looked for at {looks} places")
        self._min_n, self._max_n, self._looks = min_n, max_n, looks
        self._tokens = array("i")
        #: run -> where it ended last: the place of the token that followed it
        self._last: dict[bytes, int] = {}
        #: by place: where the run that ends there ended before; 0 for nowhere
        self._before = array("i")

    def __len__(self) -> int:
        """Tokens that were read."""
        return len(self._tokens)

    def read(self, tokens: Sequence[int], most: int | None = None) -> None:
        """``tokens`` is the whole sequence, of which the first ``len(self)`` are known; at most ``most`` others are
        read."""
        known, last, n = self._tokens, self._last, self._min_n
        end = len(tokens) if most is None else min(len(tokens), len(known) + most)
        for at in range(len(known), end):
            # the run before this token: entered only now that something follows it
            before = 0
            if at >= n:
                run = known[at - n :].tobytes()
                before = last.get(run, 0)
                last[run] = at
            self._before.append(before)
            known.append(tokens[at])

    def following(self, k: int) -> list[int]:
        """Up to ``k`` tokens that followed the end of the sequence where it stood before; none where it did not. Where
        they come to the end of the sequence they begin anew: it repeats itself then."""
        known, end = self._tokens, len(self._tokens)
        place = self._last.get(known[-self._min_n :].tobytes(), 0)
        best = longest = 0
        for _ in range(self._looks):
            if not place or longest == self._max_n:
                break
            n = self._min_n
            while n < min(self._max_n, place) and known[place - 1 - n] == known[end - 1 - n]:
                n += 1
            if n > longest:
                best, longest = place, n
            place = self._before[place]
        return [known[best + i % (end - best)] for i in range(k)] if best else []


class NGram:
    """Rows that have nothing to propose are verified beside those that have."""

    name: ClassVar[DrafterName] = "ngram"
    steady: ClassVar[bool] = False

    def __init__(self, min_n: int = MIN_N, max_n: int = MAX_N) -> None:
        self._runs = min_n, max_n
        self._known: dict[Drafted, Index] = {}

    def begin(self, heads: Heads | None, slots: Sequence[int]) -> None:
        """Nothing: ``ready`` reads."""

    def ready(self, rows: Mapping[int, Asked], budget: int) -> bool:
        """Reads ``READ`` times as many tokens: it takes no forward."""
        most = READ * budget
        for row in rows.values():
            index, tokens = self._index(row.sequence), row.sequence.tokens
            before = len(index)
            index.read(tokens, most)
            most -= len(index) - before
            if len(index) < len(tokens):
                return False
        return True

    def propose(self, round: Round, k: int) -> mx.array | None:
        found: dict[int, list[int]] = {}
        for slot, row in round.rows.items():
            index = self._index(row.sequence)
            index.read(row.sequence.tokens)
            found[slot] = index.following(k) if row.trial.open else []
        if k < 1 or not any(found.values()):
            return None
        for slot, drafts in found.items():
            round.rows[slot].trial.given(drafts)
        return mx.array([found.get(slot) or [0] * k for slot in range(round.slots)], mx.int32)

    def committed(self, round: Round, kept: Mapping[int, int]) -> None:
        """Nothing: only committed tokens were read."""

    def forget(self, sequence: Drafted) -> None:
        self._known.pop(sequence, None)

    def _index(self, sequence: Drafted) -> Index:
        if sequence not in self._known:
            self._known[sequence] = Index(*self._runs)
        return self._known[sequence]
