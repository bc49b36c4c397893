"""How much room a sequence needs: one formula for every caller (DESIGN §6, Reservation)."""

from __future__ import annotations

#: growing caches are allocated in multiples of this many rows
GRANULE = 256
#: without a known end, room for this many tokens is taken at first; the buffer grows by as much when it is full
OPEN_END = 2048


def reserve(n: int, *, lookahead: int = 0, max_len: int | None = None, granule: int = GRANULE) -> int:
    """Rows to allocate for ``n`` tokens (computed + scheduled): ``min(n + lookahead, max_len)`` rounded up."""
    want = n + lookahead if max_len is None else min(n + lookahead, max_len)
    return -(-want // granule) * granule
