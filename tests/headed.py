"""Tiny model folders in the layout that is published, with a multi-token-prediction head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests import heads, tiny

_SHIFTED = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "model.norm.weight",
    "q_norm.weight",
    "k_norm.weight",
)


def make(
    folder: Path, kind: str = "qwen3_5", *, seed: int = 5, layers: int = 1, own: bool = False, **overrides: Any
) -> Path:
    """Body as ``tiny`` makes it, put back into the layout that is published, and a head of ``kind`` (``heads.KINDS``).

    ``own``: a DeepSeek head brings an embedding and output matrix that differ from the body's; published ones do not.
    """
    made = heads.KINDS[kind]
    tiny.make(made.arch, folder, **{**made.overrides, **overrides})
    body = published(dict(mx.load(str(folder / "model.safetensors"))), made.arch)
    head = {n: mx.array(a) for n, a in heads.tensors(kind, layers=layers, seed=seed).items()}
    for name in head:
        if not own and name.endswith("embed_tokens.weight"):
            head[name] = body["model.embed_tokens.weight"]
        elif not own and name.endswith("shared_head.head.weight"):
            head[name] = body["lm_head.weight"]
    mx.save_safetensors(str(folder / "model.safetensors"), body | head)
    return folder


def published(weights: dict[str, mx.array], arch: str) -> dict[str, mx.array]:
    """A Qwen body's tensors with convolutions as [channels, 1, width] and norms as w − 1; others as they are."""
    if not arch.startswith("qwen3"):
        return weights
    out = {}
    for name, w in weights.items():
        if name.endswith("conv1d.weight"):
            out[name] = mx.contiguous(w.moveaxis(2, 1))
        elif name.endswith(_SHIFTED) and w.ndim == 1:
            out[name] = w - 1.0
        elif arch == "qwen3_next" and ".switch_mlp." in name:
            before, after = name.split("switch_mlp.")
            out |= {f"{before}experts.{e}.{after}": w[e] for e in range(w.shape[0])}
        else:
            out[name] = w
    return out


def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())
