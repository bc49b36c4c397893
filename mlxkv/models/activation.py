"""Exponentials for large float32 arrays on an x86-64 Linux CPU, and the feed-forward layers that wait for them.

There MLX computes ``exp`` (and with it sigmoid and SiLU) in about 12 ns an element, ``power`` in about 4: a prompt
spends a third of its time in exponentials. exp(x) = 2^(x log2 e) rounds the exponent once more, a relative error of
about 4e-8 |x|. Small arrays, other dtypes and other machines go MLX's own way.
"""

from __future__ import annotations

import math
import platform
import sys

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama, qwen2, qwen3, qwen3_next
from mlx_lm.models.activations import swiglu

_LOG2E = math.log2(math.e)
_MIN_SIZE = 1280  # elements; below, the saving does not pay for more operations
_MEASURED = sys.platform == "linux" and platform.machine() == "x86_64"


def _large(x: mx.array) -> bool:
    return _MEASURED and x.dtype == mx.float32 and x.size >= _MIN_SIZE


def exp(x: mx.array) -> mx.array:
    """e^x, elementwise."""
    return mx.power(2.0, x * _LOG2E) if _large(x) else mx.exp(x)


def silu(x: mx.array) -> mx.array:
    """x sigmoid(x), elementwise."""
    return x / (1.0 + mx.power(2.0, x * -_LOG2E)) if _large(x) else nn.silu(x)


class _Swiglu:
    """A feed-forward layer down(SiLU(gate(x)) * up(x)); [B, S, H] -> [B, S, H]."""

    def __call__(self, x: mx.array) -> mx.array:
        gate, up = self.gate_proj(x), self.up_proj(x)  # type: ignore[attr-defined]
        return self.down_proj(silu(gate) * up if _large(gate) else swiglu(gate, up))  # type: ignore[attr-defined]


class LlamaMLP(_Swiglu, llama.MLP):
    """Llama, Mistral, SmolLM."""


class Qwen2MLP(_Swiglu, qwen2.MLP):
    """Qwen 2 and 2.5."""


class Qwen3MLP(_Swiglu, qwen3.MLP):
    """Qwen 3."""


class QwenNextMLP(_Swiglu, qwen3_next.Qwen3NextMLP):
    """Qwen3-Next and Qwen 3.5."""


FEED_FORWARD: dict[type[nn.Module], type[nn.Module]] = {
    llama.MLP: LlamaMLP,
    qwen2.MLP: Qwen2MLP,
    qwen3.MLP: Qwen3MLP,
    qwen3_next.Qwen3NextMLP: QwenNextMLP,
}
