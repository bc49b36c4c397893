"""Replace layers of an mlx-lm model by ones that are faster on a CPU and compute the same within 5e-6."""

from __future__ import annotations

import mlx.nn as nn
from mlx_lm.models.qwen3_5 import GatedDeltaNet
from mlx_lm.models.qwen3_next import Qwen3NextGatedDeltaNet

from .. import numerics
from . import attention, rope
from .activation import FEED_FORWARD
from .attention import FewAttention
from .conv import DepthwiseConv1d, is_depthwise
from .gated_delta import ChunkedGatedDeltaNet, ChunkedNextGatedDeltaNet
from .linear import RowEmbedding, RowLinear, gains, gains_as_head
from .norm import RMSNorm
from .replace import replace
from .rope import SharedRoPE

_RECURRENT: dict[type[nn.Module], type[nn.Module]] = {
    GatedDeltaNet: ChunkedGatedDeltaNet,
    Qwen3NextGatedDeltaNet: ChunkedNextGatedDeltaNet,
}


def accelerate(model: nn.Module) -> list[str]:
    """Replace, in place, every layer that has a faster form; parameters are shared, not copied. Gives back what was
    replaced ("6 x Conv1d -> DepthwiseConv1d"), for the log."""
    leaves: dict[str, type[nn.Module]] = {}
    openblas = numerics.current().blas.startswith("openblas")
    for name, layer in model.named_modules():
        if is_depthwise(layer):
            leaves[name] = DepthwiseConv1d
        elif type(layer) is nn.RMSNorm:
            leaves[name] = RMSNorm
        elif rope.gains(layer):
            leaves[name] = SharedRoPE
        elif openblas and gains(layer):
            leaves[name] = RowLinear
        elif openblas and gains_as_head(layer):
            leaves[name] = RowEmbedding
    # A layer that holds others comes second: it takes over the children the old one has then.
    known = _RECURRENT | FEED_FORWARD
    holders = {name: known[type(layer)] for name, layer in model.named_modules() if type(layer) in known}
    holders |= {name: FewAttention for name, layer in model.named_modules() if attention.gains(layer)}
    done = [line for group in (leaves, holders) for line in replace(model, group)]
    rope.share([layer for layer in model.modules() if isinstance(layer, SharedRoPE)])
    for layer in model.modules():
        if isinstance(layer, FewAttention):
            layer.prepare()
    return done
