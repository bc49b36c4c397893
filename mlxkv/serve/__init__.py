"""How others talk to mlxkv: an OpenAI-compatible HTTP server around one engine."""

from .app import create_app

__all__ = ["create_app"]
