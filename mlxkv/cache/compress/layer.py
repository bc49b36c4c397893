"""What a layer of compressed attention asks of its cache: the same of one sequence (``CompressedCache``) and of a batch
whose rows stand at positions of their own (``cache.batch.compressed``).

B is 1, or the slots of a batch; S the new tokens of each row. Shapes of a batch's step are fixed: what a row lacks is
masked, and finite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import mlx.core as mx

#: pool(windows [B, n, window, width], first [B, n] int32, there [B, n, window] bool) -> entries [B, n, head_dim].
#: windows: raw rows in order of position, zeros where ``there`` is False (before the first token). first: positions of
#: the first token of each block; those of a row follow each other by ``ratio``, so that RoPE may be given
#: first[:, 0] // ratio as its offset, and ``ratio`` as its scale. In a batch some entries are not wanted (their block
#: does not close in this step): what comes of them goes to a dummy row.
Pool = Callable[[mx.array, mx.array, mx.array], mx.array]


class LayerState(Protocol):
    """A step of a layer asks ``offset`` and ``positions`` first, then ``update_window``, then ``compress`` of each name.

    The order of the rows that a query sees depends on its position alone, so that its sums do: the window's by
    position, and what is not there behind them.
    """

    @property
    def offset(self) -> int | mx.array:
        """The position of the first new token, before ``update_window``: an int, or [B] int32, as RoPE takes both."""
        ...

    def positions(self, count: int) -> mx.array:
        """[B, count] int32 ([1, count] for one sequence): where the new tokens stand; before ``update_window``."""
        ...

    def update_window(self, kv: mx.array) -> tuple[mx.array, mx.array]:
        """``kv`` [B, S, head_dim], the new tokens' raw latents: (rows [B, K, head_dim], index [B, S, window] int32).

        Query s of row b sees rows[b, index[b, s, i]], those of positions max(p − window + 1, 0) … p in this order,
        then −1: nothing. The index always has ``window`` places.
        """
        ...

    def compress(self, name: str, rows: mx.array, pool: Pool) -> mx.array:
        """``rows`` [B, S, width], the new tokens' raw rows: all entries [B, E, head_dim], by number; the query at p
        sees those before (p + 1) // ratio. Others that are there are not to be read."""
        ...

    def entries(self, name: str) -> mx.array:
        """[B, E, head_dim] as ``compress`` gave them."""
        ...
