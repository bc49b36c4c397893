"""What limits the tokens of one sequence: a mask for the next one, moved on by each that is chosen.

Masks are packed: uint32 [ceil(vocabulary / 32)], bit i % 32 of word i // 32 is set where token i may come next.
"""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx
import numpy as np

from ..errors import DeadEnd

#: chosen tokens after which what is kept against failures is made anew
KEEP_EVERY = 256
#: tokens that ``Constraint.free`` looks ahead: more than a cycle can emit, and one that is in flight
AHEAD = 16


class Constraint(Protocol):
    """Belongs to one sequence. ``fork`` makes another that goes its own way from here."""

    @property
    def accepting(self) -> bool:
        """The sequence may end here."""
        ...

    @property
    def done(self) -> bool:
        """The sequence may end here and no text may follow."""
        ...

    @property
    def free(self) -> bool:
        """Any token may come next, and after it, and so on for ``AHEAD`` tokens, whichever these are."""
        ...

    def mask(self) -> np.ndarray:
        """The tokens that may come next, packed; not to be written to. Raises DeadEnd if there are none, and if it may
        not end here either."""
        ...

    def advance(self, token: int) -> None:
        """``token`` was chosen. Raises DeadEnd if it was not allowed."""
        ...

    def fork(self) -> Constraint: ...

    def rollback(self, n: int) -> None:
        """Take the last ``n`` tokens back. Raises ValueError if there were not as many."""
        ...


class Scout:
    """A sampler's constraint, which may look along drafts before one is chosen. What it saw on the way is not computed
    again when they are. It goes and comes back on the one constraint; ``fork`` keeps what is needed after a failure."""

    def __init__(self, constraint: Constraint) -> None:
        """Raises DeadEnd if it allows no first token."""
        self._constraint = constraint
        self._ahead: list[int] = []  # drafts that it stands further than what was chosen
        self._masks = [constraint.mask()]  # after what was chosen, and after each of them
        self._done = [constraint.done]
        self._kept: Constraint | None = None
        self._since: list[int] = []  # chosen since ``_kept`` was made
        self._lost: BaseException | None = None

    @property
    def mask(self) -> np.ndarray:
        """As Constraint.mask."""
        return self._masks[0]

    @property
    def done(self) -> bool:
        """As Constraint.done."""
        return self._done[0]

    @property
    def free(self) -> bool:
        """As Constraint.free. While it stands further than what was chosen: as from there, which may be less."""
        return self._constraint.free

    def advance(self, token: int) -> None:
        """``token`` was chosen. Raises DeadEnd if it was not allowed, or nothing can follow it."""
        if self._lost is not None:
            raise DeadEnd(f"The grammar cannot go on: {self._lost}") from self._lost
        if self._ahead[:1] == [token]:
            del self._ahead[0], self._masks[0], self._done[0]
        else:
            try:
                self._back(0)
            except DeadEnd:
                self._recover()
            self._constraint.advance(token)
            self._masks, self._done = [self._constraint.mask()], [self._constraint.done]
        if self._kept is not None:
            self._since.append(token)

    def look(self, drafts: list[int]) -> np.ndarray | None:
        """The mask after ``drafts``; None where nothing may follow them: one is not allowed, or they are all that there
        is, or they lead nowhere. What goes wrong on a way that nobody has chosen is nobody's failure."""
        if self._lost is not None:
            return None
        try:
            return self._look(drafts)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a grammar's own dead end; in Rust some panic
            self._recover()
            return None

    def _look(self, drafts: list[int]) -> np.ndarray | None:
        same = 0
        while same < min(len(drafts), len(self._ahead)) and drafts[same] == self._ahead[same]:
            same += 1
        self._back(same)
        for draft in drafts[same:]:
            if self._done[-1] or not allows(self._masks[-1], draft):
                return None
            if self._kept is None or (len(self._since) >= KEEP_EVERY and not self._ahead):
                self._kept, self._since = self._constraint.fork(), []
            self._constraint.advance(draft)
            mask, done = self._constraint.mask(), self._constraint.done
            self._ahead.append(draft)
            self._masks.append(mask)
            self._done.append(done)
        return None if self._done[-1] else self._masks[-1]

    def _back(self, n: int) -> None:
        """To ``n`` drafts after what was chosen."""
        if n < len(self._ahead):
            self._constraint.rollback(len(self._ahead) - n)
            del self._ahead[n:], self._masks[n + 1 :], self._done[n + 1 :]

    def _recover(self) -> None:
        """Back to what was chosen, on another constraint."""
        del self._ahead[:], self._masks[1:], self._done[1:]
        if self._kept is None:  # nothing was looked at yet
            return
        try:
            constraint = self._kept.fork()
            for token in self._since:
                constraint.advance(token)
            self._constraint = constraint
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as e:  # its own sequence is told when it goes on
            self._lost = e


def pack(ids: np.ndarray | list[int], vocab_size: int) -> np.ndarray:
    """A mask that allows ``ids``."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[np.asarray(ids, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def unpack(mask: np.ndarray) -> np.ndarray:
    """The ids that a mask allows, ascending."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def allows(mask: np.ndarray, token: int) -> bool:
    """Whether a mask allows an id, which may be any number."""
    return 0 <= token < 32 * len(mask) and bool(mask[token >> 5] >> np.uint32(token & 31) & np.uint32(1))


def apply(logits: mx.array, mask: np.ndarray) -> mx.array:
    """``logits`` [1, vocabulary], float, with -inf where ``mask`` (packed) forbids the token. Lazy."""
    bits = np.unpackbits(mask.view(np.uint8), count=logits.shape[-1], bitorder="little")
    return mx.where(mx.array(bits.view(np.bool_)), logits, -float("inf"))  # type: ignore[arg-type]
