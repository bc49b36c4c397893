"""Load a head as its body is loaded: the same dtype, unpacked where the body was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .. import precision
from .find import Opened
from .head import Head
from .tensors import NORMS_KEY, VERSION, VERSION_KEY


def evaluate(opened: Opened, dtype: mx.Dtype, body: nn.Module | None = None, *, unpack: bool = False) -> Head:
    """Read an opened head, in ``dtype``.

    ``body``: the loaded network, whose embedding and output matrix a head shares where it brings the same ones, and
    which says what is not cast. ``unpack``: quantised layers become plain ones, as the body's did.
    """
    from mlx_lm.utils import dequantize_model

    head, weights = opened.head, dict(opened.weights)
    if opened.shifted:
        weights = {n: w.astype(mx.float32) + 1.0 if _is_norm(n, w) else w for n, w in weights.items()}
    head.load_weights(list(weights.items()))
    name = next(name for name, known in precision.DTYPES.items() if known == dtype)
    precision.cast(head, name, like=body)
    if unpack and precision.is_quantised(head):
        dequantize_model(head)
    if body is not None:
        share(head, body)
    head.eval()
    mx.eval(head.parameters())
    return head


def share(head: Head, body: nn.Module) -> None:
    """Let the head go of matrices that are the same, bit for bit, as those of ``body``, in the same dtype."""
    text: Any = getattr(body, "language_model", body)
    head.share(text.model.embed_tokens, text.get("lm_head"))


def write(file: Path, head: Head, opened: Opened) -> None:
    """Write ``head``, made of ``opened`` with its norms as they were stored, under its published names."""
    named: list[Any] = tree_flatten(head.parameters())  # type: ignore[assignment]
    weights = {opened.layout.stored(name, opened.config): array for name, array in named}
    norms = "w-1" if opened.shifted else "w"
    mx.save_safetensors(str(file), weights, metadata={"format": "mlx", VERSION_KEY: VERSION, NORMS_KEY: norms})


def _is_norm(name: str, weight: mx.array) -> bool:
    return weight.ndim == 1 and (name.endswith("norm.weight") or "pre_fc_norm" in name)
