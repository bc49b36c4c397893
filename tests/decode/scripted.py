"""A drafter that knows what a plain run says, and is right as often as a test wants it to be."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import ClassVar

import mlx.core as mx

from mlxkv.decode.drafters import Asked, Drafted, DrafterName, Round
from mlxkv.decode.runtime import Runtime

#: pattern -> how many of k drafts are right in the next cycle
Right = Callable[[int], int]


def pattern(name: str, rng: random.Random) -> Right:
    """all, none, alternating (all, then none), random."""
    count = iter(range(1 << 60))
    return {
        "all": lambda k: k,
        "none": lambda k: 0,
        "alternating": lambda k: k * (next(count) % 2),
        "random": lambda k: rng.randint(0, k),
    }[name]


PATTERNS = ("all", "none", "alternating", "random")


class Scripted:
    """``texts``: whole sequences of tokens, prompt and answer. ``vocab``: tokens of the model."""

    name: ClassVar[DrafterName] = "mtp"
    steady: ClassVar[bool] = True

    def __init__(self, right: Right, vocab: int) -> None:
        self.right, self.vocab = right, vocab
        self.texts: list[list[int]] = []
        #: drafts that were kept, by how many of how many, and cycles that were begun and not ended
        self.kept: list[tuple[int, int]] = []
        self.open = 0
        self._k = 0

    def learn(self, texts: Iterable[list[int]]) -> None:
        self.texts += [list(text) for text in texts]

    def begin(self, heads, slots):
        """Nothing to be read ahead."""

    def ready(self, rows: Mapping[int, Asked], budget: int) -> bool:
        return True

    def propose(self, round: Round, k: int) -> mx.array | None:
        assert not self.open, "a cycle began before the last one ended"
        self.open, self._k = 1, k
        rows = [[0] * k for _ in range(round.slots)]
        for slot, row in round.rows.items():
            rows[slot] = self._drafts(list(row.sequence.tokens), k)
            row.trial.given(rows[slot])
        return mx.array(rows, mx.int32)

    def _drafts(self, tokens: list[int], k: int) -> list[int]:
        n = len(tokens)
        known = next((text[n : n + k] for text in self.texts if text[:n] == tokens), [])
        right = known[: self.right(k)]
        wrong = [(t + 1) % self.vocab for t in known[len(right) :]]
        return (right + wrong + [7] * k)[:k]

    def committed(self, round: Round, kept: Mapping[int, int]) -> None:
        self.open = 0
        self.kept += [(n - 1, self._k) for n in kept.values()]

    def forget(self, sequence: Drafted) -> None: ...


def drafted_by(drafter: Scripted) -> Callable[[Runtime], Runtime]:
    """A runtime that drafts (any drafter), changed so that this one does."""

    def change(rt: Runtime) -> Runtime:
        assert rt.drafting is not None
        return replace(rt, drafting=replace(rt.drafting, drafter=drafter))

    return change
