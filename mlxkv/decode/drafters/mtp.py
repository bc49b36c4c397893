"""Drafts from the checkpoint's own prediction head: one small layer beside the body, fed by the body's hidden states.

The first draft comes from one forward of the head over all pairs (hidden state, next token) that wait, the root last;
each further one from the head's own output and the draft before it. Where picking a draft needs nothing on the host,
all of it, and the forward that verifies it, is one graph; on a CPU each draft is submitted as soon as it is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import mlx.core as mx

from . import Asked, Drafted, DrafterName, Heads, Round


class MTP:
    """``logits``: (the head's output m [slots, n, H], the draft's number from 0) -> [slots, n, vocabulary].

    It keeps nothing itself: all that it knows of a sequence is in the head's cache, which is stored with the prefix.
    """

    name: ClassVar[DrafterName] = "mtp"
    steady: ClassVar[bool] = True

    def __init__(self, logits: Callable[[mx.array, int], mx.array]) -> None:
        self._logits = logits
        #: a draft is computed while the graph of the next is built; a GPU is given all of a cycle at once
        self._early = mx.default_device() == mx.cpu

    def begin(self, heads: Heads | None, slots: Sequence[int]) -> None:
        """The head reads the prompt, as far as it was not stored."""
        if heads is not None:
            heads.prepare(slots)

    def ready(self, rows: Mapping[int, Asked], budget: int) -> bool:
        """Always: what waits for the head is bounded, and read by the first draft's own forward."""
        return True

    def propose(self, round: Round, k: int) -> mx.array | None:
        heads = round.heads
        if heads is None or k < 1 or not heads.can_draft(list(round.rows)):
            return None
        drafts: list[mx.array] = []
        try:
            m = heads.first({slot: row.sequence.tokens[-1] for slot, row in round.rows.items()})
            for step in range(k):
                if step:
                    if not any(row.trial.open for row in round.rows.values()):
                        break
                    m = heads.following(drafts[-1][:, None], m, step)
                drafts.append(pick(round, self._logits(m, step)[:, -1]))
                if self._early:
                    mx.async_eval(drafts[-1])
        finally:
            heads.drop()  # rows of tokens that nobody has committed
        return mx.stack(drafts, axis=1)

    def committed(self, round: Round, kept: Mapping[int, int]) -> None:
        """Nothing: the head's cache is one of the members that the cycle's commit brings into step."""

    def forget(self, sequence: Drafted) -> None:
        """Nothing is kept."""


def pick(round: Round, logits: mx.array) -> mx.array:
    """The next draft of each slot, int32 [slots]; ``logits`` [slots, vocabulary]. Free slots get any."""
    if round.slots == 1:
        return round.rows[0].trial.draft(logits)
    if all(row.trial.plain for row in round.rows.values()):
        likeliest = mx.argmax(logits, axis=-1).astype(mx.int32)
        for slot, row in round.rows.items():
            row.trial.drafted(likeliest[slot : slot + 1])
        return likeliest
    free = mx.zeros((1,), mx.int32)
    rows = [
        round.rows[slot].trial.draft(logits[slot : slot + 1]) if slot in round.rows else free
        for slot in range(round.slots)
    ]
    return mx.concatenate(rows)
