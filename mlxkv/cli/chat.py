"""``mlxkv chat``: a conversation that is kept, and goes on where it stopped."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError, MlxkvError, RequestError
from .options import DRAFTS, ENGINE, INTERRUPTED, MANY, MODEL, SALT, SAMPLING, SYSTEM, Flags, command, show_error, warn

if TYPE_CHECKING:
    from ..config import Settings
    from ..decode.engine import Engine
    from ..decode.request import Completion
    from .interrupt import Interrupt
    from .session import Session


HELP = """\
/help           this list
/reset          start a new conversation; the old one stays on disk
/save [FILE]    say where the conversation is kept, or write its messages to FILE (for mlxkv run --messages)
/system [TEXT]  show the system prompt, or set it (what was cached after it must be read again)
/exit           leave; Ctrl-D does too
\"\"\"             begins and ends a text of several lines
Ctrl-C stops an answer and keeps what has come."""


@command(MODEL, SAMPLING, SYSTEM, ENGINE, MANY, DRAFTS, SALT)
def chat(
    flags: Flags,
    session: Annotated[
        str | None, typer.Argument(help="With --resume: the session's id (default: the latest).", show_default=False)
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", "-r", help="Go on with a session.")] = False,
    list_sessions: Annotated[bool, typer.Option("--list", help="List the sessions that are kept.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a turn and nothing else.")] = False,
) -> None:
    """Chat with a model. Without a terminal each line of stdin is a turn."""
    settings = flags.settings()
    if list_sessions:
        _list(as_json)
        return
    if session is not None and not resume:
        raise ConfigError(f"{session!r} was given without --resume.", f"mlxkv chat --resume {session} goes on with it.")
    settings.require_model()
    old = _resumed(session) if resume else None

    from .interrupt import Interrupt
    from .prompt import reader
    from .start import running_engine

    with Interrupt() as interrupt, running_engine(settings, interrupt, quiet=as_json) as engine:
        talk = Chat(engine, settings, interrupt, _fit(old, engine, settings), as_json)
        code = talk.loop(reader(as_json))
    if code:
        raise typer.Exit(code)


@dataclass
class Chat:
    """One conversation at the terminal, or on a pipe."""

    engine: Engine
    settings: Settings
    interrupt: Interrupt
    session: Session
    as_json: bool

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
                if self.engine.health().reason and not self.engine.health().ok:
                    return code

    def turn(self, text: str) -> None:
        """One question and its answer. A question without an answer does not stay in the conversation."""
        from ..decode.request import Request
        from ..messages import check_text
        from .render import answer, print_json, show_stats, view
        from .run import sampling

        question = {"role": "user", "content": check_text(text, "the message")}
        request = Request(
            messages=[*self.session.messages, question],
            sampling=sampling(self.settings),
            salt=self.settings.cache_salt,
            use_cache=self.settings.cache,
        )
        try:
            completion = answer(self.engine, request, view(self.as_json), self.interrupt)
        except RequestError as error:
            if error.code == "context_length_exceeded":
                error.cure = f"{error.cure} /reset starts a new conversation.".strip()
            raise
        try:
            if completion is not None and completion.token_ids:
                self._keep(question, completion)
            elif not self.as_json:
                self._say("Stopped before the answer began; the question was not kept.")
        finally:  # also when the session could not be saved: the answer is there
            if completion is not None and self.as_json:
                print_json({**completion.to_json(), "session": self.session.id, "turn": self.session.turns})
            elif completion is not None:
                show_stats(completion)

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
        elif word == "/system":
            self._system(rest)
        else:
            raise RequestError(f"{word} is no command.", "/help lists them; a line may start with a space instead.")
        return True

    def _keep(self, question: dict[str, Any], completion: Completion) -> None:
        said = {"role": "assistant", "content": completion.text, "token_ids": completion.token_ids}
        self.session.messages += [question, said]
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

    def _system(self, text: str) -> None:
        messages = self.session.messages
        has = bool(messages) and messages[0]["role"] == "system"
        if not text:
            self._say(messages[0]["content"] if has else "There is no system prompt.")
            return
        self.session.messages = [{"role": "system", "content": text}, *(messages[1:] if has else messages)]
        self._say("System prompt set.")

    def _greet(self) -> None:
        turns = f", {self.session.turns} earlier turns" if self.session.turns else ""
        self._say(f"{self.engine.info.name} on {self.engine.info.device}{turns}. /help lists commands.")

    def _say(self, text: str) -> None:
        typer.echo(text, err=True)


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


def _fit(old: Session | None, engine: Engine, settings: Settings) -> Session:
    """The session to go on with: a new one, or ``old`` brought in line with the model and system prompt of now."""
    from .run import with_system
    from .session import Session

    model = str(engine.info.path)
    if old is None:
        return Session(model, messages=with_system(settings.system, []))
    if old.model != model:
        warn(f"session {old.id} was held with {old.model}; it goes on with {model}.")
    old.model = model
    first = old.messages[0] if old.messages and old.messages[0]["role"] == "system" else None
    if settings.source("system").kind == "flag" and (first["content"] if first else "") != settings.system:
        warn("the system prompt changed, so what is cached after it does not fit.")
        old.messages = with_system(settings.system, old.messages[1:] if first else old.messages)
    return old


def _list(as_json: bool) -> None:
    from .render import print_json
    from .session import SessionError, load, paths

    rows = []
    for path in paths():
        try:
            found = load(path)
        except SessionError as error:
            show_error(error, "warning")
            continue
        row = {key: getattr(found, key) for key in ("id", "model", "created", "updated", "turns", "title")}
        rows.append(row)
    if as_json:
        print_json(rows)
        return
    for row in rows:
        title = row["title"] if len(row["title"]) <= 50 else row["title"][:49] + "…"
        typer.echo(f"{row['id']}  {row['updated'][:16]}  {row['turns']:>3} turns  {Path(row['model']).name}  {title}")
    if not rows:
        typer.echo("No sessions yet.", err=True)
