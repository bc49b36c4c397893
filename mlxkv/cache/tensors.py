"""Tensors of records as the file format knows them: record kinds, dtypes, shapes. Plain values, no MLX."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ConfigError

#: records that hold a span of rows, and all
ROW_KINDS = ("rows", "window")
RECORD_KINDS = (*ROW_KINDS, "state")

#: what rows may be quantised to in records
STORE_BITS = (4, 8)

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


def check_store_bits(bits: int | None) -> None:
    """Raises ConfigError for a number of bits that rows cannot be stored in; None is for rows as they are."""
    if bits is not None and (type(bits) is not int or bits not in STORE_BITS):
        raise ConfigError(f"store_bits is {bits!r}.", "It must be 4 or 8; leave it out to store rows as they are.")


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a record. ``shape`` has 0 on the row axis (axis 2) of growing and window members, with a row for
    every ``per`` tokens."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    per: int = 1

    def part(self, a: int, b: int, start: int) -> slice:
        """Which rows tokens [a, b) have, counted from the first one of tokens [start, …)."""
        return slice(a // self.per - start // self.per, b // self.per - start // self.per)

    def sized(self, tokens: int, start: int = 0) -> tuple[int, ...]:
        """The shape with the rows of ``tokens`` tokens from ``start`` on."""
        rows = (start + tokens) // self.per - start // self.per
        return tuple(rows if i == 2 and n == 0 else n for i, n in enumerate(self.shape))

    def nbytes(self, tokens: int, start: int = 0) -> int:
        return math.prod(self.sized(tokens, start)) * HOST_DTYPE[self.dtype].itemsize


def finite(dtype: str, array: np.ndarray) -> bool:
    """Whether no value is NaN or infinity. ``array`` holds bfloat16 as uint16."""
    if dtype == "BF16":
        return not bool(np.any((array & 0x7F80) == 0x7F80))
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())
