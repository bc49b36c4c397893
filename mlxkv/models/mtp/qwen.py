"""Heads of Qwen3.5 and Qwen3-Next, dense or with experts.

    x_t = fc([RMSNorm_e(E[tok_{t+1}]), RMSNorm_h(h_t)]),   m_t = RMSNorm(layer(x_t)),   logits for tok_{t+2} = E' m_t

with h_t the body's hidden state after its final norm, E the shared embedding and E' the shared output matrix (vLLM's
qwen3_next_mtp.py and transformers' MtpLayer agree). The layer is one of the body's with full attention. m_t is the
hidden state of the next draft.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_5, qwen3_next
from mlx_lm.models.base import create_attention_mask

from .head import Head
from .layout import Misfit, layer_numbers, stacked

PREFIXES = ("mtp.", "language_model.mtp.")


class QwenHead(Head):
    """Layers between two norms and a projection before them and one norm after; the body's matrices are not part."""

    def __init__(self, args: Any, n_layers: int = 1) -> None:
        super().__init__()
        size, eps = args.hidden_size, args.rms_norm_eps
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = nn.RMSNorm(size, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(size, eps=eps)
        self.norm = nn.RMSNorm(size, eps=eps)
        older = isinstance(args, qwen3_next.ModelArgs)
        self.family = "Qwen3-Next" if older else "Qwen3.5"
        layer: Any = qwen3_next.Qwen3NextDecoderLayer if older else qwen3_5.DecoderLayer
        # the layer of an index that ends an interval is the one with full attention
        self.layers = [layer(args, args.full_attention_interval - 1) for _ in range(n_layers)]

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    def row(self, layer: int, embedded: mx.array, hidden: mx.array, cache: Any) -> mx.array:
        x = mx.concatenate([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], axis=-1)
        mask: Any = create_attention_mask(x, cache)
        return self.norm(self.layers[layer](self.fc(x), mask, cache))


class Qwen:
    """The layout: ``mtp.*`` beside the body's tensors."""

    #: norms of the original layout are stored as w − 1
    shifts = True

    def names(self, names: list[str], config: dict[str, Any]) -> list[str]:
        if config.get("model_type") not in ("qwen3_5", "qwen3_5_moe", "qwen3_next"):
            return []
        return [n for n in names if n.startswith(PREFIXES)]

    def local(self, name: str, config: dict[str, Any]) -> str:
        return name[name.index("mtp.") + len("mtp.") :]

    def stored(self, name: str, config: dict[str, Any]) -> str:
        return f"mtp.{name}"

    def build(self, config: dict[str, Any], weights: Mapping[str, mx.array]) -> tuple[Head, dict[str, mx.array]]:
        text = copy.deepcopy(config.get("text_config") or config)
        if text.get("mtp_use_dedicated_embeddings"):
            raise Misfit("it has embeddings of its own, whose layout is not known")
        numbers = layer_numbers(weights, "layers.")
        merged = dict(weights)
        for i in numbers:
            merged = _experts(merged, f"layers.{i}.mlp.")
        next_ = config["model_type"] == "qwen3_next"
        args: Any = (qwen3_next.ModelArgs if next_ else qwen3_5.TextModelArgs).from_dict(text)
        if not any(".switch_mlp." in n for n in merged):
            args.num_experts = 0
        elif not args.num_experts:
            raise Misfit("it has experts, and config.json says nothing of them")
        # what decides whether a layer of the body has experts decides nothing here
        args.decoder_sparse_step, args.mlp_only_layers = 1, []
        return QwenHead(args, len(numbers)), merged


def _experts(weights: dict[str, mx.array], mlp: str) -> dict[str, mx.array]:
    """Expert matrices as mlx-lm wants them, ``switch_mlp.X.weight`` [experts, out, in]; published are one tensor for
    each expert, or all of them in one with gate and up projection behind each other."""
    out = stacked(weights, mlp)
    fused = out.pop(f"{mlp}experts.gate_up_proj", None)
    if fused is not None:
        half = fused.shape[-2] // 2
        out[f"{mlp}switch_mlp.gate_proj.weight"] = fused[..., :half, :]
        out[f"{mlp}switch_mlp.up_proj.weight"] = fused[..., half:, :]
        if f"{mlp}experts.down_proj" in out:
            out[f"{mlp}switch_mlp.down_proj.weight"] = out.pop(f"{mlp}experts.down_proj")
    return out
