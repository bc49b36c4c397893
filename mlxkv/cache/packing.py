"""Packing: rows of keys and values stored as small integers, with a scale and a bias a group (``store_bits``).

A choice of the user's that costs exactness: what comes back is near what was computed, not equal to it. So the bits are
part of the layout and of every key, and whatever is stored comes back the same from wherever it is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx

from .member import Arrays
from .tensors import TensorSpec

#: values that share a scale and a bias; the first that divides a row's width is taken
GROUPS = (64, 32)
#: what is stored instead of a tensor, in the order of ``mx.quantize``
PARTS = ("packed", "scales", "biases")
_FLOATING = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Packing:
    """How one tensor of rows [1, heads, rows, width] is stored: ``bits`` a value, ``group`` values along the width with
    one scale and one bias, both of the tensor's own dtype."""

    bits: int
    group: int

    @classmethod
    def of(cls, tensor: TensorSpec, bits: int) -> Packing | None:
        """None for a tensor that is stored as it is: no floating numbers, or of a width that no group divides."""
        width = math.prod(tensor.shape[3:])
        if tensor.dtype not in _FLOATING or not width:
            return None
        group = next((g for g in GROUPS if width % g == 0), None)
        return cls(bits, group) if group else None

    def stored(self, tensor: TensorSpec) -> tuple[TensorSpec, ...]:
        """The tensors that a record holds instead of ``tensor``."""
        *outer, width = tensor.shape
        groups = (*outer, width // self.group)
        shapes = ((*outer, width * self.bits // 32), groups, groups)
        dtypes = ("U32", tensor.dtype, tensor.dtype)
        return tuple(
            TensorSpec(f"{tensor.name}.{part}", dtype, shape)
            for part, dtype, shape in zip(PARTS, dtypes, shapes, strict=True)
        )

    def pack(self, name: str, rows: mx.array) -> Arrays:
        """Lazy: the arrays that are stored of the tensor ``name``."""
        parts = mx.quantize(rows, group_size=self.group, bits=self.bits)
        return {f"{name}.{part}": array for part, array in zip(PARTS, parts, strict=True)}

    def unpack(self, name: str, arrays: Arrays) -> mx.array:
        """Lazy: the rows again, in the dtype they had. Each value depends on its own group alone, so that the same
        stored bytes give the same bits whatever is restored with them."""
        packed, scales, biases = (arrays[f"{name}.{part}"] for part in PARTS)
        return mx.dequantize(packed, scales, biases, group_size=self.group, bits=self.bits)
