"""Why a request hit or missed: every look-up ends in one ``Lookup``."""

from __future__ import annotations

from dataclasses import dataclass

SOURCES = ("none", "ram", "ssd", "object", "legacy")

#: reason -> what it means to a person
REASONS = {
    "empty": "nothing is stored from here on",
    "different_tokens": "what is stored goes on with other tokens",
    "no_state": "the rows are stored, but no recurrent state to resume from",
    "evicted": "the record was removed",
    "corrupt": "a record was damaged and is not used",
    "io_error": "a record could not be read",
    "other_model": "the same tokens are stored for other weights",
    "other_layout": "the same tokens are stored with another state layout",
    "other_numerics": "the same tokens are stored under other numerics or dtypes",
    "pending": "it was still being written, or the index does not know it yet",
    "off": "the prefix store is off",
}


@dataclass(frozen=True)
class Lookup:
    """tokens: how many were restored. source: slowest tier used. reason: None only when all but the last prompt token
    were restored. position: the first token that was not, None together with the reason."""

    tokens: int
    source: str
    reason: str | None
    position: int | None
