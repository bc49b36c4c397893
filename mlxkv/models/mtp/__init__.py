"""Multi-token-prediction heads: found in a folder, read with the right norms, and run beside their body.

mlx-lm drops their tensors when it loads a model; this reads them itself. ``find`` says what is there and why it is not
used, ``load`` gives the head, ``WithHead`` runs body and head as one.
"""

from .find import Found, find, open_head
from .head import Head
from .loading import evaluate, load
from .qwen import QwenHead as MTPHead
from .with_head import WithHead

__all__ = ["Found", "Head", "MTPHead", "WithHead", "evaluate", "find", "load", "open_head"]
