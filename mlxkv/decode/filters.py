"""Filters of a distribution: each takes log-probabilities [n, V] and gives them back with -inf for what is left out.

The same tokens are left out as by mlx-lm's, whose functions are compiled anew for each value of a parameter (half a
second each on a CPU) and for each number of rows.
"""

from __future__ import annotations

import math

import mlx.core as mx

_OUT = -float("inf")


def top_p(logprobs: mx.array, p: float) -> mx.array:
    """The likeliest tokens, as few as have ``p`` > 0 of all together; whatever is as likely as the last of them stays
    too."""
    rising = mx.sort(logprobs, axis=-1)
    probs = mx.exp(rising)
    likelier = mx.cumsum(probs, axis=-1, reverse=True, inclusive=False)
    together = likelier[:, :1] + probs[:, :1]
    out = (likelier >= p * together).sum(axis=-1, keepdims=True).astype(mx.int32)
    # where p times anything is 0, the likeliest stays
    least = mx.take_along_axis(rising, mx.minimum(out, logprobs.shape[-1] - 1), axis=-1)
    return mx.where(logprobs < least, _OUT, logprobs)


def min_p(logprobs: mx.array, p: float) -> mx.array:
    """Tokens at least ``p`` > 0 times as likely as the likeliest."""
    return mx.where(logprobs < mx.max(logprobs, axis=-1, keepdims=True) + math.log(p), _OUT, logprobs)


def top_k(logprobs: mx.array, k: int) -> mx.array:
    """The ``k`` likeliest tokens, 0 < k < V; of equals some."""
    out = mx.argpartition(-logprobs, kth=k - 1, axis=-1)[:, k:]
    return mx.put_along_axis(logprobs, out, mx.array(_OUT, logprobs.dtype), axis=-1)
