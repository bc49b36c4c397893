"""The model of the frozen fixtures: a hybrid of two layers whose files are the same bytes wherever they are made.

Weights come from numpy's ``RandomState``, whose streams never change, and are written by the few lines below: its
fingerprint is part of every key in the fixtures.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

VOCAB, WIDTH, HEADS, DIM, LINEAR = 32, 16, 2, 32, 8  # DIM: what rows can be quantised in
BLOCK, LENGTH = 8, 29

CONFIG = {
    "model_type": "qwen3_5",
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "dtype": "float32",
    "eos_token_id": VOCAB - 1,
    "pad_token_id": VOCAB - 2,
    "text_config": {
        "model_type": "qwen3_5_text",
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "head_dim": DIM,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "full_attention_interval": 2,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": LINEAR,
        "linear_value_head_dim": LINEAR,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    },
}


def shapes() -> dict[str, tuple[int, ...]]:
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, WIDTH), "model.norm.weight": (WIDTH,)}
    out["lm_head.weight"] = (VOCAB, WIDTH)
    for layer in range(2):
        at = f"model.layers.{layer}."
        out |= {at + "input_layernorm.weight": (WIDTH,), at + "post_attention_layernorm.weight": (WIDTH,)}
        out |= {at + f"mlp.{name}_proj.weight": (WIDTH, WIDTH) for name in ("gate", "up", "down")}
    at, mixed = "model.layers.0.linear_attn.", 4 * LINEAR  # queries and keys of one head, values of two
    out |= {at + "in_proj_qkv.weight": (mixed, WIDTH), at + "in_proj_z.weight": (2 * LINEAR, WIDTH)}
    out |= {at + "in_proj_a.weight": (2, WIDTH), at + "in_proj_b.weight": (2, WIDTH)}
    out |= {
        at + "conv1d.weight": (mixed, 4, 1),
        at + "A_log": (2,),
        at + "dt_bias": (2,),
        at + "norm.weight": (LINEAR,),
    }
    out |= {at + "out_proj.weight": (WIDTH, 2 * LINEAR)}
    at = "model.layers.1.self_attn."
    out |= {at + "q_proj.weight": (2 * HEADS * DIM, WIDTH), at + "o_proj.weight": (WIDTH, HEADS * DIM)}
    out |= {at + f"{name}_proj.weight": (DIM, WIDTH) for name in ("k", "v")}
    out |= {at + f"{name}_norm.weight": (DIM,) for name in ("q", "k")}
    return {"language_model." + name: shape for name, shape in sorted(out.items())}


def make(folder: Path) -> Path:
    """Write the model; gives back its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    header, parts, at = {}, [], 0
    for i, (name, shape) in enumerate(shapes().items()):
        data = _weight(name, shape, np.random.RandomState(i)).astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + len(data)]}
        parts.append(data)
        at += len(data)
    text = json.dumps({"__metadata__": {"format": "mlx"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def tokens() -> list[int]:
    """A prompt with two messages."""
    out = np.random.RandomState(7).randint(0, VOCAB - 2, LENGTH).tolist()
    out[10] = out[19] = VOCAB - 1
    return out


def _weight(name: str, shape: tuple[int, ...], random: np.random.RandomState) -> np.ndarray:
    if name.endswith("A_log"):
        return np.log(random.uniform(0.02, 0.4, shape))
    if name.endswith("dt_bias"):
        return random.uniform(0.5, 1.5, shape)
    if len(shape) == 1:
        return 1 + 0.1 * random.standard_normal(shape)
    if name.endswith("conv1d.weight"):
        return random.standard_normal(shape) * shape[1] ** -0.5
    if "embed" in name:
        return random.standard_normal(shape)
    return random.standard_normal(shape) * 1.5 * shape[-1] ** -0.5
