"""Prediction heads in PyTorch, written from their equations: nothing here knows of MLX or of mlxkv.

Run as a script it writes ``heads_reference.npz``, which the suite compares with where PyTorch is not installed:

    python -m tests.oracle.heads

Norms are RMSNorm(x) = x / sqrt(mean(x²) + eps) · w, with w = 1 + what is stored for Qwen heads. Rotary embeddings turn
pairs (i, i + d/2) of a head's first d numbers, DeepSeek's (2i, 2i + 1), by position · theta^(−2i/d).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from tests import heads

REFERENCE = Path(__file__).parent / "heads_reference.npz"
#: what is compared: (kind, layers)
CASES = [*((kind, 1) for kind in heads.KINDS), ("qwen3_5", 2), ("deepseek_v3", 2)]


class Head:
    """One head; ``rows(layer, embedded, hidden)`` are its outputs m, each row seeing those before it."""

    def __init__(self, kind: str, layers: int) -> None:
        self.kind, self.c, self.n_layers = kind, heads.config(kind), layers
        self.w = {n: torch.from_numpy(a) for n, a in heads.tensors(kind, layers=layers).items()}
        self.qwen, self.mimo = kind.startswith("qwen"), kind == "mimo"
        self.at = ""

    def get(self, name: str) -> Tensor:
        return self.w[self.at + name]

    def norm(self, x: Tensor, name: str) -> Tensor:
        w = self.get(name + ".weight") + (1 if self.qwen else 0)
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.c["rms_norm_eps"]) * w

    def lin(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.get(name + ".weight"), self.w.get(self.at + name + ".bias"))

    def rows(self, layer: int, embedded: Tensor, hidden: Tensor) -> Tensor:
        if self.qwen:
            self.at = "mtp."
            x = [self.norm(embedded, "pre_fc_norm_embedding"), self.norm(hidden, "pre_fc_norm_hidden")]
            x = self.lin(torch.cat(x, -1), "fc")
            self.at = f"mtp.layers.{layer}."
            y = self.block(x)
            self.at = "mtp."
            return self.norm(y, "norm")
        embedded = embedded.clone()
        embedded[0] = 0
        if self.mimo:
            self.at = "model.mtp_layers.0."
            x = [self.norm(hidden, "hidden_layernorm"), self.norm(embedded, "token_layernorm")]
            return self.norm(self.block(self.lin(torch.cat(x, -1), "input_proj")), "final_layernorm")
        self.at = f"model.layers.{self.c['num_hidden_layers'] + layer}."
        x = torch.cat([self.norm(embedded, "enorm"), self.norm(hidden, "hnorm")], -1)
        return self.block(self.lin(x, "eh_proj"))

    def logits(self, layer: int, m: Tensor, output: Tensor) -> Tensor:
        if self.qwen or self.mimo:
            return linear(m, output)
        self.at = f"model.layers.{self.c['num_hidden_layers'] + layer}."
        return linear(self.norm(m, "shared_head.norm"), self.get("shared_head.head.weight"))

    def block(self, x: Tensor) -> Tensor:
        y = self.norm(x, "input_layernorm")
        x = x + (self.latent(y) if "kv_lora_rank" in self.c else self.attention(y))
        y = self.norm(x, "post_attention_layernorm")
        if self.at + "mlp.gate.weight" not in self.w:
            return x + self.mlp(y, "mlp.")
        return x + (self.softmax_experts(y) if self.qwen else self.sigmoid_experts(y))

    def attention(self, x: Tensor) -> Tensor:
        c, n, k = self.c, self.c["num_attention_heads"], self.c["num_key_value_heads"]
        d, t = c["hidden_size"] // n if self.mimo else c["head_dim"], x.shape[0]
        q, gate = self.lin(x, "self_attn.q_proj"), None
        if self.qwen:
            q, gate = q.view(t, n, 2 * d).chunk(2, -1)
        q, key = q.reshape(t, n, d), self.lin(x, "self_attn.k_proj").view(t, k, d)
        if not self.mimo:
            q, key = self.norm(q, "self_attn.q_norm"), self.norm(key, "self_attn.k_norm")
        rope = c.get("rope_parameters") or {"rope_theta": c["rope_theta"]}
        part = rope.get("partial_rotary_factor", c.get("partial_rotary_factor", 1.0))
        q, key = (halves(y, int(d * part), rope["rope_theta"]) for y in (q, key))
        key, value = key.repeat_interleave(n // k, 1), self.lin(x, "self_attn.v_proj").view(t, k, d)
        out = attend(q, key, value.repeat_interleave(n // k, 1), d**-0.5).reshape(t, n * d)
        return self.lin(out if gate is None else out * torch.sigmoid(gate.reshape(t, n * d)), "self_attn.o_proj")

    def latent(self, x: Tensor) -> Tensor:
        c, n, t = self.c, self.c["num_attention_heads"], x.shape[0]
        nope, pe, v, rank = (c[f] for f in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"))
        q = self.lin(self.norm(self.lin(x, "self_attn.q_a_proj"), "self_attn.q_a_layernorm"), "self_attn.q_b_proj")
        q = q.view(t, n, nope + pe)
        kv, key_pe = self.lin(x, "self_attn.kv_a_proj_with_mqa").split([rank, pe], -1)
        kv = self.lin(self.norm(kv, "self_attn.kv_a_layernorm"), "self_attn.kv_b_proj").view(t, n, nope + v)
        theta = c.get("rope_theta", 10000.0)
        q = torch.cat([q[..., :nope], pairs(q[..., nope:], theta)], -1)
        key = torch.cat([kv[..., :nope], pairs(key_pe[:, None], theta).expand(t, n, pe)], -1)
        out = attend(q, key, kv[..., nope:], (nope + pe) ** -0.5)
        return self.lin(out.reshape(t, n * v), "self_attn.o_proj")

    def mlp(self, x: Tensor, name: str) -> Tensor:
        return self.lin(silu(self.lin(x, name + "gate_proj")) * self.lin(x, name + "up_proj"), name + "down_proj")

    def softmax_experts(self, x: Tensor) -> Tensor:
        """Of the softmax over all experts the top k, scaled to a sum of 1 where the config says so; a shared expert
        behind a gate of its own."""
        chance = torch.softmax(self.lin(x, "mlp.gate"), -1)
        best, which = chance.topk(self.c["num_experts_per_tok"], -1)
        # mlx-lm's Qwen3.5 scales them by default, its Qwen3-Next does not
        if self.c.get("norm_topk_prob", self.kind.startswith("qwen3_5")):
            best = best / best.sum(-1, keepdim=True)
        shared = torch.sigmoid(self.lin(x, "mlp.shared_expert_gate")) * self.mlp(x, "mlp.shared_expert.")
        return shared + self.mixed(x, best, which)

    def sigmoid_experts(self, x: Tensor) -> Tensor:
        """Experts are chosen by score + bias among the best groups (by the sum of their two best), and weighed by
        score alone."""
        c = self.c
        score = torch.sigmoid(self.lin(x, "mlp.gate"))
        biased = score + self.get("mlp.gate.e_score_correction_bias")
        groups = biased.view(x.shape[0], c.get("n_group", 1), -1)
        if groups.shape[1] > 1:
            worst = (-groups.topk(2, -1).values.sum(-1)).topk(groups.shape[1] - c["topk_group"], -1).indices
            groups = groups.scatter(1, worst[..., None].expand(-1, -1, groups.shape[-1]), 0.0)
        which = groups.flatten(1).topk(c["num_experts_per_tok"], -1).indices
        best = score.gather(-1, which)
        if c.get("norm_topk_prob", True):
            best = best / best.sum(-1, keepdim=True)
        factor = c.get("routed_scaling_factor", 1.8 if self.kind == "glm4_moe_lite" else 1.0)
        return self.mlp(x, "mlp.shared_experts.") + self.mixed(x, best * factor, which)

    def mixed(self, x: Tensor, weight: Tensor, which: Tensor) -> Tensor:
        out = []
        for row, ws, es in zip(x, weight, which, strict=True):
            out.append(sum((w * self.expert(row, int(e)) for w, e in zip(ws, es, strict=True)), torch.zeros_like(row)))
        return torch.stack(out)

    def expert(self, x: Tensor, e: int) -> Tensor:
        if self.at + "mlp.experts.gate_up_proj" not in self.w:
            return self.mlp(x, f"mlp.experts.{e}.")
        gate, up = linear(x, self.get("mlp.experts.gate_up_proj")[e]).chunk(2, -1)
        return linear(silu(gate) * up, self.get("mlp.experts.down_proj")[e])


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention over [rows, heads, d]."""
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)


def angles(rows: int, d: int, theta: float) -> tuple[Tensor, Tensor]:
    angle = torch.arange(rows)[:, None] * theta ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    return angle.cos().float()[:, None], angle.sin().float()[:, None]


def halves(x: Tensor, d: int, theta: float) -> Tensor:
    cos, sin = angles(x.shape[0], d, theta)
    a, b, rest = x[..., : d // 2], x[..., d // 2 : d], x[..., d:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def pairs(x: Tensor, theta: float) -> Tensor:
    cos, sin = angles(x.shape[0], x.shape[-1], theta)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


def reference(kind: str, layers: int) -> dict[str, Any]:
    """Logits [ROWS, V] of the first draft at every row, and [V] of the second draft after the last."""
    head = Head(kind, layers)
    embedded, hidden, output = (torch.from_numpy(a) for a in heads.inputs(kind))
    m = head.rows(0, embedded[:-1], hidden)
    made = {"first": head.logits(0, m, output).numpy()}
    if not head.mimo:  # made for one draft
        second = 1 % layers
        again = head.rows(second, embedded, torch.cat([hidden, m[-1:]]))[-1:]
        made["second"] = head.logits(second, again, output)[0].numpy()
    return made


if __name__ == "__main__":
    arrays = {f"{k}.{n}.{name}": a for k, n in CASES for name, a in reference(k, n).items()}
    np.savez_compressed(REFERENCE, **arrays)
