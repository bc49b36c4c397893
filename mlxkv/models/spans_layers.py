"""mlx-lm's recurrent layers, run sub-span by sub-span (spans.py)."""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import lfm2, lfm2_moe, mamba2, plamo2
from mlx_lm.models.falcon_h1 import FalconH1Mixer
from mlx_lm.models.gated_delta import gated_delta_update, normalize_qk
from mlx_lm.models.granitemoehybrid import GraniteMoeHybridMamba2Mixer
from mlx_lm.models.kimi_linear import KimiDeltaAttention
from mlx_lm.models.nemotron_h import NemotronHMamba2Mixer
from mlx_lm.models.qwen3_5 import GatedDeltaNet
from mlx_lm.models.qwen3_next import Qwen3NextGatedDeltaNet

from .gated_delta import ChunkedGatedDeltaNet, ChunkedNextGatedDeltaNet, GatedDeltaParts, NextGatedDeltaParts
from .spans import Spans


class _GatedDelta:
    """The gated delta rule of the Qwen layers: slot 0 is the convolution's window, slot 1 the state."""

    spans: Spans
    sharding_group: Any

    def __call__(self, inputs: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        if self.sharding_group is not None or not self.spans.ask(inputs, mask, cache):
            return super().__call__(inputs, mask, cache)  # type: ignore[misc]
        qkv, z, a, b = self.project(inputs)  # type: ignore[attr-defined]
        y = self.spans.run(cache, (0, 1), partial(self.recur, cache=cache), qkv, a, b)  # type: ignore[attr-defined]
        cache.advance(inputs.shape[1])
        return self.finish(y, z)  # type: ignore[attr-defined]


class SpannedGatedDeltaNet(_GatedDelta, GatedDeltaParts): ...


class SpannedNextGatedDeltaNet(_GatedDelta, NextGatedDeltaParts): ...


class SpannedChunkedGatedDeltaNet(_GatedDelta, ChunkedGatedDeltaNet): ...


class SpannedChunkedNextGatedDeltaNet(_GatedDelta, ChunkedNextGatedDeltaNet): ...


class SpannedKimiDeltaAttention(KimiDeltaAttention):
    """The gated delta rule with a gate per key channel: slots 0 to 2 are the windows of three convolutions (query, key,
    value), slot 3 is the state."""

    spans: Spans

    def __call__(self, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        if not self.spans.ask(x, mask, cache):
            return super().__call__(x, mask, cache)
        B, T, _ = x.shape
        heads = (B, T, self.num_heads, self.head_dim)
        rates = self.f_b_proj(self.f_a_proj(x)).reshape(heads)
        parts = (self.q_proj(x), self.k_proj(x), self.v_proj(x), rates, self.b_proj(x))
        out = self.spans.run(cache, (0, 1, 2, 3), partial(self._recur, cache=cache), *parts)
        cache.advance(T)
        gate = self.g_b_proj(self.g_a_proj(x)).reshape(heads)
        return self.o_proj((self.o_norm(out) * mx.sigmoid(gate)).reshape(B, T, -1))

    def _recur(self, q: mx.array, k: mx.array, v: mx.array, a: mx.array, b: mx.array, cache: Any) -> mx.array:
        """q, k, v [B, S, heads * dim], rates a [B, S, heads, dim], b [B, S, heads] -> [B, S, heads, dim]."""
        q, cache[0] = self.q_conv(q, cache[0], None, None)
        k, cache[1] = self.k_conv(k, cache[1], None, None)
        v, cache[2] = self.v_conv(v, cache[2], None, None)
        q, k, v = (part.reshape(*part.shape[:2], self.num_heads, self.head_dim) for part in (q, k, v))
        q, k = normalize_qk(q, k, inv_scale=self.scale, eps=1e-6)
        y, cache[3] = gated_delta_update(
            q,
            k,
            v,
            a,
            b,
            self.A_log.reshape(self.num_heads, 1),
            self.dt_bias.reshape(self.num_heads, self.head_dim),
            state=cache[3],
            use_kernel=not self.training,
        )
        return y


class _Mamba2:
    """Mamba-2: mlx-lm's own methods for the convolution (slot 0) and for the scan (slot 1), called per sub-span."""

    spans: Spans

    def _conv(self, conv_input: mx.array, cache: Any, mask: mx.array | None) -> mx.array:
        step = partial(super()._conv, cache=cache, mask=mask)  # type: ignore[misc]
        if not self.spans.ask(conv_input, mask, cache):
            return step(conv_input)
        return self.spans.run(cache, (0,), step, conv_input)

    def _ssm(
        self, hidden_states: mx.array, B: mx.array, C: mx.array, dt: mx.array, cache: Any, mask: mx.array | None
    ) -> mx.array:
        step = partial(super()._ssm, cache=cache, mask=mask)  # type: ignore[misc]
        if not self.spans.ask(hidden_states, mask, cache):
            return step(hidden_states, B, C, dt)
        return self.spans.run(cache, (1,), step, hidden_states, B, C, dt)


class SpannedFalconH1Mixer(_Mamba2, FalconH1Mixer): ...


class SpannedNemotronHMamba2Mixer(_Mamba2, NemotronHMamba2Mixer): ...


class SpannedGraniteMoeHybridMamba2Mixer(_Mamba2, GraniteMoeHybridMamba2Mixer): ...


class SpannedMamba2Block(_Mamba2, mamba2.Mamba2Block): ...


class SpannedPlamo2Mamba(_Mamba2, plamo2.Mamba): ...


class _ShortConv:
    """A gated short convolution, whose window (slot 0) is its only state."""

    spans: Spans

    def __call__(self, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        if not self.spans.ask(x, mask, cache):
            return super().__call__(x, mask, cache)  # type: ignore[misc]
        B, C, x = mx.split(self.in_proj(x), 3, axis=-1)  # type: ignore[attr-defined]
        out = self.spans.run(cache, (0,), partial(self._convolve, cache=cache), B * x)
        cache.advance(x.shape[1])
        return self.out_proj(C * out)  # type: ignore[attr-defined]

    def _convolve(self, x: mx.array, cache: Any) -> mx.array:
        """[B, S, H] -> [B, S, H]."""
        keep = self.L_cache - 1  # type: ignore[attr-defined]
        past = cache[0] if cache[0] is not None else mx.zeros((x.shape[0], keep, x.shape[2]), dtype=x.dtype)
        window = mx.concatenate([past, x], axis=1)
        cache[0] = window[:, -keep:]
        return self.conv(window)  # type: ignore[attr-defined]


class SpannedShortConv(_ShortConv, lfm2.ShortConv): ...


class SpannedMoeShortConv(_ShortConv, lfm2_moe.ShortConv): ...


#: Exact classes only: a subclass may compute something else.
FORMS: dict[type[nn.Module], type[nn.Module]] = {
    GatedDeltaNet: SpannedGatedDeltaNet,
    Qwen3NextGatedDeltaNet: SpannedNextGatedDeltaNet,
    ChunkedGatedDeltaNet: SpannedChunkedGatedDeltaNet,
    ChunkedNextGatedDeltaNet: SpannedChunkedNextGatedDeltaNet,
    KimiDeltaAttention: SpannedKimiDeltaAttention,
    FalconH1Mixer: SpannedFalconH1Mixer,
    NemotronHMamba2Mixer: SpannedNemotronHMamba2Mixer,
    GraniteMoeHybridMamba2Mixer: SpannedGraniteMoeHybridMamba2Mixer,
    mamba2.Mamba2Block: SpannedMamba2Block,
    plamo2.Mamba: SpannedPlamo2Mamba,
    lfm2.ShortConv: SpannedShortConv,
    lfm2_moe.ShortConv: SpannedMoeShortConv,
}
