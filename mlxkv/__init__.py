"""mlxkv: a local MLX runtime whose memory can be trusted. A miss is always allowed; a wrong hit never.

``load`` starts an engine, ``generate`` and ``stream`` ask it; ``Engine`` and ``PrefixStore`` are the parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Engine", "PrefixStore", "Request", "SamplingParams", "generate", "load", "stream"]

if TYPE_CHECKING:
    from .api import generate, load, stream
    from .cache.store import PrefixStore
    from .decode.engine import Engine
    from .decode.request import Request, SamplingParams

_WHERE = {
    "load": "api",
    "generate": "api",
    "stream": "api",
    "Engine": "decode.engine",
    "Request": "decode.request",
    "SamplingParams": "decode.request",
    "PrefixStore": "cache.store",
}


def __getattr__(name: str) -> Any:
    # looked up when first used, so that `mlxkv --help` does not wait for MLX
    if name not in _WHERE:
        raise AttributeError(f"module 'mlxkv' has no attribute {name!r}")
    from importlib import import_module

    if name == "PrefixStore":
        from . import numerics

        numerics.prepare()  # before mlx is imported
    return getattr(import_module(f".{_WHERE[name]}", __name__), name)
