"""Rotary position embedding whose angles are computed once a step and shared by all layers.

MLX's CPU fallback computes frequencies, angles, sines and cosines anew for the queries and the keys of every layer.
"""

from __future__ import annotations

import math
import threading
import weakref

import mlx.core as mx
import mlx.nn as nn


class Angles:
    """cos and sin of positions, as they are multiplied with both halves of what is rotated; the last ones asked for
    are kept, [..., L, dims], float32: (cos, cos) and (−sin, sin).

    theta_j = base^(−2j / dims), angle = position · scale · theta_j (Su et al., "RoFormer", 2021, arXiv:2104.09864).
    """

    def __init__(self, dims: int, base: float, scale: float) -> None:
        half = dims // 2
        #: [dims / 2], float32
        self.theta = mx.exp(mx.arange(half, dtype=mx.float32) * (-math.log(base) / half)) * scale
        mx.eval(self.theta)
        self._key: tuple[threading.Thread, int, int] | None = None
        self._value: tuple[mx.array, mx.array]
        self._rows: weakref.ref[mx.array] | None = None

    def at(self, offset: int, length: int) -> tuple[mx.array, mx.array]:
        """Of positions offset … offset + L − 1: [L, dims]."""
        key = threading.current_thread(), offset, length  # what is not evaluated yet belongs to its thread
        if self._key != key:
            self._value = self._of(mx.arange(offset, offset + length, dtype=mx.float32)[:, None])
            self._key, self._rows = key, None
        return self._value

    def of_rows(self, offsets: mx.array) -> tuple[mx.array, mx.array]:
        """Of one position a row, [B] -> [B, 1, 1, dims]. Layers share them if they show the very same array."""
        if self._rows is None or self._rows() is not offsets:
            self._value = self._of(offsets.astype(mx.float32)[:, None, None, None])
            self._key, self._rows = None, weakref.ref(offsets)
        return self._value

    def _of(self, positions: mx.array) -> tuple[mx.array, mx.array]:
        angle = positions * self.theta
        cos, sin = mx.cos(angle), mx.sin(angle)
        return mx.concatenate([cos, cos], axis=-1), mx.concatenate([-sin, sin], axis=-1)


class SharedRoPE(nn.RoPE):
    """``nn.RoPE`` for halves (not interleaved pairs); x [..., L, D], the first ``dims`` of D are rotated. ``offset``:
    the first position, or [B] of x [B, H, 1, D]."""

    angles: Angles

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        if x.dtype != mx.float32:
            return super().__call__(x, offset=offset)  # type: ignore[arg-type]
        if isinstance(offset, int):
            cos, sin = self.angles.at(offset, x.shape[-2])
        elif x.ndim == 4 and offset.shape == x.shape[:1] and x.shape[2] == 1:
            cos, sin = self.angles.of_rows(offset)
        else:
            return super().__call__(x, offset=offset)  # type: ignore[arg-type]
        half = self.dims // 2
        a, b, rest = x[..., :half], x[..., half : self.dims], x[..., self.dims :]
        turned = x[..., : self.dims] * cos + mx.concatenate([b, a], axis=-1) * sin
        return mx.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned


def gains(layer: nn.Module) -> bool:
    """Whether ``layer`` is a rotation that ``SharedRoPE`` computes."""
    return type(layer) is nn.RoPE and not layer.traditional


def share(layers: list[SharedRoPE]) -> None:
    """Give layers with the same frequencies the same angles."""
    known: dict[tuple[int, float, float], Angles] = {}
    for layer in layers:
        key = (layer.dims, layer.base, layer.scale)
        if key not in known:
            known[key] = Angles(*key)
        layer.angles = known[key]
