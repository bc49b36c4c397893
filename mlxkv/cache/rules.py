"""The rule of each state kind: which rows must be there to resume at a position.

A planner finds out with it where a sequence can stand, and a restore reads just that. A kind without a rule is refused
when the layout is found: taken for one that needs everything, or nothing, it would read too much or be wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..errors import MlxkvError

Spans = list[tuple[int, int]]


class RuleError(MlxkvError):
    """A layer of which nothing can be said to need; the message names it."""


class UnknownKind(RuleError):
    """A state kind that no rule is written for."""


class Ruled(Protocol):
    """A member as its rule sees it: a ``layout.MemberSpec``."""

    @property
    def path(self) -> tuple[int, ...]: ...
    @property
    def kind(self) -> str: ...
    @property
    def window(self) -> int | None: ...
    @property
    def keep(self) -> int: ...


def _all(m: Ruled, position: int) -> Spans:
    return [(0, position)]


def _last(m: Ruled, position: int) -> Spans:
    """The first ``keep`` rows, and the last ``window``."""
    window = _size(m)
    if position <= m.keep + window:
        return [(0, position)]
    return [(0, m.keep), (position - window, position)]


def _before(m: Ruled, position: int) -> Spans:
    """The last ``window`` rows of a window that is one longer: the next token brings its own."""
    return [(max(0, position - _size(m, 0)), position)]


def _chunk(m: Ruled, position: int) -> Spans:
    """What was read of the chunk in which the next token lies; nothing where it begins one."""
    return [(position // _size(m) * _size(m), position)]


def _none(m: Ruled, position: int) -> Spans:
    """A state, which has no rows."""
    return []


#: kind -> rule, for every kind that members have
RULES: dict[str, Callable[[Ruled, int], Spans]] = {
    "growing": _all,
    "head": _all,
    "entries": _all,
    "window": _last,
    "latents": _before,
    "chunked": _chunk,
    "recurrent": _none,
    "hidden": _none,
    "pending": _none,
}


def spans(m: Ruled, position: int) -> Spans:
    """The spans of rows that must be there to resume at ``position``, in order, disjoint, none of them empty. Raises
    RuleError."""
    return [(a, b) for a, b in rule(m)(m, position) if a < b]


def rule(m: Ruled) -> Callable[[Ruled, int], Spans]:
    """Raises UnknownKind."""
    if m.kind not in RULES:
        raise UnknownKind(
            f"Layer {'.'.join(map(str, m.path))} keeps its state as {m.kind!r}, a kind for which mlxkv has no rule "
            "that says which rows it needs to be resumed."
        )
    return RULES[m.kind]


def _size(m: Ruled, least: int = 1) -> int:
    """How many rows a window or chunk has. Raises RuleError where these are fewer than ``least``."""
    if m.window is None or m.window < least:
        raise RuleError(
            f"Layer {'.'.join(map(str, m.path))} ({m.kind}) attends within {m.window} tokens: it must be {least} at "
            "least."
        )
    return m.window


def window_blocks(m: Ruled, block: int) -> int | None:
    """Of how many blocks of ``block`` tokens the last ones can be needed, at the end of a block; None: of all, so that
    a look-up goes from the first block on, not from the last. A state is that of one block. Rows that a window keeps
    of the beginning come on top. Raises RuleError."""
    kept = rule(m)
    if kept is _all:
        return None
    return 1 if kept is _none else -(-_size(m, 0 if kept is _before else 1) // block)


def required_blocks(m: Ruled, block: int, position: int) -> int:
    """Of how many blocks before ``position`` rows are needed there, exactly: 0 where an attention chunk begins, and one
    more than ``window_blocks`` where ``position`` lies inside a block and chunks are no multiples of blocks. Rows that
    a window keeps of the beginning are not counted. A state is that of the block that ends there. Raises
    RuleError."""
    if rule(m) is _none:
        return 1 if position else 0
    needed = spans(m, position)
    return -(-position // block) - needed[-1][0] // block if needed else 0
