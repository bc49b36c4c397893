"""Objects that the answers of several APIs have in common: usage, log-probabilities, and mlxkv's own reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..decode.request import Completion, TokenLogprob
from ..decode.spelling import Spelling
from .answer import Tokens


def logprobs_object(tokens: Sequence[TokenLogprob], spell: Spelling) -> dict[str, Any]:
    """OpenAI's ``logprobs`` of a choice: each token's text (U+FFFD for pieces of characters) and bytes."""

    def told(id: int, logprob: float) -> dict[str, Any]:
        raw = spell(id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}

    content = [told(t.id, t.logprob) | {"top_logprobs": [told(*each) for each in t.top]} for t in tokens]
    return {"content": content, "refusal": None}


def usage_object(tokens: Tokens) -> dict[str, Any]:
    """OpenAI's ``usage``."""
    return {
        "prompt_tokens": tokens.prompt,
        "completion_tokens": tokens.completion,
        "total_tokens": tokens.prompt + tokens.completion,
        "prompt_tokens_details": {"cached_tokens": tokens.cached},
        "completion_tokens_details": {"reasoning_tokens": tokens.thought},
    }


def extension(completion: Completion) -> dict[str, Any]:
    """What mlxkv tells beyond the APIs: ``{"cache": CacheReport, "timings": Timings, "drafts": DraftReport}``."""
    return {name: asdict(getattr(completion, name)) for name in ("cache", "timings", "drafts")}
