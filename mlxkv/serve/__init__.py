"""How others talk to mlxkv: an OpenAI- and Anthropic-compatible HTTP server around its engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import numerics

__all__ = ["Limits", "Server", "create_app"]

if TYPE_CHECKING:
    from .app import create_app
    from .limits import Limits
    from .server import Server

numerics.prepare()  # the BLAS is chosen before anything in here imports MLX

_WHERE = {"create_app": "app", "Limits": "limits", "Server": "server"}


def __getattr__(name: str) -> Any:
    # looked up when first used: the command line uses the text pipeline, and does not wait for FastAPI
    if name not in _WHERE:
        raise AttributeError(f"module 'mlxkv.serve' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_WHERE[name]}", __name__), name)
