"""The members of compressed attention: what of a layer's state the store keeps, and how.

Raw rows are a window like any other. Entries are rows, one for every ``ratio`` tokens: tokens [a, b) own entries
[a // ratio, b // ratio), those that are complete at b and were not at a. The rows that later entries need are a state
of a fixed size: all of them would be several times as many bytes as all the rest of a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .compress.geometry import Geometry
from .compressed import CompressedCache, Entries, Latents, Pending, PositionRing
from .member import Arrays, Member, PositionError

if TYPE_CHECKING:
    from .inside import Inside


def members(cache: CompressedCache, path: tuple[int, ...]) -> list[Member]:
    """The window, then the state and the entries of each name."""
    out: list[Member] = [LatentWindow(cache, (*path, 0))]
    for name, part in cache.parts.items():
        at = len(out)
        out += [PendingRows(part, (*path, at)), EntryRows(part, (*path, at + 1), cache.dims[name], cache.dtype)]
    return out


class _RingMember(Member):
    """What members that stand on a ring share."""

    ring: PositionRing

    @property
    def position(self) -> int:
        return self.ring.offset

    def live(self) -> list[mx.array]:
        return self.ring.live()

    def hold(self) -> Any:
        return self.ring.hold()

    def put_back(self, held: Any) -> None:
        self.ring.put_back(held)

    def rewindable(self) -> int:
        offset = self.ring.offset
        return offset - next((p for p in range(max(0, self.ring.low), offset) if self.ring.can_stand(p)), offset)

    def rewind(self, n: int) -> None:
        self.ring.back(n)

    def expect(self, width: int) -> None:
        most = self.most_drafts() or 0
        if width - 1 > most:
            raise PositionError(f"Member {self.label} takes back {most} drafts at most, not {width - 1}.")


class LatentWindow(_RingMember):
    """Raw rows of the last tokens. All but one of a window are needed to go on: the next token brings its own."""

    kind = "latents"
    record = "window"
    cache: CompressedCache

    def __init__(self, cache: CompressedCache, path: tuple[int, ...]) -> None:
        super().__init__(cache, path)
        self.ring: Latents = cache.latents

    def params(self) -> dict[str, int]:
        return {"window": self.ring.window}

    def window(self) -> int:
        return self.ring.window - 1

    def arrays(self) -> Arrays:
        return {} if self.ring.rows is None else {"latents": self.ring.rows[:, None, : self.ring.size]}

    def rows(self, a: int, b: int) -> Arrays:
        return {"latents": self.ring.read(a, b)[:, None]}

    def most_drafts(self) -> int:
        return self.ring.spare

    def resume(self, arrays: Arrays, position: int) -> None:
        self.ring.take(arrays["latents"][:, 0], self.ring.need(position), position)


class PendingRows(_RingMember):
    """Rows of which entries are made later: [1, 1, window, width], that of position p at p % window, 0 where none is
    needed. Rings of all sizes have the same."""

    kind = "pending"
    record = "state"
    cache: Entries

    def __init__(self, cache: Entries, path: tuple[int, ...]) -> None:
        super().__init__(cache, path)
        self.ring: Pending = cache.pending

    @property
    def geometry(self) -> Geometry:
        return self.ring.geometry

    def params(self) -> dict[str, int]:
        return {"ratio": self.geometry.ratio, "overlap": int(self.geometry.overlap)}

    def arrays(self) -> Arrays:
        return {} if self.ring.rows is None else self._at(self.ring.offset)

    def _at(self, position: int) -> Arrays:
        window, start = self.geometry.window, self.ring.need(position)
        rows = self.ring.read(start, position)
        out = mx.zeros((1, window, rows.shape[2]), rows.dtype)
        if start < position:
            out[:, mx.arange(start, position) % window] = rows
        return {"pending": out[:, None]}

    def state_at(self, position: int, inside: Inside) -> Arrays:
        try:
            return self._at(position)
        except PositionError:
            return {}

    def most_drafts(self) -> int:
        return self.geometry.most_drafts

    def resume(self, arrays: Arrays, position: int) -> None:
        start = self.ring.need(position)
        self.ring.take(arrays["pending"][:, 0, mx.arange(start, position) % self.geometry.window], start, position)


class EntryRows(Member):
    """One row for every ``ratio`` tokens."""

    kind = "entries"
    record = "rows"
    cache: Entries

    def __init__(self, cache: Entries, path: tuple[int, ...], dim: int, dtype: mx.Dtype) -> None:
        super().__init__(cache, path)
        self._dim, self._dtype = dim, dtype

    @property
    def position(self) -> int:
        return self.cache.pending.offset

    def params(self) -> dict[str, int]:
        return {"ratio": self.per()}

    def per(self) -> int:
        return self.cache.geometry.ratio

    def arrays(self) -> Arrays:
        return {} if self.cache.buffer is None else {"entries": self.cache.buffer}

    def hold(self) -> Any:
        return None if self.cache.buffer is None else self.cache.buffer[:]

    def put_back(self, held: Any) -> None:
        self.cache.buffer = held

    def rows(self, a: int, b: int) -> Arrays:
        if not 0 <= a <= b <= self.position:
            raise PositionError(f"Member {self.label} holds entries of [0, {self.position}), not [{a}, {b}).")
        return {name: array[:, :, a // self.per() : b // self.per()] for name, array in self.arrays().items()}

    def rewindable(self) -> int:
        return self.position

    def rewind(self, n: int) -> None:
        """Nothing: the position says how many entries there are, and it is taken back with the rows that later ones
        need."""

    def most_drafts(self) -> int | None:
        return None

    def reserve(self, capacity: int) -> None:
        room = max(1, capacity // self.per())
        self.cache.step = room
        if self.cache.buffer is not None and self.cache.buffer.shape[2] < room:
            self.cache.widen(room, self._dim, self._dtype)

    def resume(self, arrays: Arrays, position: int) -> None:
        self.cache.buffer = arrays["entries"]
