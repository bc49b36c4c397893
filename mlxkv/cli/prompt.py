"""Where the turns of a chat come from: a terminal with line editing and history, or the lines of a pipe."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from ..config import data_dir
from .options import warn

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

QUOTES = '"""'


class LineReader:
    """Turns from stdin, one a line; three double quotes begin and end one of several lines. EOFError at the end."""

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()
        self._quoted = False

    def __call__(self) -> str:
        first = self._line("> ").removesuffix("\n")
        self._quoted = first.lstrip().startswith(QUOTES)
        if not self._quoted:
            return first
        text = first.lstrip()[len(QUOTES) :] + "\n"
        while QUOTES not in text:
            try:
                more = self._line("… ")
            except EOFError:
                break
            text += more if more.endswith("\n") else more + "\n"
        return text.partition(QUOTES)[0].strip("\n")

    def is_command(self, text: str) -> bool:
        """A line that starts with a slash; a quoted text never is one."""
        return not self._quoted and text.startswith("/")

    def _line(self, mark: str) -> str:
        if self.interactive:
            sys.stderr.write(mark)
            sys.stderr.flush()
        data = sys.stdin.buffer.readline()
        if not data:
            raise EOFError
        return data.decode("utf-8", "replace").replace("\r\n", "\n")


class TerminalReader(LineReader):
    """Turns from a terminal, with editing and a history that is kept."""

    def __init__(self) -> None:
        super().__init__()
        self._session = _prompt_session()

    def _line(self, mark: str) -> str:
        return self._session.prompt(mark) + "\n"


def reader(as_json: bool) -> LineReader:
    """The reader that suits stdin and stdout."""
    if not as_json and sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        return TerminalReader()
    return LineReader()


def _prompt_session() -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    from .session import make_private_folder

    path = data_dir() / "history"
    try:
        make_private_folder(path.parent)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        return PromptSession(history=FileHistory(str(path)))
    except OSError as error:
        warn(f"what you type is not kept for later: {path}: {error.strerror}.")
        return PromptSession(history=InMemoryHistory())
