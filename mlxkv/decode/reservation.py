"""How much room a sequence needs: one formula for every caller (DESIGN §6, Reservation). Ints only, no MLX.

Admission, warm-up, the growth of buffers and the memory guard ask here, so that what one of them reserves is what the
next one allocates. Facts and vectors: ``reference/state-handoff.md`` §G.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError

#: growing caches are allocated in multiples of this many rows
GRANULE = 256
#: without a known end, room for this many tokens is taken at first; the buffer grows by as much when it is full
OPEN_END = 2048
#: rows of a block in the tables of §G
BLOCK = 16
#: the first rung of the ladder of batch capacities
FIRST_RUNG = 256
#: rows by which mlx-lm's rings and chunked caches grow
STEP = 256

#: rows that a drafter may write past what is scheduled, as (times k, and so many more). Drafts of a look-up or of extra
#: heads are in what is scheduled already; a block drafter also fills the place of the last sampled token.
DRAFTERS: dict[str, tuple[int, int]] = {
    "none": (0, 0),
    "eagle": (1, 0),
    "eagle3": (1, 0),
    "mtp": (1, 0),
    "dspark": (1, 0),
    "draft_model": (1, 0),
    "dflash": (1, 1),
    "ngram": (0, 0),
    "ngram_gpu": (0, 0),
    "suffix": (0, 0),
    "medusa": (0, 0),
    "mlp": (0, 0),
    "hidden_states": (0, 0),
}


def lookahead(drafter: str, k: int) -> int:
    """Rows that ``drafter`` writes past the scheduled ones when it proposes ``k`` tokens (§G.1). Raises ConfigError."""
    if drafter not in DRAFTERS:
        raise ConfigError(f"The drafter {drafter!r} is unknown.", f"Known ones: {', '.join(DRAFTERS)}.")
    if k < 0:
        raise ConfigError(f"A drafter was asked for {k} tokens.", "Give 0 or more.")
    times, more = DRAFTERS[drafter]
    return times * k + more


def up(n: int, granule: int) -> int:
    """``n`` rounded up to a multiple of ``granule``."""
    return -(-n // granule) * granule


def reserve(n: int, *, lookahead: int = 0, max_len: int | None = None, granule: int = GRANULE) -> int:
    """Rows to allocate for ``n`` tokens (computed + scheduled): ``min(n + lookahead, max_len)`` rounded up."""
    return up(n + lookahead if max_len is None else min(n + lookahead, max_len), granule)


@dataclass(frozen=True)
class Attention:
    """Rows for all that was read: growing layers, windows too."""


@dataclass(frozen=True)
class CrossAttention:
    """Rows for what an encoder gave, ``encoder_len`` of them, whatever is decoded."""

    encoder_len: int


@dataclass(frozen=True)
class Recurrent:
    """Running states, ``speculative`` of them for drafts.

    ``mode``: ``none`` keeps one running state, ``all`` one at each border of a block, ``align`` those at borders where
    a chunk ended (see ``AlignTable``). Raises ConfigError for another mode.
    """

    mode: str = "none"
    speculative: int = 0

    def __post_init__(self) -> None:
        if self.mode not in ("none", "all", "align"):
            raise ConfigError(f"The mode of recurrent states is {self.mode!r}.", "It must be none, all or align.")


Spec = Attention | CrossAttention | Recurrent


def reserved_blocks(n: int, spec: Spec, *, lookahead: int = 0, max_len: int | None = None, block: int = BLOCK) -> int:
    """Blocks that a layer holds for ``n`` tokens, computed + scheduled (§G.2).

    In mode align the look-ahead does not count (states would land in the wrong column, and no drafter has recurrent
    layers) and nothing is capped.
    """
    match spec:
        case CrossAttention(encoder_len):
            return reserve(encoder_len, granule=block) // block
        case Recurrent("align", speculative):
            return reserve(n, granule=block) // block + speculative
        case Recurrent(_, speculative):
            return reserve(n, lookahead=lookahead, max_len=max_len, granule=block) // block + speculative
        case Attention():
            return reserve(n, lookahead=lookahead, max_len=max_len, granule=block) // block


@dataclass(frozen=True)
class AlignTable:
    """Which block holds the state of each column in mode align; None where no state is kept.

    The last 1 + ``speculative`` columns are the running state and its drafts' once the sequence ``runs``; before that,
    what is there was restored. Column c is the state at (c + 1) · ``block`` tokens.
    """

    speculative: int
    block: int = BLOCK
    columns: tuple[int | None, ...] = ()
    runs: bool = False

    @property
    def real(self) -> int:
        """Columns with a block."""
        return sum(c is not None for c in self.columns)

    def wants(self, n: int) -> int:
        """New blocks that ``grown(n)`` takes: 1 + speculative at first, then at most one a step."""
        length = reserved_blocks(n, Recurrent("align", self.speculative), block=self.block)
        if length <= len(self.columns):
            return 0
        return 1 if self.runs else min(1 + self.speculative, length - len(self.columns))

    def grown(self, n: int, fresh: Sequence[int]) -> AlignTable:
        """The table for ``n`` tokens (computed + scheduled) with the ``wants(n)`` blocks ``fresh``: blocks of drafts
        move forward to the new end, columns that were skipped stay empty. Raises ValueError for another number."""
        if len(fresh) != (wanted := self.wants(n)):
            raise ValueError(f"{len(fresh)} blocks were given, {wanted} are wanted")
        if not wanted:
            return self
        s, old = self.speculative, len(self.columns)
        running = reserved_blocks(n, Recurrent("align", s), block=self.block) - 1 - s
        columns = [*self.columns, *[None] * (running - old)]
        for column in range(old - s, min(old, running)) if self.runs else ():
            columns.append(columns[column])
            columns[column] = None
        return AlignTable(s, self.block, (*columns, *fresh), True)


def ladder(n: int, max_len: int | None = None, *, lookahead: int = 0, first: int = FIRST_RUNG) -> int:
    """The capacity of a batch whose longest row has ``n`` tokens (computed + scheduled): the smallest first · 2^i with
    room for ``min(n + lookahead, max_len)``, at most what ``max_len`` tokens reserve. DESIGN §6 has ``first`` 1,024 for
    compiled steps."""
    want = n + lookahead if max_len is None else min(n + lookahead, max_len)
    rung = first
    while rung < want:
        rung *= 2
    return rung if max_len is None else min(rung, reserve(max_len))


def rungs(max_len: int, *, lookahead: int = 0, first: int = FIRST_RUNG) -> tuple[int, ...]:
    """All capacities that ``ladder`` gives for rows of 1 to ``max_len`` tokens, rising."""
    found = [ladder(1, max_len, lookahead=lookahead, first=first)]
    while found[-1] < max_len:
        found.append(ladder(found[-1] + 1, max_len, first=first))
    return tuple(found)


@dataclass(frozen=True)
class WarmUp:
    """Lengths of a warm-up run (§G.3), in tokens: decoding steps are ``width`` wide; a ``prompt`` is one longer, so
    that its prefill is not taken for such a step; after ``steps`` of them the sequence has ``length``."""

    width: int
    prompt: int
    steps: int

    @property
    def length(self) -> int:
        return self.prompt + self.steps * self.width

    def requests(self, max_rows: int, token_budget: int, blocks: int, blocks_each: int) -> int:
        """How many sequences warm up together: as many as rows, one forward of ``token_budget`` tokens and blocks
        (one of them is the null block) allow."""
        by_tokens = token_budget // max(self.prompt, self.width)
        return min(max_rows, by_tokens, max(1, (blocks - 1) // blocks_each))


def warm_up(k: int = 0) -> WarmUp:
    """The warm-up of a run that drafts ``k`` tokens."""
    width = k + 1
    return WarmUp(width, width + 1, 5 if k else 3)


def shapes(
    max_len: int, slots: Sequence[int], *, k: int = 0, drafter: str = "none", first: int = FIRST_RUNG
) -> tuple[tuple[int, int, int], ...]:
    """Every (capacity, slots, width) that a decoding step can have with these settings: ``slots`` as batches come in,
    widths 1 and, with a drafter, k + 1; capacities come from ``ladder`` with that drafter's look-ahead."""
    widths = (1,) if drafter == "none" or k == 0 else (1, k + 1)
    capacities = rungs(max_len, lookahead=lookahead(drafter, k), first=first)
    return tuple((c, s, w) for c in capacities for s in slots for w in widths)


def ring_rows(held: int, position: int, width: int, size: int) -> int:
    """Rows that a ring of ``size`` holds after a forward of ``width`` rows at ``position``, when it held ``held``.

    Wider forwards leave what each of their rows can see, one row grows the ring to its size and then overwrites. As
    mlx-lm's ``RotatingKVCache`` does.
    """
    if width > 1:
        in_order = min(held, position)
        return min(in_order, size - 1) + width
    if held == 0 or (position >= held and held < size):
        held += min(STEP, size - position)
    return min(held, size)


def ring_peak(capacity: int, size: int, chunk: int = 1) -> int:
    """The most rows that such a ring ever holds in a sequence of ``capacity`` tokens read in chunks of ``chunk``."""
    return min(size - 1 + chunk, capacity + STEP - 1)


def chunked_peak(capacity: int, size: int, chunk: int = 1) -> int:
    """The same for a cache of attention chunks of ``size`` rows (``ChunkedKVCache``)."""
    return min(size + up(chunk, STEP), capacity + STEP - 1)
