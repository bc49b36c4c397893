"""mlx-lm's recurrent layers, run sub-span by sub-span (spans.py) or with a journal (journal.py)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import lfm2, lfm2_moe, mamba2, plamo2
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.falcon_h1 import FalconH1Mixer
from mlx_lm.models.gated_delta import gated_delta_update, normalize_qk
from mlx_lm.models.granitemoehybrid import GraniteMoeHybridMamba2Mixer
from mlx_lm.models.kimi_linear import KimiDeltaAttention
from mlx_lm.models.nemotron_h import NemotronHMamba2Mixer
from mlx_lm.models.qwen3_5 import GatedDeltaNet
from mlx_lm.models.qwen3_next import Qwen3NextGatedDeltaNet

from .gated_delta import (
    ChunkedGatedDeltaNet,
    ChunkedNextGatedDeltaNet,
    GatedDeltaParts,
    NextGatedDeltaParts,
    delta_after,
)
from .gated_delta_few import MOST, after_few
from .journal import Journal, Kept, Rows, joined, keep_window, scan
from .mamba2_few import mamba2_few
from .spans import Spans

#: of a step size, where the architecture has none of its own: the defaults of mlx-lm's ``ssm_update``
LIMITS = (0.001, 100.0)


class _GatedDelta:
    """The gated delta rule of the Qwen layers: slot 0 is the convolution's window, slot 1 the state."""

    spans: Spans
    sharding_group: Any

    def __call__(self, inputs: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        if self.sharding_group is not None or not self.spans.ask(inputs, mask, cache):
            return super().__call__(inputs, mask, cache)  # type: ignore[misc]
        qkv, z, a, b = self.project(inputs)  # type: ignore[attr-defined]
        step = partial(self.recur, cache=cache)  # type: ignore[attr-defined]
        record = partial(self.record, cache)  # type: ignore[attr-defined]
        y = self.spans.run(cache, (0, 1), step, record, qkv, a, b)
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
        step, record = partial(self._recur, cache=cache), partial(self._record, cache)
        out = self.spans.run(cache, (0, 1, 2, 3), step, record, *parts)
        cache.advance(T)
        gate = self.g_b_proj(self.g_a_proj(x)).reshape(heads)
        return self.o_proj((self.o_norm(out) * mx.sigmoid(gate)).reshape(B, T, -1))

    def _recur(self, q: mx.array, k: mx.array, v: mx.array, a: mx.array, b: mx.array, cache: Any) -> mx.array:
        """q, k, v [B, S, heads * dim], rates a [B, S, heads, dim], b [B, S, heads] -> [B, S, heads, dim]."""
        return self._recurrence(q, k, v, a, b, cache)[0]

    def _record(
        self, cache: Any, journal: Journal, q: mx.array, k: mx.array, v: mx.array, a: mx.array, b: mx.array
    ) -> mx.array:
        before = cache[3]
        for slot, x in enumerate((q, k, v)):
            keep_window(journal, cache, slot, x, self.conv_kernel - 1)
        y, k, v = self._recurrence(q, k, v, a, b, cache)
        journal.keep(cache, (3,), [before, k, v, a, b], self._after, fresh=before is None)
        return y

    def _recurrence(
        self, q: mx.array, k: mx.array, v: mx.array, a: mx.array, b: mx.array, cache: Any
    ) -> tuple[mx.array, mx.array, mx.array]:
        """The outputs, and the keys and values that went into the recurrence."""
        q, cache[0] = self.q_conv(q, cache[0], None, None)
        k, cache[1] = self.k_conv(k, cache[1], None, None)
        v, cache[2] = self.v_conv(v, cache[2], None, None)
        q, k, v = (part.reshape(*part.shape[:2], self.num_heads, self.head_dim) for part in (q, k, v))
        q, k = normalize_qk(q, k, inv_scale=self.scale, eps=1e-6)
        y, cache[3] = gated_delta_update(q, k, v, a, b, *self._rates(), state=cache[3], use_kernel=not self.training)
        return y, k, v

    def _rates(self) -> tuple[mx.array, mx.array]:
        return self.A_log.reshape(self.num_heads, 1), self.dt_bias.reshape(self.num_heads, self.head_dim)

    def _after(self, kept: Kept, rows: Rows) -> list[mx.array]:
        return [delta_after(kept, rows, *self._rates(), use_kernel=not self.training)]


class _Mamba2:
    """Mamba-2: mlx-lm's own methods for the convolution (slot 0) and for the scan (slot 1), called per sub-span. With a
    journal the scan goes token by token, as mlx-lm's own over several tokens sums in another order; in ``fast`` on a
    CPU all at once (mamba2_few.py)."""

    spans: Spans
    conv_kernel_size: int
    A_log: mx.array
    dt_bias: mx.array
    D: mx.array

    def _conv(self, conv_input: mx.array, cache: Any, mask: mx.array | None) -> mx.array:
        step = partial(super()._conv, cache=cache, mask=mask)  # type: ignore[misc]
        if not self.spans.ask(conv_input, mask, cache):
            return step(conv_input)
        return self.spans.run(cache, (0,), step, partial(self._record_conv, step, cache), conv_input)

    def _record_conv(
        self, step: Callable[..., mx.array], cache: Any, journal: Journal, conv_input: mx.array
    ) -> mx.array:
        keep_window(journal, cache, 0, conv_input, self.conv_kernel_size - 1)
        return step(conv_input)

    def _ssm(
        self, hidden_states: mx.array, B: mx.array, C: mx.array, dt: mx.array, cache: Any, mask: mx.array | None
    ) -> mx.array:
        step = partial(super()._ssm, cache=cache, mask=mask)  # type: ignore[misc]
        if not self.spans.ask(hidden_states, mask, cache):
            return step(hidden_states, B, C, dt)
        record = partial(self._record_ssm, step, cache)
        return self.spans.run(cache, (1,), step, record, hidden_states, B, C, dt)

    def _record_ssm(self, step: Callable[..., mx.array], cache: Any, journal: Journal, *inputs: mx.array) -> mx.array:
        if self.spans.few and journal.width <= MOST and all(x.dtype == mx.float32 for x in inputs):
            return self._record_few(cache, journal, *inputs)
        before = cache[1]
        journal.keep(cache, (1,), [before, *inputs], self._after, fresh=before is None)
        return mx.concatenate([step(*(x[:, t : t + 1] for x in inputs)) for t in range(journal.width)], axis=1)

    def _record_few(
        self, cache: Any, journal: Journal, x: mx.array, b: mx.array, c: mx.array, dt: mx.array
    ) -> mx.array:
        rows, D = x.shape[:2]
        x = x.reshape(rows, D, self.A_log.size, -1)
        b, c = (part.reshape(rows, D, getattr(self, "n_groups", 1), -1) for part in (b, c))
        fresh, state = cache[1] is None, cache[1]
        if state is None:
            state = mx.zeros((rows, *x.shape[2:], b.shape[-1]))
        limits = getattr(self, "time_step_limit", LIMITS)
        y, kept = mamba2_few(x, b, c, dt, self.A_log, self.dt_bias, self.D, state, limits)
        journal.keep(cache, (1,), kept, lambda kept, rows: [after_few(kept, rows)], fresh=fresh)
        cache[1] = after_few(kept, D)
        return y.reshape(rows, D, -1)

    def _after(self, kept: Kept, rows: Rows) -> list[mx.array]:
        before, *inputs = kept

        def step(state: mx.array | None, *token: mx.array) -> mx.array:
            cache = ArraysCache(2)
            cache[1] = state
            super(_Mamba2, self)._ssm(*token, cache=cache, mask=None)  # type: ignore[misc]
            return cache[1]

        return [scan(step, before, inputs, rows)]


class SpannedFalconH1Mixer(_Mamba2, FalconH1Mixer): ...


class SpannedNemotronHMamba2Mixer(_Mamba2, NemotronHMamba2Mixer): ...


class SpannedGraniteMoeHybridMamba2Mixer(_Mamba2, GraniteMoeHybridMamba2Mixer): ...


class SpannedMamba2Block(_Mamba2, mamba2.Mamba2Block): ...


class SpannedPlamo2Mamba(_Mamba2, plamo2.Mamba): ...


class _ShortConv:
    """A gated short convolution, whose window (slot 0) is its only state."""

    spans: Spans
    L_cache: int

    def __call__(self, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        if not self.spans.ask(x, mask, cache):
            return super().__call__(x, mask, cache)  # type: ignore[misc]
        B, C, x = mx.split(self.in_proj(x), 3, axis=-1)  # type: ignore[attr-defined]
        out = self.spans.run(cache, (0,), partial(self._convolve, cache), partial(self._record, cache), B * x)
        cache.advance(x.shape[1])
        return self.out_proj(C * out)  # type: ignore[attr-defined]

    def _convolve(self, cache: Any, x: mx.array) -> mx.array:
        """[B, S, H] -> [B, S, H]."""
        window = joined(cache[0], x, self.L_cache - 1)
        cache[0] = window[:, -(self.L_cache - 1) :]
        return self.conv(window)  # type: ignore[attr-defined]

    def _record(self, cache: Any, journal: Journal, x: mx.array) -> mx.array:
        keep_window(journal, cache, 0, x, self.L_cache - 1)
        return self._convolve(cache, x)


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
