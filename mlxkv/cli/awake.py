"""A Mac that works does not fall asleep (``caffeinate``); other systems decide for themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

#: seconds of an answer from which on a Mac is kept awake for it
LONG_ANSWER = 10.0


@contextmanager
def awake(wanted: bool = True, after: float = 0.0) -> Iterator[None]:
    """While entered, from ``after`` seconds on, a Mac does not go to sleep by itself; closing the lid still does it.

    ``caffeinate -i`` holds off idle sleep alone, and ``-w`` ends it with this process, however that ends.
    """
    command = shutil.which("caffeinate") if wanted and sys.platform == "darwin" else None
    if command is None:
        yield
        return
    running: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        null = subprocess.DEVNULL
        with suppress(OSError):  # it is a kindness, no condition; a session of its own, because Ctrl-C is not for it
            running.append(
                subprocess.Popen(
                    [command, "-i", "-w", str(os.getpid())],
                    stdin=null,
                    stdout=null,
                    stderr=null,
                    start_new_session=True,
                )
            )

    timer = threading.Timer(after, start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        for process in running:
            process.terminate()
            process.wait()
