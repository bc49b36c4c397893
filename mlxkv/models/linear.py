"""Linear layers and output heads for the few rows of a decoding step, where OpenBLAS spends most of its time packing W.

One row of a small layer goes the other way round: MLX computes ``x Wᵀ`` as a GEMM of M = 1, as ``W x`` (N = 1) it is
1.0 to 3.3 times as fast up to 4096 x 4096 (2 cores, OpenBLAS 0.3.21), and slower for wider heads. The reference BLAS
is 4 times slower this way.

A large W is cut into pieces that OpenBLAS multiplies unpacked, on processors for which it has such kernels
(``numerics.unpacked_products``): at most 10^6 multiplications and 1,200 results (OpenBLAS's
sgemm_small_kernel_permit_skylakex.c). One thread is then faster than two that pack: 1 to 8 rows of 1024 x 1024 in 0.09
to 0.21 ms against 0.4 to 0.8, of a head of 49152 x 576 in 9 to 14 ms against 18 to 23, 4 and 8 rows of 2048 x 128 in 52
and 80 µs against 126 and 135; a single row of less than 2^20 elements is as fast uncut. Where only the results are too
many, ``W xᵀ`` is unpacked too: 8 rows of 384 x 128 in 22 µs, turned back, against 40.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from .. import numerics

LARGEST = 1 << 24  # elements of W; measured: 4096 x 4096 gains, 49152 x 576 loses
#: elements of W from which on a single row's is cut, and rows up to which any is
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


def piece(rows: int, wide: int, deep: int) -> int:
    """How many rows of W [wide, deep] are taken at a time for ``rows`` rows of x; 0 if it is not to be cut."""
    uncut = 1 if wide * deep < CUT else 0
    if not uncut < rows <= ROWS or rows * wide * deep <= _PRODUCTS or not numerics.unpacked_products():
        return 0
    return min(_PRODUCTS // (rows * deep), _RESULTS // rows, wide) // _LANES * _LANES


def turns(rows: int, wide: int, deep: int) -> bool:
    """Whether ``W xᵀ`` is unpacked where ``x Wᵀ`` is not: up to as many multiplications, however many results."""
    small = rows > 1 and rows * wide > _RESULTS and rows * wide * deep <= _PRODUCTS
    return small and numerics.unpacked_products()


def quick(x: mx.array, weight: mx.array) -> mx.array | None:
    """x [..., K] times the transpose of ``weight`` [N, K] by the quickest of these ways: [..., N]. None: by MLX's."""
    wide, deep = weight.shape
    rows = x.size // deep
    if n := piece(rows, wide, deep):
        return product(x, weight, n)
    if rows == 1 and weight.size <= LARGEST:
        return (weight @ x.reshape(-1, 1)).reshape(*x.shape[:-1], -1)
    if turns(rows, wide, deep):
        columns = mx.contiguous(x.reshape(rows, -1).T)
        return mx.contiguous((weight @ columns).T).reshape(*x.shape[:-1], -1)
    return None


class RowLinear(nn.Linear):
    """``nn.Linear`` that is quick for a few rows."""

    def __call__(self, x: mx.array) -> mx.array:
        y = quick(x, self.weight)
        if y is None:
            return super().__call__(x)
        return y + self.bias if "bias" in self else y


class RowEmbedding(nn.Embedding):
    """``nn.Embedding`` that is an output head too, quick for a few rows."""

    def as_linear(self, x: mx.array) -> mx.array:
        y = quick(x, self.weight)
        return super().as_linear(x) if y is None else y


def gains(layer: nn.Module) -> bool:
    """Whether ``layer`` is a plain float32 linear layer of a size for which one of these ways is faster."""
    return type(layer) is nn.Linear and _faster(layer.weight)


def gains_as_head(layer: nn.Module) -> bool:
    """Whether ``layer`` is a plain float32 embedding that is faster so where it is the output head too."""
    return type(layer) is nn.Embedding and _faster(layer.weight)


def _faster(weight: mx.array) -> bool:
    return weight.dtype == mx.float32 and (weight.size <= LARGEST or numerics.unpacked_products())
