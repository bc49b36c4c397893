"""What runs: finding, checking, loading and fingerprinting models, and faster layers for the CPU.

This package knows nothing of the store, of requests or of HTTP.
"""

from .. import numerics

numerics.prepare()  # before anything imports mlx.core

from .loading import Loaded, load  # noqa: E402

__all__ = ["Loaded", "load"]
