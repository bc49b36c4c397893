"""Linear layers and output heads for the few rows of a decoding step, where OpenBLAS spends most of its time packing W.

One row of a small layer goes the other way round: MLX computes ``x Wᵀ`` as a GEMM of M = 1, as ``W x`` (N = 1) it is
1.0 to 3.3 times as fast up to 4096 x 4096 (2 cores, OpenBLAS 0.3.21), and slower for wider heads. The reference BLAS
is 4 times slower this way.

A large W is cut into pieces that OpenBLAS multiplies unpacked, on processors for which it has such kernels
(``numerics.unpacked_products``): at most 10^6 multiplications and 1,200 results (OpenBLAS's
sgemm_small_kernel_permit_skylakex.c). One thread is then faster than two that pack: 1 to 8 rows of 1024 x 1024 in 0.09
to 0.21 ms against 0.4 to 0.8, of a head of 49152 x 576 in 9 to 14 ms against 18 to 23; where W has less than 2^20
elements, it is not. Where only the results are too many, ``W xᵀ`` is unpacked too: 8 rows of 384 x 128 in 22 µs, turned
back, against 40.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from .. import numerics

LARGEST = 1 << 24  # elements of W; measured: 4096 x 4096 gains, 49152 x 576 loses
#: elements of W from which on it is cut, and rows up to which
CUT, ROWS = 1 << 20, 12
_PRODUCTS, _RESULTS = 10**6, 1200
#: rows of W in a piece are a multiple of this, the width of the kernels
_LANES = 16


def product(x: mx.array, weight: mx.array, piece: int) -> mx.array:
    """x [..., K] times the transpose of W [N, K], of which ``piece`` rows are taken at a time: [..., N]."""
    wide, deep = weight.shape
    rows, n = x.size // deep, wide // piece
    flat = x.reshape(rows, deep)
    y = flat @ weight[: n * piece].reshape(n, piece, deep).swapaxes(-1, -2)  # [n, rows, piece]
    y = y.swapaxes(0, 1).reshape(rows, n * piece)
    if n * piece < wide:
        y = mx.concatenate([y, flat @ weight[n * piece :].T], axis=-1)
    return y.reshape(*x.shape[:-1], wide)


def piece(rows: int, weight: mx.array) -> int:
    """How many rows of ``weight`` [N, K] are taken at a time for ``rows`` rows of x; 0 if it is not to be cut."""
    if weight.size < CUT or rows > ROWS or not numerics.unpacked_products():
        return 0
    most = min(_PRODUCTS // (rows * weight.shape[1]), _RESULTS // rows, weight.shape[0])
    return most // _LANES * _LANES


def turns(rows: int, weight: mx.array) -> bool:
    """Whether ``W xᵀ`` is unpacked where ``x Wᵀ`` is not: up to as many multiplications, however many results."""
    results = rows * weight.shape[0]
    small = rows > 1 and results > _RESULTS and results * weight.shape[1] <= _PRODUCTS
    return small and numerics.unpacked_products()


class RowLinear(nn.Linear):
    """``nn.Linear`` that is quick for a few rows: x [..., K] -> [..., N] with W [N, K]."""

    def __call__(self, x: mx.array) -> mx.array:
        rows = x.size // x.shape[-1]
        if n := piece(rows, self.weight):
            y = product(x, self.weight, n)
        elif turns(rows, self.weight):
            columns = mx.contiguous(x.reshape(rows, -1).T)
            y = mx.contiguous((self.weight @ columns).T).reshape(*x.shape[:-1], -1)
        elif rows == 1 and self.weight.size <= LARGEST:
            y = (self.weight @ x.reshape(-1, 1)).reshape(*x.shape[:-1], -1)
        else:
            return super().__call__(x)
        return y + self.bias if "bias" in self else y


class RowEmbedding(nn.Embedding):
    """``nn.Embedding`` that is an output head too, quick for a few rows."""

    def as_linear(self, x: mx.array) -> mx.array:
        n = piece(x.size // x.shape[-1], self.weight)
        return product(x, self.weight, n) if n else super().as_linear(x)


def gains(layer: nn.Module) -> bool:
    """Whether ``layer`` is a plain float32 linear layer of a size for which one of these ways is faster."""
    if type(layer) is not nn.Linear or layer.weight.dtype != mx.float32:
        return False
    return layer.weight.size <= LARGEST or numerics.unpacked_products()


def gains_as_head(layer: nn.Module) -> bool:
    """Whether ``layer`` is a plain float32 embedding that is faster cut where it is the output head too."""
    if type(layer) is not nn.Embedding or layer.weight.dtype != mx.float32:
        return False
    return layer.weight.size >= CUT and numerics.unpacked_products()
