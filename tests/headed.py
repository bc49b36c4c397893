"""A tiny qwen3_5 folder in the original checkpoint layout, with a multi-token-prediction head."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx

from tests import tiny

_SHIFTED = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "model.norm.weight",
    "q_norm.weight",
    "k_norm.weight",
)


def make(folder: Path, *, seed: int = 5) -> Path:
    """Body as ``tiny`` makes it, convolutions and norms put back into the layout that is published (w − 1)."""
    tiny.make("qwen3_5", folder)
    config = json.loads((folder / "config.json").read_text())["text_config"]
    weights = dict(mx.load(str(folder / "model.safetensors")))
    for name, w in weights.items():
        if name.endswith("conv1d.weight"):
            weights[name] = mx.contiguous(w.moveaxis(2, 1))
        elif name.endswith(_SHIFTED) and w.ndim == 1:
            weights[name] = w - 1.0
    size, inner = config["hidden_size"], config["intermediate_size"]
    n, k, d = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    shapes = {
        "fc.weight": (size, 2 * size), "norm.weight": (size,), "pre_fc_norm_embedding.weight": (size,),
        "pre_fc_norm_hidden.weight": (size,), "layers.0.input_layernorm.weight": (size,),
        "layers.0.post_attention_layernorm.weight": (size,), "layers.0.self_attn.q_proj.weight": (2 * n * d, size),
        "layers.0.self_attn.k_proj.weight": (k * d, size), "layers.0.self_attn.v_proj.weight": (k * d, size),
        "layers.0.self_attn.o_proj.weight": (size, n * d), "layers.0.self_attn.q_norm.weight": (d,),
        "layers.0.self_attn.k_norm.weight": (d,), "layers.0.mlp.gate_proj.weight": (inner, size),
        "layers.0.mlp.up_proj.weight": (inner, size), "layers.0.mlp.down_proj.weight": (size, inner),
    }  # fmt: skip
    for (name, shape), key in zip(shapes.items(), mx.random.split(mx.random.key(seed), len(shapes)), strict=True):
        scale = 0.2 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5
        weights["mtp." + name] = mx.random.normal(shape, key=key) * scale
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder
