"""The server's log: lines for people, or with ``--log-json`` one JSON object a line. Neither has a word of a prompt or
an answer at the default level."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

_FORMAT = "%(asctime)s %(levelname)s %(message)s"


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
        if record.exc_info:
            made["error"] = self.formatException(record.exc_info)
        return json.dumps(made, default=str)


def configure(as_json: bool = False, stream: TextIO | None = None) -> None:
    """Have everything logged to ``stream`` (stderr), once: warnings of others, and what mlxkv itself has to say."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if as_json else logging.Formatter(_FORMAT))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("mlxkv").setLevel(logging.INFO)
