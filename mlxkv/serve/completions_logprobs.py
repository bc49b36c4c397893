"""Log-probabilities as the completions API has them: four lists side by side, one entry for each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..decode.request import TokenLogprob

#: id of a token -> its bytes
Spell = Callable[[int], bytes]


def spelled(raw: bytes) -> str:
    """A token's text; of one that is only a piece of a character, its bytes: ``bytes:\\xe2\\x80``, as OpenAI has it."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def listed(tokens: Sequence[TokenLogprob], spell: Spell, start: int, length: int) -> dict[str, Any]:
    """The lists for tokens that came with ``length`` characters of text, the first of which is the ``start``-th."""
    return _lists([(t.id, t) for t in tokens], spell, start, length)


def listed_prompt(
    ids: Sequence[int], tokens: Sequence[TokenLogprob | None], spell: Spell, length: int
) -> dict[str, Any]:
    """The lists for a prompt of ``length`` characters; nothing comes before its first token, which has no numbers."""
    raw = sum(_begun(spell(id)) for id in ids)
    # what the tokenizer puts before the text (a start token) is no part of it
    return _lists(list(zip(ids, tokens, strict=True)), spell, min(0, length - raw), max(0, length - raw) + raw)


def joined(lists: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Lists of consecutive pieces as one; None where there are none."""
    made: dict[str, Any] | None = None
    for some in lists:
        if some is not None:
            made = some if made is None else {name: made[name] + some[name] for name in made}
    return made


def _lists(tokens: Sequence[tuple[int, TokenLogprob | None]], spell: Spell, start: int, length: int) -> dict[str, Any]:
    made: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    at = start
    for id, told in tokens:
        raw = spell(id)
        inside = bool(raw) and raw[0] & 0xC0 == 0x80  # it goes on with a character that has begun
        made["text_offset"].append(max(0, min(at - inside, start + length)))
        made["tokens"].append(spelled(raw))
        made["token_logprobs"].append(None if told is None else told.logprob)
        made["top_logprobs"].append(None if told is None else _top(told, spell))
        at += _begun(raw)
    return made


def _top(told: TokenLogprob, spell: Spell) -> dict[str, float]:
    """Token text -> log-probability: the likeliest, and the sampled one, which need not be among them. Of two tokens
    with one text the likelier one stays."""
    made: dict[str, float] = {}
    for id, logprob in [*told.top, (told.id, told.logprob)]:
        made.setdefault(spelled(spell(id)), logprob)
    return made


def _begun(raw: bytes) -> int:
    """How many characters begin in these bytes."""
    return sum(byte & 0xC0 != 0x80 for byte in raw)
