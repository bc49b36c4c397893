"""Multi-token-prediction heads: found in a folder, read with the right norms, and run beside their body.

mlx-lm drops their tensors when it loads a model; this reads them itself. ``find`` says what is there and why it is not
used, ``open_head`` and ``evaluate`` give the head, ``WithHead`` runs body and head as one.
"""

from .find import Found, Opened, find, open_head
from .head import Head
from .loading import evaluate, share, write
from .qwen import QwenHead as MTPHead
from .tensors import SIDE_FILE
from .with_head import WithHead

__all__ = [
    "SIDE_FILE",
    "Found",
    "Head",
    "MTPHead",
    "Opened",
    "WithHead",
    "evaluate",
    "find",
    "open_head",
    "share",
    "write",
]
