"""The gated delta rule over the few tokens of a verify forward, for the CPU, and the state after any number of them.

One chunk of ``gated_delta.py``'s equations, in as few operations as they can be had, since of so few tokens it is the
number of operations that takes the time. What the state takes in, u, is on the way: so the state after r tokens is one
product more, S_r = c_r S_0 + sum_{j<=r} D_rj u_j k_j^T, and nobody has to compute it before r is known.
"""

from __future__ import annotations

from functools import lru_cache, partial

import mlx.core as mx
import mlx.nn as nn

from .journal import Kept, Rows

#: more tokens than this go by chunks; measured at 4 heads of 32 x 32 and 32 of 128 x 128
MOST = 16


@lru_cache(maxsize=MOST)
def _constants(tokens: int) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """For D tokens: which logarithms of g each decay sums up, [D, (D + 1)^2] (l is in (j, i]); the decays that there
    are, j <= i [D + 1, D + 1]; those of earlier tokens, j < i [D, D]; the unit matrix [D, D]."""
    n = tokens + 1
    at = mx.arange(n)
    i, j, token = at[None, :, None], at[None, None, :], mx.arange(1, n)[:, None, None]
    sums = ((j < token) & (token <= i)).astype(mx.float32).reshape(tokens, n * n)
    made = sums, mx.tril(mx.ones((n, n))), mx.tril(mx.ones((tokens, tokens)), -1), mx.eye(tokens)
    mx.eval(made)
    return made


@partial(mx.compile, shapeless=True)
def _gates(a: mx.array, b: mx.array, A_log: mx.array, dt_bias: mx.array) -> tuple[mx.array, mx.array]:
    return -mx.exp(A_log) * nn.softplus(a + dt_bias), mx.sigmoid(b)


@partial(mx.compile, shapeless=True)
def _unit(x: mx.array, squares: mx.array) -> mx.array:
    return x * mx.rsqrt(squares + 1e-6)


@partial(mx.compile, shapeless=True)
def _decays(sums: mx.array, there: mx.array) -> mx.array:
    return mx.exp(sums) * there


@partial(mx.compile, shapeless=True)
def _system(alike: mx.array, decay: mx.array, beta: mx.array, earlier: mx.array, unit: mx.array) -> mx.array:
    return alike * decay * beta * earlier + unit


@partial(mx.compile, shapeless=True)
def _given(v: mx.array, beta: mx.array, decay: mx.array, read: mx.array) -> mx.array:
    return (v - decay * read) * beta


@partial(mx.compile, shapeless=True)
def _out(decay: mx.array, read: mx.array, added: mx.array, scale: float) -> mx.array:
    return (decay * read + added) * scale


@partial(mx.compile, shapeless=True)
def _lead(state: mx.array, decay: mx.array, taken: mx.array) -> mx.array:
    return state * decay + taken


def gated_delta_few(
    qk: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    state: mx.array,
) -> tuple[mx.array, list[mx.array]]:
    """D tokens a row from ``state`` [B, Hv, Dv, Dk].

    ``qk`` [B, D, 2, Hk, Dk] (query first, not normalised), ``v`` [B, D, Hv, Dv], ``a`` and ``b`` [B, D, Hv]; all
    float32. Gives back y [B, D, Hv, Dv] and what ``after_few`` makes states of, the state before first.
    """
    B, D, _, Hk, Dk = qk.shape
    Hv, Dv = v.shape[2:]
    R = Hv // Hk
    sums, there, earlier, unit = _constants(D)
    log_g, beta = _gates(a, b, A_log, dt_bias)
    decays = _decays((log_g.swapaxes(1, 2) @ sums).reshape(B, Hk, R, D + 1, D + 1), there)
    beta = beta.swapaxes(1, 2).reshape(B, Hk, R, D, 1)
    since, between = decays[..., 1:, :1], decays[..., 1:, 1:]

    qk = qk.transpose(0, 3, 2, 1, 4)
    qk = _unit(qk, mx.square(qk).sum(axis=-1, keepdims=True)).reshape(B, Hk, 2 * D, Dk)
    k = qk[:, :, D:]
    alike = (qk @ k.swapaxes(-1, -2)).reshape(B, Hk, 1, 2, D, D)
    read = (qk @ state.reshape(B, Hk, R * Dv, Dk).swapaxes(-1, -2)).reshape(B, Hk, 2, D, R, Dv)
    read = read.transpose(0, 1, 4, 2, 3, 5)

    given = _given(v.reshape(B, D, Hk, R, Dv).transpose(0, 2, 3, 1, 4), beta, since, read[:, :, :, 1])
    u = mx.linalg.tri_inv(_system(alike[:, :, :, 1], between, beta, earlier, unit)) @ given
    y = _out(since, read[:, :, :, 0], (alike[:, :, :, 0] * between) @ u, Dk**-0.5)
    return y.transpose(0, 3, 1, 2, 4).reshape(B, D, Hv, Dv), [state, u, k, decays]


def after_few(kept: Kept, rows: Rows) -> mx.array:
    """The state [B, Hv, Dv, Dk] after the first ``rows`` tokens of a ``gated_delta_few``."""
    state, u, k, decays = kept
    B, Hk, R, D, Dv = u.shape
    if isinstance(rows, int):
        decays = decays[..., rows : rows + 1, :]
    else:
        decays = mx.take_along_axis(decays, rows[:, None, None, None, None], axis=3)
    # decays of tokens after the last are zero
    taken = u * decays[..., 1:].swapaxes(-1, -2)
    taken = taken.swapaxes(-1, -2).reshape(B, Hk, R * Dv, D) @ k
    made = _lead(state.reshape(B, Hk, R, -1), decays[..., 0], taken.reshape(B, Hk, R, -1))
    return made.reshape(state.shape)
