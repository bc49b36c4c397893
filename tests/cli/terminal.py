"""A command in a pseudo-terminal, as somebody at a keyboard meets it."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: what prompt_toolkit says where a prompt begins: bracketed paste is on, the mark is drawn, the cursor is shown
PROMPT = rb"2004h.*>.*\x1b\[\?25h"
#: what Rich says where an answer begins, once the prompt is done: the cursor is hidden, something is drawn
ANSWERING = rb"2004l.*\x1b\[\?25l.{40}"


def readable(said: bytes) -> str:
    """What was said, without escape sequences."""
    return re.sub(r"\x1b\[[\d;?]*[a-zA-Z]|\r", "", said.decode("utf-8", "replace"))


class Terminal:
    """``said``: all that came; ``until`` looks at what came since the last ``type``."""

    def __init__(self, pid: int, handle: int) -> None:
        self.pid, self.handle, self.said, self._from = pid, handle, b"", 0

    def until(self, what: bytes, seconds: float = 60) -> bytes:
        """Read on until ``what``, a regular expression, was said; gives back all since the last ``type``."""
        end = time.monotonic() + seconds
        while not re.search(what, self.said[self._from :], re.DOTALL):
            assert time.monotonic() < end, (what, self.said[self._from :])
            self._read()
        return self.said[self._from :]

    def type(self, keys: str | bytes) -> None:
        self._from = len(self.said)
        os.write(self.handle, keys if isinstance(keys, bytes) else keys.encode())

    def ask(self, text: str) -> str:
        """Type a line, and read until the next prompt; what was said, without escape sequences."""
        self.type(text + "\r")
        return readable(self.until(rb"2004l.*" + PROMPT))

    def end(self, keys: str | bytes = b"\x04", seconds: float = 30) -> int:
        """Type ``keys`` (Ctrl-D), and wait for the process; its exit code."""
        self.type(keys)
        end = time.monotonic() + seconds
        while (ended := os.waitpid(self.pid, os.WNOHANG)) == (0, 0):
            assert time.monotonic() < end, self.said
            with contextlib.suppress(OSError):  # the other end has closed
                self._read()
        self.pid = 0
        return os.waitstatus_to_exitcode(ended[1])

    def _read(self) -> None:
        if select.select([self.handle], [], [], 0.1)[0]:
            new = os.read(self.handle, 65536)
            self.said += new
            if b"\x1b[6n" in new:  # prompt_toolkit asks where the cursor is
                os.write(self.handle, b"\x1b[1;1R")


@contextlib.contextmanager
def terminal(*command: object) -> Iterator[Terminal]:
    """``python -m mlxkv.cli`` with the arguments ``command``, 24 lines of 80 columns."""
    pid, handle = pty.fork()
    if pid == 0:  # the child's terminal is the pty
        os.chdir(ROOT)
        os.environ.update(TERM="xterm-256color", COLUMNS="80", LINES="24")
        os.execv(sys.executable, [sys.executable, "-m", "mlxkv.cli", *map(str, command)])
    made = Terminal(pid, handle)
    try:
        yield made
    finally:
        os.close(handle)
        if made.pid:
            os.kill(made.pid, signal.SIGKILL)
            os.waitpid(made.pid, 0)
