"""DeepSeek-V4 in NumPy and float64, for all tokens at once: from the equations alone, with none of the package's code.

A token's row of a layer is computed from the definition of what it sees: raw rows max(0, p − w + 1) … p, and entries
n < (p + 1) // ratio, each of them from the whole prompt. Nothing is remembered, cut, planned or kept in a ring.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray


def logits(weights: dict[str, Array], config: dict[str, Any], ids: list[int]) -> Array:
    """[len(ids), vocabulary]; ``weights`` by the model's own names, ``config`` a whole config.json."""
    return Oracle(weights, config).run(ids)


def softmax(x: Array, axis: int = -1) -> Array:
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def entry(kv: Array, gate: Array, ape: Array, n: int, ratio: int, overlap: bool) -> Array:
    """Entry ``n`` before it is normalised; kv, gate [tokens, c·d], ape [ratio, c·d] -> [d]."""
    d = kv.shape[1] // (2 if overlap else 1)
    own = range(n * ratio, (n + 1) * ratio)
    high = slice(d, 2 * d) if overlap else slice(0, d)
    values = [kv[p, high] for p in own]
    logit = [gate[p, high] + ape[p % ratio, high] for p in own]
    if overlap and n:
        values += [kv[p - ratio, :d] for p in own]
        logit += [gate[p - ratio, :d] + ape[p % ratio, :d] for p in own]
    return (softmax(np.array(logit), 0) * np.array(values)).sum(0)


def index_scores(q: Array, keys: Array, w: Array) -> Array:
    """q [H, d], keys [n, d], w [H] -> [n]."""
    heads, d = q.shape
    return np.maximum(keys @ q.T, 0) @ w / math.sqrt(heads * d)


def attention(q: Array, rows: Array, sink: float, scale: float) -> tuple[Array, Array]:
    """q [d], rows [n, d] -> (weights [n], Σ weights · rows), the sink in the denominator."""
    e = np.exp(np.append(rows @ q * scale, sink))
    weights = (e / e.sum())[:-1]
    return weights, weights @ rows


class Oracle:
    def __init__(self, weights: dict[str, Array], config: dict[str, Any]) -> None:
        self.w = {name: np.asarray(array, np.float64) for name, array in weights.items()}
        self.c = config

    def run(self, ids: list[int]) -> Array:
        c, w = self.c, self.w
        x = w["model.embed_tokens.weight"][ids]
        streams = np.repeat(x[:, None], c["hc_mult"], axis=1)  # [T, hc, hidden]
        for i in range(c["num_hidden_layers"]):
            self.at = f"model.layers.{i}."
            streams = self.around("attn_hc", "input_layernorm", streams, lambda x, i=i: self.attend(x, i))
            streams = self.around("ffn_hc", "post_attention_layernorm", streams, lambda x, i=i: self.experts(x, i, ids))
        flat = self.unit(streams.reshape(len(ids), -1))
        pre = sigmoid(flat @ w["model.hc_head.fn"].T * w["model.hc_head.scale"] + w["model.hc_head.base"]) + self.of(
            "hc_eps", 1e-6
        )
        x = (pre[..., None] * streams).sum(1)
        return self.unit(x) * w["model.norm.weight"] @ w["lm_head.weight"].T

    def of(self, name: str, default: Any) -> Any:
        return self.c.get(name, default)

    def p(self, name: str) -> Array:
        return self.w[self.at + name]

    def unit(self, x: Array) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.c["rms_norm_eps"])

    # manifold-constrained hyper-connections

    def around(self, hc: str, norm: str, streams: Array, part: Any) -> Array:
        n, eps = self.c["hc_mult"], self.of("hc_eps", 1e-6)
        mix = self.unit(streams.reshape(len(streams), -1)) @ self.p(f"{hc}.fn").T
        scale, base = self.p(f"{hc}.scale"), self.p(f"{hc}.base")
        pre = sigmoid(mix[:, :n] * scale[0] + base[:n]) + eps
        post = 2 * sigmoid(mix[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        comb = softmax((mix[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n)) + eps
        comb = comb / (comb.sum(1, keepdims=True) + eps)
        for _ in range(self.c["hc_sinkhorn_iters"] - 1):
            comb = comb / (comb.sum(2, keepdims=True) + eps)
            comb = comb / (comb.sum(1, keepdims=True) + eps)
        out = part(self.unit((pre[..., None] * streams).sum(1)) * self.p(f"{norm}.weight"))
        return post[..., None] * out[:, None] + np.einsum("tjk,tjd->tkd", comb, streams)

    # attention

    def attend(self, x: Array, i: int) -> Array:
        c, tokens = self.c, len(x)
        ratio, heads, d = c["compress_ratios"][i], c["num_attention_heads"], c["head_dim"]
        residual = self.unit(x @ self.p("self_attn.q_a_proj.weight").T) * self.p("self_attn.q_a_norm.weight")
        q = self.unit((residual @ self.p("self_attn.q_b_proj.weight").T).reshape(tokens, heads, d))
        kv = self.unit(x @ self.p("self_attn.kv_proj.weight").T) * self.p("self_attn.kv_norm.weight")
        q = np.array([self.turned(q[t], t, ratio) for t in range(tokens)])
        kv = np.array([self.turned(kv[t], t, ratio) for t in range(tokens)])
        entries = self.compressed(x, "self_attn.compressor.", ratio) if ratio else None
        chosen = self.chosen(x, residual, ratio) if ratio == 4 else None
        out = []
        for t in range(tokens):
            seen = kv[max(0, t - c["sliding_window"] + 1) : t + 1]
            if entries is not None:
                some = range((t + 1) // ratio) if chosen is None else chosen[t]
                seen = np.concatenate([seen, entries[list(some)]]) if len(some) else seen
            sinks = self.p("self_attn.sinks")
            row = np.array([attention(q[t, h], seen, sinks[h], d**-0.5)[1] for h in range(heads)])
            out.append(self.turned(row, -t, ratio))
        groups = np.array(out).reshape(tokens, c["o_groups"], -1)
        low = np.einsum("tgi,goi->tgo", groups, self.p("self_attn.o_a_proj.weight"))
        return low.reshape(tokens, -1) @ self.p("self_attn.o_b_proj.weight").T

    def compressed(self, x: Array, name: str, ratio: int) -> Array:
        kv, gate = x @ self.p(f"{name}kv_proj.weight").T, x @ self.p(f"{name}gate_proj.weight").T
        made = []
        for n in range(len(x) // ratio):
            latent = entry(kv, gate, self.p(f"{name}ape"), n, ratio, ratio == 4)
            made.append(self.turned(self.unit(latent) * self.p(f"{name}kv_norm.weight"), n * ratio, ratio))
        return np.array(made).reshape(len(made), -1)

    def chosen(self, x: Array, residual: Array, ratio: int) -> list[list[int]]:
        heads, d = self.c["index_n_heads"], self.c["index_head_dim"]
        q = (residual @ self.p("self_attn.indexer.q_b_proj.weight").T).reshape(len(x), heads, d)
        w = x @ self.p("self_attn.indexer.weights_proj.weight").T
        keys = self.compressed(x, "self_attn.indexer.compressor.", ratio)
        out = []
        for t in range(len(x)):
            n = (t + 1) // ratio
            scored = index_scores(self.turned(q[t], t, ratio), keys[:n], w[t]) if n else np.zeros(0)
            out.append(sorted(np.argsort(-scored, kind="stable")[: self.c["index_topk"]].tolist()))
        return out

    def turned(self, x: Array, position: int, ratio: int) -> Array:
        """The last dimensions in interleaved pairs, each pair as a complex number times exp(i · position · θ)."""
        dims = self.c["qk_rope_head_dim"]
        # in float32 as in the reference, so that the angle of a late position is rounded as it is there
        angle = np.float32(position) * self.frequencies(dims, ratio).astype(np.float32)
        pairs = x[..., -dims:].reshape(*x.shape[:-1], -1, 2)
        z = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angle)
        return np.concatenate([x[..., :-dims], np.stack([z.real, z.imag], -1).reshape(*x.shape[:-1], dims)], axis=-1)

    def frequencies(self, dims: int, ratio: int) -> Array:
        base = self.c["compress_rope_theta" if ratio else "rope_theta"]
        plain = base ** -(np.arange(0, dims, 2) / dims)
        scaling = self.c.get("rope_scaling") or {}
        if not ratio or not scaling:
            return plain
        trained = scaling["original_max_position_embeddings"]

        def dimension(turns: float) -> float:  # the one that turns so often in the trained length
            return dims * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

        low = max(math.floor(dimension(scaling.get("beta_fast", 32))), 0)
        high = min(math.ceil(dimension(scaling.get("beta_slow", 1))), dims - 1)
        ramp = np.clip((np.arange(dims // 2) - low) / (max(high - low, 0.001)), 0, 1)
        return plain / scaling["factor"] * ramp + plain * (1 - ramp)

    # experts

    def experts(self, x: Array, i: int, ids: list[int]) -> Array:
        c = self.c
        scored = np.sqrt(np.logaddexp(0, x @ self.p("mlp.gate.weight").T))
        out = []
        for t, row in enumerate(x):
            if i < c["num_hash_layers"]:
                some = [int(e) for e in self.p("mlp.gate.tid2eid")[ids[t]]]
            else:
                order = np.argsort(-(scored[t] + self.p("mlp.gate.e_score_correction_bias")))
                some = [int(e) for e in order[: c["num_experts_per_tok"]]]
            total = scored[t][some].sum()
            made = self.unit_of(row, "mlp.shared_experts.", None)
            for e in some:
                part = self.unit_of(row, "mlp.experts.switch_mlp.", e)
                made = made + part * scored[t][e] / total * c["routed_scaling_factor"]
            out.append(made)
        return np.array(out)

    def unit_of(self, x: Array, name: str, expert: int | None) -> Array:
        gate, up, down = (self.p(f"{name}{part}_proj.weight") for part in ("gate", "up", "down"))
        if expert is not None:
            gate, up, down = gate[expert], up[expert], down[expert]
        limit = self.c["swiglu_limit"]
        g, u = np.minimum(gate @ x, limit), np.clip(up @ x, -limit, limit)
        return down @ (g * sigmoid(g) * u)
