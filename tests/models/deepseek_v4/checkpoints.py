"""The tiny model's weights as other people write them: under their names, in their shapes."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from tests import tiny

Weights = dict[str, mx.array]

_PUBLISHED = {
    "model.embed_tokens.": "embed.",
    "lm_head.": "head.",
    "model.hc_head.": "hc_head_",
    "model.": "",
    ".self_attn.": ".attn.",
    ".mlp.": ".ffn.",
    ".input_layernorm.": ".attn_norm.",
    ".post_attention_layernorm.": ".ffn_norm.",
    ".attn_hc.": ".hc_attn_",
    ".ffn_hc.": ".hc_ffn_",
    ".sinks": ".attn_sink",
    ".shared_experts.gate_proj.": ".shared_experts.w1.",
    ".shared_experts.down_proj.": ".shared_experts.w2.",
    ".shared_experts.up_proj.": ".shared_experts.w3.",
    ".compressor.kv_norm.": ".compressor.norm.",
    ".q_a_norm.": ".q_norm.",
    ".q_a_proj.": ".wq_a.",
    ".q_b_proj.": ".wq_b.",
    ".kv_proj.": ".wkv.",
    ".gate_proj.": ".wgate.",
    ".o_a_proj.": ".wo_a.",
    ".o_b_proj.": ".wo_b.",
    ".e_score_correction_bias": ".bias",
}
_HUGGING_FACE = {
    ".indexer.compressor.": ".compressor.indexer.",
    ".self_attn.indexer.weights_proj.": ".self_attn.compressor.indexer.scorer.weights_proj.",
    ".self_attn.indexer.": ".self_attn.compressor.indexer.",
    ".ape": ".position_bias",
    "hc_head.": "hc_head.hc_",
}
_MATRIX = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def own(**overrides: Any) -> tuple[Weights, dict[str, Any]]:
    model, config = tiny.build("deepseek_v4", **overrides)
    return dict(tree_flatten(model.parameters())), config  # type: ignore[arg-type]


def published(weights: Weights) -> Weights:
    """The names of the checkpoint that was published."""
    out = {}
    for name, array in weights.items():
        if match := re.fullmatch(r"model\.(layers\.\d+)\.mlp\.experts\.switch_mlp\.(\w+)\.weight", name):
            layer, matrix = match.groups()
            for i, one in enumerate(array):
                out[f"{layer}.ffn.experts.{i}.{_MATRIX[matrix]}.weight"] = one
            continue
        if name.endswith("o_a_proj.weight"):
            array = array.reshape(-1, array.shape[-1])
        elif name.endswith("tid2eid"):
            array = array.astype(mx.int64)
        out[_replaced(name, _PUBLISHED)] = array
    out["mtp.0.e_proj.weight"] = mx.zeros((4, 4))
    return out


def hugging_face(weights: Weights) -> Weights:
    out, stem = {}, "mlp.experts.switch_mlp."
    for name, array in weights.items():
        if name.endswith(f"{stem}gate_proj.weight"):
            both = mx.concatenate([array, weights[name.replace("gate_proj", "up_proj")]], axis=1)
            out[name.replace("switch_mlp.gate_proj.weight", "gate_up_proj")] = both
        elif name.endswith(f"{stem}down_proj.weight"):
            out[name.replace("switch_mlp.down_proj.weight", "down_proj")] = array
        elif not name.endswith(f"{stem}up_proj.weight"):
            array = array.reshape(-1, array.shape[-1]) if name.endswith("o_a_proj.weight") else array
            out[_replaced(name, _HUGGING_FACE)] = array
    return out


def packed(weights: Weights) -> tuple[dict[str, tuple[str, mx.array]], Weights]:
    """The published form with experts in fp4 and attention's matrices in fp8, one scale for a tile of 128 by 128: by
    name (safetensors' dtype, bytes); and the published weights as they are once unpacked."""
    files, plain = {}, dict(weights)
    for name, array in weights.items():
        if not re.search(r"\.(wq_a|wq_b|wkv|wo_b|w[123])\.weight$", name) or ".compressor." in name:
            files[name] = ({mx.float32: "F32", mx.int64: "I64"}[array.dtype], array)
            continue
        scale = f"{name.removesuffix('weight')}scale"
        if ".experts." in name:
            words, scales = mx.quantize(array, group_size=32, bits=4, mode="mxfp4")
            files[name], files[scale] = ("I8", words.view(mx.uint8)), ("F8_E8M0", scales)
            plain[name] = mx.dequantize(words, scales, group_size=32, bits=4, mode="mxfp4", dtype=mx.float32)
        else:
            numbers = mx.to_fp8(array * 64)
            tiles = mx.full([-(-n // 128) for n in array.shape], 127 - 6, mx.uint8)  # 2^-6
            files[name], files[scale] = ("F8_E4M3", numbers), ("F8_E8M0", tiles)
            plain[name] = mx.from_fp8(numbers, mx.float32) / 64
    return files, plain


def write(folder: Path, arrays: dict[str, tuple[str, mx.array]], config: dict[str, Any]) -> Path:
    """A model folder whose tensors have dtypes that MLX itself does not write."""
    header, data = {}, b""
    for name, (dtype, array) in arrays.items():
        raw = bytes(memoryview(array))
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (folder / "config.json").write_text(json.dumps(config))
    tiny.write_tokenizer(folder)
    return folder


def _replaced(name: str, table: dict[str, str]) -> str:
    for ours, theirs in table.items():
        name = name.replace(ours, theirs)
    return name
