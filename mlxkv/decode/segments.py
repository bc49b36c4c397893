"""Where a prefill is cut into forwards, and which boundaries lie inside one."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from ..cache.layout import Layout

#: a boundary nearer than this many tokens to the last cut does not split a forward on a GPU
NEAR = 512
#: states at boundaries inside one forward are live at the same time: at most this many bytes of them
HELD_BYTES = 1 << 30


@dataclass(frozen=True)
class Split:
    """``near``: tokens from the last cut within which a boundary does not split the forward; 0 = each one splits.
    ``most``: boundaries inside one forward."""

    near: int = 0
    most: int = 0

    @classmethod
    def by(cls, setting: str, device: str, layout: Layout) -> Split:
        """``setting``: always | auto | never. Each reading of the weights costs a GPU much, a CPU little."""
        near = {"always": 0, "never": sys.maxsize, "auto": 0 if device == "cpu" else NEAR}[setting]
        state = sum(t.nbytes(0) for t in layout.tensors("state"))
        return cls(near, max(1, HELD_BYTES // max(1, state))) if near else cls()

    def segment(self, position: int, edges: list[int], chunk: int) -> tuple[int, tuple[int, ...]]:
        """The end of the next forward, at most ``chunk`` tokens on, and the boundaries inside it. ``edges`` rise; the
        last one is where the prefill ends, and always a cut."""
        inside: list[int] = []
        for edge in edges:
            if edge <= position:
                continue
            if edge - position > chunk:
                break
            last = edge == edges[-1] or edge - position == chunk
            if last or edge - position >= self.near or len(inside) == self.most:
                return edge, tuple(inside)
            inside.append(edge)
        return position + chunk, tuple(inside)
