"""How long chunks of a prefill and decoding steps take here: learned from those that were made. Plain Python, no MLX.

A chunk of n tokens from position p on is taken to need ``a + b·n + c·n·(p + n/2)`` seconds: reading the weights, the
work of each token, and its attention to what stands before it. The three are fitted to the latest chunks, each weighed
by the time it took, so that one which took far too long (a kernel was built, a machine stood still) counts for little.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

#: the shortest chunk, tokens; shorter pieces come from boundaries only
SMALLEST = 16
#: chunks and steps that are remembered
CHUNKS, STEPS = 24, 64
#: what a chunk counts for, against the one after it
FADE = 0.9
#: where most of the latest chunks took so many times what was expected, or so small a part, the machine's speed changed
LATEST, SHIFT = 3, 1.3
#: a chunk may be at most so many times as long as the longest that is remembered
GROWTH = 4


@dataclass(frozen=True)
class Ladder:
    """The lengths, tokens, that a prefill is cut into where no boundary is nearer. ``rungs`` rise."""

    rungs: tuple[int, ...]

    @classmethod
    def up_to(cls, chunk: int) -> Ladder:
        """Powers of two from 16 on and what lies halfway between them, below ``chunk`` tokens, and ``chunk``."""
        powers = [SMALLEST << i for i in range(max(0, chunk.bit_length() - 4))]
        halves = [low + low // 2 for low in powers]
        return cls((*sorted(rung for rung in (*powers, *halves) if rung < chunk), chunk))

    @property
    def smallest(self) -> int:
        return self.rungs[0]

    @property
    def largest(self) -> int:
        return self.rungs[-1]


class Pace:
    """Seconds of chunks and of decoding steps. What is told of one must be all that it took, from the end of what the
    engine did before to its own: a chunk with what is kept at its boundary, a step with sampling and emitting."""

    def __init__(self) -> None:
        self._chunks: deque[tuple[int, int, float]] = deque(maxlen=CHUNKS)
        self._steps: deque[tuple[int, int, float]] = deque(maxlen=STEPS)
        self._fitted: tuple[float, float, float] | None = None
        self._off = 1.0

    def chunk_took(self, tokens: int, position: int, seconds: float) -> None:
        """``tokens`` of a prompt were read, the first at ``position``. A lone last token is such a chunk too."""
        if tokens > 0 and seconds > 0:
            self._chunks.append((tokens, position, seconds))
            self._fitted = None

    def step_took(self, slots: int, columns: int, seconds: float) -> None:
        """A step of a group was made: ``slots`` rows, the free ones counted, of ``columns`` tokens."""
        if seconds > 0:
            self._steps.append((slots, columns, seconds))
            self._fitted = None

    @property
    def longest(self) -> int:
        """The longest chunk that is remembered, tokens; 0 before there was one."""
        return max((tokens for tokens, _, _ in self._chunks), default=0)

    def chunk(self, tokens: int, position: int) -> float | None:
        """Seconds that ``tokens`` from ``position`` on will take; None before there was a chunk."""
        if not self._chunks:
            return None
        if self._fitted is None:
            self._fitted, self._off = self._adapt()
        return self._off * _seconds(self._fitted, tokens, position)

    def step(self, slots: int, columns: int) -> float:
        """Seconds that a step of such a group will take; 0 before there was any step."""
        if not self._steps:
            return 0.0
        alike = [s for s in self._steps if s[0] == slots and columns <= 2 * s[1] and s[1] <= 2 * columns]
        alike = alike or [s for s in self._steps if s[0] == slots]
        if alike:
            return median(seconds for _, _, seconds in alike[-5:])
        # the nearest below costs at most in proportion more, the nearest above is no faster than this one
        below = max((s[0] for s in self._steps if s[0] < slots), default=0)
        nearest = below or min(s[0] for s in self._steps)
        known = median([seconds for n, _, seconds in self._steps if n == nearest][-5:])
        return known * slots / nearest if below else known

    def _adapt(self) -> tuple[tuple[float, float, float], float]:
        """What fits the chunks, and how far off the latest ones were from that."""
        fitted, late = self._fit(), self._late
        if not 1 / SHIFT < median(late(fitted)) < SHIFT and len(self._chunks) > LATEST:
            # most of the latest say so: the machine is slower or faster than it was, and what is older misleads
            self._chunks = deque(list(self._chunks)[-LATEST:], CHUNKS)
            fitted = self._fit()
        off = late(fitted)
        # the last one alone is believed up to twice the time, until the next one is known
        return fitted, max(median(off) if len(off) == LATEST else 1.0, min(off[-1], 2.0))

    def _late(self, fitted: tuple[float, float, float]) -> list[float]:
        """What the latest chunks took, over what they should have taken."""
        return [seconds / _seconds(fitted, n, p) for n, p, seconds in list(self._chunks)[-LATEST:]]

    def _fit(self) -> tuple[float, float, float]:
        """(a, b, c), seconds: of a chunk, of a token, and of a token that looks at another."""
        scale_n = max(n for n, _, _ in self._chunks)
        scale_p = max(p + n / 2 for n, p, _ in self._chunks)
        rows: list[tuple[float, float, float]] = []
        weight = 1.0
        for n, p, seconds in reversed(self._chunks):
            by = weight**0.5 / seconds
            rows.append((by, by * n / scale_n, by * n * (p + n / 2) / (scale_n * scale_p)))
            weight *= FADE
        wanted = [weight**0.5 for weight in (FADE**i for i in range(len(rows)))]
        typical = median(seconds for _, _, seconds in self._chunks)
        if self._steps and scale_n < 4 * min(n for n, _, _ in self._chunks):
            # chunks that are alike do not tell what the weights cost and what each token does: a step reads them too
            least = min(self.step(slots, columns) for slots, columns, _ in list(self._steps)[-4:])
            by = 0.3 / max(least, 0.01 * typical)
            rows.append((by, by / scale_n, 0.0))
            wanted.append(by * least)
        for i in (0, 2):  # and where nothing tells them apart, the time is the tokens'
            row = [0.0, 0.0, 0.0]
            row[i] = 0.05 / typical
            rows.append((row[0], row[1], row[2]))
            wanted.append(0.0)
        a, b, c = _least_squares(rows, wanted)
        return a, b / scale_n, c / (scale_n * scale_p)


def _seconds(fitted: tuple[float, float, float], tokens: int, position: int) -> float:
    a, b, c = fitted
    return a + b * tokens + c * tokens * (position + tokens / 2)


def _least_squares(rows: Sequence[tuple[float, float, float]], wanted: Sequence[float]) -> list[float]:
    """x of three numbers, none below 0 and the second above it, for which rows · x is nearest to ``wanted``: the best
    of the solutions in which the first, the third, both or none are 0."""
    best, least = [0.0, 1e-12, 0.0], float("inf")
    for which in ((1,), (0, 1), (1, 2), (0, 1, 2)):
        x = [0.0, 0.0, 0.0]
        for i, value in zip(which, _solve(rows, wanted, which), strict=True):
            x[i] = value
        if min(x) < 0 or x[1] <= 0:
            continue
        error = sum(
            (sum(f * v for f, v in zip(row, x, strict=True)) - w) ** 2 for row, w in zip(rows, wanted, strict=True)
        )
        if error < least:
            best, least = x, error
    return best


def _solve(rows: Sequence[tuple[float, ...]], wanted: Sequence[float], which: Sequence[int]) -> list[float]:
    """The normal equations for the columns ``which``, by elimination; they are positive definite but for rounding."""
    m = [[sum(r[i] * r[j] for r in rows) for j in which] for i in which]
    v = [sum(r[i] * w for r, w in zip(rows, wanted, strict=True)) for i in which]
    size = len(which)
    for i in range(size):
        m[i][i] *= 1 + 1e-9
        for k in range(i + 1, size):
            by = m[k][i] / m[i][i]
            m[k] = [x - by * y for x, y in zip(m[k], m[i], strict=True)]
            v[k] -= by * v[i]
    x = [0.0] * size
    for i in reversed(range(size)):
        x[i] = (v[i] - sum(m[i][j] * x[j] for j in range(i + 1, size))) / m[i][i]
    return x
