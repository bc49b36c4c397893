"""RMS normalisation of a few rows on the CPU, where MLX needs six operations and a decoding step has dozens of them."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import mlx.nn as nn

#: elements; above, the work outweighs the number of operations
MAX_SIZE = 8192


@partial(mx.compile, shapeless=True)
def _scale(x: mx.array, squares: mx.array, weight: mx.array, mean: float, eps: float) -> mx.array:
    return x * mx.rsqrt(squares * mean + eps) * weight


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; the same as ``mx.fast.rms_norm`` up to rounding."""
    if x.size > MAX_SIZE or x.dtype != mx.float32 or weight.dtype != mx.float32:
        return mx.fast.rms_norm(x, weight, eps)
    return _scale(x, mx.square(x).sum(axis=-1, keepdims=True), weight, 1.0 / x.shape[-1], eps)


class RMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` by ``rms_norm``."""

    def __call__(self, x: mx.array) -> mx.array:
        return rms_norm(x, self.weight, self.eps)
