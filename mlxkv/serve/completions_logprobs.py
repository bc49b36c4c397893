"""Log-probabilities as the completions API has them: four lists side by side, one entry for each token."""

from __future__ import annotations

import codecs
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


def joined(lists: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Lists of consecutive pieces as one; None where there are none."""
    made: dict[str, Any] | None = None
    for some in lists:
        if some is not None:
            made = some if made is None else {name: made[name] + some[name] for name in made}
    return made


def nothing() -> dict[str, Any]:
    """The lists of no token."""
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def of_prompt(ids: Sequence[int], told: Sequence[TokenLogprob | None], spell: Spell, length: int) -> dict[str, Any]:
    """The lists of a prompt of ``length`` characters; nothing comes before its first token, which has no numbers."""
    # what the tokenizer put before the text (a start token) is no part of it
    before = len(b"".join(map(spell, ids)).decode("utf-8", "replace")) - length
    return Lists(spell, -max(0, before)).add(list(zip(ids, told, strict=True)), "", length)


class Lists:
    """Makes the lists of one choice, piece by piece. A token that only goes on with a character is at the place of that
    character; ``at`` is that of the first."""

    def __init__(self, spell: Spell, at: int = 0) -> None:
        self._spell = spell
        self._at = at
        self._begun = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, tokens: Sequence[tuple[int, TokenLogprob | None]], text: str, end: int) -> dict[str, Any]:
        """The lists of the next tokens. ``text`` came with them, and then the whole is ``end`` characters long."""
        made = nothing()
        if not self._begun and text and tokens:  # some tokenizers leave out the space before a text
            self._begun = True
            self._at -= self._spell(tokens[0][0]).startswith(b" ") and not text.startswith(" ")
        for id, told in tokens:
            raw = self._spell(id)
            begun = bool(self._decoder.getstate()[0]) and bool(raw) and raw[0] & 0xC0 != 0x80
            made["text_offset"].append(max(0, min(self._at + begun, end)))  # begun: a character that never ends
            made["tokens"].append(spelled(raw))
            made["token_logprobs"].append(None if told is None else told.logprob)
            made["top_logprobs"].append(None if told is None else self._top(told))
            self._at += len(self._decoder.decode(raw))
        return made

    def _top(self, told: TokenLogprob) -> dict[str, float]:
        """Token text -> log-probability: the likeliest, and the sampled one, which need not be among them. Of two
        tokens with one text the likelier one stays."""
        made: dict[str, float] = {}
        for id, logprob in [*told.top, (told.id, told.logprob)]:
            made.setdefault(spelled(self._spell(id)), logprob)
        return made
