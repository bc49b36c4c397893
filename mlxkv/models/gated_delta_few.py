"""The gated delta rule over the few tokens of a verify forward, for the CPU, and the state after any number of them.

One chunk of ``gated_delta.py``'s equations, in as few operations as they can be had, since of so few tokens it is the
number of operations that takes the time. What the state takes in, u, is on the way: so the state after r tokens is one
product more, S_r = c_r S_0 + sum_{j<=r} D_rj u_j k_j^T, and nobody has to compute it before r is known.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .journal import Kept, Rows

#: more tokens than this go by chunks; measured at 4 heads of 32 x 32 and 32 of 128 x 128
MOST = 16


@lru_cache(maxsize=MOST)
def constants(tokens: int) -> tuple[mx.array, ...]:
    """For D tokens: which logarithms of g each decay sums up, [D, (D + 1)^2] (l is in (j, i]); the decays that there
    are, j <= i [D + 1, D + 1]; those of earlier tokens, j < i [D, D]; the unit matrix [D, D]. Made from data, not by
    operations: the first to ask may be a trace."""
    n = tokens + 1
    token, i, j = np.ogrid[1:n, :n, :n]
    sums = ((j < token) & (token <= i)).reshape(tokens, n * n)
    made = sums, np.tri(n), np.tri(tokens, k=-1), np.eye(tokens)
    return tuple(mx.array(x.astype(np.float32)) for x in made)


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
    y, *kept = _few(qk, v, a, b, A_log, dt_bias, state, *constants(qk.shape[1]))
    return y, [state, *kept]


@mx.compile  # by shape: building the graph would take as long as computing it
def _few(
    qk: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    state: mx.array,
    sums: mx.array,
    there: mx.array,
    earlier: mx.array,
    unit: mx.array,
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """y [B, D, Hv, Dv]; what the state takes in, u [B, Hk, R, D, Dv] and k [B, Hk, D, Dk]; decays [B, Hk, R, D + 1, D +
    1], of row i, column j: from the state before (j = 0) or from what token j brought, until after token i."""
    B, D, _, Hk, Dk = qk.shape
    Hv, Dv = v.shape[2:]
    R = Hv // Hk
    log_g = -mx.exp(A_log) * nn.softplus(a + dt_bias)
    decays = mx.exp(log_g.swapaxes(1, 2) @ sums).reshape(B, Hk, R, D + 1, D + 1) * there
    beta = mx.sigmoid(b).swapaxes(1, 2).reshape(B, Hk, R, D, 1)
    since, between = decays[..., 1:, :1], decays[..., 1:, 1:]

    qk = qk.transpose(0, 3, 2, 1, 4)
    qk = (qk * mx.rsqrt(mx.square(qk).sum(axis=-1, keepdims=True) + 1e-6)).reshape(B, Hk, 2 * D, Dk)
    k = qk[:, :, D:]
    alike = (qk @ k.swapaxes(-1, -2)).reshape(B, Hk, 1, 2, D, D)
    read = (qk @ state.reshape(B, Hk, R * Dv, Dk).swapaxes(-1, -2)).reshape(B, Hk, 2, D, R, Dv)
    read = read.transpose(0, 1, 4, 2, 3, 5)

    given = (v.reshape(B, D, Hk, R, Dv).transpose(0, 2, 3, 1, 4) - since * read[:, :, :, 1]) * beta
    system = alike[:, :, :, 1] * between * beta * earlier + unit
    u = mx.linalg.tri_inv(system) @ given
    y = (since * read[:, :, :, 0] + (alike[:, :, :, 0] * between) @ u) * Dk**-0.5
    return y.transpose(0, 3, 1, 2, 4).reshape(B, D, Hv, Dv), u, k, decays


def after_few(kept: Kept, rows: Rows) -> mx.array:
    """The state [B, Hv, Dv, Dk] after the first ``rows`` tokens of a ``gated_delta_few``."""
    state, u, k, decays = kept
    if isinstance(rows, int):
        rows = mx.array([rows] * state.shape[0])
    return _after(state, u, k, decays, rows)


@mx.compile
def _after(state: mx.array, u: mx.array, k: mx.array, decays: mx.array, rows: mx.array) -> mx.array:
    B, Hk, R, D, Dv = u.shape
    row = mx.take_along_axis(decays, rows[:, None, None, None, None], axis=3)  # zero for tokens after the last
    taken = (u * row[..., 1:].swapaxes(-1, -2)).swapaxes(-1, -2).reshape(B, Hk, R * Dv, D) @ k
    state = state.reshape(B, Hk, R, Dv, -1) * row[..., :1] + taken.reshape(B, Hk, R, Dv, -1)
    return state.reshape(B, Hk * R, Dv, -1)
