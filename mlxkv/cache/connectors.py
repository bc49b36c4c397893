"""Connectors: places that records come from, behind one interface that says what each of them can restore.

RAM and SSD are *local*: the planner sees what they hold. Others are *remote*: asked, once a request, for what the local
ones lack. Where rows reach further than states, local hits *diverge*; only a connector that says it can restore the
missing state may then be asked about the longer one. ``hits.resolve_hit`` is that decision. This module does
not own: which thread asks and when (``exchange``), nor how a remote one finds and verifies what it offers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .hits import NOTHING, Offer

if TYPE_CHECKING:
    from .index import Entry
    from .keys import KeySpace
    from .layout import Layout
    from .ram import Draft, RamReader
    from .record import Reader

__all__ = ["Connector", "ConnectorError", "Connectors", "Delivery", "Local", "Offer", "Question", "Remote"]


class ConnectorError(Exception):
    """A remote place gave no answer, or a wrong one. ``reason`` is one of ``lookup.REASONS``."""

    def __init__(self, message: str, reason: str = "io_error") -> None:
        super().__init__(message)
        self.reason = reason


class Connector(ABC):
    """``source`` is what a look-up reports for what came from here: one of ``lookup.SOURCES``."""

    source: str

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Whether it restores the states of members that cannot stand where local rows end, and may so be asked from
        there on. Nobody who does not say so is taken to."""
        return False


class Local(Connector):
    """A place on this machine, whose entries the planner sees. The engine's thread, but for ``open``."""

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return True  # states are records like others here, found under the same keys

    @abstractmethod
    def entry(self, key: bytes) -> Entry | None: ...

    @abstractmethod
    def children(self, parent: bytes, tokens: bytes) -> list[Entry]: ...

    @abstractmethod
    def open(self, key: bytes, kind: str) -> Reader | RamReader | None:
        """A reader of one record, which checks what it reads; None: another place has it, or nobody. Raises
        RecordError. Any thread."""


@dataclass(frozen=True)
class Question:
    """What one request asks a remote connector. It must not be changed.

    Rows [0, ``asked``) are here, as full blocks: a leaf among them brings its own. ``asked`` is a multiple of the
    block. Every member can stand at ``common``: in the block that begins at ``asked``, or before it, which only a
    connector that supports it is asked; then what stands further is wanted. Nothing after ``limit`` is of use, and no
    more than ``most`` bytes are wanted. ``until``: when it must have been answered and delivered, ``time.monotonic()``.
    ``stopped()``: nobody waits any more. ``request`` is unlike that of other requests that are under way.
    """

    tokens: Sequence[int]
    space: KeySpace
    layout: Layout
    asked: int
    common: int
    limit: int
    until: float
    most: int
    stopped: Callable[[], bool]
    request: int = 0


@dataclass
class Delivery:
    """What was loaded: verified ``drafts``, each after what it hangs on, in host bytes that nobody else has, and each
    with what it ``needs`` (its parent unless that is the root, and its base). ``failure`` is why it is less than was
    offered, one of ``lookup.REASONS``; ``detail`` is for the log."""

    drafts: list[Draft] = field(default_factory=list)
    failure: str | None = None
    detail: str = ""


class Remote(Connector):
    """A place that is asked. Both calls block, run on a thread that is not the engine's (those of one request one after
    the other, those of several at once), and return when ``until`` is over or ``stopped()`` at the latest."""

    @abstractmethod
    def ask(self, question: Question) -> Offer | None:
        """What it can bring beyond ``question.asked``; None: it cannot say yet (another request is asking, say).

        An offer is a promise: after ``load`` every member can stand at its end, from the records that were delivered
        and the local rows before ``asked``; windows that reach back before it are to be delivered too. Raises
        ConnectorError; whatever else it raises is an ``io_error``.
        """

    @abstractmethod
    def load(self, question: Question, offer: Offer) -> Delivery:
        """Load what was offered. Less is a broken promise, which costs what depends on it. Raises as ``ask`` does;
        nothing is delivered then."""

    def end(self, question: Question) -> None:  # noqa: B027 - most remember nothing
        """The request wants nothing more of what was said to it. The engine's thread; must not block."""

    def close(self, timeout: float) -> None:  # noqa: B027
        """Nothing is asked any more; wait for at most so many seconds. The engine's thread."""


class Connectors(Remote):
    """A group, which can only what all of its members can. They are asked in order; the first that has anything is the
    one that delivers."""

    def __init__(self, members: Sequence[Remote]) -> None:
        self.members = tuple(members)
        self._offered: dict[int, Remote] = {}  # by request

    @property
    def source(self) -> str:  # type: ignore[override]
        """Of a group, the slowest one: the last."""
        return self.members[-1].source if self.members else "none"

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        # of no members, "all can" is true of anything
        return bool(self.members) and all(m.supports_divergent_local_hybrid_hits for m in self.members)

    def ask(self, question: Question) -> Offer | None:
        pending = False
        error: Exception | None = None
        for member in self.members:
            try:
                offer = member.ask(question)
            except Exception as e:  # the others may have it
                error = error or e
                continue
            if offer is None:
                pending = True
            elif offer:
                self._offered[question.request] = member
                return offer
        if error is not None:
            raise error
        return None if pending else NOTHING

    def load(self, question: Question, offer: Offer) -> Delivery:
        member = self._offered.get(question.request)
        if member is None:
            raise ConnectorError("nobody has offered this")
        return member.load(question, offer)

    def end(self, question: Question) -> None:
        self._offered.pop(question.request, None)
        for member in self.members:
            member.end(question)

    def close(self, timeout: float) -> None:
        for member in self.members:
            member.close(timeout)
