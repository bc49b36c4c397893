"""Starting the engine for a command, and closing it whatever happens."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from ..errors import ConfigError
from .options import paint, warn
from .render import Status

if TYPE_CHECKING:
    from ..config import Settings
    from ..decode.engine import Engine
    from .interrupt import Interrupt


class Progress:
    """Says on stderr what takes long: on a terminal how far it is, else once that it takes more than a second."""

    def __init__(self, status: Status, quiet: bool) -> None:
        self._status, self._quiet, self._began, self._said = status, quiet, time.monotonic(), False

    def __call__(self, what: str, done: int, total: int) -> None:
        if done == 0:
            self._began = time.monotonic()
        if time.monotonic() - self._began > 1:
            self._status.show(f"{what}: {done:,} of {total:,} records")
            if not self._said and not self._quiet and not sys.stderr.isatty():
                typer.echo(f"{what}: {total:,} records", err=True)
            self._said = True


def quiet_libraries() -> None:
    """Before transformers is imported: its advice is about libraries that are not used here."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@contextmanager
def running_engine(settings: Settings, interrupt: Interrupt | None = None, quiet: bool = False) -> Iterator[Engine]:
    """An engine with the model of ``settings``. Says on stderr what the user should know. Raises MlxkvError."""
    settings = _with_table(settings)
    model = settings.require_model()
    quiet_libraries()
    status = Status(not quiet)
    status.show(f"loading {model}")
    try:
        from ..decode.engine import Engine

        engine = Engine(model, **settings.engine_options(), progress=Progress(status, quiet))
    finally:
        status.clear()
    if interrupt is not None:
        interrupt.idle()
    say_about(engine, settings, quiet)
    try:
        yield engine
    finally:
        if interrupt is not None:
            interrupt.closing()
        engine.close()


def _with_table(settings: Settings) -> Settings:
    """``settings`` with those of the table [models.NAME], if the model is called by the name of one; of an adapter that
    is called by a name of [adapters], its folder."""
    table = settings.models.get(settings.model or "")
    if table is None:
        folder = settings.adapters.get(settings.adapter or "")
        return settings if folder is None else replace(settings, adapter=str(folder))
    adapter = None
    if table.adapter is not None:
        if table.adapter not in settings.adapters:
            raise ConfigError(
                f"The adapter {table.adapter!r} of {settings.model} is not registered.", "Add it to [adapters]."
            )
        adapter = str(settings.adapters[table.adapter])
    return replace(settings, model=table.path, adapter=adapter, **table.options)


def say_about(engine: Engine, settings: Settings, quiet: bool = False) -> None:
    """What the user should know about a model that was loaded, on stderr."""
    if engine.info.store_off and settings.cache:
        warn(f"nothing will be remembered: {engine.info.store_off}")
    elif engine.info.disk_off and settings.cache:
        what = "what is there is read, nothing is added" if engine.info.reads_disk else "only in RAM while this runs"
        warn(f"nothing is kept on disk, {what}: {engine.info.disk_off}")
    if not quiet:
        for note in engine.info.notes:
            typer.echo(paint(f"note: {note}", "2"), err=True)
