"""From the tokens of a window to one compressed entry."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from .config import OVERLAPPING, ModelArgs
from .rotary import Rotary

_NEVER = -1e30  # finite: a row of nothing but −inf would make NaN of a softmax


class Compressor(nn.Module):
    """One entry of width ``head_dim`` for each ``ratio`` tokens.

    A window is those tokens and, where windows overlap, the ``ratio`` before them, of which then the low half of each
    row counts and of the others the high half. Per channel the entry is Σ softmax(gate + ape) · kv over the window's
    rows in float32, normalised, and rotated to the position of the first of its own tokens.
    """

    def __init__(self, args: ModelArgs, ratio: int, head_dim: int) -> None:
        super().__init__()
        self.ratio, self.head_dim, self.overlap = ratio, head_dim, ratio == OVERLAPPING
        self.width = head_dim * (2 if self.overlap else 1)
        self.kv_proj = nn.Linear(args.hidden_size, self.width, bias=False)
        self.gate_proj = nn.Linear(args.hidden_size, self.width, bias=False)
        self.ape = mx.zeros((ratio, self.width), dtype=mx.float32)
        self.kv_norm = nn.RMSNorm(head_dim, eps=args.rms_norm_eps)

    def rows(self, x: mx.array) -> mx.array:
        """x [B, S, hidden] -> what is remembered of each token until its windows are full: [B, S, 2 · width] float32,
        kv and gate."""
        x = x.astype(mx.float32)
        return mx.concatenate([self.kv_proj(x), self.gate_proj(x)], axis=-1)

    def pool(self, windows: mx.array, first: mx.array, there: mx.array, rotary: Rotary) -> mx.array:
        """windows [B, n, window, 2 · width], rows in order of position; ``first`` [n] or [B, n]: the position of the
        first of each entry's own tokens; ``there`` [(B,) n, window]: which rows there are. Gives back [B, n, head_dim]
        float32."""
        kv, gate, ape = windows[..., : self.width], windows[..., self.width :], self.ape
        if self.overlap:
            r, d = self.ratio, self.head_dim
            kv = mx.concatenate([kv[:, :, :r, :d], kv[:, :, r:, d:]], axis=2)
            gate = mx.concatenate([gate[:, :, :r, :d], gate[:, :, r:, d:]], axis=2)
            ape = mx.concatenate([ape[:, :d], ape[:, d:]], axis=0)
        there = there[..., None]
        kv, gate = mx.where(there, kv, 0.0), mx.where(there, gate + ape, _NEVER)
        latent = mx.sum(kv * mx.softmax(gate, axis=2), axis=2)
        return rotary.at(self.kv_norm(latent), mx.broadcast_to(first, latent.shape[:2]))
