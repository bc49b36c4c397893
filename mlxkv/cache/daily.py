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
    """``{"day": "2025-01-31", "bytes": 123, "merged": 45}``; a file that cannot be read or says anything else counts as
    nothing written. Days are those of the local clock."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE

    def used(self) -> int:
        """Bytes written today."""
        return self._read()["bytes"]

    def merged(self) -> int:
        """How many of them to merge the pieces of blocks."""
        return self._read()["merged"]

    def _read(self) -> dict[str, int]:
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return _parse(b"")
        try:
            return _parse(os.read(fd, 4096))
        except OSError:
            return _parse(b"")
        finally:
            os.close(fd)

    def add(self, nbytes: int, *, merging: bool = False) -> None:
        """Count bytes that were written. What cannot be noted is not counted."""
        with contextlib.suppress(OSError):
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                with contextlib.suppress(OSError):  # a file system without locks: two processes may count as one
                    fcntl.flock(fd, fcntl.LOCK_EX)
                now = _parse(os.read(fd, 4096))
                now["bytes"] += nbytes
                now["merged"] += nbytes if merging else 0
                text = json.dumps({"day": today(), **now}).encode()
                os.ftruncate(fd, 0)
                os.pwrite(fd, text, 0)
            finally:
                os.close(fd)


def _parse(text: bytes) -> dict[str, int]:
    try:
        found = json.loads(text)
        if found["day"] == today():
            return {"bytes": max(0, int(found["bytes"])), "merged": max(0, int(found.get("merged", 0)))}
    except (ValueError, KeyError, TypeError, OverflowError, AttributeError):
        pass
    return {"bytes": 0, "merged": 0}
