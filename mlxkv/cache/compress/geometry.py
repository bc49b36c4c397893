"""The numbers of a compress-state ring. Plain Python, no MLX.

A layer makes one *entry* of every ``ratio`` tokens, out of a *window*: their rows and, with ``overlap``, those of the
``ratio`` tokens before them. Rows that a later window still needs stand in a ring, position p in row p % ring.

Source of the formulas: ``reference/state-handoff.md`` A.2, A.6, A.8.
"""

from __future__ import annotations

from dataclasses import dataclass


def write_pad(window: int, ring: int) -> int:
    """So many of the newest rows of a forward are written whatever else is needed, for some of them may be taken back;
    0 for a ring without room for more than a window."""
    return ring - window + 2 if ring > window else 0


@dataclass(frozen=True)
class Geometry:
    """``ring``: rows of the ring. Raises ValueError for numbers that no ring can have."""

    ratio: int
    overlap: bool
    ring: int

    def __post_init__(self) -> None:
        if self.ratio < 2:
            raise ValueError(f"a compression ratio of {self.ratio}: it must be at least 2")
        if self.ring < self.window or self.ring % self.ratio:
            raise ValueError(
                f"a ring of {self.ring} rows at ratio {self.ratio}: it must be a multiple of the ratio and hold a "
                f"window, {self.window} rows"
            )

    @classmethod
    def serving(cls, ratio: int, overlap: bool, width: int = 1) -> Geometry:
        """With the smallest ring that serves forwards which verify ``width`` rows."""
        least = cls(ratio, overlap, ratio * (2 if overlap else 1))
        return cls(ratio, overlap, least.ring_for(width))

    @property
    def window(self) -> int:
        """Rows that one entry is made of."""
        return self.ratio * (2 if self.overlap else 1)

    @property
    def write_pad(self) -> int:
        return write_pad(self.window, self.ring)

    @property
    def most_width(self) -> int:
        """Rows of one forward that verifies, its root included, at most. A write replaces what stood ``ring`` positions
        before it, and once a row is kept no window reads further back than window − 2 before the root; the windows of
        the forward itself are read before it writes. So width ≤ ring − window + 2. 1 (plain steps only) for a ring
        without spare rows, of which a prompt leaves nothing that could be taken back."""
        return max(1, self.write_pad)

    @property
    def most_drafts(self) -> int:
        return self.most_width - 1

    def ring_for(self, width: int) -> int:
        """Rows of the smallest ring that serves ``width`` rows of a forward: a multiple of the ratio."""
        if width <= 1:
            return self.window
        least = max(self.window + width - 2, self.window + 1)
        return -(-least // self.ratio) * self.ratio

    def entries(self, n: int) -> int:
        """Entries of the first ``n`` tokens."""
        return n // self.ratio

    def pending(self, n: int) -> int:
        """After ``n`` tokens, how many of the last ones' rows are still needed if none is taken back."""
        return min(n, n % self.ratio + (self.ratio if self.overlap else 0))
