"""``mlxkv cache explain``: what a prompt would find in the cache, and why not more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from .options import ENGINE, MODEL, SALT, SYSTEM, AsJson, Flags, Messages, PromptTokens, Question, Raw, command

if TYPE_CHECKING:
    from ..config import Settings
    from ..decode.explain import Explanation


@command(MODEL, SYSTEM, ENGINE, SALT)
def explain(
    flags: Flags,
    prompt: Question = None,
    messages: Messages = None,
    prompt_tokens: PromptTokens = None,
    raw: Raw = False,
    as_json: AsJson = False,
) -> None:
    """Say how much of a prompt is cached and, where that ends, why. Loads the model; computes and stores nothing."""
    from .run import read_request
    from .start import quiet_libraries

    settings = flags.settings()
    asked = read_request(settings, prompt, messages, prompt_tokens, raw)
    model = settings.require_model()
    quiet_libraries()

    from .interrupt import Interrupt
    from .render import Status, print_json

    status = Status(not as_json)
    status.show(f"loading {model}")
    with Interrupt():  # Ctrl-C ends at once: nothing is being written
        try:
            found, name = _explain(settings, model, asked)
        finally:
            status.clear()
    if as_json:
        print_json(_to_json(found, name))
    else:
        _print(found)


def _explain(settings: Settings, model: str, asked: dict[str, Any]) -> tuple[Explanation, str]:
    from ..cache.catalogue import CacheError, holds_something
    from ..decode.explain import explain as ask
    from ..decode.options import Options
    from ..decode.request import Request

    options = settings.engine_options()
    if not options.pop("cache"):
        options["cache_dir"] = None
    try:
        stored = settings.cache and holds_something(settings.cache_dir)
    except CacheError:
        stored = True  # opening it says what a run says
    request = Request(**asked, salt=settings.cache_salt, use_cache=settings.cache)
    return ask(Options(model=model, **options), request, stored=stored)


def _to_json(found: Explanation, name: str) -> dict[str, Any]:
    return {
        "model": name,
        "prompt_tokens": found.tokens,
        "cached_tokens": found.lookup.tokens,
        "source": found.lookup.source,
        "miss_reason": found.lookup.reason,
        "miss_position": found.lookup.position,
        "why": found.why,
        "ids_before": found.before,
        "ids_after": found.after,
        "text_before": found.text_before,
        "text_after": found.text_after,
    }


def _print(found: Explanation) -> None:
    from .render import printable

    lookup = found.lookup
    source = f" (from {lookup.source})" if lookup.source != "none" else ""
    typer.echo(f"cached    {lookup.tokens:,} of {found.tokens:,} prompt tokens{source}")
    if lookup.reason is None:
        typer.echo("          everything but the last token, which is always computed")
    else:
        typer.echo(f"why       {lookup.reason} from token {lookup.position:,} on: {found.why}")
    typer.echo(f"there     {printable(repr(found.text_before))} then {printable(repr(found.text_after))}")
