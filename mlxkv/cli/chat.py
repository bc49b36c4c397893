"""``mlxkv chat``: a conversation that is kept, and goes on where it stopped."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError, MlxkvError, RequestError
from .options import (
    DRAFTS,
    ENGINE,
    INTERRUPTED,
    MANY,
    MODEL,
    SALT,
    SAMPLING,
    SERVED,
    SYSTEM,
    Flags,
    command,
    show_error,
    warn,
)
from .render import Totals, printable
from .run import read_messages

if TYPE_CHECKING:
    from ..config import Settings
    from .client import Client, Said
    from .interrupt import Interrupt
    from .session import Session


HELP = """\
/help           this list
/reset          start a new conversation; the old one stays on disk
/save [FILE]    say where the conversation is kept, or write its messages to FILE (for mlxkv run --messages)
/load [WHAT]    list conversations that are kept, or go on with one: the beginning of its id, or a FILE of messages
/system [TEXT]  show the system prompt, or set it (what was cached after it must be read again)
/model [NAME]   list models, or go on with another one
/stats          what this conversation took, and what answers it
/exit           leave; Ctrl-D does too
\"\"\"             begins and ends a text of several lines; Alt-Enter starts a line too
Ctrl-C stops an answer and keeps what has come."""

COMMANDS = ("/help", "/reset", "/save", "/load", "/system", "/model", "/stats", "/exit")

#: conversations that /load lists
SHOWN = 10


@command(MODEL, SERVED, SAMPLING, SYSTEM, ENGINE, MANY, DRAFTS, SALT)
def chat(
    flags: Flags,
    session: Annotated[
        str | None, typer.Argument(help="With --resume: the session's id (default: the latest).", show_default=False)
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", "-r", help="Go on with a session.")] = False,
    list_sessions: Annotated[bool, typer.Option("--list", help="List the sessions that are kept.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a turn and nothing else.")] = False,
) -> None:
    """Chat with a model, of this process or (--url) of a running server. Without a terminal each line of stdin is a
    turn."""
    settings = flags.settings()
    if list_sessions:
        _list(as_json)
        return
    if session is not None and not resume:
        raise ConfigError(f"{session!r} was given without --resume.", f"mlxkv chat --resume {session} goes on with it.")
    from .client import Local, check_flags, served
    from .interrupt import Interrupt
    from .prompt import reader

    check_flags(settings)
    if not settings.url:
        settings.require_model()
    old = _resumed(session) if resume else None

    def talk(client: Client) -> int:
        return Chat(client, interrupt, _fit(old, client, settings), as_json).loop(reader(as_json, COMMANDS))

    with Interrupt() as interrupt:
        if settings.url:
            code = talk(served(settings, interrupt))
        else:
            with Local(settings, interrupt, quiet=as_json) as client:
                code = talk(client)
    if code:
        raise typer.Exit(code)


@dataclass
class Chat:
    """One conversation at the terminal, or on a pipe."""

    client: Client
    interrupt: Interrupt
    session: Session
    as_json: bool
    totals: Totals = field(default_factory=Totals)

    def loop(self, read: Any) -> int:
        """Turns until the input ends. Gives back the exit code: that of the last failed turn where nobody watches."""
        if read.interactive and not self.as_json:
            self._greet()
        code = 0
        while True:
            self.interrupt.idle()
            try:
                text = read()
            except EOFError:
                return 0 if read.interactive else code
            except KeyboardInterrupt:
                if not read.interactive:
                    return INTERRUPTED
                self._say("Ctrl-D or /exit leaves.")
                continue
            if not text.strip():
                continue
            try:
                if read.is_command(text):
                    if not self.command(text.strip()):
                        return 0 if read.interactive else code
                else:
                    self.turn(text)
            except MlxkvError as error:
                show_error(error)
                code = error.exit_code
                if self.client.gone():
                    return code
            except KeyboardInterrupt:  # a command was waiting for something
                if not read.interactive:
                    return INTERRUPTED

    def turn(self, text: str) -> None:
        """One question and its answer. A question without an answer does not stay in the conversation."""
        from ..messages import check_text
        from .render import print_json, show_stats, view

        question = {"role": "user", "content": check_text(text, "the message")}
        try:
            said = self.client.answer([*self.session.messages, question], view(self.as_json), self.interrupt)
        except RequestError as error:
            if error.code == "context_length_exceeded":
                error.cure = f"{error.cure} /reset starts a new conversation.".strip()
            raise
        try:
            if said is not None and (said.completion.token_ids or said.completion.text or said.thoughts):
                self._keep(question, said)
            elif not self.as_json:
                self._say("Stopped before the answer began; the question was not kept.")
        finally:  # also when the session could not be saved: the answer is there
            if said is not None:
                self.totals.add(said.completion)
            if said is not None and self.as_json:
                more = {"reasoning": said.thoughts} if said.thoughts else {}
                print_json(
                    {**said.completion.to_json(), **more, "session": self.session.id, "turn": self.session.turns}
                )
            elif said is not None:
                show_stats(said.completion)

    def command(self, line: str) -> bool:
        """Do what a line that starts with a slash says. False: leave."""
        from .session import Session

        word, _, rest = line.partition(" ")
        rest = rest.strip()
        if word in ("/exit", "/quit", "/bye"):
            return False
        if word == "/help":
            self._say(HELP)
        elif word == "/reset":
            system = [m for m in self.session.messages[:1] if m["role"] == "system"]
            self.session = Session(self.session.model, messages=system)
            self._say("A new conversation.")
        elif word == "/save":
            self._save_as(rest)
        elif word == "/load":
            self._load(rest)
        elif word == "/system":
            self._system(rest)
        elif word == "/model":
            self._model(rest)
        elif word == "/stats":
            self._stats()
        else:
            raise RequestError(f"{word} is no command.", "/help lists them; a line may start with a space instead.")
        return True

    def _keep(self, question: dict[str, Any], said: Said) -> None:
        answer: dict[str, Any] = {"role": "assistant", "content": said.completion.text}
        if said.thoughts:
            answer["reasoning_content"] = said.thoughts
        if said.completion.token_ids:
            answer["token_ids"] = said.completion.token_ids
        self.session.messages += [question, answer]
        before = self.session.id
        if not self.session.save():
            warn(f"session {before} was changed by another chat; this one is kept as {self.session.id}.")

    def _save_as(self, name: str) -> None:
        from .session import write_private

        if not name:
            kept = self.session.path.exists()
            self._say(f"Kept after each answer: {self.session.path}" if kept else "There is nothing to keep yet.")
            return
        path = Path(name).expanduser()
        if path.exists():
            raise RequestError(f"{path} exists.", "Choose another name.")
        plain = [{k: v for k, v in m.items() if k != "token_ids"} for m in self.session.messages]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_private(path, json.dumps(plain, ensure_ascii=False, indent=1).encode("utf-8", "replace"))
        except OSError as error:
            raise RequestError(f"{path} cannot be written: {error.strerror}.", "Choose another place.") from None
        self._say(f"Written to {path}.")

    def _load(self, wanted: str) -> None:
        from .session import Session, find

        if not wanted:
            rows = _rows(SHOWN)
            self._say("\n".join(map(_row_text, rows)) if rows else "No sessions yet.")
            return
        path = Path(wanted).expanduser()
        if path.is_file():
            self.session = Session(self.client.model, messages=read_messages(str(path), wanted))
        else:
            found = find(wanted)
            if not self.client.fits(found.model):
                warn(f"session {found.id} was held with {found.model}; it goes on with {self.client.model}.")
            found.model = self.client.model
            self.session = found
        self._say(f"{_turns(self.session)} loaded.")

    def _system(self, text: str) -> None:
        from ..messages import check_text

        messages = self.session.messages
        has = bool(messages) and messages[0]["role"] == "system"
        if not text:
            self._say(messages[0]["content"] if has else "There is no system prompt.")
            return
        made = {"role": "system", "content": check_text(text, "the system prompt")}
        self.session.messages = [made, *(messages[1:] if has else messages)]
        self._say("System prompt set.")

    def _model(self, name: str) -> None:
        if not name:
            names = self.client.names()
            self._say("\n".join(f"{'*' if name == self.client.shown else ' '} {printable(name)}" for name in names))
            return
        self.client.use(name, self.interrupt)
        self.session.model = self.client.model
        self._say(self.client.greeting())

    def _stats(self) -> None:
        kept = f", kept as {self.session.id}" if self.session.path.exists() else ""
        rows = {"conversation": f"{_turns(self.session)}{kept}"} | self.totals.facts() | self.client.facts()
        wide = max(map(len, rows))
        self._say("\n".join(f"{name:<{wide}}  {value}" for name, value in rows.items()))

    def _greet(self) -> None:
        earlier = f", {_turns(self.session)} before" if self.session.turns else ""
        self._say(f"{self.client.greeting()}{earlier}. /help lists commands.")

    def _say(self, text: str) -> None:
        typer.echo(text, err=True)


def _turns(session: Session) -> str:
    return "1 turn" if session.turns == 1 else f"{session.turns} turns"


def _resumed(wanted: str | None) -> Session | None:
    """The session that was asked for; for the latest, the newest one that is whole. None if there is none."""
    from .session import SessionError, find, load, paths

    if wanted is not None:
        return find(wanted)
    for path in paths():
        try:
            return load(path)
        except SessionError as error:
            show_error(error, "warning")
    warn("there is no session to resume; this is a new one.")
    return None


def _fit(old: Session | None, client: Client, settings: Settings) -> Session:
    """The session to go on with: a new one, or ``old`` brought in line with the model and system prompt of now."""
    from .run import with_system
    from .session import Session

    model = client.model
    if old is None:
        return Session(model, messages=with_system(settings.system, []))
    if not client.fits(old.model):
        warn(f"session {old.id} was held with {old.model}; it goes on with {model}.")
    old.model = model
    first = old.messages[0] if old.messages and old.messages[0]["role"] == "system" else None
    if settings.source("system").kind == "flag" and (first["content"] if first else "") != settings.system:
        warn("the system prompt changed, so what is cached after it does not fit.")
        old.messages = with_system(settings.system, old.messages[1:] if first else old.messages)
    return old


def _rows(most: int | None = None) -> list[dict[str, Any]]:
    """What is told of each session, the one last changed first; damaged ones are named on stderr."""
    from .session import SessionError, load, paths

    rows: list[dict[str, Any]] = []
    for path in paths():
        if most is not None and len(rows) >= most:
            break
        try:
            found = load(path)
        except SessionError as error:
            show_error(error, "warning")
            continue
        rows.append({key: getattr(found, key) for key in ("id", "model", "created", "updated", "turns", "title")})
    return rows


def _row_text(row: dict[str, Any]) -> str:
    title = row["title"] if len(row["title"]) <= 50 else row["title"][:49] + "…"
    return f"{row['id']}  {row['updated'][:16]}  {row['turns']:>3} turns  {Path(row['model']).name}  {title}"


def _list(as_json: bool) -> None:
    from .render import print_json

    rows = _rows()
    if as_json:
        print_json(rows)
        return
    for row in rows:
        typer.echo(_row_text(row))
    if not rows:
        typer.echo("No sessions yet.", err=True)
