"""The cache of a multi-token-prediction head, as two members: its rows, and the hidden state that waits for a token.

Row i of a head is made from (hidden i, token i+1). At position p the store keeps head rows [0, p−1) and the hidden
state at p−1, so that prompts which differ only in token p share everything at p. In records the rows stand one place
later (row i at i+1, a zero row at 0): then block [a, b) of a prompt owns rows [a, b) of the head like those of any
layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from .kinds import Growing
from .member import Arrays, Member, OwnCache, PositionError

if TYPE_CHECKING:
    from .inside import Inside

#: run(tokens [1, n], hidden [1, n, H], key/value cache, number of the draft from 0) -> m [1, n, H]
Run = Callable[..., mx.array]

#: hidden states that wait for the head while nobody drafts, at most, and rows of one forward of it (DESIGN §4)
HEAD_BEHIND = 512
#: steps after which what they left is joined into one array: few arrays are evaluated again and again
_JOIN = 32
#: steps of which something may not be evaluated yet: one that was submitted, and one that is built behind it
RECENT = 2
#: rows that the first draft's own forward makes; of more, all but the last are made without an output
_TOGETHER = 8


class HeadCache(OwnCache):
    """Rows made so far, and the tokens and hidden states [1, n, H] of positions that have no row yet.

    A plain step only shows its hidden state; ``catch_up`` runs the head over all that wait but the last, whose token is
    not processed yet. Drafting makes that row too, with the root as its token, and then *speculative* rows from the
    head's own output, which ``drop`` forgets:

        hidden    h0 h1 h2 | .. h[p-1]      rows  0 .. p-2 | p-1    | p, p+1, ..
        with      t1 t2 t3 | ..  root             true     | true   | speculative

    A forward that verifies drafts shows all of its hidden states; ``commit`` keeps those of tokens that were accepted.
    """

    def __init__(self, run: Run, joint: bool = False) -> None:
        """``joint``: ``run`` takes several sequences at once, with a cache that has an offset for each."""
        self.run, self.joint = run, joint
        self.kv = KVCache()
        #: positions seen: the body stands here
        self.seen = 0
        #: of positions [start, seen); the last one is always held, also when its row is made
        self.tokens: list[mx.array] = []
        self.hidden: list[mx.array] = []
        self.start = 0
        #: nobody drafts with it, and nobody stores it: it only counts
        self.deaf = False
        #: how often something was shown, and when what waits was last put together
        self._shows = self._put = 0

    def observe(self, tokens: mx.array, hidden: mx.array) -> None:
        """The body ran over ``tokens`` [1, n] and gave ``hidden`` [1, n, H]."""
        self.drop()
        self.show(tokens, hidden)

    def show(self, tokens: mx.array, hidden: mx.array) -> None:
        """``observe`` where rows of these tokens may have been made already."""
        if self.deaf:
            self.seen += tokens.shape[1]
            return
        waiting = self.seen - self.kv.offset
        # only what was there before: of these tokens some may be taken back
        if waiting > 1 and waiting + tokens.shape[1] > HEAD_BEHIND:
            self.catch_up()
        self.tokens = [*self.tokens, tokens]
        self.hidden = [*self.hidden, hidden]
        self.seen += tokens.shape[1]
        self._shows += 1
        if len(self.hidden) >= _JOIN:
            self._join()

    def commit(self, kept: int, width: int) -> None:
        """Of the last ``width`` tokens shown, the first ``kept`` stay."""
        if self.deaf:
            self.seen -= width - kept
        elif gone := width - kept:
            self._one()
            self.have(self.tokens[0][:, :-gone], self.hidden[0][:, :-gone])
            self.seen -= gone

    def catch_up(self) -> None:
        """Make the rows up to seen − 1; one hidden state is left waiting for its token. What comes of them is not
        computed: of a head of one layer nothing but projections to keys and values."""
        if self.deaf:
            return
        self.drop()
        self._join()
        made, end = self.kv.offset, self.seen - 1
        while made < end:
            n = min(end - made, HEAD_BEHIND)
            at = made - self.start
            self.run(self.tokens[0][:, at + 1 : at + 1 + n], self.hidden[0][:, at : at + n], self.kv)
            made += n
        self._join()

    # drafting

    def prepare(self, slots: Sequence[int]) -> None:
        """Make what rows can be made before the next root is known, lazily."""
        self.catch_up()

    def can_draft(self, slots: Sequence[int]) -> bool:
        """Whether there is a hidden state to begin with."""
        return self.seen > 0 and not self.deaf

    def first(self, roots: Mapping[int, int]) -> mx.array:
        """Make all rows that wait, the last of them from ``roots[0]``, the one token that the body has not processed:
        m [1, 1, H] of it. States inside the last forward can be read no more."""
        self.drop()
        if self.seen - self.kv.offset > _TOGETHER:
            self.catch_up()
        self._join()
        # where drafts were made and not verified the last row is there already; its output is not
        made = min(self.kv.offset, self.seen - 1)
        self.kv.trim(self.kv.offset - made)
        at = made - self.start
        tokens = mx.concatenate([self.tokens[0][:, at + 1 :], mx.array([[roots[0]]], mx.int32)], axis=1)
        m = self.run(tokens, self.hidden[0][:, at:], self.kv)
        self._join()
        return m[:, -1:]

    def following(self, drafts: mx.array, m: mx.array, step: int) -> mx.array:
        """A speculative row for ``drafts`` [1, 1] and the last ``m`` [1, 1, H]: the next m, of draft ``step``."""
        return self.run(drafts, m, self.kv, step)

    def drop(self) -> None:
        """Forget rows of tokens that were not committed."""
        if self.kv.offset > self.seen:
            self.kv.trim(self.kv.offset - self.seen)

    # what is held

    def recent(self) -> list[mx.array]:
        """Of what waits for the head, what may not be evaluated yet: what was put together of late, and what the last
        forwards left. A token is evaluated with the hidden state that came of it. All that was recent at a step is to
        be evaluated with it."""
        first = 1 if self._shows - self._put <= RECENT else 0
        return [*self.tokens[:first], *self.hidden[:first], *self.hidden[max(first, len(self.hidden) - RECENT) :]]

    def hidden_at(self, position: int) -> mx.array | None:
        """The body's hidden state [1, 1, H] at ``position``, while it is still held."""
        first = self.start
        for hidden in self.hidden:
            if first <= position < first + hidden.shape[1]:
                return hidden[:, position - first : position - first + 1]
            first += hidden.shape[1]
        return None

    def deafen(self) -> None:
        """From now on it is shown nothing, and cannot draft: rows that are missing are not made later."""
        self.deaf, self.tokens, self.hidden = True, [], []

    def skip(self, position: int) -> None:
        """All rows before ``position`` are made. What the body gave there is shown next; of what was before nobody
        asks."""
        self.tokens, self.hidden = [], []
        self.start = self.seen = position

    def _one(self) -> None:
        """One array of each."""
        if len(self.hidden) > 1:
            self.have(mx.concatenate(self.tokens, axis=1), mx.concatenate(self.hidden, axis=1))

    def have(self, tokens: mx.array, hidden: mx.array) -> None:
        """This pair, [1, n] and [1, n, H], is all that waits."""
        self.tokens, self.hidden, self._put = [tokens], [hidden], self._shows

    def _join(self) -> None:
        """One array of each, of what is still needed."""
        self._one()
        if (made := min(self.kv.offset, self.seen - 1) - self.start) > 0:
            self.have(self.tokens[0][:, made:], self.hidden[0][:, made:])
            self.start += made

    def members(self, path: tuple[int, ...]) -> list[Member]:
        return [HeadRows(self, (*path, 0)), HeadHidden(self, (*path, 1))]


def head_in(caches: Sequence[Any]) -> HeadCache | None:
    """The head's cache among those of a sequence; None where the model has no head."""
    return next((cache for cache in caches if isinstance(cache, HeadCache)), None)


class _HeadMember(Member):
    cache: HeadCache

    @property
    def position(self) -> int:
        return self.cache.seen

    def rewindable(self) -> int:
        return 0

    def rewind(self, n: int) -> None:
        if n:
            raise PositionError(f"Member {self.label} cannot go back without its hidden states.")

    def commit(self, kept: int, width: int, replay: Any = None) -> None:
        """Nothing: the hidden states that are kept say which rows there will be."""

    def most_drafts(self) -> int | None:
        return None


class HeadRows(_HeadMember):
    """The head's keys and values, one place later than the head counts them."""

    kind = "head"
    record = "rows"

    def __init__(self, cache: HeadCache, path: tuple[int, ...]) -> None:
        super().__init__(cache, path)
        self._rows = Growing(cache.kv, path)

    def reserve(self, capacity: int) -> None:
        self._rows.reserve(capacity)

    def arrays(self) -> Arrays:
        return self._rows.arrays()

    def hold(self) -> Any:
        return self._rows.hold()

    def put_back(self, held: Any) -> None:
        self._rows.put_back(held)

    def catch_up(self) -> None:
        self.cache.catch_up()

    def rows(self, a: int, b: int) -> Arrays:
        if not 0 <= a <= b <= self.cache.kv.offset + 1:
            raise PositionError(f"Member {self.label} holds rows [0, {self.cache.kv.offset + 1}), not [{a}, {b}).")
        out = {}
        for name, array in self.arrays().items():
            rows = array[..., max(a - 1, 0) : max(b - 1, 0), :]
            first = mx.zeros((*array.shape[:2], 1, array.shape[3]), array.dtype)
            out[name] = mx.concatenate([first, rows], axis=2) if a == 0 and b > 0 else rows
        return out

    def resume(self, arrays: Arrays, position: int) -> None:
        # the zero row exists in records only
        self._rows.resume({name: mx.contiguous(array[..., 1:, :]) for name, array in arrays.items()}, position - 1)
        self.cache.seen = position


class HeadHidden(_HeadMember):
    """The body's hidden state at the last position, which the head needs together with the next token."""

    kind = "hidden"
    record = "state"

    def arrays(self) -> Arrays:
        if not self.cache.hidden:
            return {}
        return {"hidden": self.cache.hidden[-1][:, -1:]}

    def state_at(self, position: int, inside: Inside) -> Arrays:
        hidden = self.cache.hidden_at(position - 1)
        return {} if hidden is None else {"hidden": hidden}

    def live(self) -> list[mx.array]:
        return self.cache.recent()

    def hold(self) -> Any:
        return self.cache.seen, self.cache.start, self.cache.tokens, self.cache.hidden

    def put_back(self, held: Any) -> None:
        self.cache.seen, self.cache.start, self.cache.tokens, self.cache.hidden = held

    def commit(self, kept: int, width: int, replay: Any = None) -> None:
        self.cache.commit(kept, width)

    def resume(self, arrays: Arrays, position: int) -> None:
        # the token of this position is in the row before; only the one that follows is still needed
        self.cache.have(mx.zeros((1, 1), mx.int32), arrays["hidden"])
        self.cache.seen, self.cache.start = position, position - 1
