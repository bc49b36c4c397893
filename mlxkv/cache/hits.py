"""How far a prefix is held: the place where all groups of members can stand, and what a connector may add to it.

Pure logic on integers. A *group* is the members of a layout that are held alike: growing rows, the windows of one
length, states. Each says how deep it can stand on its own; the deepest place for all of them is the fixed point of
asking them in turn (reference/state-handoff.md, C.2), neither their minimum nor their maximum: a window that reaches
to 112 need not be whole at 96.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol


class BrokenPromise(Exception):
    """A connector offers what cannot be: more than was asked for, or a place before the one that is held anyway."""


class Group(Protocol):
    @property
    def whole(self) -> bool:
        """Whether it needs all rows from the first on, and so stands at any place before one that it can stand at."""
        ...

    @property
    def recurrent(self) -> bool:
        """Whether it stands only where a state was kept."""
        ...

    def deepest(self, limit: int) -> int:
        """The last place, at most ``limit``, where it can stand; 0 if there is none."""
        ...


@dataclass(frozen=True)
class Rows:
    """Growing members: rows [0, held) are there, looked up in units of ``unit`` tokens."""

    held: int
    unit: int = 1
    whole = True
    recurrent = False

    def deepest(self, limit: int) -> int:
        return max(0, min(self.held, limit)) // self.unit * self.unit


@dataclass(frozen=True)
class Places:
    """Members that stand at ``places`` alone, of which only multiples of ``unit`` count: states, as a rule."""

    places: Collection[int]
    unit: int = 1
    recurrent: bool = True
    whole = False

    def deepest(self, limit: int) -> int:
        return max((p for p in self.places if 0 < p <= limit and p % self.unit == 0), default=0)


@dataclass(frozen=True)
class Offer:
    """What a connector can bring. ``tokens`` beyond the place it was asked at, and all that is needed to stand there.
    ``stands``: or it has no more tokens, but brings what is lacking to stand at this place among the rows that are
    here already."""

    tokens: int = 0
    stands: int = 0

    def __bool__(self) -> bool:
        return self.tokens > 0 or self.stands > 0


NOTHING = Offer()


@dataclass(frozen=True)
class Hit:
    """Where a request may stand: at ``tokens`` = ``local`` + ``external``.

    ``external`` tokens are a connector's; with ``promised`` it brings what stands at ``tokens``, which must be checked
    once it has delivered. ``common`` is where all local groups can stand: what is left where a promise is broken.
    ``shared`` is a place beyond ``common`` up to which most of it is held (where a lagging group should keep a state
    next time), 0 if there is none. ``diverged``: local rows reach further than ``common``, and the connector was asked
    from there. ``asked``: the place it was asked at, None if it was not. ``pending``: it has not answered yet.
    """

    local: int
    external: int = 0
    common: int = 0
    shared: int = 0
    diverged: bool = False
    asked: int | None = None
    promised: bool = False
    pending: bool = False

    @property
    def tokens(self) -> int:
        return self.local + self.external


@dataclass(frozen=True)
class Reach:
    """What the groups hold together: ``hit`` tokens, and ``shared`` as of ``Hit``. ``diverged``: ``hit`` is where rows
    end, and some group cannot stand there."""

    hit: int
    shared: int = 0
    diverged: bool = False


def common(groups: Iterable[Group], limit: int) -> Reach:
    """The deepest place, at most ``limit``, at which all groups can stand."""
    ordered = sorted(groups, key=lambda g: not g.whole)
    if not ordered or limit <= 0:
        return Reach(0)
    reached: dict[int, int] = {}  # what groups of all rows hold is asked once: they stand anywhere before it
    candidate, longest = limit, 0
    while True:
        before = candidate
        for i, group in enumerate(ordered):
            if group.whole and i in reached:
                candidate = min(candidate, reached[i])
            else:
                candidate = reached[i] = group.deepest(candidate)
            longest = max(longest, candidate)
        if candidate == before or candidate == 0:
            return Reach(candidate, longest if longest > candidate else 0)


def longest(groups: Sequence[Group], limit: int) -> Reach:
    """What a connector may be asked from that restores the states of lagging groups: where rows end, unless some group
    reaches beyond them (then rows were evicted, and what they lead to is not to be had)."""
    rows = [g.deepest(limit) for g in groups if g.whole]
    if limit <= 0 or len(groups) < 2 or not rows or not any(g.recurrent for g in groups):
        return common(groups, limit)
    hit, alone = min(rows), [g.deepest(limit) for g in groups]
    if max(alone) > hit:
        return common(groups, limit)
    return Reach(hit, diverged=min(alone) < hit)


def resolve_hit(
    groups: Sequence[Group],
    limit: int,
    capability: bool,
    ask: Callable[[int], Offer | None] | None,
    *,
    block: int = 1,
) -> Hit:
    """Where a request may stand that has ``limit`` tokens before its last one.

    ``ask`` is told a place, a multiple of ``block``, and answers what a connector can bring from there on, None as long
    as it does not know; ``ask=None``: there is no connector. It is asked at most once. ``capability``: it restores
    states where rows reach further (``supports_divergent_local_hybrid_hits``); else it is asked only from a place where
    every group can stand. Raises BrokenPromise.
    """
    agreed = common(groups, limit)
    if ask is None:
        return Hit(agreed.hit, common=agreed.hit, shared=agreed.shared)
    found = longest(groups, limit) if capability else agreed
    tail = found.hit % block
    asked = found.hit - tail
    offer = ask(asked)
    alone = Hit(agreed.hit, common=agreed.hit, shared=agreed.shared, asked=asked, diverged=found.diverged)
    if offer is None:
        return replace(alone, pending=True)
    if offer.tokens < 0 or asked + offer.tokens > limit or not 0 <= offer.stands <= min(limit, found.hit):
        raise BrokenPromise(f"{offer} was offered at {asked}, of at most {limit} tokens")
    if found.diverged:
        # nothing stands on the tail: what is offered is worth what it leads to beyond the common place
        if offer.tokens and asked + offer.tokens > agreed.hit:
            return replace(alone, local=asked, external=offer.tokens, shared=0, promised=True)
        if offer.stands > agreed.hit:
            return replace(alone, local=offer.stands, shared=0, promised=True)
        return alone
    if offer.tokens > tail:  # the local tail is dropped
        return replace(alone, local=asked, external=offer.tokens, promised=True)
    return alone
