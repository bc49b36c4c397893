"""Tensors of records as the file format knows them: record kinds, dtypes, shapes. Plain values, no MLX."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

#: records that hold a span of rows, and all
ROW_KINDS = ("rows", "window")
RECORD_KINDS = (*ROW_KINDS, "state")

#: safetensors dtype name -> the numpy dtype with the same bytes (numpy has no bfloat16)
HOST_DTYPE: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(np.uint16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U8": np.dtype(np.uint8),
    "I64": np.dtype(np.int64),
}


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a record. ``shape`` has 0 on the row axis (axis 2) of growing and window members."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def sized(self, rows: int) -> tuple[int, ...]:
        return tuple(rows if i == 2 and n == 0 else n for i, n in enumerate(self.shape))

    def nbytes(self, rows: int) -> int:
        return math.prod(self.sized(rows)) * HOST_DTYPE[self.dtype].itemsize
