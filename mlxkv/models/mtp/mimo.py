"""Heads of MiMo, for one draft.

    x_t = P [RMSNorm_h(h_t), RMSNorm_e(E[tok_{t+1}])],   m_t = RMSNorm(layer(x_t)),   logits for tok_{t+2} = E' m_t

The hidden state comes first, and h_t is the body's before its final norm (vLLM's mimo.py gives it back so, and
mimo_mtp.py takes it). E[.] is zero in row 0.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import mimo
from mlx_lm.models.base import create_attention_mask

from .head import Head
from .layout import Misfit, layer_numbers

_PREFIX = "model.mtp_layers."
_OWN = ("token_layernorm.", "hidden_layernorm.", "input_proj.", "final_layernorm.")


class MiMoHead(Head):
    family = "MiMo"
    most_drafts = 1
    blind_first = True

    def __init__(self, args: mimo.ModelArgs) -> None:
        super().__init__()
        size, eps = args.hidden_size, args.rms_norm_eps
        self.token_layernorm, self.hidden_layernorm = nn.RMSNorm(size, eps=eps), nn.RMSNorm(size, eps=eps)
        self.input_proj = nn.Linear(2 * size, size, bias=False)
        self.block = mimo.TransformerBlock(args)
        self.final_layernorm = nn.RMSNorm(size, eps=eps)

    def row(self, layer: int, embedded: mx.array, hidden: mx.array, cache: Any) -> mx.array:
        x = mx.concatenate([self.hidden_layernorm(hidden), self.token_layernorm(embedded)], axis=-1)
        mask: Any = create_attention_mask(x, cache)
        return self.final_layernorm(self.block(self.input_proj(x), mask, cache))

    def hidden(self, text: Any, ids: mx.array, cache: list[Any]) -> mx.array:
        """[1, n, H] before the final norm: mlx-lm's body gives it only after."""
        h = text.model.embed_tokens(ids)
        mask: Any = create_attention_mask(h, cache[0])
        for layer, c in zip(text.model.layers, cache, strict=True):
            h = layer(h, mask, c)
        return h

    def finish(self, text: Any, hidden: mx.array) -> mx.array:
        return text.model.norm(hidden)


class MiMo:
    """The layout: ``model.mtp_layers.0.*``."""

    shifts = False

    def names(self, names: list[str], config: dict[str, Any]) -> list[str]:
        return [n for n in names if n.startswith(_PREFIX)] if config.get("model_type") == "mimo" else []

    def local(self, name: str, config: dict[str, Any]) -> str:
        return "layers." + name.removeprefix(_PREFIX)

    def stored(self, name: str, config: dict[str, Any]) -> str:
        return f"{_PREFIX}0.{name.removeprefix('block.')}"

    def build(self, config: dict[str, Any], weights: Mapping[str, mx.array]) -> tuple[Head, dict[str, mx.array]]:
        if len(layer_numbers(weights, "layers.")) > 1:
            raise Misfit("it has more than one layer, and how they follow each other is not known")
        out = {}
        for name, array in weights.items():
            rest = re.sub(r"^layers\.0\.", "", name)
            if "rotary_emb.inv_freq" not in rest:
                out[rest if rest.startswith(_OWN) else f"block.{rest}"] = array
        return MiMoHead(mimo.ModelArgs.from_dict(copy.deepcopy(config))), out
