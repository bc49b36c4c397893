"""Attention over a sliding window of raw rows and compressed entries, with a sink; keys and values are the same rows.

A query's columns are: its head's sink, its own window, and entries. In a row of these what is hidden stands at places
that the query's position alone decides, or behind all that is seen, and ends at a multiple of ``_LANES``. So neither
the other queries of a forward nor the room of a cache changes the order in which anything is summed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchLinear

from .compressor import Compressor
from .config import OVERLAPPING, ModelArgs
from .indexer import Indexer, best, scores
from .rotary import Rotary

#: numbers that MLX sums side by side at most; a rest is summed after them
_LANES = 16
_HIDDEN = -1e30  # finite: 0 · inf and a softmax over nothing are NaN
#: bytes that may be taken for several queries at once: their rows, logits and scores
_AT_ONCE = 1 << 28


def attend(
    q: mx.array,
    own: mx.array,
    own_mask: mx.array,
    shared: mx.array | None,
    shared_mask: mx.array | None,
    sinks: mx.array,
    scale: float,
) -> mx.array:
    """softmax(scale · q·k, sink) · k, in float32. q [B, S, H, D]; each query's ``own`` rows [B, S, K, D], and rows that
    are ``shared`` by all, [B, E, D] or None; masks [B, S, K] and [B, S, E]; sinks [H] -> [B, S, H, D].

    The sink is one more logit in the denominator, without a value (Xiao et al., arXiv:2309.17453). What is hidden may
    be anything, NaN too.
    """
    batch, length, heads, dim = q.shape
    own = mx.where(own_mask[..., None], own, 0.0)
    logits = [mx.broadcast_to(sinks[:, None], (batch, length, heads, 1))]
    logits.append(mx.where(own_mask[:, :, None], (q @ own.swapaxes(2, 3)) * scale, _HIDDEN))
    if shared is not None and shared_mask is not None:
        shared = mx.where(mx.any(shared_mask, axis=1)[..., None], shared, 0.0)
        dots = q.reshape(batch, length * heads, dim) @ shared.swapaxes(1, 2)
        dots = dots.reshape(batch, length, heads, -1) * scale
        logits.append(mx.where(shared_mask[:, :, None], dots, _HIDDEN))
    columns = sum(part.shape[3] for part in logits)
    if tail := -columns % _LANES:
        logits.append(mx.full((batch, length, heads, tail), _HIDDEN))
    weights = mx.softmax(mx.concatenate(logits, axis=3), axis=3)
    out = weights[..., 1 : 1 + own.shape[2]] @ own
    if shared is not None:
        given = weights[..., 1 + own.shape[2] : columns].reshape(batch, length * heads, -1)
        out = out + (given @ shared).reshape(out.shape)
    return out


def gather(rows: mx.array, index: mx.array) -> mx.array:
    """rows [B, n, D] at index [B, S, k], of which −1 stands for any row: [B, S, k, D]."""
    batch, n, dim = rows.shape
    flat = mx.maximum(index, 0) + (mx.arange(batch) * n)[:, None, None]
    return mx.take(rows.reshape(-1, dim), flat, axis=0)


class Attention(nn.Module):
    """One layer's. With ``ratio`` 0 it has its window only; where windows overlap its indexer chooses the entries that
    a query reads, else it reads all that end at or before its token."""

    def __init__(self, args: ModelArgs, layer: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.eps = args.num_attention_heads, args.head_dim, args.rms_norm_eps
        self.ratio, self.o_groups = args.ratios[layer], args.o_groups
        self.q_a_proj = nn.Linear(args.hidden_size, args.q_lora_rank, bias=False)
        self.q_a_norm = nn.RMSNorm(args.q_lora_rank, eps=args.rms_norm_eps)
        self.q_b_proj = nn.Linear(args.q_lora_rank, self.num_heads * self.head_dim, bias=False)
        self.kv_proj = nn.Linear(args.hidden_size, self.head_dim, bias=False)
        self.kv_norm = nn.RMSNorm(self.head_dim, eps=args.rms_norm_eps)
        # heads are projected in groups, each by its own matrix
        group = self.num_heads * self.head_dim // args.o_groups
        self.o_a_proj = SwitchLinear(group, args.o_lora_rank, args.o_groups, bias=False)
        self.o_b_proj = nn.Linear(args.o_groups * args.o_lora_rank, args.hidden_size, bias=False)
        self.sinks = mx.zeros((self.num_heads,), dtype=mx.float32)
        if self.ratio:
            self.compressor = Compressor(args, self.ratio, self.head_dim)
        if self.ratio == OVERLAPPING:
            self.indexer = Indexer(args, self.ratio)
        self._rotary = Rotary(args, bool(self.ratio))
        self._groups = mx.arange(args.o_groups)[None]

    def __call__(self, x: mx.array, offset: int | mx.array, cache: Any) -> mx.array:
        """x [B, S, hidden] of positions offset … offset + S − 1 (``offset``: a number, or [B]); ``cache``: a
        CompressedCache or its batch form."""
        batch, length, _ = x.shape
        residual = self.q_a_norm(self.q_a_proj(x))
        q = self.q_b_proj(residual).reshape(batch, length, self.num_heads, self.head_dim)
        q = self._rotary.run(mx.fast.rms_norm(q, None, self.eps), offset)
        seen = cache.update_window(self._rotary.run(self.kv_norm(self.kv_proj(x)), offset))
        read = self._entries(x, residual, offset, cache) if self.ratio else None

        step = max(1, _AT_ONCE // (4 * batch * self._numbers(cache.window, read)))
        out = [self._attend(q[:, a : a + step], seen, read, a) for a in range(0, length, step)]
        out = out[0] if len(out) == 1 else mx.concatenate(out, axis=1)

        out = self._rotary.run(out, offset, inverse=True).astype(x.dtype)
        out = self.o_a_proj(out.reshape(batch * length, self.o_groups, 1, -1), self._groups)
        return self.o_b_proj(out.reshape(batch, length, -1))

    def _entries(self, x: mx.array, residual: mx.array, offset: int | mx.array, cache: Any) -> _Entries:
        """The entries there are after these tokens, and how each query finds its own."""
        length = x.shape[1]
        made = self.compressor
        entries = cache.compress("kv", made.rows(x), partial(made.pool, rotary=self._rotary))
        start = offset if isinstance(offset, int) else offset[:, None]
        visible = mx.broadcast_to((start + mx.arange(1, length + 1)) // self.ratio, x.shape[:2])
        if self.ratio != OVERLAPPING:
            return _Entries(entries, visible)
        made = self.indexer.compressor
        keys = cache.compress("index", made.rows(x), partial(made.pool, rotary=self._rotary))
        if not keys.shape[1]:
            return _Entries(entries, visible)
        q, weights = self.indexer.queries(x, residual, offset, self._rotary)
        keys = keys.astype(mx.float32)

        def choose(a: int, b: int) -> mx.array:
            scored = scores(q[:, a:b], keys, weights[:, a:b])
            return best(scored, visible[:, a:b], self.indexer.topk)

        return _Entries(entries, visible, choose)

    def _numbers(self, window: int, read: _Entries | None) -> int:
        """How many are computed for one query."""
        entries = 0 if read is None else read.entries.shape[1]
        if read is None or read.choose is None:
            return window * self.head_dim + (window + entries) * self.num_heads
        own = window + min(self.indexer.topk, entries)
        return own * (self.head_dim + self.num_heads) + entries * self.indexer.num_heads

    def _attend(self, q: mx.array, seen: Any, read: _Entries | None, a: int) -> mx.array:
        """Of the queries a … a + S − 1 of this forward, q [B, S, H, D]; float32."""
        b = a + q.shape[1]
        own, mask = gather(seen.rows, seen.index[:, a:b]), seen.mask[:, a:b]
        shared = shared_mask = None
        if read is not None and read.choose is not None:
            chosen = read.choose(a, b)
            own = mx.concatenate([own, gather(read.entries, chosen)], axis=2)
            mask = mx.concatenate([mask, chosen >= 0], axis=2)
        elif read is not None and read.entries.shape[1]:
            shared = read.entries.astype(mx.float32)
            shared_mask = mx.arange(shared.shape[1]) < read.visible[:, a:b, None]
        mask = mx.broadcast_to(mask, own.shape[:3])
        return attend(
            q.astype(mx.float32), own.astype(mx.float32), mask, shared, shared_mask, self.sinks, self.head_dim**-0.5
        )


class _Entries:
    """Entries [B, E, D], of which query s sees the first ``visible`` [B, S]; ``choose(a, b)``: which of them queries
    a … b − 1 read, [B, b − a, k] with −1 for none; None: all."""

    def __init__(
        self, entries: mx.array, visible: mx.array, choose: Callable[[int, int], mx.array] | None = None
    ) -> None:
        self.entries, self.visible, self.choose = entries, visible, choose
