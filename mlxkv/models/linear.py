"""Linear layers whose single-row product is handed to the BLAS the other way round.

MLX computes ``x Wᵀ`` with one row as a GEMM of M = 1, for which OpenBLAS packs all of W; as ``W x`` (N = 1) it is 1.0
to 3.3 times as fast up to about 4096 x 4096 (2 cores, OpenBLAS 0.3.21, weights in cache), and slower for output heads
far wider than that. The reference BLAS is 4 times slower this way.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

LARGEST = 1 << 24  # elements of W; measured: 4096 x 4096 gains, 49152 x 576 loses


class RowLinear(nn.Linear):
    """``nn.Linear`` that is quick for one row: x [..., K] -> [..., N] with W [N, K]."""

    def __call__(self, x: mx.array) -> mx.array:
        if x.size != x.shape[-1]:
            return super().__call__(x)
        y = (self.weight @ x.reshape(-1, 1)).reshape(*x.shape[:-1], -1)
        return y + self.bias if "bias" in self else y


def gains(layer: nn.Module) -> bool:
    """Whether ``layer`` is a plain float32 linear layer of a size for which this is measured to be no slower."""
    return type(layer) is nn.Linear and layer.weight.dtype == mx.float32 and layer.weight.size <= LARGEST
