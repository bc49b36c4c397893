"""The gated delta rule over many tokens at once, for the CPU, and the layers that use it.

Per value head, with state S [Dv, Dk], decay g, step size beta, key k, value v and query q, token by token:

    S' = g S;   u = beta (v - S' k);   S = S' + u k^T;   y = S q

A chunk of C tokens from state S0 is solved as a whole. Let D_ij = g_{j+1} ... g_i for j <= i and c_i = g_1 ... g_i:

    (I + A) U = diag(beta) V - diag(beta c) K S0^T,    A_ij = beta_i D_ij (k_i . k_j) for j < i
    Y = diag(c) Q S0^T + (D * Q K^T) U,                S = c_C S0 + sum_j D_Cj u_j k_j^T

(the WY form of a product of Householder-like factors; Yang et al., "Gated Delta Networks", 2024, arXiv:2412.06464). The
triangular inverse and everything that does not depend on S0 is computed for all chunks together; a short loop carries
the state. Decays enter as sums of logarithms over the very span they cover, so nothing is divided, nothing overflows,
and a strong decay does not swallow the digits of a weak one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import gated_delta_update, normalize_qk
from mlx_lm.models.qwen3_5 import GatedDeltaNet
from mlx_lm.models.qwen3_next import Qwen3NextGatedDeltaNet

from .activation import exp, silu
from .gated_delta_few import MOST, after_few, gated_delta_few
from .journal import Journal, Kept, Rows, joined, keep_window, scan
from .norm import rms_norm

CHUNK = 32  # tokens; measured best of 16, 32, 64 at 4 heads of 32 x 32 (exponentials grow with it, the loop shrinks)
MIN_TOKENS = 8  # below this, the token-by-token step is as fast


def log_decay(a: mx.array, A_log: mx.array, dt_bias: mx.array) -> mx.array:
    """log g [B, T, Hv], float32, from the projection ``a`` [B, T, Hv]: -exp(A_log) softplus(a + dt_bias)."""
    return -mx.exp(A_log.astype(mx.float32)) * nn.softplus(a + dt_bias)


def chunked_gated_delta(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_g: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    *,
    chunk: int = CHUNK,
) -> tuple[mx.array, mx.array]:
    """The gated delta rule over T tokens.

    ``q``, ``k`` [B, T, Hk, Dk] (normalised and scaled as mlx-lm's ``normalize_qk`` does), ``v`` [B, T, Hv, Dv] with Hv
    a multiple of Hk, ``log_g`` (<= 0) and ``beta`` [B, T, Hv], ``state`` [B, Hv, Dv, Dk] or None for zeros. Computes in
    float32. Gives back y [B, T, Hv, Dv] in ``q``'s dtype and the new state in float32. Any T >= 1.
    """
    out_type = q.dtype
    B, T, Hk, Dk = q.shape
    Hv, Dv = v.shape[-2:]
    R, C = Hv // Hk, min(chunk, T)
    N = -(-T // C)

    def split(x: mx.array, groups: int) -> mx.array:
        """[B, T, Hk * groups, ...] -> [B, Hk, groups, N, C, ...]; padding tokens (zeros) leave the state as it is."""
        x = x.astype(mx.float32)
        if N * C > T:
            x = mx.pad(x, [(0, 0), (0, N * C - T)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(B, N, C, Hk, groups, *x.shape[3:])
        return x.transpose(0, 3, 4, 1, 2, *range(5, x.ndim))

    q, k, v = mx.contiguous(split(q, 1)), mx.contiguous(split(k, 1)), split(v, R)
    log_g, beta = mx.contiguous(split(log_g, R)), split(beta, R)[..., None]

    # Sums of log g over (j, i], each added up on its own: differences of running sums would cancel.
    strict = mx.tril(mx.ones((C, C)), -1)
    decay = exp(mx.cumsum(log_g[..., None] * strict, axis=-2)) * mx.tril(mx.ones((C, C)))
    since_start = exp(mx.cumsum(log_g, axis=-1))[..., None]  # [B, Hk, R, N, C, 1]

    kt = k.swapaxes(-1, -2)
    system = (k @ kt) * (decay * beta) * strict + mx.eye(C)
    inverse = mx.linalg.tri_inv(system)
    scaled = mx.concatenate([k * (beta * since_start), v * beta], axis=-1)
    solved = inverse @ scaled
    w, u = solved[..., :Dk], solved[..., Dk:]
    to_end = kt * decay[..., -1:, :]  # [B, Hk, R, N, Dk, C]
    keep = since_start[..., -1:, :]

    if state is None:
        s = mx.zeros((B, Hk, R, Dk, Dv), dtype=mx.float32)
    else:
        s = state.astype(mx.float32).reshape(B, Hk, R, Dv, Dk).swapaxes(-1, -2)
    before, updates = [], []
    for n in range(N):
        before.append(s)
        update = u[:, :, :, n] - w[:, :, :, n] @ s
        updates.append(update)
        s = s * keep[:, :, :, n] + to_end[:, :, :, n] @ update
    y = (q * since_start) @ mx.stack(before, axis=3) + ((q @ kt) * decay) @ mx.stack(updates, axis=3)
    y = y.transpose(0, 3, 4, 1, 2, 5).reshape(B, N * C, Hv, Dv)[:, :T]
    return y.astype(out_type), mx.contiguous(s.swapaxes(-1, -2).reshape(B, Hv, Dv, Dk))


@partial(mx.compile, shapeless=True)
def _gates(a: mx.array, b: mx.array, A_log: mx.array, dt_bias: mx.array) -> tuple[mx.array, mx.array]:
    return mx.exp(-mx.exp(A_log.astype(mx.float32)) * nn.softplus(a + dt_bias)), mx.sigmoid(b)


@partial(mx.compile, shapeless=True)
def _unit(x: mx.array, squares: mx.array) -> mx.array:
    return x * mx.rsqrt(squares + 1e-6)


@partial(mx.compile, shapeless=True)
def _update(
    v: mx.array, g: mx.array, beta: mx.array, read_k: mx.array, read_q: mx.array, qk: mx.array, scale: float
) -> tuple[mx.array, mx.array]:
    u = (v - g * read_k) * beta
    return u, (g * read_q + u * qk) * scale


@partial(mx.compile, shapeless=True)
def _write(state: mx.array, g: mx.array, u: mx.array, k: mx.array) -> mx.array:
    return state * g + u * k


def gated_delta_step(
    qk: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    state: mx.array,
) -> tuple[mx.array, mx.array]:
    """One token, in half the operations: the old state is read once, by key and query together, since
    S q = g (S_old q) + u (k . q).

    ``qk`` [B, 2, Hk, Dk] (query first, not normalised), ``v`` [B, Hv, Dv], ``a`` and ``b`` [B, Hv], ``state``
    [B, Hv, Dv, Dk]; all float32. Gives back y [B, Hv, Dv] and the new state.
    """
    B, _, Hk, Dk = qk.shape
    Hv, Dv = v.shape[1:]
    R = Hv // Hk
    g, beta = _gates(a, b, A_log, dt_bias)
    g, beta = g.reshape(B, Hk, R, 1), beta.reshape(B, Hk, R, 1)
    qk = _unit(qk, mx.square(qk).sum(axis=-1, keepdims=True))
    q, k = qk[:, 0], qk[:, 1]
    read = (state.reshape(B, Hk, R * Dv, Dk) @ qk.transpose(0, 2, 3, 1)).reshape(B, Hk, R, Dv, 2)
    alike = (q * k).sum(axis=-1)[..., None, None]
    u, y = _update(v.reshape(B, Hk, R, Dv), g, beta, read[..., 1], read[..., 0], alike, Dk**-0.5)
    state = _write(state.reshape(B, Hk, R, Dv, Dk), g[..., None], u[..., None], k[:, :, None, None])
    return y.reshape(B, Hv, Dv), state.reshape(B, Hv, Dv, Dk)


class _Parts:
    """What both layers share of their middle part: convolution and recurrence, as mlx-lm computes them."""

    conv_kernel_size: int
    key_dim: int
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    training: bool
    sharding_group: Any
    A_log: mx.array
    dt_bias: mx.array

    def recur(self, qkv: mx.array, a: mx.array, b: mx.array, cache: Any) -> mx.array:
        """Convolution and recurrence: y [B, S, Hv, Dv]. Rebinds the slots of ``cache``; does not advance it."""
        return self._recurrence(self._window(qkv, cache), a, b, cache)[0]

    def record(self, cache: Any, journal: Journal, qkv: mx.array, a: mx.array, b: mx.array) -> mx.array:
        """``recur``, with a journal of it."""
        before, window = cache[1], keep_window(journal, cache, 0, qkv, self.conv_kernel_size - 1)
        y, k, v = self._recurrence(window, a, b, cache)
        journal.keep(cache, (1,), [before, k, v, a, b], self._after, fresh=before is None)
        return y

    def _window(self, qkv: mx.array, cache: Any) -> mx.array:
        """[B, K - 1 + S, conv_dim]: the inputs of the convolution, those before this piece first."""
        return joined(cache[0] if cache is not None else None, qkv, self.conv_kernel_size - 1)

    def _recurrence(
        self, window: mx.array, a: mx.array, b: mx.array, cache: Any
    ) -> tuple[mx.array, mx.array, mx.array]:
        """y [B, S, Hv, Dv], and the keys and values that went in."""
        q, k, v = _heads(self, nn.silu(self.conv1d(window)))  # type: ignore[attr-defined]
        before = cache[1] if cache is not None else None
        rates = (a, b, self.A_log, self.dt_bias)
        y, state = gated_delta_update(q, k, v, *rates, before, use_kernel=not self.training)
        if cache is not None:
            cache[0] = mx.contiguous(window[:, -(self.conv_kernel_size - 1) :])
            cache[1] = state
        return y, k, v

    def _after(self, kept: Kept, rows: Rows) -> list[mx.array]:
        return [delta_after(kept, rows, self.A_log, self.dt_bias, use_kernel=not self.training)]


def delta_after(kept: Kept, rows: Rows, A_log: mx.array, dt_bias: mx.array, *, use_kernel: bool) -> mx.array:
    """The state of a gated delta rule after ``rows`` tokens, by mlx-lm's own recurrence. ``kept``: the state before or
    None, k, v, a, b of all D tokens, as ``gated_delta_update`` takes them."""
    before, *inputs = kept
    # on a GPU one kernel goes over all tokens; its masked form skips those that a row has not
    mask = None
    if isinstance(rows, int):
        inputs = [x[:, :rows] for x in inputs]
    elif mx.default_device() == mx.gpu:
        mask = mx.arange(inputs[0].shape[1]) < rows[:, None]

    def step(state: mx.array | None, k: mx.array, v: mx.array, a: mx.array, b: mx.array) -> mx.array:
        # the query makes no difference to the state
        return gated_delta_update(k, k, v, a, b, A_log, dt_bias, state, mask, use_kernel=use_kernel)[1]

    if isinstance(rows, int) or mask is not None:
        return step(before, *inputs)
    return scan(step, before, inputs, rows)


class GatedDeltaParts(_Parts, GatedDeltaNet):
    """Qwen3.5's layer cut in three, as mlx-lm computes it: ``project`` all tokens, ``recur`` over any number of them,
    ``finish`` all. Only one that is not sharded."""

    def project(self, inputs: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """[B, S, H] -> qkv [B, S, conv_dim], gate z [B, S, Hv, Dv], a and b [B, S, Hv]."""
        B, S, _ = inputs.shape
        z = self.in_proj_z(inputs).reshape(B, S, self.num_v_heads, self.head_v_dim)
        return self.in_proj_qkv(inputs), z, self.in_proj_a(inputs), self.in_proj_b(inputs)

    def finish(self, y: mx.array, z: mx.array) -> mx.array:
        """The layer's output [B, S, H]."""
        return self.out_proj(self.norm(y, z).reshape(*y.shape[:2], -1))


class NextGatedDeltaParts(_Parts, Qwen3NextGatedDeltaNet):
    """Qwen3-Next's layer, whose projections interleave the heads, cut in the same three."""

    sharding_group = None

    def project(self, inputs: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        B, S, _ = inputs.shape
        projected = self.fix_query_key_value_ordering(self.in_proj_qkvz(inputs), self.in_proj_ba(inputs))
        q, k, v, z, b, a = projected
        return mx.concatenate([part.reshape(B, S, -1) for part in (q, k, v)], axis=-1), z, a, b

    def finish(self, y: mx.array, z: mx.array) -> mx.array:
        return self.out_proj(self.norm(y, z).reshape(*y.shape[:2], -1))


def _heads(layer: Any, mixed: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """What the convolution gave, [B, S, conv_dim] -> q and k [B, S, Hk, Dk], ready for the recurrence, and v [B, S, Hv,
    Dv]."""
    B, S, _ = mixed.shape
    q, k, v = mx.split(mixed, [layer.key_dim, 2 * layer.key_dim], axis=-1)
    q = q.reshape(B, S, layer.num_k_heads, layer.head_k_dim)
    k = k.reshape(B, S, layer.num_k_heads, layer.head_k_dim)
    q, k = normalize_qk(q, k, inv_scale=layer.head_k_dim**-0.5, eps=1e-6)
    return q, k, v.reshape(B, S, layer.num_v_heads, layer.head_v_dim)


class _Chunked(_Parts):
    """What both layers share: convolution and recurrence of a prompt's piece, and when that way may be taken."""

    @staticmethod
    def gains(tokens: int, dtype: mx.Dtype, cache: Any) -> bool:
        """Whether its own way is the faster one: a long piece, or one float32 token."""
        return tokens >= MIN_TOKENS or (tokens == 1 and cache is not None and dtype == mx.float32)

    def __call__(self, inputs: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        padded = mask is not None or (cache is not None and cache.lengths is not None)
        own = not padded and not self.training and self.sharding_group is None
        if not own or not self.gains(inputs.shape[1], inputs.dtype, cache):
            return super().__call__(inputs, mask, cache)  # type: ignore[misc]
        qkv, z, a, b = self.project(inputs)  # type: ignore[attr-defined]
        y = self.recur(qkv, a, b, cache)
        if cache is not None:
            cache.advance(inputs.shape[1])
        return self.finish(y, z)

    def recur(self, qkv: mx.array, a: mx.array, b: mx.array, cache: Any) -> mx.array:
        B, S, _ = qkv.shape
        if not self.gains(S, qkv.dtype, cache):
            return super().recur(qkv, a, b, cache)  # type: ignore[misc]
        window = self._window(qkv, cache)  # type: ignore[attr-defined]
        mixed = silu(self.conv1d(window))  # type: ignore[attr-defined]
        before = cache[1] if cache is not None else None
        if S == 1 and before is not None:
            qk, v = mx.split(mixed[:, 0], [2 * self.key_dim], axis=-1)
            y, state = gated_delta_step(
                qk.reshape(B, 2, self.num_k_heads, self.head_k_dim),
                v.reshape(B, self.num_v_heads, self.head_v_dim),
                a[:, 0],
                b[:, 0],
                self.A_log,  # type: ignore[attr-defined]
                self.dt_bias,  # type: ignore[attr-defined]
                before,
            )
            y = y[:, None]
        else:
            q, k, v = _heads(self, mixed)
            decay = log_decay(a, self.A_log, self.dt_bias)  # type: ignore[attr-defined]
            y, state = chunked_gated_delta(q, k, v, decay, mx.sigmoid(b), before)
        if cache is not None:
            cache[0] = mx.contiguous(window[:, -(self.conv_kernel_size - 1) :])
            cache[1] = state
        return y

    def record(self, cache: Any, journal: Journal, qkv: mx.array, a: mx.array, b: mx.array) -> mx.array:
        B, D, _ = qkv.shape
        if D > MOST or qkv.dtype != mx.float32:
            return super().record(cache, journal, qkv, a, b)  # type: ignore[misc]
        window = keep_window(journal, cache, 0, qkv, self.conv_kernel_size - 1)
        qk, v = mx.split(silu(self.conv1d(window)), [2 * self.key_dim], axis=-1)  # type: ignore[attr-defined]
        fresh, state = cache[1] is None, cache[1]
        if state is None:
            state = mx.zeros((B, self.num_v_heads, self.head_v_dim, self.head_k_dim))
        y, kept = gated_delta_few(
            qk.reshape(B, D, 2, self.num_k_heads, self.head_k_dim),
            v.reshape(B, D, self.num_v_heads, self.head_v_dim),
            a,
            b,
            self.A_log,  # type: ignore[attr-defined]
            self.dt_bias,  # type: ignore[attr-defined]
            state,
        )
        journal.keep(cache, (1,), kept, _after_few, fresh=fresh)
        cache[0] = mx.contiguous(window[:, -(self.conv_kernel_size - 1) :])
        cache[1] = after_few(kept, D)
        return y

    def finish(self, y: mx.array, z: mx.array) -> mx.array:
        normed = rms_norm(y, self.norm.weight, self.norm.eps).astype(mx.float32)  # type: ignore[attr-defined]
        gated = (normed * silu(z.astype(mx.float32))).astype(y.dtype)
        return self.out_proj(gated.reshape(*y.shape[:2], -1))  # type: ignore[attr-defined]


def _after_few(kept: Kept, rows: Rows) -> list[mx.array]:
    return [after_few(kept, rows)]


class ChunkedGatedDeltaNet(_Chunked, GatedDeltaParts):
    """Qwen3.5's layer; a piece of a prompt goes by chunks, a single token by ``gated_delta_step``."""


class ChunkedNextGatedDeltaNet(_Chunked, NextGatedDeltaParts):
    """Qwen3-Next's layer, the same way."""
