"""How others talk to mlxkv: an OpenAI-compatible HTTP server around its engines."""

from .app import create_app
from .limits import Limits
from .server import Server

__all__ = ["Limits", "Server", "create_app"]
