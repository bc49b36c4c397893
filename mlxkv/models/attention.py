"""Attention with an output gate (Qwen3-Next, Qwen 3.5) over the few tokens of a decoding step, for the CPU.

There it is the number of operations that takes the time, so queries and keys go together: one norm, whose weight has
the scale of the scores for queries, and one rotation x cos + (x R) sin, where R turns halves and what is not rotated
has the angle 0. Heads that share keys are rows of one product.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.qwen3_next import Qwen3NextAttention

from . import rope
from .linear import CUT, RowLinear
from .norm import MAX_SIZE, rms_norm

#: more tokens than this go mlx-lm's way
MOST = 16


class FewAttention(Qwen3NextAttention):
    """mlx-lm's layer: x [B, S, H] -> [B, S, H], the same up to rounding. Float32 with S <= MOST goes this way where
    ``mask`` is None (S = 1) or bool [B, 1, S, columns]; all else, and several tokens under "causal", mlx-lm's.

    ``prepare`` is to be called once weights are evaluated and ``rope`` is a ``SharedRoPE``."""

    _norm: mx.array
    _theta: mx.array
    _turn: mx.array
    _columns: bool

    def prepare(self) -> None:
        """What is made of the weights, from data: the first to need it may be a trace."""
        shared: Any = self.rope
        n, size, half = self.num_attention_heads, self.head_dim, shared.dims // 2
        q, k = np.array(self.q_norm.weight) * np.float32(self.scale), np.array(self.k_norm.weight)
        self._norm = mx.array(np.stack([q] * n + [k] * self.num_key_value_heads))
        theta = np.array(shared.angles.theta)
        self._theta = mx.array(np.concatenate([theta, theta, np.zeros(size - 2 * half, np.float32)]))
        turn, j = np.zeros((size, size), np.float32), np.arange(half)
        turn[j + half, j], turn[j, j + half] = -1, 1
        self._turn = mx.array(turn)
        layers = self.q_proj, self.k_proj, self.v_proj, self.o_proj
        self._columns = all(
            type(layer) is RowLinear and "bias" not in layer and layer.weight.size < CUT for layer in layers
        )

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        B, S, _ = x.shape
        n, m, size = self.num_attention_heads, self.num_key_value_heads, self.head_dim
        few = S <= MOST and B * S * (n + m) * size <= MAX_SIZE and x.dtype == mx.float32
        shown = isinstance(mask, mx.array) and mask.dtype == mx.bool_ and mask.ndim == 4 and mask.shape[1] == 1
        seen: mx.array | None = mask if shown else None
        if not few or seen is not mask or cache is None or hasattr(cache, "bits"):
            return super().__call__(x, mask, cache)

        q, k, v = self._project(x)
        q = q.reshape(B, S, n, 2 * size)
        both = mx.concatenate([q[..., :size], k.reshape(B, S, m, size)], axis=2)
        both = rms_norm(both, self._norm, self.q_norm.eps)
        at = cache.offset if isinstance(cache.offset, mx.array) else mx.array([int(cache.offset)], mx.int32)
        cos, sin = _angles(at.reshape(-1, 1, 1, 1), _steps(S), self._theta)
        both = _turned(both, both @ self._turn, cos, sin)
        queries, keys = both[:, :, :n], both[:, :, n:]
        if S > 1:
            queries, keys = queries.swapaxes(1, 2), keys.swapaxes(1, 2)
        keys = keys.reshape(B, m, S, size)
        values = v.reshape(B, m, 1, size) if S == 1 else v.reshape(B, S, m, size).swapaxes(1, 2)
        keys, values = cache.update_and_fetch(keys, values)

        scores = queries.reshape(B, m, n // m * S, size) @ keys.swapaxes(-1, -2)
        if seen is not None:
            each = scores.reshape(B, m, n // m, S, -1) if S > 1 else scores
            scores = _masked(each, mx.expand_dims(seen, 2) if S > 1 else seen).reshape(scores.shape)
        y = mx.softmax(scores, axis=-1, precise=True) @ values
        y = y.reshape(B, n, S, size).swapaxes(1, 2) if S > 1 else y.reshape(B, 1, n, size)
        return self._output(_gated(y, q[..., size:]))

    def _project(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Queries with their gates, keys and values, of some shape."""
        if self._columns and x.shape[0] * x.shape[1] == 1:
            column = x.reshape(-1, 1)
            return self.q_proj.weight @ column, self.k_proj.weight @ column, self.v_proj.weight @ column
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def _output(self, y: mx.array) -> mx.array:
        B, S = y.shape[:2]
        if self._columns and B * S == 1:
            return (self.o_proj.weight @ y.reshape(-1, 1)).reshape(1, 1, -1)
        return self.o_proj(y.reshape(B, S, -1))


@lru_cache(maxsize=MOST)
def _steps(tokens: int) -> mx.array:
    return mx.array(np.arange(tokens, dtype=np.int32).reshape(1, -1, 1, 1))


@partial(mx.compile, shapeless=True)
def _angles(at: mx.array, steps: mx.array, theta: mx.array) -> tuple[mx.array, mx.array]:
    angle = (at + steps).astype(mx.float32) * theta
    return mx.cos(angle), mx.sin(angle)


@partial(mx.compile, shapeless=True)
def _turned(x: mx.array, halves: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    return x * cos + halves * sin


@partial(mx.compile, shapeless=True)
def _masked(scores: mx.array, mask: mx.array) -> mx.array:
    return mx.where(mask, scores, mx.finfo(mx.float32).min)


@partial(mx.compile, shapeless=True)
def _gated(y: mx.array, gate: mx.array) -> mx.array:
    return y * mx.sigmoid(gate)


def gains(layer: nn.Module) -> bool:
    """Whether ``layer``, as mlx-lm made it, is one that ``FewAttention`` computes."""
    if type(layer) is not Qwen3NextAttention:
        return False
    norms = [layer.q_norm.weight, layer.k_norm.weight]
    return rope.gains(layer.rope) and layer.q_norm.eps == layer.k_norm.eps and all(w.dtype == mx.float32 for w in norms)
