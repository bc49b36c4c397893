"""The network: hyper-connections around attention and experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import deepseek_v41 as v41

from ...cache.compressed import CompressedCache
from .attention import Attention
from .checkpoint import sanitize
from .config import OVERLAPPING, ModelArgs


def collapse(streams: mx.array, pre: mx.array) -> mx.array:
    """streams [B, S, hc, hidden] weighted by pre [B, S, hc] -> [B, S, hidden]."""
    return mx.sum(pre[..., None] * streams.astype(mx.float32), axis=2).astype(streams.dtype)


def expand(x: mx.array, streams: mx.array, post: mx.array, comb: mx.array) -> mx.array:
    """A layer's output x [B, S, hidden] into each stream by post [B, S, hc], and the streams mixed: stream k is
    post_k · x + Σ_j comb[j, k] · stream_j (comb [B, S, hc, hc])."""
    mixed = mx.sum(comb[..., None] * streams[..., :, None, :], axis=2)
    return (post[..., None] * x[..., None, :] + mixed).astype(streams.dtype)


class HyperHead(nn.Module):
    """What makes one row of the streams, before the last normalisation."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.hc_eps, self.norm_eps = args.hc_eps, args.rms_norm_eps
        self.fn = mx.zeros((args.hc_mult, args.hc_mult * args.hidden_size), dtype=mx.float32)
        self.base = mx.zeros((args.hc_mult,), dtype=mx.float32)
        self.scale = mx.ones((1,), dtype=mx.float32)

    def __call__(self, streams: mx.array) -> mx.array:
        flat = streams.reshape(*streams.shape[:2], -1).astype(mx.float32)
        flat = mx.fast.rms_norm(flat, None, self.norm_eps)
        return collapse(streams, mx.sigmoid((flat @ self.fn.T) * self.scale + self.base) + self.hc_eps)


class HashRouter(nn.Module):
    """Which experts a token goes to is looked up by its id; how much each counts is learned."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.weight = mx.zeros((args.n_routed_experts, args.hidden_size), dtype=mx.float32)
        self.tid2eid = mx.zeros((args.vocab_size, args.num_experts_per_tok), dtype=mx.int32)
        self.score_func, self.route_scale = args.scoring_func, args.routed_scaling_factor

    def __call__(self, x: mx.array, ids: mx.array) -> tuple[mx.array, mx.array]:
        """x [n, hidden] of tokens ``ids`` [n] -> experts and their weights, [n, k] each."""
        logits = x.astype(mx.float32) @ self.weight.astype(mx.float32).T
        if self.score_func == "sigmoid":
            scored = mx.sigmoid(logits)
        elif self.score_func == "softmax":
            scored = mx.softmax(logits, axis=-1)
        else:
            scored = mx.sqrt(nn.softplus(logits))
        chosen = self.tid2eid[ids]
        weights = mx.take_along_axis(scored, chosen, axis=-1)
        weights = weights / (mx.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return chosen, weights * self.route_scale


class MoE(v41.MoE):
    """mlx-lm's, or with experts by token id."""

    def __init__(self, args: ModelArgs, hashed: bool) -> None:
        super().__init__(args)
        self.hashed = hashed
        if hashed:
            self.gate = HashRouter(args)

    def run(self, x: mx.array, ids: mx.array) -> mx.array:
        """x [B, S, hidden] of tokens ``ids`` [B, S]."""
        if not self.hashed:
            return self(x)
        flat = x.reshape(-1, self.dim)
        chosen, weights = self.gate(flat, ids.reshape(-1))
        out = self.experts(flat, chosen, weights) + self.shared_experts(flat).astype(mx.float32)
        return out.reshape(x.shape).astype(x.dtype)


class DecoderLayer(nn.Module):
    """Unlike DeepSeek-V4.1's, a part is fed from the streams by weights of its own hyper-connection."""

    def __init__(self, args: ModelArgs, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(args, layer)
        self.mlp = MoE(args, layer < args.num_hash_layers)
        self.input_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.attn_hc = v41.HyperConnection(args)
        self.ffn_hc = v41.HyperConnection(args)

    def __call__(self, streams: mx.array, ids: mx.array, offset: int | mx.array, cache: Any) -> mx.array:
        pre, post, comb = self.attn_hc(streams)
        out = self.self_attn(self.input_layernorm(collapse(streams, pre)), offset, cache)
        streams = expand(out, streams, post, comb)
        pre, post, comb = self.ffn_hc(streams)
        out = self.mlp.run(self.post_attention_layernorm(collapse(streams, pre)), ids)
        return expand(out, streams, post, comb)


class TextModel(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [DecoderLayer(args, i) for i in range(args.num_hidden_layers)]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.hc_head = HyperHead(args)
        self.hc_mult = args.hc_mult

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        """ids [B, S] -> hidden states after the last normalisation, [B, S, hidden]."""
        embedded = self.embed_tokens(ids)
        shape = (*embedded.shape[:2], self.hc_mult, embedded.shape[2])
        streams = mx.broadcast_to(embedded[:, :, None], shape)
        offset = cache[0].offset  # of all: the first layer counts these tokens before the second one reads its own
        for layer, held in zip(self.layers, cache, strict=True):
            streams = layer(streams, ids, offset, held)
        return self.norm(self.hc_head(streams))


class Model(nn.Module):
    def __init__(self, config: ModelArgs) -> None:
        super().__init__()
        self.args, self.model_type = config, config.model_type
        self.model = TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None) -> mx.array:
        """inputs [B, S] -> logits [B, S, vocabulary]. Without ``cache`` (B = 1) nothing is remembered."""
        return self.lm_head(self.model(inputs, self.make_cache() if cache is None else cache))

    @property
    def layers(self) -> list[DecoderLayer]:
        return self.model.layers

    def make_cache(self) -> list[CompressedCache]:
        args, dtype = self.args, self.model.norm.weight.dtype
        return [
            CompressedCache(
                window=args.sliding_window,
                ratio=ratio,
                overlap=ratio == OVERLAPPING,
                head_dim=args.head_dim,
                index_dim=args.index_head_dim if ratio == OVERLAPPING else None,
                dtype=dtype,
            )
            for ratio in args.ratios
        ]

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        return sanitize(weights, self.args)

    @property
    def cast_predicate(self) -> Callable[[str], bool]:
        """What stays as it is when weights are cast: the reference keeps these in float32."""
        kept = ("attn_hc.", "ffn_hc.", "hc_head.", "sinks", "e_score_correction_bias", "compressor.", "gate.weight")
        return lambda name: not any(part in name for part in kept)

    @property
    def quant_predicate(self) -> Callable[[str, nn.Module], bool]:
        """What may be quantised: the reference keeps what makes entries, and what chooses them, as it is."""
        return lambda name, module: "compressor." not in name and not name.endswith("weights_proj")
