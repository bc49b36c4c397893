"""A prefix as a legacy source hands it over: proven tokens, their rows, and the places where it can be resumed.

Host bytes only. A source (oMLX folder, prompt-cache file) has validated what it says before it makes one; what is made
of it is cut by ``convert`` and kept by ``commit``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

#: tensor name as in ``layout.tensor_name`` -> (safetensors dtype, C-contiguous array; bfloat16 as uint16)
HostArrays = dict[str, tuple[str, np.ndarray]]
#: arrays, or what reads them when they are wanted; None: there turned out to be nothing of use
Arrays = HostArrays | Callable[[], HostArrays | None]


def load(arrays: Arrays) -> HostArrays | None:
    return arrays() if callable(arrays) else arrays


@dataclass(frozen=True)
class Strip:
    """Rows [start, end) of all windowed members, shapes [1, heads, end − start, dim]."""

    start: int
    end: int
    arrays: Arrays


@dataclass(frozen=True)
class Stand:
    """A place to resume from: the state of recurrent members at exactly ``position`` (empty for a layout without), and
    what windowed members hold there, as strips in order of position (none for a layout without)."""

    position: int
    state: Arrays
    strips: tuple[Strip, ...] = ()


@dataclass(frozen=True)
class Prefix:
    """``rows(a, b)`` reads the rows [a, b) of growing members, 0 ≤ a < b ≤ len(tokens); it may read files, and raises
    Refused where they are not what they were. ``stands`` are in order of position. ``how`` the tokens were found, for
    people, where that is worth saying."""

    tokens: list[int]
    rows: Callable[[int, int], HostArrays]
    stands: tuple[Stand, ...]
    how: str = ""
