"""The Python API: load a model, then generate or stream."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

from .decode.engine import Engine
from .decode.request import Completion, Delta, Finished, Request, SamplingParams


def load(model: str | Path, **options: Any) -> Engine:
    """Start an engine with ``model`` (a folder or a Hugging Face id). Options are those of ``Engine``; without a
    ``cache_dir`` the user's default cache folder is used (``cache=False``: none). Raises ModelError, ConfigError."""
    if options.get("cache", True) and options.get("cache_dir") is None:
        from .config import default_cache_dir

        options["cache_dir"] = default_cache_dir()
    return Engine(model, **options)


#: options that are fields of Request; all others are of SamplingParams
_FIELDS = (
    "tools",
    "template_kwargs",
    "salt",
    "use_cache",
    "grammar",
    "continue_final",
    "reasoning_budget",
    "prompt_logprobs",
    "deadline",
    "name",
)


def _request(prompt: str | list[dict[str, Any]] | list[int], options: dict[str, Any]) -> Request:
    fields = {k: options.pop(k) for k in _FIELDS if k in options}
    if "stop" in options:
        stop = options["stop"]
        options["stop"] = (stop,) if isinstance(stop, str) else tuple(stop or ())
    sampling = SamplingParams(**options)
    if isinstance(prompt, str):
        return Request(messages=[{"role": "user", "content": prompt}], sampling=sampling, **fields)
    if prompt and isinstance(prompt[0], int):
        return Request(tokens=list(prompt), sampling=sampling, **fields)  # type: ignore[arg-type]
    return Request(messages=list(prompt), sampling=sampling, **fields)  # type: ignore[arg-type]


def generate(engine: Engine, prompt: str | list[dict[str, Any]] | list[int], **options: Any) -> Completion:
    """The whole answer to a question (text), a message list, or raw token ids.

    Options are the fields of SamplingParams (max_tokens, temperature, seed, …) and those of Request (tools, grammar,
    reasoning_budget, …). Raises RequestError, EngineError.
    """
    return engine.submit(_request(prompt, options)).result()


def stream(
    engine: Engine, prompt: str | list[dict[str, Any]] | list[int], **options: Any
) -> Generator[Delta, None, Completion]:
    """Like ``generate``, but yields pieces of text as they are made. Closing the iterator cancels the request; the
    completion is its return value."""
    ticket = engine.submit(_request(prompt, options))
    try:
        for event in ticket:
            if isinstance(event, Delta):
                yield event
            elif isinstance(event, Finished):
                return event.completion
        raise RuntimeError("the stream ended without a completion")
    finally:
        ticket.cancel()
