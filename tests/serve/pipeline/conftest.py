"""The demo model's tokenizer, and tokenizers that write calls in other formats."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import mlxkv
from mlxkv.decode.request import Delta, TokenLogprob
from mlxkv.decode.text import Detokenizer, plain
from mlxkv.serve.parts import Arguments, Call, Part, Text, Thought, Tools
from mlxkv.serve.pipeline import Pipeline

DEMO = Path(mlxkv.__file__).parent / "models" / "mlxkv-demo"


@lru_cache(maxsize=1)
def demo() -> Any:
    from mlx_lm.tokenizer_utils import load

    return load(DEMO)


def like(parser: str) -> Any:
    """The demo's tokenizer, but with calls as ``parser`` reads them."""
    from importlib import import_module

    from mlx_lm.tokenizer_utils import TokenizerWrapper

    module = import_module(f"mlx_lm.tool_parsers.{parser}")
    return TokenizerWrapper(
        plain(demo()),
        tool_call_start=module.tool_call_start,
        tool_call_end=module.tool_call_end,
        tool_parser=module.parse_tool_call,
    )


def function(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


WEATHER = function("get_weather", city={"type": "string"}, days={"type": "integer"})
TOOLS = Tools((WEATHER, function("now")))


def deltas(text: str, tokenizer: Any = None) -> list[Delta]:
    """``text`` as an engine gives it: a token at a time, each with a log-probability that names its place."""
    tokenizer = tokenizer or demo()
    decoder, made = Detokenizer(tokenizer), []
    for i, token in enumerate(plain(tokenizer)(text, add_special_tokens=False)["input_ids"]):
        made.append(Delta(decoder.feed(token), [token], (TokenLogprob(token, -float(i)),)))
    if rest := decoder.finish():
        made.append(Delta(rest, []))
    return made


def through(found: list[Delta], reason: Any = "stop", stop: str | None = None, **options: Any) -> list[Part]:
    """All parts of an answer."""
    pipeline = Pipeline(options.pop("tokenizer", None) or demo(), **options)
    parts = [part for delta in found for part in pipeline.feed(delta)]
    return parts + pipeline.finish(reason, stop)


def joined(parts: list[Part]) -> list[tuple[Any, ...]]:
    """Parts as a client sees them: neighbours of a kind in one; ids of calls, which are random, left out."""
    made: list[tuple[Any, ...]] = []
    for part in parts:
        if isinstance(part, (Text, Thought)):
            kind = "text" if isinstance(part, Text) else "thought"
            old = made.pop() if made and made[-1][0] == kind else (kind, "", (), ())
            made.append((kind, old[1] + part.text, old[2] + part.token_ids, old[3] + part.logprobs))
        elif isinstance(part, Call):
            made.append(("call", part.index, part.name))
        else:
            assert isinstance(part, Arguments)
            made.append(("arguments", part.index, part.text))
    return made


def said(parts: list[Part]) -> list[tuple[str, str]]:
    """Only the texts: ("text", ...), ("thought", ...), ("call", name), ("arguments", ...)."""
    return [(each[0], each[1] if each[0] in ("text", "thought") else each[2]) for each in joined(parts)]
