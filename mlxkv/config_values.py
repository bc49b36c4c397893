"""What a setting may be: one parser for each kind of value. All raise ValueError, TypeError or OverflowError."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_TIMES = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size(value: Any) -> int:
    """Bytes from ``512MB`` (10^6), ``2GiB`` (2^30), ``2G`` (10^9) or a plain number. Raises ValueError."""
    if isinstance(value, bool):
        raise ValueError
    if isinstance(value, (int, float)):
        if not math.isfinite(value) or value < 0 or value != int(value):
            raise ValueError
        return int(value)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", str(value).lower())
    if not match:
        raise ValueError
    return int(float(match[1]) * _UNITS[match[2] or ""])


def a_switch(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError


def a_number(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError
    return float(value)


def whole(low: int, high: int = 2**63 - 1) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if isinstance(value, (bool, float)):
            raise ValueError
        number = int(value)
        if not low <= number <= high:
            raise ValueError
        return number

    return parse


def store_bits(value: Any) -> int | None:
    """4 or 8; "off" takes back what a weaker source set."""
    if isinstance(value, str) and value.strip().lower() == "off":
        return None
    number = whole(4, 8)(value)
    if number not in (4, 8):
        raise ValueError
    return number


def depth(value: Any) -> int | None:
    """1 to 8; "auto" takes back what a weaker source set."""
    if isinstance(value, str) and value.strip().lower() == "auto":
        return None
    return whole(1, 8)(value)


def a_text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError
    return value


def plain(value: Any) -> str:
    """A text; the empty one takes back what a weaker source set."""
    return a_text(value) if value != "" else ""


def a_path(value: Any) -> Path:
    return Path(os.path.abspath(os.path.expanduser(a_text(str(value) if isinstance(value, Path) else value))))


def paths(value: Any) -> tuple[Path, ...]:
    """Folders: a list, or one text in which the system's path separator stands between them."""
    parts = value.split(os.pathsep) if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)):
        raise ValueError
    return tuple(dict.fromkeys(a_path(part) for part in parts if part != ""))


def words(value: Any) -> tuple[str, ...]:
    """Several short texts: a list, or one text with commas between them."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or not all(isinstance(part, str) for part in parts):
        raise ValueError
    return tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))


def origins(value: Any) -> tuple[str, ...]:
    """Web origins: scheme and host, no path; or ``*``."""
    found = tuple(word.lower() for word in words(value))
    if not all(word == "*" or re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]*", word) or word == "null" for word in found):
        raise ValueError
    return found


def api_keys(value: Any) -> str:
    """API keys as one text with commas between them; the empty one takes back what a weaker source set."""
    keys = words(value)
    if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise ValueError
    return ",".join(keys)


def seconds(value: Any) -> float:
    """``90``, ``30s``, ``5m``, ``2h``, ``500ms``. Raises ValueError."""
    if isinstance(value, bool):
        raise ValueError
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?\s*", value.lower())
        if not match:
            raise ValueError
        value = float(match[1]) * _TIMES[match[2] or "s"]
    if not isinstance(value, (int, float)) or not 0 <= value <= 366 * 86400:
        raise ValueError
    return float(value)


def some_seconds(value: Any) -> float:
    if (found := seconds(value)) <= 0:
        raise ValueError
    return found


def seconds_or_never(value: Any) -> float | None:
    """Seconds, or never: "off", "never", -1, and 0 where at once makes no sense."""
    if isinstance(value, str) and value.strip().lower() in ("off", "never", "-1"):
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value == -1:
        return None
    return seconds(value)


def timeout(value: Any) -> float | None:
    return seconds_or_never(value) or None


def store_url(value: Any) -> str | None:
    """The URL of an object store; off for none. What is wrong with it, its own check says."""
    text = a_text(value)
    return None if text.lower() in ("off", "none") else text


def choice(names: Mapping[str, str]) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if not isinstance(value, str) or value.lower() not in names:
            raise ValueError
        return names[value.lower()]

    return parse
