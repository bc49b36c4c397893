"""Prediction heads of tiny models as they are published: tensor names, shapes and random values, in NumPy alone.

Both sides of a comparison draw the same head from here: ``tests.headed``, which writes it beside a tiny body, and
``tests.oracle.heads``, which runs it in PyTorch where there is no MLX.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.architectures import HEADED, MORE, SUITE

Weights = dict[str, np.ndarray]
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}


@dataclass(frozen=True)
class Kind:
    """A layout. ``arch`` and ``overrides`` are what ``tiny.make`` takes; ``experts``: "", "each" or "fused"."""

    arch: str
    overrides: dict[str, Any] = field(default_factory=dict)
    experts: str = ""


KINDS = {
    "qwen3_5": Kind("qwen3_5"),
    "qwen3_5_moe": Kind("qwen3_5_moe", _EXPERTS, "fused"),
    "qwen3_5_moe_each": Kind("qwen3_5_moe", _EXPERTS, "each"),
    "qwen3_next": Kind("qwen3_next", _EXPERTS, "each"),
    "qwen3_next_dense": Kind("qwen3_next"),
    "deepseek_v3": Kind(
        "deepseek_v3", {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}, "each"
    ),
    "deepseek_v3_dense": Kind("deepseek_v3"),
    "glm4_moe": Kind("glm4_moe", {}, "each"),
    "glm4_moe_lite": Kind("glm4_moe_lite", {}, "each"),
    "mimo": Kind("mimo"),
}
ROWS = 7


def config(kind: str) -> dict[str, Any]:
    """The fields of a tiny body's text config that its head depends on."""
    arch, made = KINDS[kind].arch, KINDS[kind]
    whole = (SUITE | MORE | HEADED)[arch]
    return {**whole.get("text_config", whole), **made.overrides}


def tensors(kind: str, *, layers: int = 1, seed: int = 5) -> Weights:
    """The head of ``kind``, by published names. Norms of Qwen heads are w − 1."""
    c = config(kind)
    if kind.startswith("qwen"):
        shapes = _qwen(c, layers, KINDS[kind].experts)
    elif kind == "mimo":
        shapes = _mimo(c)
    else:
        shapes = {n: s for i in range(layers) for n, s in _deepseek(c, i, KINDS[kind]).items()}
    rng = np.random.default_rng(seed)
    made = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape, dtype=np.float32)
        if name.endswith("norm.weight") or "norm_" in name:
            made[name] = 0.2 * values + (0 if kind.startswith("qwen") else 1)
        elif name.endswith("e_score_correction_bias"):
            made[name] = abs(0.2 * values)  # a score below 0 would tie with those of groups that are left out
        elif len(shape) == 1:  # biases
            made[name] = 0.2 * values
        else:
            made[name] = values * np.float32(1.5 * shape[-1] ** -0.5)
    return {name: array.astype(np.float32) for name, array in made.items()}


def inputs(kind: str, seed: int = 9) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Embeddings [ROWS + 1, H], hidden states [ROWS, H], and an output matrix [V, H]."""
    c, rng = config(kind), np.random.default_rng(seed)
    size = c["hidden_size"]
    embedded, hidden = (rng.standard_normal((n, size), dtype=np.float32) for n in (ROWS + 1, ROWS))
    return embedded, hidden, rng.standard_normal((c["vocab_size"], size), dtype=np.float32) * np.float32(size**-0.5)


def _mlp(prefix: str, size: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (inner, size),
        f"{prefix}up_proj.weight": (inner, size),
        f"{prefix}down_proj.weight": (size, inner),
    }


def _qwen(c: dict[str, Any], layers: int, experts: str) -> dict[str, tuple[int, ...]]:
    size, n, k, d = (c[f] for f in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"))
    shapes: dict[str, tuple[int, ...]] = {
        "mtp.fc.weight": (size, 2 * size), "mtp.norm.weight": (size,), "mtp.pre_fc_norm_embedding.weight": (size,),
        "mtp.pre_fc_norm_hidden.weight": (size,),
    }  # fmt: skip
    for i in range(layers):
        layer = f"mtp.layers.{i}."
        shapes |= {
            layer + "input_layernorm.weight": (size,), layer + "post_attention_layernorm.weight": (size,),
            layer + "self_attn.q_proj.weight": (2 * n * d, size), layer + "self_attn.k_proj.weight": (k * d, size),
            layer + "self_attn.v_proj.weight": (k * d, size), layer + "self_attn.o_proj.weight": (size, n * d),
            layer + "self_attn.q_norm.weight": (d,), layer + "self_attn.k_norm.weight": (d,),
        }  # fmt: skip
        if not experts:
            shapes |= _mlp(layer + "mlp.", size, c["intermediate_size"])
            continue
        many, inner = c["num_experts"], c["moe_intermediate_size"]
        shapes |= {layer + "mlp.gate.weight": (many, size), layer + "mlp.shared_expert_gate.weight": (1, size)}
        shapes |= _mlp(layer + "mlp.shared_expert.", size, c["shared_expert_intermediate_size"])
        if experts == "fused":
            shapes[layer + "mlp.experts.gate_up_proj"] = (many, 2 * inner, size)
            shapes[layer + "mlp.experts.down_proj"] = (many, size, inner)
        else:
            for e in range(many):
                shapes |= _mlp(f"{layer}mlp.experts.{e}.", size, inner)
    return shapes


def _deepseek(c: dict[str, Any], i: int, kind: Kind) -> dict[str, tuple[int, ...]]:
    size, n, vocab = c["hidden_size"], c["num_attention_heads"], c["vocab_size"]
    layer = f"model.layers.{c['num_hidden_layers'] + i}."
    shapes: dict[str, tuple[int, ...]] = {
        "enorm.weight": (size,), "hnorm.weight": (size,), "eh_proj.weight": (size, 2 * size),
        "shared_head.norm.weight": (size,), "shared_head.head.weight": (vocab, size),
        "embed_tokens.weight": (vocab, size), "input_layernorm.weight": (size,),
        "post_attention_layernorm.weight": (size,),
    }  # fmt: skip
    if kind.arch == "glm4_moe":
        k, d = c["num_key_value_heads"], c["head_dim"]
        shapes |= {
            "self_attn.q_proj.weight": (n * d, size), "self_attn.k_proj.weight": (k * d, size),
            "self_attn.v_proj.weight": (k * d, size), "self_attn.o_proj.weight": (size, n * d),
            "self_attn.q_proj.bias": (n * d,), "self_attn.k_proj.bias": (k * d,), "self_attn.v_proj.bias": (k * d,),
            "self_attn.q_norm.weight": (d,), "self_attn.k_norm.weight": (d,),
        }  # fmt: skip
    else:
        q, kv, nope, pe, v = (
            c[f] for f in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        shapes |= {
            "self_attn.q_a_proj.weight": (q, size), "self_attn.q_a_layernorm.weight": (q,),
            "self_attn.q_b_proj.weight": (n * (nope + pe), q), "self_attn.kv_a_proj_with_mqa.weight": (kv + pe, size),
            "self_attn.kv_a_layernorm.weight": (kv,), "self_attn.kv_b_proj.weight": (n * (nope + v), kv),
            "self_attn.o_proj.weight": (size, n * v),
        }  # fmt: skip
    if kind.experts:
        many, inner = c["n_routed_experts"], c["moe_intermediate_size"]
        shapes |= {"mlp.gate.weight": (many, size), "mlp.gate.e_score_correction_bias": (many,)}
        shapes |= _mlp("mlp.shared_experts.", size, inner * c["n_shared_experts"])
        for e in range(many):
            shapes |= _mlp(f"mlp.experts.{e}.", size, inner)
    else:
        shapes |= _mlp("mlp.", size, c["intermediate_size"])
    return {layer + name: shape for name, shape in shapes.items()}


def _mimo(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    size, n, k = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
    d, layer = size // n, "model.mtp_layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        "token_layernorm.weight": (size,), "hidden_layernorm.weight": (size,), "input_proj.weight": (size, 2 * size),
        "final_layernorm.weight": (size,), "input_layernorm.weight": (size,),
        "post_attention_layernorm.weight": (size,), "self_attn.q_proj.weight": (n * d, size),
        "self_attn.k_proj.weight": (k * d, size), "self_attn.v_proj.weight": (k * d, size),
        "self_attn.q_proj.bias": (n * d,), "self_attn.k_proj.bias": (k * d,), "self_attn.v_proj.bias": (k * d,),
        "self_attn.o_proj.weight": (size, n * d),
    } | _mlp("mlp.", size, c["intermediate_size"])  # fmt: skip
    return {layer + name: shape for name, shape in shapes.items()}
