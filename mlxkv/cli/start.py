"""Starting the engine for a command, and closing it whatever happens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from .options import paint, warn
from .render import Status

if TYPE_CHECKING:
    from ..config import Settings
    from ..decode.engine import Engine
    from .interrupt import Interrupt


@contextmanager
def running_engine(settings: Settings, interrupt: Interrupt | None = None, quiet: bool = False) -> Iterator[Engine]:
    """An engine with the model of ``settings``. Says on stderr what the user should know. Raises MlxkvError."""
    model = settings.require_model()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its advice is about libraries that are not used here
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    status = Status(not quiet)
    status.show(f"loading {model}")
    try:
        from ..decode.engine import Engine

        engine = Engine(model, **settings.engine_options())
    finally:
        status.clear()
    if interrupt is not None:
        interrupt.idle()
    if engine.info.store_off and settings.cache:
        warn(f"nothing will be remembered: {engine.info.store_off}")
    if not quiet:
        for note in engine.info.notes:
            typer.echo(paint(f"note: {note}", "2"), err=True)
    try:
        yield engine
    finally:
        if interrupt is not None:
            interrupt.closing()
        engine.close()
