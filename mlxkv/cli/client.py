"""Who answers a chat: the engine of this process, or a server that runs already."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..config import ALIASES
from ..errors import ConfigError, MlxkvError, ModelError
from .options import DRAFTS, ENGINE, MANY, warn
from .render import Thought, printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..config import Settings
    from ..decode.engine import Engine
    from ..decode.request import Completion, Request
    from ..serve.pipeline import Pipeline
    from .interrupt import Interrupt
    from .remote import Remote
    from .render import Events, View


@dataclass(frozen=True)
class Said:
    """An answer: what was sampled, and the reasoning that came before it where that is told apart."""

    completion: Completion
    thoughts: str = ""


class Client(Protocol):
    """What a chat asks of whoever answers it. Every method may raise MlxkvError."""

    #: what a session file calls the model, and what ``names`` does
    model: str
    shown: str

    def greeting(self) -> str:
        """The model and where it runs, for people."""
        ...

    def answer(self, messages: list[dict[str, Any]], shown: View, interrupt: Interrupt) -> Said | None:
        """The answer to ``messages``, shown as it comes; None if it was stopped before it began."""
        ...

    def names(self) -> list[str]:
        """Models that ``use`` takes; there may be others."""
        ...

    def use(self, name: str, interrupt: Interrupt) -> None:
        """Go on with another model. Where that fails, the old one is there still, or again."""
        ...

    def facts(self) -> dict[str, str]:
        """What there is to know about the model and its home, in words."""
        ...

    def fits(self, model: str) -> bool:
        """Whether a session that was held with ``model`` was held with this one."""
        ...

    def gone(self) -> bool:
        """Whether no further answer can come."""
        ...


class Local:
    """An engine of this process, with the model of ``settings``. Enter it; leaving it closes the engine."""

    def __init__(self, settings: Settings, interrupt: Interrupt, quiet: bool) -> None:
        self._settings, self._interrupt, self._quiet = settings, interrupt, quiet
        self._running = ExitStack()

    def __enter__(self) -> Local:
        self._start(self._settings)
        return self

    def __exit__(self, *why: Any) -> None:
        self._running.__exit__(*why)

    def _start(self, settings: Settings) -> None:
        from .start import running_engine

        self._engine: Engine = self._running.enter_context(running_engine(settings, self._interrupt, self._quiet))
        self._settings = settings
        self.model, self.shown = str(self._engine.info.path), self._engine.info.name

    def greeting(self) -> str:
        return f"{self._engine.info.name} on {self._engine.info.device}"

    def answer(self, messages: list[dict[str, Any]], shown: View, interrupt: Interrupt) -> Said | None:
        from ..decode.request import Request
        from .awake import LONG_ANSWER, awake
        from .render import Plain, Silent, answer
        from .run import sampling

        request = Request(
            messages=messages,
            sampling=sampling(self._settings),
            salt=self._settings.cache_salt,
            use_cache=self._settings.cache,
        )
        ticket: Events = self._engine.submit(request) if isinstance(shown, Plain | Silent) else self._submit(request)
        with awake(after=LONG_ANSWER):
            completion = answer(ticket, shown, interrupt)
        return None if completion is None else Said(completion)

    def _submit(self, request: Request) -> Events:
        """With thoughts told apart, for people to see; what is kept is the text as the model gave it."""
        from ..decode.thinking import Marks

        if Marks.of(self._engine.tokenizer) is None:
            return self._engine.submit(request)
        from ..serve.pipeline import Pipeline

        prepared = self._engine.prepare(request)
        pipeline = Pipeline(self._engine.tokenizer, thinking=prepared.thinking)
        return Apart(self._engine.submit(replace(request, prepared=prepared)), pipeline)

    def names(self) -> list[str]:
        return list(dict.fromkeys((self.shown, *self._settings.models)))

    def use(self, name: str, interrupt: Interrupt) -> None:
        # two models may not fit into memory together: the old one goes first, and comes back where the new one fails
        old = self._settings
        interrupt.loading()
        self._running.close()
        interrupt.loading()
        try:
            drafts = {"draft_model": None, "draft": "auto" if old.draft == "model" else old.draft}
            self._start(replace(old, model=name, adapter=None, **drafts))
        except MlxkvError as error:
            warn(f"{name} cannot be used; going back to the model before.")
            self._start(old)
            raise error

    def facts(self) -> dict[str, str]:
        info, now = self._engine.info, self._engine.status()
        where = (
            str(info.cache_dir) if info.cache_dir and not info.store_off else f"off: {info.store_off or 'not asked'}"
        )
        if info.disk_off and not info.store_off:
            where = f"in RAM only: {info.disk_off}"
        made = {"model": f"{info.name} ({info.path})", "runs on": f"{info.device}, {info.dtype}", "cache": where}
        if info.object_store:
            made["shared in"] = info.object_store
        if info.context_length:
            made["context"] = f"{info.context_length:,} tokens"
        made["drafts"] = info.drafter or f"off: {info.drafts_off}"
        if now.memory:
            made["memory"] = f"{sum(now.memory.values()) / 1e6:,.0f} MB"
        return made

    def fits(self, model: str) -> bool:
        return model in (self.model, self.shown, self._engine.info.name)  # a server calls it by its name

    def gone(self) -> bool:
        health = self._engine.health()
        return bool(health.reason) and not health.ok


class Apart:
    """A ticket of the engine whose thoughts are events of their own."""

    def __init__(self, ticket: Events, pipeline: Pipeline) -> None:
        self._ticket, self._pipeline = ticket, pipeline

    @property
    def cancelled(self) -> bool:
        return self._ticket.cancelled

    def cancel(self) -> None:
        self._ticket.cancel()

    def __iter__(self) -> Iterator[Any]:
        from ..decode.request import Delta, Finished

        for event in self._ticket:
            if isinstance(event, Delta):
                yield from self._told(self._pipeline.feed(event))
                continue
            if isinstance(event, Finished):
                yield from self._told(self._pipeline.finish(event.completion.finish_reason))
            yield event

    def _told(self, parts: list[Any]) -> Iterator[Any]:
        from ..decode.request import Delta
        from ..serve import parts as kinds

        for part in parts:
            if isinstance(part, kinds.Thought):
                yield Thought(part.text)
            elif isinstance(part, kinds.Text):
                yield Delta(part.text, [])


class Served:
    """A model of a running server. Its settings are the server's; only what ``settings`` names is asked for."""

    def __init__(self, remote: Remote, settings: Settings) -> None:
        self._remote, self._settings = remote, settings
        names = remote.models()
        if not names:
            raise ModelError(f"{remote.url} has no model.", "Start mlxkv serve with one.")
        self.model = self.shown = _choose(settings, names, remote)

    def greeting(self) -> str:
        return f"{self.model} at {self._remote.url}"

    def answer(self, messages: list[dict[str, Any]], shown: View, interrupt: Interrupt) -> Said | None:
        from .render import answer

        thoughts: list[str] = []
        sent = [{k: v for k, v in message.items() if k != "token_ids"} for message in messages]
        body = {"model": self.model, "messages": sent} | _asked(self._settings)
        completion = answer(self._remote.ask(body), shown, interrupt, thoughts)
        return None if completion is None else Said(completion, "".join(thoughts))

    def names(self) -> list[str]:
        return self._remote.models()

    def use(self, name: str, interrupt: Interrupt) -> None:
        names = self._remote.models()
        found = name if name in names else self._remote.model(name)
        if found is None:
            raise ModelError(f"{self._remote.url} has no model {name!r}.", f"It has {printable(', '.join(names))}.")
        self.model = self.shown = found

    def facts(self) -> dict[str, str]:
        made = {"model": self.model, "runs at": self._remote.url}
        if not self._remote.is_mlxkv:
            return made
        told = self._remote.get("/v1/status")
        busy = [f"{told[name]} {name}" for name in ("active", "queued") if isinstance(told.get(name), int)]
        made["requests"] = ", ".join(busy)
        for model in told.get("models") or []:
            info = model.get("info") if isinstance(model, dict) and model.get("name") == self.model else None
            if isinstance(info, dict):
                made["runs at"] += f" on {info.get('device')}, {info.get('dtype')}"
                if isinstance(info.get("context_length"), int):
                    made["context"] = f"{info['context_length']:,} tokens"
        return {name: printable(value) for name, value in made.items()}

    def fits(self, model: str) -> bool:
        return Path(model).name == Path(self.model).name

    def gone(self) -> bool:
        return False  # a server may come back


#: settings of an answer, as a chat request names them
_ASKED = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "cache_salt")
#: settings of an engine, which a running server has made for itself
_OWN = tuple(ALIASES.get(key, key) for key in ("adapter", "dtype", *ENGINE, *MANY, *DRAFTS))


def served(settings: Settings, interrupt: Interrupt) -> Served:
    """The server that ``settings`` name. Raises MlxkvError."""
    from .remote import Remote

    assert settings.url
    key = next(iter(settings.api_keys()), None)
    remote = Remote(settings.url, key)
    if key and not remote.protected:
        warn(f"the key goes to {remote.url} as plain text, which others on the way can read; https is for that.")
    interrupt.idle()
    return Served(remote, settings)


def check_flags(settings: Settings) -> None:
    """Raises ConfigError for a flag that whoever answers does not follow."""
    for key in _OWN if settings.url else ("api_key", "api_key_file"):
        if settings.source(key).kind != "flag":
            continue
        name = settings.source(key).name
        if settings.url:
            raise ConfigError(
                f"{name} is an engine's setting, and the server at {settings.url} has its own.",
                "Give it to mlxkv serve, or leave --url away.",
            )
        raise ConfigError(f"{name} is for a running server, and none was named.", "Name it with --url.")


def _asked(settings: Settings) -> dict[str, Any]:
    """Fields of a request: what was set here. The rest is as the server has it."""
    return {key: getattr(settings, key) for key in _ASKED if settings.source(key).kind != "default"}


def _choose(settings: Settings, names: list[str], remote: Remote) -> str:
    """The model to ask for: the one that was named, where the server has it, else its first. Settings may name one for
    an engine of this process; what is asked for by a flag must be there."""
    wanted = settings.model
    if wanted is None or wanted in names:
        return wanted or names[0]
    if settings.source("model").kind == "flag":
        found = remote.model(wanted)
        if found is None:
            raise ModelError(f"{remote.url} has no model {wanted!r}.", f"It has {printable(', '.join(names))}.")
        return found
    return next((name for name in names if Path(name).name == Path(wanted).name), names[0])
