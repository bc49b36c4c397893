"""The sources that there are, by kind; each is loaded when it is asked for."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from .source import Context, Source

#: kind, as ``recognise`` says it -> (module of this room, class)
SOURCES = {"omlx": ("omlx", "OmlxSource"), "mlx-lm": ("prompt_cache", "PromptCacheSource")}


def open_source(kind: str, path: Path, context: Context) -> Source:
    """A source of ``path``; nothing of it is read yet."""
    module, name = SOURCES[kind]
    return getattr(import_module(f".{module}", __package__), name)(path, context)
