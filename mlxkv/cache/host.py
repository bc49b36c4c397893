"""Between MLX arrays and host bytes: private copies out, in-place reads in, without going through a file map."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from .layout import DTYPE_NAME, MLX_DTYPE


def private_copy(array: mx.array) -> tuple[str, np.ndarray]:
    """(safetensors dtype, C-contiguous host copy) of an evaluated array; bfloat16 comes as uint16.

    The copy shares nothing with the array: whatever is assigned to it later changes nothing here.
    """
    name = DTYPE_NAME[array.dtype]
    plain = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return name, np.array(plain, copy=True, order="C")


class Destination:
    """An evaluated MLX array that is filled in place through host views, then handed over.

    Views are byte views over memory that MLX owns: ``release()`` drops them before anyone computes with the array.
    """

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self._dtype = MLX_DTYPE[dtype]
        raw = mx.uint16 if self._dtype == mx.bfloat16 else self._dtype
        self._array: mx.array | None = mx.zeros(shape, raw)
        mx.eval(self._array)
        self._host: np.ndarray | None = np.array(self._array, copy=False)
        if not (self._host.flags.c_contiguous and self._host.flags.writeable):
            raise RuntimeError("MLX gave a host view that cannot be filled in place")

    def views(self) -> list[memoryview]:
        """The whole array as one byte view."""
        assert self._host is not None
        return [self._host.reshape(-1).view(np.uint8).data] if self._host.size else []

    def row_views(self, a: int, b: int) -> list[memoryview]:
        """Rows [a, b) of ``[1, heads, rows, width]``, a byte view a head."""
        assert self._host is not None
        if a == b or not self._host.size:
            return []
        return [head[a:b].reshape(-1).view(np.uint8).data for head in self._host[0]]

    def put_rows(self, a: int, rows: np.ndarray) -> None:
        """Fill the rows from ``a`` on with a copy of ``rows`` [1, heads, n, width]."""
        assert self._host is not None
        self._host[:, :, a : a + rows.shape[2]] = rows

    def rows(self, a: int, b: int) -> np.ndarray:
        """Rows [a, b) of ``[1, heads, rows, width]``, seen, not copied; not to be kept."""
        assert self._host is not None
        return self._host[:, :, a:b]

    def copy(self) -> np.ndarray:
        """A host copy of what is there."""
        assert self._host is not None
        return np.array(self._host, copy=True, order="C")

    def copy_rows(self, a: int, b: int) -> np.ndarray:
        """A host copy of rows [a, b) of ``[1, heads, rows, width]``."""
        return np.array(self.rows(a, b), copy=True, order="C")

    def release(self) -> mx.array:
        """Drop the views and give the array away."""
        array = self._array
        assert array is not None
        self._array = self._host = None
        return array.view(mx.bfloat16) if self._dtype == mx.bfloat16 else array


def from_host(array: np.ndarray, dtype: str) -> mx.array:
    """A copy of a host array (bfloat16 given as uint16) as an MLX array."""
    out = mx.array(array)
    return out.view(mx.bfloat16) if dtype == "BF16" else out
