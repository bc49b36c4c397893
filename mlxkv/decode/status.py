"""What an engine is doing, at one moment. Plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..cache.status import StoreStatus


@dataclass(frozen=True)
class Row:
    """One request. id: what its caller calls it. state: ``waiting`` (in the queue, for room, or for what is stored of
    its prompt), ``prefilling``, ``decoding``, or ``leaving``: it is no longer wanted, and goes at the next step edge.
    age_s: seconds since it came. prompt_tokens: None until they were counted; done_tokens: of these, restored or read
    so far; cached_tokens: restored. context_left: tokens that the model's context has room for, None where either is
    unknown."""

    id: str
    state: str
    age_s: float
    prompt_tokens: int | None
    done_tokens: int
    generated_tokens: int
    cached_tokens: int
    context_left: int | None


@dataclass(frozen=True)
class Status:
    """running: answers that decode. prefilling: prompts that are read. restoring: what the store has of a prompt is
    read. waiting: prompts that wait for room. queued: requests that nobody has looked at yet. reserved_bytes: charged
    to all of these. reserved_rows: rows that their caches have room for. pool_used: states that wait for the writer.
    groups: (slots, capacity in rows) of each group; capacity is 0 where one sequence is on its own caches. steps,
    step_s: decoding steps made, and seconds spent on them. traces: functions compiled. memory: the ledger, bytes by
    entry. turns: why rows of this model do not share a batch, None if they do or nobody has asked yet. handoff: where
    the stream that speculates stands (``handoff.State``); handoffs: how often it went from one state to another, by
    ``"before > after"``. cycles: steps that verified drafts; drafted, accepted: drafts, of all rows. depth: drafts of
    each row in the latest step, 0 if it was a plain one.
    memory_limit: what the entries of the ledger may come to, bytes. store: the prefix store's own account, None where
    nothing is kept. rows: all requests that have not ended, in the order in which they came, as they are now."""

    running: int = 0
    prefilling: int = 0
    restoring: int = 0
    waiting: int = 0
    queued: int = 0
    reserved_bytes: int = 0
    reserved_rows: int = 0
    pool_used: int = 0
    groups: tuple[tuple[int, int], ...] = ()
    steps: int = 0
    step_s: float = 0.0
    traces: int = 0
    memory: Mapping[str, int] = field(default_factory=dict)
    turns: str | None = None
    handoff: str = "idle"
    handoffs: Mapping[str, int] = field(default_factory=dict)
    cycles: int = 0
    drafted: int = 0
    accepted: int = 0
    depth: int = 0
    memory_limit: int = 0
    store: StoreStatus | None = None
    rows: tuple[Row, ...] = ()

    @property
    def active(self) -> int:
        """Requests that were admitted and have not ended."""
        return self.running + self.prefilling + self.restoring
