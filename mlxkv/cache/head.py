"""The cache of a multi-token-prediction head, as two members: its rows, and the hidden state that waits for a token.

Row i of a head is made from (hidden i, token i+1). At position p the store keeps head rows [0, p−1) and the hidden
state at p−1, so that prompts which differ only in token p share everything at p. In records the rows stand one place
later (row i at i+1, a zero row at 0): then block [a, b) of a prompt owns rows [a, b) of the head like those of any
layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from .kinds import Growing
from .member import Arrays, Member, OwnCache, PositionError

if TYPE_CHECKING:
    from .inside import Inside

Run = Callable[[mx.array, mx.array, Any], mx.array]


class HeadCache(OwnCache):
    """Rows made so far, and the tokens and hidden states [1, n, H] of positions that have no row yet.

    A plain step only shows its hidden state; ``catch_up`` runs the head over all that wait but the last, in one
    forward.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.kv = KVCache()
        #: positions seen: the body stands here
        self.seen = 0
        #: of positions [kv.offset, seen)
        self.tokens: list[mx.array] = []
        self.hidden: list[mx.array] = []

    def observe(self, tokens: mx.array, hidden: mx.array) -> None:
        """The body ran over ``tokens`` [1, n] and gave ``hidden`` [1, n, H]."""
        self.tokens = [*self.tokens, tokens]
        self.hidden = [*self.hidden, hidden]
        self.seen += tokens.shape[1]

    def catch_up(self) -> None:
        """Make the rows up to seen − 1; one hidden state is left waiting for its token."""
        if len(self.hidden) > 1:
            self.tokens, self.hidden = [mx.concatenate(self.tokens, axis=1)], [mx.concatenate(self.hidden, axis=1)]
        if self.seen - self.kv.offset < 2:
            return
        tokens, hidden = self.tokens[0], self.hidden[0]
        self.run(tokens[:, 1:], hidden[:, :-1], self.kv)
        self.tokens, self.hidden = [tokens[:, -1:]], [hidden[:, -1:]]

    def hidden_at(self, position: int) -> mx.array | None:
        """The body's hidden state [1, 1, H] at ``position``, while it is still held."""
        first = self.kv.offset
        for hidden in self.hidden:
            if first <= position < first + hidden.shape[1]:
                return hidden[:, position - first : position - first + 1]
            first += hidden.shape[1]
        return None

    def members(self, path: tuple[int, ...]) -> list[Member]:
        return [HeadRows(self, (*path, 0)), HeadHidden(self, (*path, 1))]


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
        return [*self.cache.tokens, *self.cache.hidden]

    def hold(self) -> Any:
        return self.cache.seen, self.cache.tokens, self.cache.hidden

    def put_back(self, held: Any) -> None:
        self.cache.seen, self.cache.tokens, self.cache.hidden = held

    def resume(self, arrays: Arrays, position: int) -> None:
        # the token of this position is in the row before; only the one that follows is still needed
        self.cache.tokens, self.cache.hidden = [mx.zeros((1, 1), mx.int32)], [arrays["hidden"]]
        self.cache.seen = position
