"""How many bytes were written today, by all processes that use the folder: one small file, read and changed under a
lock."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from pathlib import Path

FILE = "writes.json"


def today() -> str:
    return time.strftime("%Y-%m-%d")


class Daily:
    """``{"day": "2025-01-31", "bytes": 123}``; a file that cannot be read or says anything else counts as nothing
    written. Days are those of the local clock."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE

    def used(self) -> int:
        """Bytes written today."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return 0
        try:
            return _parse(os.read(fd, 4096))
        except OSError:
            return 0
        finally:
            os.close(fd)

    def add(self, nbytes: int) -> None:
        """Count bytes that were written. What cannot be noted is not counted."""
        with contextlib.suppress(OSError):
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                with contextlib.suppress(OSError):  # a file system without locks: two processes may count as one
                    fcntl.flock(fd, fcntl.LOCK_EX)
                total = _parse(os.read(fd, 4096)) + nbytes
                text = json.dumps({"day": today(), "bytes": total}).encode()
                os.ftruncate(fd, 0)
                os.pwrite(fd, text, 0)
            finally:
                os.close(fd)


def _parse(text: bytes) -> int:
    try:
        found = json.loads(text)
        return max(0, int(found["bytes"])) if found["day"] == today() else 0
    except (ValueError, KeyError, TypeError, OverflowError):
        return 0
