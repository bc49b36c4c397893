"""What objects are called. Names are digests, so that they say nothing of the text, and a prompt's are computed.

``v1/SPACE/PLACE/ID.CUT.KIND``: SPACE is a key space, PLACE a group of entries that one listing finds, ID an entry.
A full block is alone in its place. A leaf of n tokens shares one with those leaves of the same parent that begin with
the same 2^i tokens, the largest power of two that is at most n: all leaves that are a prefix of a prompt are found by
one listing for each power of two, however many others hang on the same block. CUT is how many of the entry's first
tokens have their rows in the leaf that ends there (0: in none); ``ID.state`` has none.

Without a secret an ID is the key itself, and whoever can guess a text could compute it. With one, all three are HMACs.
"""

from __future__ import annotations

import hmac
import re

from ..keys import digest

VERSION = "v1"
_NAME = re.compile(r"([0-9a-f]{64})\.(?:(state)|(0|[1-9][0-9]{0,4})\.(rows|window))")


class Names:
    """``key``: 32 bytes derived from the secret, or None. ``block``: tokens of a full block."""

    def __init__(self, key: bytes | None, block: int) -> None:
        self._key = key
        self.block = block

    def _tag(self, what: bytes, *fields: bytes) -> str:
        named = digest(what, *fields)
        return (named if self._key is None else hmac.digest(self._key, named, "sha256")).hex()

    def space(self, root: bytes) -> str:
        return f"{VERSION}/{self._tag(b'space', root)[:32]}"

    def place(self, root: bytes, parent: bytes, tokens: bytes) -> str:
        """Where the entry with these packed tokens after ``parent`` is."""
        n = len(tokens) // 4
        if n == self.block:
            return f"{self.space(root)}/{self._tag(b'block', parent, tokens)[:32]}"
        return f"{self.space(root)}/{self._tag(b'leaves', parent, tokens[: 4 << (n.bit_length() - 1)])[:32]}"

    def id(self, key: bytes) -> str:
        return key.hex() if self._key is None else self._tag(b"entry", key)


def file_name(entry_id: str, kind: str, cut: int) -> str:
    return f"{entry_id}.state" if kind == "state" else f"{entry_id}.{cut}.{kind}"


def parse(name: str) -> tuple[str, str, int] | None:
    """(id, kind, cut) of an object's name without its place; None: it is none of ours."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    return (found[1], "state", 0) if found[2] else (found[1], found[4], int(found[3]))
