"""How others talk to mlxkv: an OpenAI-compatible HTTP server around its engines."""

from .. import numerics

numerics.prepare()  # chooses the BLAS before MLX is imported

from .app import create_app  # noqa: E402
from .limits import Limits  # noqa: E402
from .server import Server  # noqa: E402

__all__ = ["Limits", "Server", "create_app"]
