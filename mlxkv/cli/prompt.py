"""Where the turns of a chat come from: a terminal with line editing and history, or the lines of a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
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

    def __init__(self, commands: Sequence[str]) -> None:
        super().__init__()
        self._session = _prompt_session(commands)

    def _line(self, mark: str) -> str:
        return self._session.prompt(mark) + "\n"


def reader(as_json: bool, commands: Sequence[str] = ()) -> LineReader:
    """The reader that suits stdin and stdout. On a terminal the Tab key completes ``commands``."""
    if not as_json and sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        return TerminalReader(commands)
    return LineReader()


def _prompt_session(commands: Sequence[str]) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.application import get_app
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.filters import Condition
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    from .session import make_private_folder

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @Condition
    def in_quotes() -> bool:
        """Enter makes a new line until the quotes are closed, so that the text can be edited, and recalled, whole."""
        text = get_app().current_buffer.text.lstrip()
        return text.startswith(QUOTES) and QUOTES not in text[len(QUOTES) :]

    path = data_dir() / "history"
    history: History = InMemoryHistory()
    try:
        make_private_folder(path.parent)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        history = FileHistory(str(path))
    except OSError as error:
        warn(f"what you type is not kept for later: {path}: {error.strerror}.")
    return PromptSession(
        history=history,
        key_bindings=keys,
        multiline=in_quotes,
        prompt_continuation="… ",
        completer=WordCompleter(list(commands), sentence=True),
        complete_while_typing=False,
    )
