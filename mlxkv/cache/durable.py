"""Making files durable, on Linux and on macOS, where fsync alone is not."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterable
from pathlib import Path

_F_FULLFSYNC = 51
_F_BARRIERFSYNC = 85


def sync_group(paths: Iterable[Path]) -> None:
    """All of ``paths`` are on stable storage when this returns. Raises OSError.

    macOS: a barrier for each file and one full flush for the whole group (Apple's fcntl(2)); Linux: fsync each.
    """
    last = None
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if sys.platform == "darwin":
                try:
                    fcntl.fcntl(fd, _F_BARRIERFSYNC)
                except OSError:
                    os.fsync(fd)
            else:
                os.fsync(fd)
        finally:
            os.close(fd)
        last = path
    if sys.platform == "darwin" and last is not None:
        fd = os.open(last, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):  # not every file system has it
                fcntl.fcntl(fd, _F_FULLFSYNC)
        finally:
            os.close(fd)


def sync_folder(path: Path) -> None:
    """Names in ``path`` are durable when this returns; a file system that cannot sync folders is let be."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)
