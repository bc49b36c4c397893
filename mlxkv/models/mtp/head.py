"""What every multi-token-prediction head has in common, whatever its checkpoint calls its tensors.

Row i of a head is made from (h_i, tok_{i+1}): h_i what the body gave at position i, tok_{i+1} the token that follows.
Its output m_i predicts tok_{i+2}; with the draft of that token it is the input of the next draft.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

Project = Callable[[mx.array], mx.array]


class Head(nn.Module):
    """A prediction head; a family's class says how one of its layers makes a row.

    All layers of a head make every row, from the same inputs, and share one key/value cache: the heads of attention of
    layer i stand behind those of layer i − 1. So whoever keeps that cache needs to know one thing of it, its rows. The
    answer of the draft of number ``step`` (0 for the first) is that of layer ``step`` % n.
    """

    #: for people: "Qwen3.5", "DeepSeek-V3", ...
    family = ""
    #: how many drafts in a row it can make; None: any number
    most_drafts: int | None = None
    #: row 0 is made without its token: the embedding there is zero
    blind_first = False

    @property
    def n_layers(self) -> int:
        return 1

    def row(self, layer: int, embedded: mx.array, hidden: mx.array, cache: Any) -> mx.array:
        """One layer's rows [1, n, H] from ``embedded`` and ``hidden`` [1, n, H]."""
        raise NotImplementedError

    def __call__(self, embedded: mx.array, hidden: mx.array, cache: Any, step: int = 0) -> mx.array:
        """``embedded`` (of the following tokens) and ``hidden`` [1, n, H] -> m [1, n, H]; ``cache`` grows by n rows."""
        if self.blind_first:
            embedded = _blind(embedded, cache)
        n = self.n_layers
        if n == 1 or cache is None:
            return self.row(step % n, embedded, hidden, cache)
        parts = [_Part(cache, i) for i in range(n)]
        made = [self.row(i, embedded, hidden, part) for i, part in enumerate(parts)]
        keys, values = [part.new[0] for part in parts], [part.new[1] for part in parts]
        cache.update_and_fetch(mx.concatenate(keys, axis=1), mx.concatenate(values, axis=1))
        return made[step % n]

    def embed(self, tokens: mx.array, body: Project) -> mx.array:
        """Embeddings [1, n, H] of ``tokens`` [1, n]: by the body's matrix, unless the head has its own."""
        return body(tokens)

    def logits(self, m: mx.array, body: Project, step: int = 0) -> mx.array:
        """Logits [1, n, V] of m [1, n, H]: by the body's output matrix ``body``, unless the head has its own."""
        return body(m)

    def hidden(self, text: Any, ids: mx.array, cache: list[Any]) -> mx.array:
        """What this head takes of the body ``text`` for ``ids`` [1, n]: [1, n, H], here after the final norm."""
        return text.model(ids, cache)

    def finish(self, text: Any, hidden: mx.array) -> mx.array:
        """What the body's output matrix takes, from what ``hidden`` gave back."""
        return hidden

    def share(self, embedding: nn.Module | None, output: nn.Module | None) -> None:
        """Let go of matrices that are the same, bit for bit, as the body's."""


class _Part:
    """The cache of one layer among several: its heads of attention in the shared one.

    The rows so far are copied in each forward. Heads of several layers are rare; one layer uses its cache itself.
    """

    def __init__(self, shared: Any, index: int) -> None:
        self._shared, self._index = shared, index
        self.new: tuple[mx.array, mx.array]

    @property
    def offset(self) -> int:
        return self._shared.offset

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        return self._shared.make_mask(*args, **kwargs)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.new = (keys, values)
        if not self._shared.offset:
            return keys, values
        a, b, rows = self._index * keys.shape[1], (self._index + 1) * keys.shape[1], self._shared.offset
        old = self._shared.keys[:, a:b, :rows], self._shared.values[:, a:b, :rows]
        return mx.concatenate([old[0], keys], axis=2), mx.concatenate([old[1], values], axis=2)


def _blind(embedded: mx.array, cache: Any) -> mx.array:
    """``embedded`` with zeros in row 0, which stands where ``cache`` has no rows yet."""
    offset = 0 if cache is None else cache.offset
    if isinstance(offset, int):
        if offset:
            return embedded
        return mx.concatenate([mx.zeros_like(embedded[:, :1]), embedded[:, 1:]], axis=1)
    rows = offset[:, None] + mx.arange(embedded.shape[1])  # a batch: each sequence has its own offset
    return mx.where(rows[..., None] == 0, mx.zeros((), embedded.dtype), embedded)
