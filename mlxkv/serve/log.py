"""The server's log: lines for people, or with ``--log-json`` one JSON object a line. Neither has a word of a prompt or
an answer at the default level."""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, TextIO

from ..errors import ConfigError

#: bytes of a log file at most; about 50,000 requests
FILE_BYTES = 10 * 2**20

_FORMAT = "%(asctime)s %(levelname)s %(message)s"
#: errors that speak of the machine. What others say may be a piece of what somebody wrote (a key that is not there, a
#: value that cannot be converted): of those only the kind and the place are told.
_OF_THE_MACHINE = (OSError, RuntimeError, MemoryError, ImportError)


def told(error: BaseException) -> str:
    """The traceback of an error and of those that led to it, without words that may be a client's."""
    made: list[str] = []
    at: BaseException | None = error
    while at is not None and len(made) < 10:
        said = f": {at}" if isinstance(at, _OF_THE_MACHINE) else ""
        made.append("".join(traceback.format_tb(at.__traceback__)) + f"{type(at).__name__}{said}")
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    return "\nwhich came from:\n".join(made)


class Lines(logging.Formatter):
    """Lines for people."""

    def __init__(self) -> None:
        super().__init__(_FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        record.exc_text = None  # another handler's, in its words
        return super().format(record)

    def formatException(self, ei: Any) -> str:
        return told(ei[1])


class JsonLines(logging.Formatter):
    """``{"time", "level", "logger", "message"}``; the line of a request (``metrics.Metrics.observe``) has its books
    under ``request`` and no message; a traceback stands under ``error``."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        made: dict[str, Any] = {"time": moment, "level": record.levelname.lower(), "logger": record.name}
        request = getattr(record, "request", None)
        if request is not None:
            made["request"] = request
        else:
            made["message"] = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            made["error"] = told(record.exc_info[1])
        return json.dumps(made, default=str)


def configure(as_json: bool = False, stream: TextIO | None = None, file: Path | None = None) -> None:
    """Have everything logged to ``stream`` (stderr), or to ``file``, once: warnings of others, and what mlxkv itself
    has to say. A file never outgrows ``FILE_BYTES``; the lines before are in the file of the same name with ``.1``
    behind it. Raises ConfigError for a file that cannot be written."""
    handler = logging.StreamHandler(stream or sys.stderr) if file is None else _to_file(file)
    handler.setFormatter(JsonLines() if as_json else Lines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("mlxkv").setLevel(logging.INFO)


class _Private(RotatingFileHandler):
    """Files that are their owner's alone."""

    def _open(self) -> Any:
        os.close(os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        return super()._open()


def _to_file(path: Path) -> logging.Handler:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return _Private(path, maxBytes=FILE_BYTES, backupCount=1, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"The log {path} cannot be written: {error.strerror}.", "Choose another file.") from None
