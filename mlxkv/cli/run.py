"""``mlxkv run``: one question, one answer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..errors import ConfigError, RequestError
from .options import (
    DEFAULT_MAX_TOKENS,
    DRAFTS,
    ENGINE,
    INTERRUPTED,
    MANY,
    MODEL,
    SALT,
    SAMPLING,
    SYSTEM,
    AsJson,
    Flags,
    Messages,
    PromptTokens,
    Question,
    Raw,
    command,
)

if TYPE_CHECKING:
    from ..config import Settings


@command(MODEL, SAMPLING, SYSTEM, ENGINE, MANY, DRAFTS, SALT)
def run(
    flags: Flags,
    prompt: Question = None,
    messages: Messages = None,
    prompt_tokens: PromptTokens = None,
    raw: Raw = False,
    as_json: AsJson = False,
) -> None:
    """Ask a model one question and print its answer."""
    settings = flags.settings()
    asked = read_request(settings, prompt, messages, prompt_tokens, raw)

    from ..decode.request import Request
    from .awake import LONG_ANSWER, awake
    from .interrupt import Interrupt
    from .render import answer, print_json, show_stats, view
    from .start import running_engine

    request = Request(**asked, sampling=sampling(settings), salt=settings.cache_salt, use_cache=settings.cache)
    with Interrupt() as interrupt, running_engine(settings, interrupt, quiet=as_json) as engine:
        with awake(after=LONG_ANSWER):
            completion = answer(engine.submit(request), view(as_json), interrupt)
        if completion is not None and as_json:
            print_json(completion.to_json())
        elif completion is not None:
            show_stats(completion)
    if completion is None or completion.finish_reason == "cancelled":
        raise typer.Exit(INTERRUPTED)


def sampling(settings: Settings) -> Any:
    """What ``run`` and ``chat`` sample with: like the settings, with a limit where they name none."""
    return settings.sampling(max_tokens=settings.max_tokens or DEFAULT_MAX_TOKENS)


def read_request(
    settings: Settings, prompt: str | None, messages: str | None, prompt_tokens: str | None, raw: bool
) -> dict[str, Any]:
    """The one of messages, prompt and tokens that a Request starts from. Raises ConfigError, RequestError."""
    from ..messages import check_text

    ways = {"a prompt": prompt, "--messages": messages, "--prompt-tokens": prompt_tokens}
    given = [name for name, value in ways.items() if value is not None]
    if len(given) != 1:
        raise ConfigError(
            f"{' and '.join(given)} were given together." if given else "There is no question.",
            'Give one of: a prompt ("-" reads it from stdin), --messages FILE, --prompt-tokens FILE.',
        )
    if raw and prompt is None:
        raise ConfigError(f"--raw does not go with {given[0]}.", "It is for a prompt given as text.")
    asked_system = settings.source("system").kind == "flag" and bool(settings.system)
    if asked_system and (raw or prompt_tokens is not None):
        raise ConfigError("--system needs a chat template.", "Leave away --system, or --raw and --prompt-tokens.")
    if prompt_tokens is not None:
        return {"tokens": _token_list(_read_json(prompt_tokens, "--prompt-tokens"), prompt_tokens)}
    if messages is not None:
        listed = read_messages(messages, "--messages")
        has_system = any(m["role"] == "system" for m in listed)
        if has_system and asked_system:
            raise ConfigError(f"--system was given, and {messages} has a system message.", "Keep one of them.")
        return {"messages": listed if has_system else with_system(settings.system, listed)}
    text = check_text(read_text(prompt, "the prompt") if prompt == "-" else prompt, "the prompt")
    if not text.strip():
        raise RequestError("The prompt is empty.", "Write a question.", param="prompt")
    if raw:
        return {"prompt": text}
    return {"messages": with_system(settings.system, [{"role": "user", "content": text}])}


def read_messages(name: str, what: str) -> list[dict[str, Any]]:
    """The messages of a JSON file, or stdin for ``-``: a list, or an object with "messages" alone. Raises ConfigError,
    RequestError."""
    from ..messages import normalise

    found = _read_json(name, what)
    if isinstance(found, dict):
        extra = sorted(found.keys() - {"messages"})
        if extra or "messages" not in found:
            raise RequestError(
                f"{name} is an object with {', '.join(map(repr, extra)) or 'no messages'}.",
                'It must be a message list, or an object with "messages" alone.',
                param="messages",
            )
        found = found["messages"]
    return normalise(found, token_ids=True)


def with_system(system: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``messages`` behind a system message, if there is a system prompt."""
    return [{"role": "system", "content": system}, *messages] if system else messages


def read_text(name: str | None, what: str) -> str:
    """A UTF-8 file, or stdin for ``-``. Raises ConfigError, RequestError."""
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(str(name)).expanduser().read_bytes()
        return data.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{what}: {name} cannot be read: {error.strerror}.", "Check the path.") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{what}: {name} is not UTF-8 (byte {error.start}).", "Save it as UTF-8.") from None


def _read_json(name: str, flag: str) -> Any:
    text = read_text(name, flag)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{flag}: {name} is not JSON: {error}.", "Fix the file.") from None


def _token_list(found: Any, name: str) -> list[int]:
    if isinstance(found, list) and found and all(type(t) is int and t >= 0 for t in found):
        return found
    raise RequestError(f"{name} is not a JSON list of token ids.", "It looks like [1, 529, 7].", param="tokens")
