"""The indexer: which compressed entries a query reads."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from .compressor import Compressor
from .config import ModelArgs
from .rotary import Rotary


def scores(q: mx.array, keys: mx.array, weights: mx.array) -> mx.array:
    """score(n) = Σ_h w_h · relu(q_h · k_n) / √(heads · dim). q [B, S, H, d], keys [B, E, d], weights [B, S, H], all
    float32 -> [B, S, E]."""
    batch, length, heads, dim = q.shape
    dots = q.reshape(batch, length * heads, dim) @ keys.swapaxes(1, 2)
    dots = mx.maximum(dots, 0.0) * dim**-0.5
    weights = weights[:, :, None] * heads**-0.5
    return (weights @ dots.reshape(batch, length, heads, -1)).squeeze(2)


def best(scored: mx.array, visible: mx.array, k: int) -> mx.array:
    """The ``k`` best of the first ``visible`` [B, S] entries of each query, in rising order, then −1s. scored [B, S, E]
    -> [B, S, min(k, E)] int32.

    Of equal scores the earlier entries count: the choice depends neither on E nor on how a device sorts. Every score is
    compared with the k-th best one, and numbers without ties take the place of scores.
    """
    entries = scored.shape[-1]
    at = mx.arange(entries)
    seen = at < visible[..., None]
    if k >= entries:
        return mx.where(seen, at, -1)
    turned = mx.where(seen, -scored, mx.inf)
    last = mx.partition(turned, k - 1, axis=-1)[..., k - 1 : k]
    rank = mx.where(turned < last, 0, mx.where(turned == last, 1, 2)) * entries + at
    chosen = mx.partition(rank, k - 1, axis=-1)[..., :k] % entries
    chosen = mx.sort(mx.where(chosen < visible[..., None], chosen, entries), axis=-1)
    return mx.where(chosen < entries, chosen, -1)


class Indexer(nn.Module):
    """Heads of its own, and keys that its own compressor makes of the same windows."""

    def __init__(self, args: ModelArgs, ratio: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.topk = args.index_n_heads, args.index_head_dim, args.index_topk
        self.q_b_proj = nn.Linear(args.q_lora_rank, self.num_heads * self.head_dim, bias=False)
        self.weights_proj = nn.Linear(args.hidden_size, self.num_heads, bias=False)
        self.compressor = Compressor(args, ratio, self.head_dim)

    def queries(
        self, x: mx.array, q_residual: mx.array, offset: int | mx.array, rotary: Rotary
    ) -> tuple[mx.array, mx.array]:
        """x [B, S, hidden], q_residual [B, S, q_lora_rank] -> queries [B, S, H, d] and weights [B, S, H], float32."""
        q = self.q_b_proj(q_residual).reshape(*x.shape[:2], self.num_heads, self.head_dim)
        return rotary.run(q.astype(mx.float32), offset), self.weights_proj(x).astype(mx.float32)
