"""DeepSeek-V4: attention over a sliding window and compressed entries, in mlx-lm's modules for DeepSeek-V4.1.

What the two share (hyper-connections, experts, YaRN) comes from ``mlx_lm.models.deepseek_v41``; attention, compressor
and indexer differ and are ours. What is remembered of a sequence is ``mlxkv.cache.compressed``'s.
"""

from .config import ModelArgs
from .model import Model

__all__ = ["Model", "ModelArgs"]
