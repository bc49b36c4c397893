"""What limits the tokens of one sequence: a mask for the next one, moved on by each that is chosen.

Masks are packed: uint32 [ceil(vocabulary / 32)], bit i % 32 of word i // 32 is set where token i may come next.
"""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx
import numpy as np


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


def pack(ids: np.ndarray | list[int], vocab_size: int) -> np.ndarray:
    """A mask that allows ``ids``."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[np.asarray(ids, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def unpack(mask: np.ndarray) -> np.ndarray:
    """The ids that a mask allows, ascending."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def apply(logits: mx.array, mask: np.ndarray) -> mx.array:
    """``logits`` [1, vocabulary], float, with -inf where ``mask`` (packed) forbids the token. Lazy."""
    bits = np.unpackbits(mask.view(np.uint8), count=logits.shape[-1], bitorder="little")
    return mx.where(mx.array(bits.view(np.bool_)), logits, -float("inf"))  # type: ignore[arg-type]
