"""What a request needs that does not decode yet, and whether there is room for it."""

from __future__ import annotations

from dataclasses import dataclass

from .memory import Memory
from .reservation import OPEN_END, reserve
from .runtime import Runtime
from .seats import Seats
from .sequence import Sequence


@dataclass(frozen=True)
class Limits:
    """What no request may exceed, whatever else runs. Any thread may ask."""

    memory: Memory
    chunk: int
    lookahead: int
    context_length: int | None

    @staticmethod
    def of(rt: Runtime) -> Limits:
        return Limits(rt.memory, rt.chunk, rt.lookahead, rt.context_length)

    def refuse(self, prompt_tokens: int, answer_tokens: int | None) -> None:
        """Raises RequestTooLarge for a request that would not fit if nothing else ran. answer_tokens: at most; None for
        any number."""
        answer = OPEN_END if answer_tokens is None else min(answer_tokens, OPEN_END)
        rows = reserve(prompt_tokens + answer, lookahead=self.lookahead, max_len=self.context_length)
        room = self.memory.room(self.memory.sequence_bytes(rows, self.chunk))
        if not room.ever:
            raise self.memory.too_large(room, rows)


class Needs:
    def __init__(self, rt: Runtime, seats: Seats) -> None:
        self._rt, self._seats = rt, seats

    def rows(self, sequence: Sequence, alone: bool) -> int:
        """Rows of the caches that its prompt is read into: with the answer's where it decodes on them, ``alone``."""
        n = len(sequence.prompt.tokens)
        answer = min(sequence.limit, OPEN_END) if alone else 0
        ahead = self._rt.lookahead if alone else 0
        return reserve(n + answer, lookahead=ahead, max_len=self._rt.context_length)

    def alone(self, beside: int) -> bool:
        """Who is admitted beside so many others will decode on the caches that its prompt is read into, as far as can
        be foreseen."""
        return not beside or self._seats.obstacle is not None

    def fit(self, sequence: Sequence, beside: int) -> bool:
        """Room for its caches, and for a place in a batch where ``beside`` others are."""
        memory, alone = self._rt.memory, self.alone(beside)
        need = memory.sequence_bytes(self.rows(sequence, alone), self._rt.chunk)
        if not alone:
            need += memory.sequence_bytes(self._seats.capacity_for(sequence))
        return memory.room(need).fits

    def refuse_what_never_fits(self, sequence: Sequence) -> None:
        """Raises RequestTooLarge for a request that would not fit if nothing else ran."""
        Limits.of(self._rt).refuse(len(sequence.prompt.tokens), sequence.limit)
