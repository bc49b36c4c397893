"""Names and forms of the weights: those of the published checkpoint, of Hugging Face's, and this model's own.

The published checkpoint packs experts into fp4 and most other matrices into fp8, with scales that are powers of two;
both are MLX's mxfp4 and mxfp8 in another arrangement, so that nothing is unpacked here.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ...errors import ModelError

if TYPE_CHECKING:
    from .config import ModelArgs

#: in order; what does not match is as it should be already
_RENAMES = [
    (re.compile(pattern), new)
    for pattern, new in (
        (r"^embed\.", "model.embed_tokens."),
        (r"^head\.", "lm_head."),
        (r"^(norm|layers|hc_head)(?=[._])", r"model.\1"),
        (r"\bhc_head_(\w+)$", r"hc_head.\1"),
        (r"\bhc_head\.hc_", "hc_head."),
        (r"\.attn\.", ".self_attn."),
        (r"\.ffn\.", ".mlp."),
        (r"\.attn_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.hc_(attn|ffn)_", r".\1_hc."),
        (r"\.attn_sink$", ".sinks"),
        (r"\.compressor\.indexer\.scorer\.", ".indexer."),
        (r"\.compressor\.indexer\.(q_b_proj)", r".indexer.\1"),
        (r"\.compressor\.indexer\.", ".indexer.compressor."),
        (r"\.position_bias$", ".ape"),
        (r"\.wq_a\.", ".q_a_proj."),
        (r"\.wq_b\.", ".q_b_proj."),
        (r"\.wkv\.", ".kv_proj."),
        (r"\.wgate\.", ".gate_proj."),
        (r"\.wo_a\.", ".o_a_proj."),
        (r"\.wo_b\.", ".o_b_proj."),
        (r"\.self_attn\.q_norm\.", ".self_attn.q_a_norm."),
        (r"\.compressor\.norm\.", ".compressor.kv_norm."),
        (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
        (r"(experts\..*)\bw1\.", r"\1gate_proj."),
        (r"(experts\..*)\bw2\.", r"\1down_proj."),
        (r"(experts\..*)\bw3\.", r"\1up_proj."),
        (r"\.weight_scale_inv$", ".scale"),
    )
]
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(\w+)\.(weight|scale)")
#: not of the text model, or of a prediction head
_DROPPED = re.compile(r"(model\.)?(mtp|vision|aligner)\.")
#: columns of a row that share a scale in MLX's forms, and the sides of tiles that do in a checkpoint's fp8
_GROUP = 32
_TILES = (128, 32)


def quantization(config: dict[str, Any]) -> dict[str, Any]:
    """What mlx-lm's loader must be told of a checkpoint in fp8 whose config it does not know; {} if nothing."""
    stored = config.get("quantization_config") or {}
    if config.get("quantization") or stored.get("quant_method") != "fp8":
        return {}
    return {"quantization": {"group_size": _GROUP, "bits": 8, "mode": "mxfp8"}}


def renamed(name: str) -> str:
    """This model's name for a tensor of any of the three kinds of checkpoints."""
    for pattern, new in _RENAMES:
        name = pattern.sub(new, name)
    return name


def sanitize(weights: dict[str, mx.array], args: ModelArgs) -> dict[str, mx.array]:
    """Weights by this model's names, in its shapes. Raises ModelError where an expert is missing."""
    named = {renamed(name): array for name, array in weights.items() if not _DROPPED.match(name)}
    for stem, arrays in _experts(named).items():
        for part, parts in arrays.items():
            missing = sorted(set(range(args.n_routed_experts)) - set(parts))
            if missing or len(parts) != args.n_routed_experts:
                raise ModelError(
                    f"{stem} has {len(parts)} experts, and config.json says {args.n_routed_experts}.",
                    "Finish the download, or copy the missing files.",
                )
            named[f"{stem}.{part}"] = mx.stack([parts[i] for i in range(args.n_routed_experts)])
    _split(named)
    for name in [name for name in named if name.endswith(".o_a_proj.weight")]:
        for key in (name, f"{name.removesuffix('weight')}scale"):
            if key in named and named[key].ndim == 2:  # block diagonal: one matrix a group
                rows = named[key]
                named[key] = rows.reshape(args.o_groups, -1, rows.shape[-1])
    out = {}
    for name, array in named.items():
        if name.endswith(".scale") and f"{name.removesuffix('scale')}weight" in named:
            continue
        scale = named.get(f"{name.removesuffix('weight')}scale") if name.endswith(".weight") else None
        if scale is not None:
            array, scale = _repacked(array, scale)
            out[f"{name.removesuffix('weight')}scales"] = scale
        elif name.endswith(".tid2eid"):
            array = array.astype(mx.int32)
        elif ".compressor." in name and mx.issubdtype(array.dtype, mx.floating):
            array = array.astype(mx.float32)
        out[name] = array
    return out


def _experts(named: dict[str, mx.array]) -> dict[str, dict[str, dict[int, mx.array]]]:
    """Taken out of ``named``: matrices of single experts, by stem, then by part (``weight``, ``scale``)."""
    found: dict[str, dict[str, dict[int, mx.array]]] = {}
    for name in list(named):
        if match := _EXPERT.fullmatch(name):
            stem, index, matrix, part = match.groups()
            found.setdefault(f"{stem}.switch_mlp.{matrix}", {}).setdefault(part, {})[int(index)] = named.pop(name)
    return found


def _split(named: dict[str, mx.array]) -> None:
    """Hugging Face's experts, which have their gate and up matrices in one tensor [experts, 2 · wide, hidden]."""
    for name in list(named):
        if name.endswith(".mlp.experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj") + "switch_mlp."
            gate, up = mx.split(named.pop(name), 2, axis=1)
            named[f"{stem}gate_proj.weight"], named[f"{stem}up_proj.weight"] = gate, up
        elif name.endswith(".mlp.experts.down_proj"):
            named[name.removesuffix("down_proj") + "switch_mlp.down_proj.weight"] = named.pop(name)


def _repacked(weight: mx.array, scale: mx.array) -> tuple[mx.array, mx.array]:
    """A matrix [..., out, bytes] in fp8 or fp4 (two numbers a byte) and its scales, of a tile or of a group, in MLX's
    form: words of 32 bits, and one scale of 8 bits for ``_GROUP`` columns of each row."""
    if scale.dtype != mx.uint8:
        scale = (mx.round(mx.log2(scale.astype(mx.float32))) + 127).astype(mx.uint8)
    rows, wide = weight.shape[-2:]
    if scale.shape[-2] != rows:  # in tiles, so that it is fp8: a byte a number
        sides = [n for n in _TILES if (-(-rows // n), -(-wide // n)) == scale.shape[-2:]]
        if not sides:
            raise ModelError(
                f"A matrix of {rows} x {wide} comes with {scale.shape[-2]} x {scale.shape[-1]} scales: they are not of "
                f"tiles of {' or '.join(map(str, _TILES))}.",
                "Use the published checkpoint, or one that mlxkv has converted.",
            )
        scale = mx.repeat(scale, sides[0], axis=-2)[..., :rows, :]
        scale = mx.repeat(scale, sides[0] // _GROUP, axis=-1)[..., : wide // _GROUP]
    return weight.view(mx.uint32), scale
