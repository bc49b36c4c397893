"""Damaged oMLX files: each with the one reason that it must be refused with.

A ``Damage`` writes a folder of three blocks (12 tokens, blocks of 4) with something wrong in it, and says which file
is to be refused and why. Where the format's description leaves two readings open, more than one code is allowed.

What nothing in such a file can tell, so that no reader can refuse it: a byte flipped, or less than a page zeroed by a
loss of power, inside a recurrent state, inside rows of a flat or per-member block, or inside the newest rows of the
last cumulative block. There is no checksum, and any finite number may be a value.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from tests.cache.synthetic import MODELS, Model

from .omlx_writer import Block, Story, Style, blocks, framed, prepare
from .stories import hashed

TOKENS = [300, 7, 7, 12, 1, 0, 255, 256, 65536, 9, 8, 70, 3, 5]
CHAIN = 12

#: layouts that are damaged
LAYOUTS = {
    **{name: MODELS[name] for name in ("growing", "list", "mixed")},
    "window": Model("ring", lambda: [RotatingKVCache(6), KVCache(), RotatingKVCache(6)]),
    "bare": Model("bare", lambda: [ArraysCache(2), KVCache()]),
    "slots": Model("slots", lambda: [ArraysCache(3), RotatingKVCache(5), KVCache()]),
    "only": Model("only", lambda: [ArraysCache(2)]),
    "pair": Model("pair", lambda: [CacheList(KVCache(), ArraysCache(2))]),
}
_STORIES: dict[str, Story] = {}


def told(name: str) -> Story:
    """The run of a layout, made once."""
    if name not in _STORIES:
        _STORIES[name] = hashed(LAYOUTS[name], TOKENS, (4, 8, 12, 14))
    return _STORIES[name]


@dataclass(frozen=True)
class Damage:
    """``write`` fills a folder and gives back the file that must be refused, None for any of them."""

    name: str
    codes: tuple[str, ...]
    layout: str
    write: Callable[[Path], Path | None]


ALL: list[Damage] = []


def add(name: str, codes: str, layout: str, write: Callable[[Path], Path | None]) -> None:
    ALL.append(Damage(name, tuple(codes.split("|")), layout, write))


def chain(layout: str, style: Style) -> list[Block]:
    return blocks(told(layout), style)


def save_all(folder: Path, made: list[Block]) -> list[Path]:
    prepare(folder)
    return [b.save(folder) for b in made]


def block(name: str, codes: str, change: Callable[[Block], Any], *, layout: str = "growing", at: int = 1, **style: Any):
    """One block is changed before it is written."""

    def write(folder: Path) -> Path:
        made = chain(layout, Style(**style))
        change(made[at])
        return save_all(folder, made)[at]

    add(name, codes, layout, write)


def header(name: str, codes: str, change: Callable[[dict[str, Any]], Any], *, layout: str = "growing", at: int = 1):
    """The header of one file is changed after it was written; it may change in place or give a new one."""

    def write(folder: Path) -> Path:
        path = save_all(folder, chain(layout, Style()))[at]
        found, data = taken_apart(path.read_bytes())
        changed = change(found)
        changed = found if changed is None else changed
        text = changed if isinstance(changed, bytes) else json.dumps(changed, separators=(",", ":")).encode()
        path.write_bytes(framed(text, data))
        return path

    add(name, codes, layout, write)


def file(
    name: str, codes: str, change: Callable[[Path], Path | None], *, layout: str = "growing", at: int = 1, **style
):
    """A file is changed after it was written; ``change`` may give back where it is now."""

    def write(folder: Path) -> Path:
        path = save_all(folder, chain(layout, Style(**style)))[at]
        return change(path) or path

    add(name, codes, layout, write)


def taken_apart(raw: bytes) -> tuple[dict[str, Any], bytes]:
    n = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + n]), raw[8 + n :]


def written(path: Path, raw: bytes) -> None:
    path.write_bytes(raw)


def moved(to: Callable[[Path], Path]) -> Callable[[Path], Path]:
    def move(path: Path) -> Path:
        new = to(path)
        new.parent.mkdir(exist_ok=True)
        return path.rename(new)

    return move


KEYS, VALUES = "layer_0_state_0", "layer_0_state_1"
