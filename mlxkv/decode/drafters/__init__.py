"""Drafters: what proposes tokens that one forward then verifies. What a drafter says costs time when it is wrong, never
a token: acceptance decides.

One interface for all; each is one file. ``mtp``: the checkpoint's own prediction head. ``model``: a smaller model with
the same tokenizer. ``ngram``: what followed the same words before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import mlx.core as mx

#: as ``reservation.lookahead`` knows them
DrafterName = Literal["mtp", "draft_model", "ngram"]


class Drafted(Protocol):
    """A sequence as a drafter sees it; told apart by identity."""

    @property
    def tokens(self) -> Sequence[int]:
        """All committed tokens, the prompt's first. The last one is the *root*: no forward has processed it yet."""
        ...


class Trial(Protocol):
    """One row's side of one cycle (``acceptance``): it is told of every draft, in order, by one of these."""

    @property
    def plain(self) -> bool:
        """It takes the likeliest token of the logits as they are."""
        ...

    @property
    def open(self) -> bool:
        """Another draft may follow; where it may not, what is drafted is not judged."""
        ...

    def draft(self, logits: mx.array) -> mx.array:
        """Pick the next draft, int32 [1], from a drafter's ``logits`` [1, vocabulary]. Lazy where it can be."""
        ...

    def drafted(self, token: mx.array) -> mx.array:
        """``token``, int32 [1], is the next draft of this row, which is ``plain``. Gives it back."""
        ...

    def given(self, tokens: list[int]) -> None:
        """These are all drafts of this row; they were looked up, so each is certain as far as the drafter goes."""
        ...


class Heads(Protocol):
    """The prediction head's caches of a group: one sequence's own (``HeadCache``), or a batch's (``BatchHead``)."""

    def prepare(self, slots: Sequence[int]) -> None:
        """Read of these rows what can be read before their next tokens are known, lazily."""
        ...

    def can_draft(self, slots: Sequence[int]) -> bool:
        """Whether the body has shown a hidden state for each of these rows."""
        ...

    def first(self, roots: Mapping[int, int]) -> mx.array:
        """The head over all that waits, with ``roots`` (slot -> token) last: m [slots, 1, H], from which the first
        drafts come."""
        ...

    def following(self, drafts: mx.array, m: mx.array, step: int) -> mx.array:
        """One more speculative row for ``drafts`` [slots, 1] and the last ``m`` [slots, 1, H]: the next m. ``step``:
        the number of the draft that comes of it, from 1."""
        ...

    def drop(self) -> None:
        """Forget the speculative rows; those of committed tokens stay."""
        ...


@dataclass(frozen=True)
class Asked:
    """A row that drafts are wanted for."""

    sequence: Drafted
    trial: Trial


@dataclass(frozen=True)
class Round:
    """What a cycle is made of, as drafters see it. ``rows`` by slot, of ``slots`` a forward has. ``heads``: None where
    the model has no head."""

    rows: Mapping[int, Asked]
    slots: int = 1
    heads: Heads | None = None


class Drafter(Protocol):
    """Belongs to an engine and serves all its groups. What it remembers of a sequence is a function of the sequence's
    tokens, so that a resumed sequence gets the drafts that it would have got."""

    name: ClassVar[DrafterName]
    #: how good its drafts are depends on the model more than on the text
    steady: ClassVar[bool]

    def begin(self, heads: Heads | None, slots: Sequence[int]) -> None:
        """The first tokens of the rows in these slots are in flight, and drafts may be asked for next: what can be read
        already is read meanwhile, lazily."""
        ...

    def ready(self, rows: Mapping[int, Asked], budget: int) -> bool:
        """Whether ``propose`` can be asked about these rows. A drafter that has to read their tokens first reads at
        most ``budget`` of them in this call; while it is False a plain step is made. Raises what a forward raises."""
        ...

    def propose(self, round: Round, k: int) -> mx.array | None:
        """Up to ``k`` drafts a row: int32 [slots, n], 1 <= n <= k, lazy where possible. Each row's trial was told of
        its drafts; a row that has fewer than n, and a free slot, is filled with 0. None: nothing to propose for any
        row, and no trial was told anything."""
        ...

    def committed(self, round: Round, kept: Mapping[int, int]) -> None:
        """The cycle for which it proposed has ended: by slot, how many of [root, drafts] were kept (1 at least). 0: the
        row was not verified and its drafts are void. Sequences that ended are forgotten after this. No tokens of the
        cycle need be in ``sequence.tokens`` yet."""
        ...

    def forget(self, sequence: Drafted) -> None:
        """The sequence has ended; does nothing for one that is unknown."""
        ...
