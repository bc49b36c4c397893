"""Filters of a distribution: each takes logits [n, V], normalised or not, and gives them back with -inf for what it
leaves out.

The same tokens are left out as by mlx-lm's, whose functions are compiled anew for each value of a parameter (half a
second each on a CPU) and for each number of rows.
"""

from __future__ import annotations

import math

import mlx.core as mx

_OUT = -float("inf")


def top_p(logits: mx.array, p: float) -> mx.array:
    """The likeliest tokens, as few as have ``p`` > 0 of all together; whatever is as likely as the last of them stays
    too."""
    rising = mx.sort(logits, axis=-1)
    probs = mx.exp(rising - rising[:, -1:])
    likelier = mx.cumsum(probs, axis=-1, reverse=True, inclusive=False)
    together = likelier[:, :1] + probs[:, :1]
    out = (likelier >= p * together).sum(axis=-1, keepdims=True).astype(mx.int32)
    # where p times anything is 0, the likeliest stays
    least = mx.take_along_axis(rising, mx.minimum(out, logits.shape[-1] - 1), axis=-1)
    return mx.where(logits < least, _OUT, logits)


def min_p(logits: mx.array, p: float) -> mx.array:
    """Tokens at least ``p`` > 0 times as likely as the likeliest."""
    return mx.where(logits < mx.max(logits, axis=-1, keepdims=True) + math.log(p), _OUT, logits)


def top_k(logits: mx.array, k: int) -> mx.array:
    """The ``k`` likeliest tokens, 0 < k < V; of equals some."""
    out = mx.argpartition(-logits, kth=k - 1, axis=-1)[:, k:]
    return mx.put_along_axis(logits, out, mx.array(_OUT, logits.dtype), axis=-1)
