"""JSON of files that nobody vouches for: one meaning only, bounded in depth, numbers and elements."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

#: commas and opening brackets, which bound how many values there are, and so the memory that they take
MAX_VALUES = 1_000_000
#: digits of a number: 64 bits need 20
MAX_DIGITS = 20
#: lists and objects inside one another
MAX_DEPTH = 32


def loads(data: bytes | str, *, values: int = MAX_VALUES) -> Any:
    """The value of a JSON text. Raises ValueError for anything else than UTF-8 JSON, a key that stands twice in an
    object, NaN, infinities, numbers beyond 64 bits or ``MAX_DIGITS``, halves of surrogate pairs, and for what is
    nested or long beyond all reason."""
    try:
        text = data.decode() if isinstance(data, bytes) else data
        if text.count(",") + text.count("[") + text.count("{") > values:
            raise ValueError(f"more than {values:,} values")
        value = json.loads(
            text, object_pairs_hook=_once, parse_constant=_constant, parse_int=_whole, parse_float=_float
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None
    _check(value)
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in an object")
    return found


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS or not -(2**63) <= (value := int(digits)) < 2**64:
        raise ValueError("a number beyond 64 bits")
    return value


def _float(digits: str) -> float:
    if len(digits) > 2 * MAX_DIGITS or not math.isfinite(value := float(digits)):
        raise ValueError("a number that is too large or too long")
    return value


def _check(value: Any) -> None:
    """Depth and strings, without recursion."""
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                for key in item:
                    key.encode()  # UnicodeEncodeError is a ValueError
                below += item.values()
            elif isinstance(item, list):
                below += item
            elif isinstance(item, str):
                item.encode()
        if not below:
            return
        level = below
    raise ValueError("nested too deeply")
