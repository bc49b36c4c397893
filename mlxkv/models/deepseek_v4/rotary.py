"""Rotary position embedding of the last dimensions, in interleaved pairs, forwards and back."""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.rope_utils import YarnRoPE

from .config import ModelArgs


class Rotary:
    """The angles of one layer: ``compress_rope_theta`` with YaRN (Peng et al., arXiv:2309.00071) where it has
    compressed entries, else ``rope_theta`` alone. Nothing here is a parameter."""

    def __init__(self, args: ModelArgs, compressed: bool) -> None:
        self.dims = args.qk_rope_head_dim
        made: Any = YarnRoPE  # its annotations are narrower than what it takes
        if compressed:
            yarn = args.yarn
            self.rope = made(
                dims=self.dims,
                traditional=True,
                base=args.compress_rope_theta,
                scaling_factor=float(yarn.get("factor", 1.0)),
                original_max_position_embeddings=int(
                    yarn.get("original_max_position_embeddings", args.max_position_embeddings)
                ),
                beta_fast=int(yarn.get("beta_fast", 32)),
                beta_slow=int(yarn.get("beta_slow", 1)),
                mscale=0.0,  # sines and cosines are not scaled
                mscale_all_dim=0.0,
            )
        else:
            self.rope = made(dims=self.dims, traditional=True, base=args.rope_theta)

    def run(self, x: mx.array, offset: int | mx.array, inverse: bool = False) -> mx.array:
        """x [B, S, D] or [B, S, H, D] of positions offset … offset + S − 1; ``offset``: a number, or [B]."""
        tail, turn = x[..., -self.dims :].astype(mx.float32), partial(self.rope, offset=offset, inverse=inverse)
        tail = turn(tail.swapaxes(1, 2)).swapaxes(1, 2) if x.ndim == 4 else turn(tail)
        return mx.concatenate([x[..., : -self.dims], tail.astype(x.dtype)], axis=-1)

    def at(self, x: mx.array, positions: mx.array) -> mx.array:
        """x [B, n, D], each row at its own position [B, n]."""
        flat = self.run(x.reshape(-1, 1, x.shape[-1]), positions.reshape(-1))
        return flat.reshape(x.shape)
