"""Mamba-2's scan over the few tokens of a verify forward, for the CPU, and what the state after any of them is made of.

Per head, with state S [Dh, Ds], step size d, decay g = exp(-exp(A_log) d), input x, matrices B and C, token by token:

    S = g S + d x B^T;   y = S C + D x

(Dao and Gu, "Transformers are SSMs", 2024, arXiv:2405.21060). With D_ij = g_{j+1} ... g_i and c_i = g_1 ... g_i, of all
tokens at once: y_i = c_i S_0 C_i + sum_{j<=i} D_ij (B_j . C_i) d_j x_j. The state after r tokens has the form of the
gated delta rule's, with d_j x_j for what token j brings: ``gated_delta_few.after_few``.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from .gated_delta_few import constants


def mamba2_few(
    x: mx.array,
    b: mx.array,
    c: mx.array,
    dt: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    skip: mx.array,
    state: mx.array,
    limits: tuple[float, float],
) -> tuple[mx.array, list[mx.array]]:
    """``x`` [B, D, H, Dh], ``b`` and ``c`` [B, D, G, Ds] with H a multiple of G, ``dt`` [B, D, H] before its softplus,
    which is kept within ``limits``; ``A_log``, ``dt_bias``, ``skip`` [H], ``state`` [B, H, Dh, Ds]; all float32. Gives
    back y [B, D, H, Dh] and what ``after_few`` makes states of, the state before first."""
    sums, there, _, _ = constants(x.shape[1])
    y, *kept = _few(x, b, c, dt, A_log, dt_bias, skip, state, sums, there, *limits)
    return y, [state, *kept]


@mx.compile  # by shape, as for the gated delta rule
def _few(
    x: mx.array,
    b: mx.array,
    c: mx.array,
    dt: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    skip: mx.array,
    state: mx.array,
    sums: mx.array,
    there: mx.array,
    least: float,
    most: float,
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """y [B, D, H, Dh]; what the state takes in, u [B, G, R, D, Dh] and b [B, G, D, Ds]; decays [B, G, R, D + 1, D + 1],
    of row i, column j: from the state before (j = 0) or from what token j brought, until after token i."""
    B, D, H, Dh = x.shape
    G, Ds = b.shape[2:]
    R = H // G
    dt = mx.clip(nn.softplus(dt + dt_bias), least, most)
    log_g = dt * -mx.exp(A_log)
    decays = mx.exp(log_g.swapaxes(1, 2) @ sums).reshape(B, G, R, D + 1, D + 1) * there
    since, between = decays[..., 1:, :1], decays[..., 1:, 1:]
    u = (x * dt[..., None]).reshape(B, D, G, R, Dh).transpose(0, 2, 3, 1, 4)
    b, c = b.transpose(0, 2, 1, 3), c.transpose(0, 2, 1, 3)
    alike = (c @ b.swapaxes(-1, -2))[:, :, None]
    read = (c @ state.reshape(B, G, R * Dh, Ds).swapaxes(-1, -2)).reshape(B, G, D, R, Dh).swapaxes(2, 3)
    y = since * read + (alike * between) @ u
    return y.transpose(0, 3, 1, 2, 4).reshape(B, D, H, Dh) + x * skip[:, None], u, b, decays
