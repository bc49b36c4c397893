"""Rotary position embedding whose angles are computed once a step and shared by all layers.

MLX's CPU fallback computes frequencies, angles, sines and cosines anew for the queries and the keys of every layer.
"""

from __future__ import annotations

import math

import mlx.core as mx
import mlx.nn as nn


class Angles:
    """cos and sin [L, dims / 2] of positions offset … offset + L − 1, float32; the last ones asked for are kept.

    theta_j = base^(−2j / dims), angle = position · scale · theta_j (Su et al., "RoFormer", 2021, arXiv:2104.09864).
    """

    def __init__(self, dims: int, base: float, scale: float) -> None:
        half = dims // 2
        self._theta = mx.exp(mx.arange(half, dtype=mx.float32) * (-math.log(base) / half)) * scale
        mx.eval(self._theta)
        self._key: tuple[int, int] | None = None
        self._value: tuple[mx.array, mx.array]

    def at(self, offset: int, length: int) -> tuple[mx.array, mx.array]:
        if self._key != (offset, length):
            angle = mx.arange(offset, offset + length, dtype=mx.float32)[:, None] * self._theta
            self._key, self._value = (offset, length), (mx.cos(angle), mx.sin(angle))
        return self._value


class SharedRoPE(nn.RoPE):
    """``nn.RoPE`` for halves (not interleaved pairs); x [..., L, D], the first ``dims`` of D are rotated."""

    angles: Angles

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        if not isinstance(offset, int) or x.dtype != mx.float32:
            return super().__call__(x, offset=offset)  # type: ignore[arg-type]
        cos, sin = self.angles.at(offset, x.shape[-2])
        half = self.dims // 2
        a, b, rest = x[..., :half], x[..., half : self.dims], x[..., self.dims :]
        turned = [a * cos - b * sin, a * sin + b * cos]
        return mx.concatenate([*turned, rest] if rest.shape[-1] else turned, axis=-1)


def share(layers: list[SharedRoPE]) -> None:
    """Give layers with the same frequencies the same angles."""
    known: dict[tuple[int, float, float], Angles] = {}
    for layer in layers:
        key = (layer.dims, layer.base, layer.scale)
        if key not in known:
            known[key] = Angles(*key)
        layer.angles = known[key]
